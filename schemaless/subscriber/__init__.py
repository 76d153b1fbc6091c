"""The subscribers' kit: every cell of a datastore for other people's programs, over Kafka and HTTP alone."""
