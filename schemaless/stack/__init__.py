"""The embedded stack: real MySQL and Kafka servers and all services, in one folder, on loopback."""
