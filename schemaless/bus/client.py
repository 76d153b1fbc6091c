"""What every Kafka client of ours is set to."""

from __future__ import annotations

from typing import Any


def client_settings(bootstrap: str) -> dict[str, Any]:
    """Errors are raised to us and told once, so librdkafka itself says nothing but that a producer was fenced.

    Never through a Python logger: its lines are handed over in the same calls as a fatal error, and a line that comes
    after the error turns it into a SystemError (seen on 2.16.1 when a flush was fenced).
    """
    return {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.max.ms": 500,  # soon back after the broker is
        "log_level": 0,
        "enable.metrics.push": False,  # nobody asks for them, and a tailer has a client for each partition
    }
