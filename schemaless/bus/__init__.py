"""Kafka: the only importer of confluent-kafka and Faust. ARCHITECTURE.md, "The log", tells how it hangs together."""
