"""Explainer: reads what all servers know of one row, and makes its timeline and what it waits for.

Any node may answer for its cluster. A cluster that can't be asked is named, and the rest is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from api.read.reader import Reader, Served, served_together
from schemaless.cell import (
    CellKey,
    ColumnName,
    RefKey,
    RowKey,
    StoredCell,
    cause_and_trace,
    created_at_text,
    erasure_id,
    row_key_text,
)
from schemaless.codec import Body, decode_packed, erasing, inflate_body
from schemaless.errors import (
    CellMissing,
    Misconfigured,
    NotFound,
    SchemalessError,
    TooLarge,
    Unavailable,
)
from schemaless.facts import consumers
from schemaless.facts.servers import Unheard, texts
from schemaless.index.entry import IndexEntry, entries_for, entry_shard, stored_fields, why_no_entry
from schemaless.index.versions import merge
from schemaless.location import (
    ADDED_ID_MAX,
    GenerationStart,
    Location,
    ShardLocation,
    kept_until,
    shard_location_text,
    verify_location,
)
from schemaless.names import TRIGGER_PREFIX, Stall, trigger_consumer
from schemaless.quantity import quantity
from schemaless.sharding import shard_of
from schemaless.storage import (
    buffer_table,
    checkpoint_table,
    diverged_table,
    entity_table,
    everywhere,
    index_definition_table,
    index_table,
    job_table,
    parked_table,
    shard_head,
    shard_log,
    trigger_order_table,
    worker_table,
)
from schemaless.storage.buffer_table import BufferedCopy
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.diverged_table import DivergedRow
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.job_table import Job
from schemaless.storage.operation import Operation
from schemaless.storage.parked_table import Cause, EndedCell, Ending, ParkedCell
from schemaless.storage.shard_log import RowCell, RowPage
from schemaless.storage.standstill import stall_after
from schemaless.storage.trigger_order_table import ProgramFunctions, TriggerOrders
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore, Role

EXPLAIN_BYTES_MAX = 4 << 20
"""What one explanation holds at most of what it read."""

EXPLAINED_AT_ONCE = 16
_NEWEST_BYTES_MAX = 1 << 20
T = TypeVar("T")
Looked = Mapping[int, Sequence[RowKey]]
Entries = Mapping[int, Sequence[FoundEntry]]


class Explainer:
    """Explains rows, a bounded number at once. All requests of a process share it."""

    def __init__(self, reader: Reader, *, wait_s: float) -> None:
        self._reader = reader
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(EXPLAINED_AT_ONCE)

    async def explain(
        self, datastore: Datastore, where: RowKey | ShardLocation, limit: int, read_from: Role | None
    ) -> tuple[dict[str, Any], Served]:
        """Returns the explanation of a row, or of the row of the cell at a location.

        Raises CellMissing, NotFound for a shard that doesn't exist, LocationGone for a superseded location,
        StorageUnavailable when nobody knows of the row, and Unavailable when too many explanations are under way.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable(f"{EXPLAINED_AT_ONCE} explanations are under way in this process already") from None
        try:
            return await _Explanation(self._reader, datastore, read_from).of(where, limit)
        finally:
            self._slots.release()


class _Explanation:
    """One explanation on its way. `unknown` says by cluster why it couldn't be asked."""

    def __init__(self, reader: Reader, datastore: Datastore, read_from: Role | None) -> None:
        self._reader = reader
        self._datastore = datastore
        self._read_from = read_from
        self._unknown: dict[str, SchemalessError] = {}
        self._served: list[Served] = []

    async def of(self, where: RowKey | ShardLocation, limit: int) -> tuple[dict[str, Any], Served]:
        datastore = self._datastore
        if isinstance(where, ShardLocation):
            row_key = await self._row_at(where)
            window = CellWindow(where.location.added_id, (limit + 1) // 2, limit // 2)
        else:
            row_key, window = where, CellWindow(ADDED_ID_MAX, limit, 0)
        shard = shard_of(row_key, datastore.shards)
        parts = await self._ask({name: lambda: read_cluster(datastore, row_key) for name in datastore.clusters})
        home = (await self._ask({datastore.home(shard): lambda: read_home(datastore, shard, row_key, window)})).get(
            datastore.home(shard)
        )
        copies = {name: part.copies for name, part in parts.items() if part.copies}
        diverged = [row for part in parts.values() for row in part.diverged]
        if not copies and not diverged and (home is None or not home.page.cells):
            consumers.require_known((), Unheard(self._unknown, {}))
            raise CellMissing(f"there is no row {row_key_text(row_key)}")
        workers = consumers.present_workers([part.workers for part in parts.values()])
        home_stall = self._stall_of_master(datastore.home(shard))
        programs = [] if home is None else _programs(row_key, shard, home, parts.values(), workers, home_stall)
        program_views = [program.view() for program in programs]
        index_views = [] if home is None else await self._indexes(row_key, shard, home, parts)
        document = {
            "row_key": row_key_text(row_key),
            "shard": shard,
            "cluster": datastore.home(shard),
            "head": None if home is None else f"{shard}:{home.head}",
            "events": events_of(shard, home, copies, programs, diverged),
            "earlier": home is not None and home.page.earlier,
            "later": home is not None and home.page.later,
            "programs": program_views,
            "indexes": index_views,
            "waits": list(
                waits_of(
                    copies,
                    home,
                    program_views,
                    index_views,
                    home_stall=home_stall,
                    tailing=consumers.tailing_stall(workers, shard),
                )
            ),
            "unknown": texts(self._unknown),
        }
        return document, served_together(self._served)

    async def _row_at(self, at: ShardLocation) -> RowKey:
        if at.shard >= self._datastore.shards:
            raise NotFound(f"{self._datastore.name} has no shard {at.shard}")
        row_key, _ = await self._reader.read(
            self._datastore.home(at.shard), read_row_at, self._datastore, at, read_from=self._read_from
        )
        if row_key is None:
            raise CellMissing(f"there is no cell at {at}")
        return row_key

    async def _ask(self, questions: Mapping[str, Callable[[], Operation[T]]]) -> dict[str, T]:
        """Asks one node of each cluster. Notes those of which none answers."""
        answers = await answers_of_all(
            {
                name: self._reader.read(name, question, read_from=self._read_from)
                for name, question in questions.items()
            },
            tolerated=SchemalessError,
        )
        self._unknown |= answers.failures
        self._served += [served for _, served in answers.found.values()]
        return {name: value for name, (value, _) in answers.found.items()}

    def _stall_of_master(self, cluster: str) -> Stall | None:
        """Returns why the master didn't answer, where a minion answered in its place, or nobody."""
        if self._read_from is not None:
            return None
        if (error := self._unknown.get(cluster)) is not None:
            return stall_after(error)
        if Role.MINION in {served.role for served in self._served if served.cluster == cluster}:
            return Stall.REFUSED if self._reader.is_refused(cluster) else Stall.MASTER_DOWN
        return None

    async def _indexes(
        self, row_key: RowKey, shard: int, home: HomeFacts, parts: Mapping[str, ClusterFacts]
    ) -> list[dict[str, Any]]:
        """Looks for the row's entries where its newest cells put them, all indexes of a cluster in one read.

        Of an index this is the version that answers queries.
        """
        known = merge({name: part.indexes for name, part in parts.items()}, {}).indexes()
        standings = [
            IndexStanding(index, home.checkpoints.get(index.definition.consumer), home.starts, self._datastore.shards)
            for index in (named.answering for named in known.values())
            if index.is_present
        ]
        with_tables = [standing for standing in standings if standing.index.has_tables]
        bodies = await self._bodies(row_key, shard, with_tables)
        looked: dict[str, dict[str, Looked]] = {}
        for standing in with_tables:
            shards = sorted({place for place, _, _ in standing.expected(bodies)}) if bodies else []
            placed = standing.index.definition.placed(self._datastore)
            for cluster, here in placed.by_home(shards, lambda place: place).items():
                looked.setdefault(cluster, {})[standing.index.name] = {place: [row_key] for place in here}
        found = await self._ask({cluster: partial(self._entries, each, standings) for cluster, each in looked.items()})
        views = []
        for standing in standings:
            name = standing.index.name
            wanted = [cluster for cluster, each in looked.items() if name in each]
            entries: Entries | None = None
            if found.keys() >= set(wanted):
                entries = {place: each for cluster in wanted for place, each in found[cluster][name].items()}
            views.append(standing.view(bodies, entries))
        return views

    def _entries(
        self, looked: Mapping[str, Looked], standings: Sequence[IndexStanding]
    ) -> Operation[dict[str, Entries]]:
        definitions = {standing.index.name: standing.index.definition for standing in standings}
        found: dict[str, Entries] = {}
        for name, rows in looked.items():
            found[name] = yield from index_table.entries_of(self._datastore, definitions[name], rows)
        return found

    async def _bodies(self, row_key: RowKey, shard: int, standings: Sequence[IndexStanding]) -> RowBodies | None:
        """Returns the newest bodies of all indexes' columns, None where they can't be read or are too large."""
        columns = sorted({column for standing in standings for column in standing.index.definition.columns})
        if not columns:
            return RowBodies([])
        keys = [(shard, row_key, ColumnName(column), None) for column in columns]
        try:
            cells, _ = await self._reader.read(
                self._datastore.home(shard),
                entity_table.get_or_newest,
                self._datastore,
                keys,
                _NEWEST_BYTES_MAX,
                read_from=self._read_from,
            )
            return RowBodies(cells)
        except SchemalessError:
            return None


def _programs(
    row_key: RowKey,
    shard: int,
    home: HomeFacts,
    parts: Collection[ClusterFacts],
    workers: Sequence[WorkerRow],
    home_stall: Stall | None,
) -> list[ProgramStanding]:
    known = {name for part in parts for name in part.programs}
    return [
        ProgramStanding(
            consumer.removeprefix(TRIGGER_PREFIX),
            row_key,
            shard,
            home,
            home.checkpoints.get(consumer),
            home.records.get(consumer, ()),
            home.ended.get(consumer, ()),
            everywhere.latest(part.programs.get(consumer) for part in parts),
            consumers.orders_of_all([part.orders[consumer] for part in parts if consumer in part.orders]),
            [row for row in workers if row.consumer == consumer],
            home_stall,
        )
        for consumer in sorted(known | {name for name in home.checkpoints if name.startswith(TRIGGER_PREFIX)})
    ]


# The document of an explanation: the timeline of a row, and what the row waits for now. Does no I/O.

Event = tuple[int, int, Mapping[str, Any]]
"""When it happened, in microseconds, the added_id of its cell or 0, and what is shown of it."""


def events_of(
    shard: int,
    home: HomeFacts | None,
    copies: Mapping[str, Sequence[BufferedCopy]],
    programs: Iterable[ProgramStanding],
    diverged: Iterable[DivergedRow] = (),
) -> list[dict[str, Any]]:
    """Returns what happened to a row, in the order of time. Cells come in added_id order, because time does (I4)."""
    events: list[Event] = []
    if home is not None:
        events += [_cell_event(shard, cell) for cell in home.page.cells]
    for cluster, each in copies.items():
        events += [_copy_event(cluster, copy, home) for copy in each]
    events += [_diverged_event(row) for row in diverged]
    for program in programs:
        events += [(at, 0, event) for at, event in program.events()]
    return [{"at": created_at_text(at), **event} for at, _, event in sorted(events, key=lambda one: one[:2])]


def waits_of(
    copies: Mapping[str, Sequence[BufferedCopy]],
    home: HomeFacts | None,
    programs: Iterable[Mapping[str, Any]],
    indexes: Iterable[Mapping[str, Any]],
    *,
    home_stall: Stall | None = None,
    tailing: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields what the row waits for now: of each program its first cell that isn't finished.

    `home_stall`: why the master of the row's home can't be asked. `tailing`: why nobody publishes the shard, which
    keeps cells from every program.
    """
    for cluster, each in copies.items():
        for copy in each:
            if _is_at_home(copy, home) is False:
                why = copy.refused and f"its home refuses it: {copy.refused}"
                if home_stall is not None:
                    why = (
                        f"{home_stall}: it is in the buffer of cluster {cluster}, and its home's master can't be asked"
                    )
                cell = f"{copy.column_name}/{copy.ref_key}"
                yield {"for": "its home", "cell": cell, "why": why or f"it is in the buffer of cluster {cluster}"}
    for program in programs:
        for cell in program["unfinished"][:1]:
            yield {"for": f"program {program['program']}", "cell": cell["location"], "why": cell["why"]}
            if tailing is not None and cell["state"] == "not_reached":
                yield {"for": "the topic", "cell": cell["location"], "why": tailing}
    for index in indexes:
        if index["late"]:
            yield {"for": f"index {index['name']}", "cell": index["late"], "why": index["why"]}


def _cell_event(shard: int, cell: RowCell) -> Event:
    if cell.entry is not None:
        said = erasing(cell.entry)
        count = sum(map(len, said.cells.values()))
        place = {"location": f"{shard}:{cell.location}", "erasure": erasure_id(said.erasure), "cells": count}
        return cell.created_at, cell.location.added_id, {"kind": "erasure", **place}
    shown: dict[str, Any] = {
        "kind": "cell",
        "location": f"{shard}:{cell.location}",
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "size_bytes": cell.size_bytes,
    }
    if (by := cell.erased) is not None:
        shown["erased"] = {"erasure": by.erasure_id, "erased_at": created_at_text(by.at)}
    cause, trace = cause_and_trace(cell.cause)
    noted = {name: value for name, value in (("cause", cause), ("trace", trace)) if value is not None}
    return cell.created_at, cell.location.added_id, shown | noted


def _copy_event(cluster: str, copy: BufferedCopy, home: HomeFacts | None) -> Event:
    shown = {
        "kind": "buffered",
        "cluster": cluster,
        "column_name": copy.column_name,
        "ref_key": copy.ref_key,
        "size_bytes": copy.size_bytes,
        "at_home": _is_at_home(copy, home),
        "refused": copy.refused,
    }
    return copy.buffered_at, 0, shown


def _diverged_event(row: DivergedRow) -> Event:
    """A former master wrote the cell, and nobody else had it. It was kept at that moment, and put again after it."""
    shown = {
        "kind": "diverged",
        "server": row.server,
        "epoch": row.epoch,
        "location": f"{row.shard}:{row.generation}:{row.added_id}" if row.added_id else None,
        "column_name": row.column_name,
        "ref_key": row.ref_key,
        "size_bytes": row.size_bytes,
        "outcome": row.outcome,
        "stored_at": None if row.outcome is None else f"{row.shard}:{row.home_generation}:{row.home_added_id}",
    }
    return row.kept_at, 0, shown


def _is_at_home(copy: BufferedCopy, home: HomeFacts | None) -> bool | None:
    """Returns whether the cell of a copy is at home, None where that can't be told from the cells that are shown."""
    if home is None:
        return None
    if any((cell.column_name, cell.ref_key) == (copy.column_name, copy.ref_key) for cell in home.page.cells):
        return True
    return None if home.page.earlier or home.page.later else False


# How one trigger program stands to the cells of one row: what is finished, what isn't, and why not. Does no I/O.
#
# A successful call leaves nothing behind but the checkpoint. So a cell is finished when the checkpoint of its shard
# has passed it and no record says otherwise.

# How one index stands to one row: its entries, and why it has none, or others than the newest cells make. No I/O.

ENTRIES_MAX = 20
"""Entries of one row and index that are looked for: a row has more only where an array makes one for each element."""

_BODIES_BYTES_MAX = 4 << 20


class RowBodies:
    """The newest bodies of a row by column, decoded once for all indexes. Raises TooLarge for too many bytes."""

    def __init__(self, cells: Sequence[StoredCell | None]) -> None:
        self.cells = {cell.column_name: cell for cell in cells if cell is not None and not cell.is_erased}
        self.by_column: dict[ColumnName, Body] = {}
        size = 0
        for column, cell in self.cells.items():
            packed = inflate_body(cell.body)
            size += len(packed)
            if size > _BODIES_BYTES_MAX:
                raise TooLarge("the row's cells are too large to be evaluated here")
            self.by_column[column] = decode_packed(packed)


class IndexStanding(msgspec.Struct, frozen=True):
    """One index and one row. `checkpoint` is the index's in the row's shard, on its home."""

    index: DefinedIndex
    checkpoint: Checkpoint | None
    starts: Sequence[GenerationStart]
    shards: int

    def expected(self, bodies: RowBodies) -> list[tuple[int, int, IndexEntry]]:
        """Returns shard, element and entry that the newest cells make, at most ENTRIES_MAX."""
        definition = self.index.definition
        made = entries_for(definition, bodies.by_column)
        found = [
            (entry_shard(definition, entry, self.shards), element, entry)
            for element, entry in enumerate(made)
            if entry is not None
        ]
        return found[:ENTRIES_MAX]

    def view(self, bodies: RowBodies | None, found: Mapping[int, Sequence[FoundEntry]] | None) -> dict[str, Any]:
        """Returns what people see. `found`, by shard of the index, are the row's entries where they are expected.

        None for `bodies` or `found` means that they couldn't be read.
        """
        checkpoint = self.checkpoint
        document: dict[str, Any] = {
            "name": self.index.name,
            "state": str(self.index.state),
            "reason": self.index.order.reason,
            "checkpoint": None
            if checkpoint is None
            else {
                "location": f"{checkpoint.shard}:{checkpoint.location}",
                "at": created_at_text(checkpoint.updated_at),
            },
            "entries": [],
            "late": None,
            "why": None,
        }
        if not self.index.has_tables:
            return {**document, "why": f"the index is {self.index.state}, and has no entries"}
        if bodies is None or found is None:
            return {**document, "why": "the row's entries couldn't be read"}
        definition = self.index.definition
        expected = self.expected(bodies)
        stored = {(shard, one.element): one.entry for shard, each in found.items() for one in each}
        document["entries"] = [
            {"shard": shard, "element": element, "fields": stored_fields(definition, entry)}
            for (shard, element), entry in sorted(stored.items(), key=lambda each: each[0])[:ENTRIES_MAX]
        ]
        missing = any(stored.get((shard, element)) != entry for shard, element, entry in expected)
        late = self.late(bodies)
        if late:
            document["late"] = f"{late[0].shard}:{late[0].location}"
            document["why"] = self._why_late(document["late"])
        elif missing:
            document["why"] = "the newest cells make other entries: compare with `schemaless audit`"
        elif not expected:
            document["why"] = why_no_entry(definition, bodies.by_column)
        return document

    def late(self, bodies: RowBodies) -> list[StoredCell]:
        """Returns the row's newest cells that the index has not reached."""
        reached = 0 if self.checkpoint is None else kept_until(self.checkpoint.location, self.starts)
        columns = self.index.definition.columns
        newest = [cell for column, cell in bodies.cells.items() if column in columns and cell.added_id > reached]
        return sorted(newest, key=lambda cell: cell.added_id)

    def _why_late(self, at: str) -> str:
        match self.index.state:
            case IndexState.FAILED:
                return f"the index has failed, before {at}: {self.index.order.reason}"
            case IndexState.PAUSED:
                return f"the index is paused, and has not reached {at}"
            case state:
                return f"the index is {state}, and has not reached {at}"


# Row facts: all that the servers know of one row, as they stored it. No bodies, and every list is bounded (I14).

RECORDS_MAX = 20
"""Parked cells of one row and program that are shown, and as many that are parked no longer."""
ERROR_CHARACTERS_MAX = 2000
COPIES_MAX = 100
"""Buffered copies of one row and cluster that are shown, and as many cells of former masters."""


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
    """What every cluster has: copies of the row, if it is a secondary, what a former master of it had of the row, and
    what is kept everywhere.
    """

    copies: Sequence[BufferedCopy]
    programs: Mapping[str, ProgramFunctions]
    orders: Mapping[str, TriggerOrders]
    workers: Sequence[WorkerRow]
    indexes: Sequence[DefinedIndex]
    diverged: Sequence[DivergedRow] = ()


def read_home(datastore: Datastore, shard: int, row_key: RowKey, window: CellWindow) -> Operation[HomeFacts]:
    """Reads what the home has. Checkpoints come before records: else a cell that is parked meanwhile seems finished."""
    found = yield from checkpoint_table.of_shard(datastore.name, shard)
    checkpoints = {checkpoint.consumer: checkpoint for checkpoint in found}
    programs = [name for name in checkpoints if name.startswith(TRIGGER_PREFIX)]
    records = yield from parked_table.of_row(datastore.name, programs, row_key, RECORDS_MAX + 1, ERROR_CHARACTERS_MAX)
    ended = yield from parked_table.ended_of_row(datastore.name, programs, row_key, RECORDS_MAX)
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
    programs = yield from trigger_order_table.functions_by_program(datastore.name)
    orders = yield from trigger_order_table.of_datastore(datastore.name)
    workers = yield from worker_table.of_datastore(datastore.name)
    indexes = yield from index_definition_table.all_of(datastore.name)
    diverged = yield from diverged_table.of_row(datastore.name, row_key, COPIES_MAX)
    return ClusterFacts(copies, programs, orders, workers, indexes, diverged)


def read_row_at(datastore: Datastore, at: ShardLocation) -> Operation[RowKey | None]:
    """Returns the row of the cell at a location, None where there is none. Raises LocationGone (I13)."""
    starts = yield from shard_head.generations(datastore.name, at.shard)
    row_key = yield from shard_log.row_at(datastore, at.shard, at.location.added_id)
    heads = yield from shard_head.heads_of(datastore.name, [at.shard])
    verify_location(at.location.generation, at.location.added_id, starts, heads[0].added_id)
    return None if row_key is None else RowKey(row_key)


UNFINISHED_MAX = 20
"""Cells of one row and program whose state is shown one by one."""


_MASTER_AWAY = "the master of the row's home can't be asked, and no checkpoint moves there meanwhile"


class ProgramStanding(msgspec.Struct, frozen=True):
    """One program, and the row of one shard. `orders` are of all clusters.

    `home_stall`: why the master of the row's home can't be asked. `ended` are cells that are parked no longer.
    `workers` are its processes that were seen lately.
    """

    program: str
    row_key: RowKey
    shard: int
    home: HomeFacts
    checkpoint: Checkpoint | None
    records: Sequence[ParkedCell]
    ended: Sequence[EndedCell]
    functions: ProgramFunctions | None
    orders: TriggerOrders
    workers: Sequence[WorkerRow]
    home_stall: Stall | None = None

    def view(self) -> dict[str, Any]:
        """Returns what people see: how far the program is, and of each cell that isn't finished why."""
        cells = [cell for cell in self.home.page.cells if self._wants(cell)]
        unfinished = [(cell, *found) for cell in cells if (found := self._unfinished(cell)) is not None]
        program_state, reason = self._state()
        checkpoint = self.checkpoint
        return {
            "program": self.program,
            "state": program_state,
            "reason": reason,
            "workers": len(self.workers),
            "checkpoint": None
            if checkpoint is None
            else {
                "location": f"{self.shard}:{checkpoint.location}",
                "at": created_at_text(checkpoint.updated_at),
                "pending": max(0, self.home.head.added_id - self._reached),
            },
            "finished": len(cells) - len(unfinished),
            "unfinished": [
                {
                    "location": f"{self.shard}:{cell.location}",
                    "column_name": cell.column_name,
                    "ref_key": cell.ref_key,
                    "state": state,
                    "why": why,
                }
                for cell, state, why in unfinished[:UNFINISHED_MAX]
            ],
            "unfinished_count": len(unfinished),
        }

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields what happened to cells that are parked or wait, and to those that were parked, each with its time.

        Times are in microseconds. A record that failed again has some events of the one before.
        """
        told = set()
        for at, event in self._events():
            key = at, event["kind"], event["location"], event["trigger"]
            if key not in told:
                told.add(key)
                yield at, event

    def _events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for record, ended in [*((one.record, one) for one in self.ended), *((one, None) for one in self.records)]:
            about = {
                "program": self.program,
                "trigger": record.function_name,
                "location": shard_location_text(self.shard, record.generation, record.added_id),
            }
            earlier = max(0, record.attempts - len(record.attempted_at))
            for number, at in enumerate(record.attempted_at, start=earlier + 1):
                yield at, {"kind": "failed_call", **about, "attempt": number}
            details = {"attempts": record.attempts, "error": record.error, "version": record.version}
            if record.cause is Cause.WAITING:
                yield record.parked_at, {"kind": "waiting", **about, **details}
            else:
                cause = {"cause": str(record.cause), "holds_row": record.holds_row}
                yield record.parked_at, {"kind": "parked", **about, **cause, **details}
            job = self.home.jobs.get(record.job or 0)
            if job is not None:
                ordered = {"job": f"{job.job:016x}", "who": job.who, "reason": job.reason}
                yield job.made_at, {"kind": f"{job.kind}_ordered", **about, **ordered}
            if ended is not None and ended.ending is not Ending.FAILED:
                yield ended.ended_at, {"kind": "unparked", **about, "ending": str(ended.ending)}

    @property
    def _reached(self) -> int:
        """The added_id up to which the shard is finished in its present history."""
        return 0 if self.checkpoint is None else kept_until(self.checkpoint.location, self.home.starts)

    def _wants(self, cell: RowCell) -> bool:
        return cell.erased is None and (self.functions is None or cell.column_name in self.functions.functions)

    def _state(self) -> tuple[str, str | None]:
        if self.orders.program.paused:
            return "paused", self.orders.program.reason
        if self.checkpoint is not None and self.checkpoint.state is State.STOPPED:
            return "stopped", self.checkpoint.reason
        if self.shard in self.orders.paused:
            return "paused", self.orders.paused[self.shard]
        if breakers := consumers.tripped(self.workers):
            return "tripped", breakers[0]
        if stall := consumers.stall_of(self.workers, trigger_consumer(self.program)):
            return stall
        if self.home_stall is not None:
            return self.home_stall, _MASTER_AWAY
        return "running", None if self.workers else "no worker runs it"

    def _unfinished(self, cell: RowCell) -> tuple[str, str] | None:
        """Returns the state of a cell and why it waits, None for one that is finished."""
        added_id = cell.location.added_id
        for record in self.records:
            if record.added_id == added_id:
                return str(record.cause), self._why_recorded(cell, record)
            if record.holds_row and record.added_id < added_id <= self._reached:
                at = shard_location_text(self.shard, record.generation, record.added_id)
                return "behind", f"it waits behind {at} of its row, so that the row's order holds"
        if added_id <= self._reached:
            return None
        return "not_reached", self._why_not_reached(cell)

    def _why_recorded(self, cell: RowCell, record: ParkedCell) -> str:
        if record.ordered is not None and record.due_at is not None:
            why = f"a {record.ordered} is ordered, due at {created_at_text(record.due_at)}"
        elif record.cause is Cause.WAITING:
            why = self._running_call(cell) or "its next attempt is due later, or its call takes long"
        else:
            command = f"schemaless parked retry {self.program} {self.shard}:{record.location}:{record.function_name}"
            return f"it is parked until somebody orders a retry or a discard: {command}"
        return "; ".join([why, *self._blockers()])

    def _why_not_reached(self, cell: RowCell) -> str:
        why = list(self._blockers())
        if self.checkpoint is None:
            return "; ".join(["the program has not begun this shard", *why])
        if not why and (running := self._running_call(cell)) is not None:
            return running
        before = cell.location.added_id - self._reached - 1
        ahead = f"{quantity(before, 'cell')} of its shard before it"
        next_one = ahead if before else "it is the next cell of its shard"
        return "; ".join([*why, next_one])

    def _running_call(self, cell: RowCell) -> str | None:
        key = str(CellKey(self.row_key, ColumnName(cell.column_name), RefKey(cell.ref_key)))
        for row in self.workers:
            call = row.report.oldest_call
            if call is not None and call.cell == key:
                return f"its call of {call.trigger} has run for {call.age_s + row.age_s:.0f} s"
        return None

    def _blockers(self) -> Iterator[str]:
        """Yields why nothing of the program is called now in this shard."""
        if self.checkpoint is not None and self.checkpoint.state is State.STOPPED:
            yield f"the shard has stopped: {self.checkpoint.reason}"
        if self.orders.program.paused:
            yield f"the program is paused: {self.orders.program.reason or 'no reason was given'}"
        elif self.shard in self.orders.paused:
            yield f"the shard is paused: {self.orders.paused[self.shard] or 'no reason was given'}"
        if not self.workers:
            yield "nobody runs the program"
        if self.home_stall is not None:
            yield f"{self.home_stall}: {_MASTER_AWAY}"
        yield from self._stalled_workers()
        seek = self.orders.seeks.get(self.shard)
        if seek is not None:
            yield f"a seek to {seek.to.location} is ordered"

    def _stalled_workers(self) -> Iterator[str]:
        for row in self.workers:
            for waiting in (*row.report.unconfirmed, *row.report.refused, *row.report.failing_shards):
                if waiting.shard == self.shard:
                    yield f"its worker doesn't go on: {waiting.reason}"
            if row.report.tripped is not None:
                yield f"the breaker is open: {row.report.tripped}"
            if row.report.stall is not None:
                yield f"{row.report.stall}: {row.report.stall_reason}"
