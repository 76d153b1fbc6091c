"""What every Kafka client of ours is set to.

librdkafka's own log lines go to the logger `librdkafka`, which shows nothing by default: errors are raised to us and
told once.
"""

from __future__ import annotations

import logging
from typing import Any

_LOGGER = logging.getLogger("librdkafka")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False


def client_settings(bootstrap: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.max.ms": 500,  # soon back after the broker is
        "logger": _LOGGER,
    }
