"""Row facts: all that the servers know of one row, as they stored it. No bodies, and every list is bounded (I14)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.errors import Misconfigured
from schemaless.location import GenerationStart, Location, ShardLocation, verify_location
from schemaless.names import TRIGGER_PREFIX
from schemaless.storage import (
    buffer_table,
    checkpoint_table,
    index_definition_table,
    job_table,
    parked_history_table,
    parked_table,
    shard_head,
    shard_log,
    trigger_order_table,
    trigger_program_table,
    worker_table,
)
from schemaless.storage.buffer_table import BufferedCopy
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.index_definition_table import DefinedIndex
from schemaless.storage.job_table import Job
from schemaless.storage.operation import Operation
from schemaless.storage.parked_history_table import EndedCell
from schemaless.storage.parked_table import ParkedCell
from schemaless.storage.shard_log import RowPage
from schemaless.storage.trigger_order_table import TriggerOrders
from schemaless.storage.trigger_program_table import ProgramFunctions
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore

RECORDS_MAX = 20
"""Parked cells of one row and program that are shown, and as many that are parked no longer."""
ERROR_CHARACTERS_MAX = 2000
COPIES_MAX = 100
"""Buffered copies of one row and cluster that are shown."""


class CellWindow(msgspec.Struct, frozen=True):
    """Which cells of a row are shown: the last `before` up to an added_id, and the first `after` behind it."""

    until: int
    before: int
    after: int


class HomeFacts(msgspec.Struct, frozen=True):
    """What the home of the row's shard has. `records`, `ended`, `jobs` and `checkpoints` are of this shard only."""

    head: Location
    starts: Sequence[GenerationStart]
    page: RowPage
    checkpoints: Mapping[str, Checkpoint]
    records: Mapping[str, Sequence[ParkedCell]]
    ended: Mapping[str, Sequence[EndedCell]]
    jobs: Mapping[int, Job]


class ClusterFacts(msgspec.Struct, frozen=True):
    """What every cluster has: copies of the row, if it is a secondary, and what is kept everywhere."""

    copies: Sequence[BufferedCopy]
    programs: Mapping[str, ProgramFunctions]
    orders: Mapping[str, TriggerOrders]
    workers: Sequence[WorkerRow]
    indexes: Sequence[DefinedIndex]


def read_home(datastore: Datastore, shard: int, row_key: RowKey, window: CellWindow) -> Operation[HomeFacts]:
    """Reads what the home has. Checkpoints come before records: else a cell that is parked meanwhile seems finished."""
    found = yield from checkpoint_table.of_shard(datastore.name, shard)
    checkpoints = {checkpoint.consumer: checkpoint for checkpoint in found}
    programs = [name for name in checkpoints if name.startswith(TRIGGER_PREFIX)]
    records = yield from parked_table.of_row(datastore.name, programs, row_key, RECORDS_MAX + 1, ERROR_CHARACTERS_MAX)
    ended = yield from parked_history_table.of_row(datastore.name, programs, row_key, RECORDS_MAX)
    found_records = [one for each in records.values() for one in each]
    found_records += [one.record for each in ended.values() for one in each]
    jobs = yield from job_table.of_numbers(datastore.name, {one.job for one in found_records if one.job is not None})
    starts = yield from shard_head.generations(datastore.name, shard)
    page = yield from shard_log.cells_of_row(datastore, shard, row_key, window.until, window.before, window.after)
    heads = yield from shard_head.heads_of(datastore.name, [shard])
    if not heads:
        raise Misconfigured(f"shard {shard} of datastore {datastore.name} doesn't live here")
    head = Location(heads[0].generation, heads[0].added_id)
    return HomeFacts(head, starts, page, checkpoints, records, ended, jobs)


def read_cluster(datastore: Datastore, row_key: RowKey) -> Operation[ClusterFacts]:
    """Reads what is kept on every cluster."""
    copies = yield from buffer_table.of_row(datastore.name, row_key, COPIES_MAX)
    programs = yield from trigger_program_table.of_datastore(datastore.name)
    orders = yield from trigger_order_table.of_datastore(datastore.name)
    workers = yield from worker_table.of_datastore(datastore.name)
    indexes = yield from index_definition_table.all_of(datastore.name)
    return ClusterFacts(copies, programs, orders, workers, indexes)


def read_row_at(datastore: Datastore, at: ShardLocation) -> Operation[RowKey | None]:
    """Returns the row of the cell at a location, None where there is none. Raises LocationGone (I13)."""
    starts = yield from shard_head.generations(datastore.name, at.shard)
    row_key = yield from shard_log.row_at(datastore, at.shard, at.location.added_id)
    heads = yield from shard_head.heads_of(datastore.name, [at.shard])
    verify_location(at.location.generation, at.location.added_id, starts, heads[0].added_id)
    return None if row_key is None else RowKey(row_key)


def newest_programs(parts: Iterable[ClusterFacts]) -> dict[str, ProgramFunctions]:
    """Returns the functions of each program, as the worker that started last has them."""
    found: dict[str, list[ProgramFunctions]] = {}
    for part in parts:
        for consumer, functions in part.programs.items():
            found.setdefault(consumer, []).append(functions)
    return {consumer: max(each, key=lambda one: one.changed_at) for consumer, each in found.items()}
