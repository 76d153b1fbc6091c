"""How callers follow a shard's log over HTTP: pages, the long poll and server-sent events."""
