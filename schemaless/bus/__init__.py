"""Kafka: the only importer of confluent-kafka and Faust. See ARCHITECTURE.md, "The log"."""
