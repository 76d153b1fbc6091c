"""Catching up: how far index and trigger programs have come behind the heads, and waiting for them within bounds.

Reads heads and checkpoints from the masters, as an operator would; the audit afterwards proves what this only shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schemaless.errors import SchemalessError, StorageUnavailable, Unavailable
from schemaless.storage import checkpoint_table, shard_head
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.sync_driver import SyncStorage
from schemaless.topology import Datastore

TURN_S = 0.5
STALL_TIMEOUT_S = 120.0


class ProgramStopped(SchemalessError):
    hint = "the program's log tells more; `schemaless status` names it"


@dataclass(frozen=True, slots=True)
class Positions:
    """Sums over all shards: cells in MySQL, and for each consumer the cells that it has finished."""

    head: int
    finished: Mapping[str, int]

    def lag(self, consumer: str) -> int:
        return self.head - self.finished.get(consumer, 0)


def read_positions(storage: SyncStorage, datastore: Datastore) -> Positions:
    """Raises StorageUnavailable, or ProgramStopped with the reason of the first shard that stopped."""
    head = 0
    reached: dict[tuple[str, int], int] = {}
    for cluster in datastore.placement:
        master = storage.master(cluster)
        head += sum(found.added_id for found in master.run(lambda: shard_head.heads(datastore.name)))
        for checkpoint in master.run(lambda: checkpoint_table.all_of(datastore.name)):
            _require_running(checkpoint)
            key = (checkpoint.consumer, checkpoint.shard)  # an index's stands on every cluster: the least counts
            reached[key] = min(reached.get(key, checkpoint.location.added_id), checkpoint.location.added_id)
    finished: dict[str, int] = {}
    for (consumer, _), added_id in reached.items():
        finished[consumer] = finished.get(consumer, 0) + added_id
    return Positions(head, finished)


def wait_until_caught_up(
    storage: SyncStorage, datastore: Datastore, consumers: set[str], show: Callable[[Positions], None]
) -> Positions:
    """Until each consumer has finished every cell. Raises Unavailable when nothing moves for STALL_TIMEOUT_S."""
    moved_at = time.monotonic()
    before: Positions | None = None
    while True:
        try:
            now = read_positions(storage, datastore)
        except StorageUnavailable:
            now = before or Positions(0, {})
        show(now)
        if now.head and all(now.lag(consumer) == 0 for consumer in consumers):
            return now
        if now != before:
            before, moved_at = now, time.monotonic()
        elif time.monotonic() - moved_at > STALL_TIMEOUT_S:
            lags = ", ".join(f"{consumer} {now.lag(consumer)}" for consumer in sorted(consumers))
            raise Unavailable(f"nothing moved for {STALL_TIMEOUT_S:.0f} s; cells still to be finished: {lags}")
        time.sleep(TURN_S)


def _require_running(checkpoint: Checkpoint) -> None:
    if checkpoint.state is State.STOPPED:
        raise ProgramStopped(f"{checkpoint.consumer} stopped in shard {checkpoint.shard}: {checkpoint.reason}")
