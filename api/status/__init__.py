"""The state of servers, buffers, consumers and workers, as /status and other calls report it."""
