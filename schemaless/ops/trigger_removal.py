"""Removing a trigger program: its checkpoints and the rows of its workers go, so nothing waits for it any longer.

Its module and what its functions did are not touched. If a worker of the program starts again, it begins like one that
never ran.
"""

from __future__ import annotations

import msgspec

from schemaless.errors import Misconfigured, NotFound
from schemaless.names import trigger_consumer
from schemaless.storage import checkpoint_table, worker_table
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.worker_table import SEEN_WITHIN_S, WorkerRow
from schemaless.topology import Datastore


class TriggerRemoval(msgspec.Struct, frozen=True):
    """What is removed. `running` are the workers that were seen lately, each once."""

    program: str
    checkpoints: int
    finished: int
    running: tuple[WorkerRow, ...]


def plan_removal(storage: SyncStorage, datastore: Datastore, program: str) -> TriggerRemoval:
    """Returns what would be removed. Raises NotFound for a program that never ran, StorageUnavailable."""
    consumer = trigger_consumer(program)
    checkpoints = finished = 0
    running: dict[int, WorkerRow] = {}
    for cluster in datastore.clusters:
        master = storage.master(cluster)
        for row in master.run(checkpoint_table.of_consumer, datastore.name, consumer):
            checkpoints, finished = checkpoints + 1, finished + (row.finished or 0)
        for worker in master.run(worker_table.of_datastore, datastore.name):
            if worker.consumer == consumer and worker.age_s <= SEEN_WITHIN_S:
                running[worker.worker] = worker
    if not checkpoints and not running:
        raise NotFound(f"no trigger program {program!r} has run on datastore {datastore.name}")
    return TriggerRemoval(program, checkpoints, finished, tuple(running.values()))


def remove_program(storage: SyncStorage, datastore: Datastore, removal: TriggerRemoval) -> None:
    """Removes a program on all clusters. May be repeated. Raises Misconfigured while workers run."""
    require_no_workers(removal)
    for cluster in datastore.clusters:
        consumer = trigger_consumer(removal.program)
        if not storage.master(cluster).run(checkpoint_table.remove, datastore.name, consumer, SEEN_WITHIN_S):
            raise Misconfigured(f"a worker of {removal.program} has started on cluster {cluster}: stop it first")


def require_no_workers(removal: TriggerRemoval) -> None:
    """Raises Misconfigured while workers run: they would make new checkpoints, and call every cell again."""
    if removal.running:
        places = ", ".join(f"{worker.report.host} pid {worker.report.pid}" for worker in removal.running)
        raise Misconfigured(
            f"{len(removal.running)} workers of {removal.program} run: {places}. Stop them first. One that was killed"
            f" counts for {SEEN_WITHIN_S:.0f} s"
        )
