"""Removing a trigger program: its checkpoints, parked cells, orders and workers go. Nothing waits for it any longer.

Its module and what its functions did are not touched. If a worker of the program starts again, it begins like one that
never ran.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from schemaless.errors import InUse, NotFound
from schemaless.names import trigger_consumer
from schemaless.quantity import quantity
from schemaless.storage import checkpoint_table, parked_selection, worker_table
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.operation import Operation
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.worker_table import SEEN_WITHIN_S, WorkerRow
from schemaless.topology import Datastore

_PROGRAM = re.compile(r"[!-~]{1,120}")


def consumer_of_program(program: str) -> str:
    """Returns the consumer of a program that somebody names. Raises NotFound for what no program can be called.

    Consumers are ASCII in the tables. A server refuses to compare other text with them, as if it were out of order.
    """
    if not _PROGRAM.fullmatch(program):
        raise NotFound(f"no trigger program can be called {program[:100]!r}")
    return trigger_consumer(program)


class TriggerRemoval(msgspec.Struct, frozen=True):
    """What is removed. `running` are the workers that were seen lately, each once."""

    program: str
    checkpoints: int
    finished: int
    parked: int
    running: tuple[WorkerRow, ...]

    def require_removed(self, cluster: str, removed: bool) -> None:
        """Raises InUse where a cluster refused, because a worker had started meanwhile."""
        if not removed:
            raise InUse(f"a worker of {self.program} has started on cluster {cluster}: stop it first")


class RemovalPart(msgspec.Struct, frozen=True):
    """What one server has of a program."""

    checkpoints: Sequence[Checkpoint]
    workers: Sequence[WorkerRow]
    parked: int


def read_removal(datastore: str, consumer: str) -> Operation[RemovalPart]:
    """Returns what this server has of a program."""
    checkpoints = yield from checkpoint_table.of_consumer(datastore, consumer)
    workers = yield from worker_table.of_datastore(datastore)
    parked = (yield from parked_selection.summaries(datastore)).get(consumer)
    own = [row for row in workers if row.consumer == consumer and row.age_s <= SEEN_WITHIN_S]
    return RemovalPart(checkpoints, own, 0 if parked is None else parked.parked)


def removal_of(datastore: Datastore, program: str, parts: Sequence[RemovalPart]) -> TriggerRemoval:
    """Adds up what the servers have. Raises NotFound for a program that never ran."""
    rows = [row for part in parts for row in part.checkpoints]
    running = {worker.worker: worker for part in parts for worker in part.workers}
    if not rows and not running:
        raise NotFound(f"no trigger program {program!r} has run on datastore {datastore.name}")
    return TriggerRemoval(
        program,
        len(rows),
        sum(row.finished or 0 for row in rows),
        sum(part.parked for part in parts),
        tuple(running.values()),
    )


def plan_removal(storage: SyncStorage, datastore: Datastore, program: str) -> TriggerRemoval:
    """Returns what would be removed. Raises NotFound for a program that never ran, StorageUnavailable."""
    consumer = consumer_of_program(program)
    parts = [storage.master(cluster).run(read_removal, datastore.name, consumer) for cluster in datastore.clusters]
    return removal_of(datastore, program, parts)


def remove_program(storage: SyncStorage, datastore: Datastore, removal: TriggerRemoval) -> None:
    """Removes a program on all clusters. May be repeated. Raises InUse while workers run."""
    require_no_workers(removal)
    for cluster in datastore.clusters:
        consumer = trigger_consumer(removal.program)
        removed = storage.master(cluster).run(checkpoint_table.remove, datastore.name, consumer, SEEN_WITHIN_S)
        removal.require_removed(cluster, removed)


def require_no_workers(removal: TriggerRemoval) -> None:
    """Raises InUse while workers run: they would make new checkpoints, and call every cell again."""
    if removal.running:
        places = ", ".join(f"{worker.report.host} pid {worker.report.pid}" for worker in removal.running)
        raise InUse(
            f"{removal.program} is run by {quantity(len(removal.running), 'worker')}: {places}. Stop that first. One"
            f" that was killed counts for {SEEN_WITHIN_S:.0f} s"
        )
