"""The engine that runs consumers, indexes and trigger programs, whatever the transport."""
