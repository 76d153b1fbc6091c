"""Names on the wire and in tables. Processes of different versions meet there, so these never change."""

from __future__ import annotations

INDEX_PREFIX = "index:"
TRIGGER_PREFIX = "trigger:"


def index_consumer(index: str) -> str:
    """Returns the consumer that maintains an index. Its checkpoints are stored under this name."""
    return INDEX_PREFIX + index


def trigger_consumer(program: str) -> str:
    """Returns the consumer of a trigger program. Its checkpoints are stored under this name."""
    return TRIGGER_PREFIX + program
