"""Inspection compares index tables with cells in bounded pages, on any nodes, and repairs them on masters (I11).

An index follows the log, so both sides must be of one moment. An inspector reads the checkpoint of a row's shard first,
then entries and cells, the cells as of that checkpoint. A difference counts if the row got no cell since. Otherwise the
row is looked at again. Only a new generation changes the log up to a checkpoint, so generations are read last (I13).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from schemaless.cell import RowKey, StoredCell, row_key_text
from schemaless.codec import decode_body
from schemaless.errors import Corrupt, NotReady, StorageUnavailable
from schemaless.index.comparison import (
    FIRST_ROW,
    LAST_ROW,
    EntryFault,
    EntryPlace,
    expected_entries,
    misplaced,
    missing_or_stale,
    repairs,
    row_after,
    row_before,
    rows_of,
)
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import Bodies, IndexEntry
from schemaless.location import ADDED_ID_MAX, Location, kept_until
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, entity_table, index_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

T = TypeVar("T")

PAGE_ROWS = 2000
"""How many rows or entries a page compares at most: a tenth of a second of a server.

Its rows are spread over all shards. Fewer cost more each, because most of a statement's cost is its beginning.
"""

_PAGE_ENTRIES = 4000
"""After how many entries a page of rows ends. Those of arrays have at most 3 KiB each."""

_SPAN_ENTRY_BYTES_MAX = 32 << 20
_SPAN_ENTRIES_MIN = 32

_LOOKS_MAX = 3
_LOOK_AGAIN_S = 0.1
_KNOWN_FOR_S = 1.0

Reached = Mapping[int, Sequence[Location]]
"""The checkpoints of some nodes, by the shard of the rows."""


Unreadable = dict[RowKey, str]
"""Rows that weren't judged, because a cell of theirs can't be decoded, and why."""


class InspectedRows(msgspec.Struct):
    """A page of rows, from cells to entries. `faults` is by node. `last` is None where the shard has no more rows."""

    rows: int
    faults: dict[str, list[EntryFault]]
    unsettled: Sequence[RowKey]
    unreadable: Unreadable
    last: RowKey | None


class InspectedEntries(msgspec.Struct):
    """A page of entries of a node, from entries to cells. `last` is None where the table has no more entries."""

    entries: int
    faults: list[EntryFault]
    unsettled: Sequence[RowKey]
    unreadable: Unreadable
    last: EntryKey | None


class InspectedSpan(msgspec.Struct):
    """Rows of a span of row keys, up to `last`, with all their entries. `entries` and `faults` are by node."""

    rows: int
    entries: dict[str, int]
    faults: dict[str, list[EntryFault]]
    unsettled: Sequence[RowKey]
    unreadable: Unreadable
    last: RowKey


class IndexInspector:
    """Compares a version of an index with the cells. The index must have been complete once."""

    def __init__(
        self, storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition, page_rows: int = PAGE_ROWS
    ) -> None:
        self.datastore = datastore = storage.live(datastore)  # it may have been read before shards moved
        self.placed = definition.placed(datastore)
        """The datastore as its entries lie."""
        self.definition = definition
        self.version = IndexVersion(datastore.name, definition.name, definition.number)
        self._storage = storage
        self.page_rows = page_rows
        self.cells = ExpectedEntries(storage, datastore, definition)
        self._repairs = EntryRepairs(storage, datastore, definition, self.cells)
        self._known: dict[str, tuple[float, Reached]] = {}

    async def rows(
        self, nodes: Sequence[AsyncNode], shard: int, after: RowKey = FIRST_ROW, last: RowKey = LAST_ROW
    ) -> InspectedRows:
        """Compares a page of a shard's rows above `after`, up to `last`, with the entries that these nodes have.

        There is one node of each cluster. Raises StorageUnavailable, and NotReady for a node without a checkpoint.
        """
        reached = await self._reached(nodes, shard)
        columns, until = self.definition.columns, _lowest(reached[shard])
        found = await self.cells.read(
            {shard: until}, entity_table.row_keys, self.datastore, shard, columns, until, after, self.page_rows
        )
        row_keys: Sequence[RowKey] = [row_key for row_key in found if row_key <= last]
        is_last = len(found) < self.page_rows or len(row_keys) < len(found)
        page = InspectedRows(0, {node.node.name: [] for node in nodes}, (), {}, None)
        for look in range(_LOOKS_MAX):
            if look:
                await asyncio.sleep(_LOOK_AGAIN_S)
                reached = await self._reached(nodes, shard)
            read, unsettled = await self._compare_rows(page, nodes, shard, reached, row_keys)
            if not look:
                page.rows = read
                page.last = None if is_last and read == len(row_keys) else row_keys[read - 1]
                row_keys = row_keys[:read]
            # A row may have more entries when it is looked at again, and then fewer rows fit a page.
            row_keys = [*unsettled, *row_keys[read:]]
            page.unsettled = row_keys
            if not row_keys:
                break
        return page

    async def entries(
        self, node: AsyncNode, shard: int, after: EntryKey = BEFORE_ALL, last: RowKey = LAST_ROW
    ) -> InspectedEntries:
        """Compares a page of the entries that a node has of an index shard, those behind `after`, up to the row `last`.

        Raises StorageUnavailable, and NotReady for a node without a checkpoint.
        """
        # Checkpoints may be as they were a second ago: what came since is looked at again.
        now = time.monotonic()
        if node.node.name not in self._known or now - self._known[node.node.name][0] > _KNOWN_FOR_S:
            self._known[node.node.name] = now, await self._reached([node])
        reached = self._known[node.node.name][1]
        found = await node.run(
            index_table.live_page, self.datastore, self.definition, shard, after, last, self.page_rows
        )
        page = InspectedEntries(len(found), [], (), {}, None)
        if len(found) == self.page_rows:
            _, row_key, element = max(found)
            page.last = row_key, element
        for _ in range(_LOOKS_MAX):
            again = await self._compare_entries(page, reached, found)
            page.unsettled = again
            if not again:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
            reached = await self._reached([node])
            found = await node.run(index_table.of_rows, self.datastore, self.definition, {shard: again})
        return page

    async def span(self, nodes: Sequence[AsyncNode], after: RowKey, last: RowKey) -> InspectedSpan:
        """Compares the rows above `after`, up to `last`, with all their entries, in both directions at once.

        Each cell and each entry is read once, in the order of row keys. There is one node of each cluster. Raises
        StorageUnavailable, and NotReady for a node without a checkpoint.
        """
        reached = await self._reached(nodes)  # just now: what cells came after looks different, and is looked at again
        columns = self.definition.columns
        shards = self.placed.by_home(range(self.datastore.shards), lambda shard: shard)
        columns_max = max(len(columns) + 1, 3 * self.page_rows * len(columns) // (2 * self.datastore.shards))
        cells = await all_or_first_error(
            self.cells.read(
                {shard: _lowest(reached[shard]) for shard in here},
                entity_table.span,
                self.datastore,
                {shard: _lowest(reached[shard]) for shard in here},
                columns,
                after,
                last,
                columns_max,
            )
            for here in self.datastore.by_home(range(self.datastore.shards), lambda shard: shard).values()
        )
        last = min(last, *(part.last for part in cells))
        together = min(self.datastore.shards, index_table.SHARDS_AT_ONCE)
        entry_bytes = index_table.ENTRY_BYTES + self.definition.entry_bytes_max
        entries = await all_or_first_error(
            node.run(
                index_table.live_in_span,
                self.datastore,
                self.definition,
                shards.get(node.node.cluster, []),
                (after, last),
                max(_SPAN_ENTRIES_MIN, _SPAN_ENTRY_BYTES_MAX // (together * entry_bytes)),
                _SPAN_ENTRY_BYTES_MAX // len(nodes),
            )
            for node in nodes
        )
        last = min(last, *(until for _, until in entries))
        if last == after:  # one row has more entries of one shard than that
            row_key = row_after(after)
            return msgspec.structs.replace(await self.of_rows(nodes, [row_key]), last=row_key)
        page = InspectedSpan(0, {}, {node.node.name: [] for node in nodes}, (), {}, last)
        expected: dict[EntryPlace, IndexEntry] = {}
        async for made in self.cells.of_cells(cell for part in cells for cell in part.cells if cell.row_key <= last):
            page.rows += len(made.rows)
            page.unreadable |= made.unreadable
            expected |= made.entries
        found = [{place: entry for place, entry in here.items() if place.row_key <= last} for here, _ in entries]
        page.entries = _counted(nodes, found)
        await self._settle(page, nodes, await self._judge(page, nodes, expected, found, reached))
        return page

    async def of_rows(self, nodes: Sequence[AsyncNode], row_keys: Sequence[RowKey]) -> InspectedSpan:
        """Compares some rows with all their entries, in both directions. Raises what `span` does."""
        page = InspectedSpan(0, {}, {node.node.name: [] for node in nodes}, (), {}, LAST_ROW)
        page.rows, page.entries, unsettled = await self._look(page, nodes, row_keys)
        await self._settle(page, nodes, unsettled)
        return page

    async def _settle(self, page: InspectedSpan, nodes: Sequence[AsyncNode], unsettled: Sequence[RowKey]) -> None:
        """Looks again at rows that weren't judged, some times."""
        for _ in range(_LOOKS_MAX - 1):
            if not unsettled:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
            _, _, unsettled = await self._look(page, nodes, unsettled)
        page.unsettled = unsettled

    async def _look(
        self, page: InspectedSpan, nodes: Sequence[AsyncNode], row_keys: Sequence[RowKey]
    ) -> tuple[int, dict[str, int], Sequence[RowKey]]:
        """Adds the faults of some rows to a page. Returns how many rows and entries it read, and rows not judged."""
        reached = await self._reached(nodes)
        by_shard: dict[int, list[RowKey]] = {}
        for row_key in row_keys:
            by_shard.setdefault(shard_of(row_key, self.datastore.shards), []).append(row_key)
        rows, expected = 0, dict[EntryPlace, IndexEntry]()
        async for made in self.cells.of_rows(by_shard, _untils(reached, by_shard)):
            rows += len(made.rows)
            page.unreadable |= made.unreadable
            expected |= made.entries
        shards = self.placed.by_home(range(self.datastore.shards), lambda shard: shard)
        found = []
        for node in nodes:
            here: dict[EntryPlace, IndexEntry] = {}
            for some_shards in chunks(shards.get(node.node.cluster, []), count_max=index_table.SHARDS_AT_ONCE):
                wanted = {shard: row_keys for shard in some_shards}
                here |= await node.run(index_table.of_rows, self.datastore, self.definition, wanted)
            found.append(here)
        unsettled = await self._judge(page, nodes, expected, found, reached)
        return rows, _counted(nodes, found), unsettled

    async def _judge(
        self,
        page: InspectedSpan,
        nodes: Sequence[AsyncNode],
        expected: Mapping[EntryPlace, IndexEntry],
        found: Sequence[Mapping[EntryPlace, IndexEntry]],
        reached: Reached,
    ) -> Sequence[RowKey]:
        """Adds the faults of whole rows to a page, by what each node has of them. Returns rows to look at again."""
        found = [_without(page.unreadable, here) for here in found]
        faults = {
            node.node.name: [
                *missing_or_stale({place: expected[place] for place in expected if self._is_on(node, place)}, here),
                *misplaced(expected, here),
            ]
            for node, here in zip(nodes, found, strict=True)
        }
        suspects: dict[int, list[RowKey]] = {}
        for row_key in rows_of([fault for of_node in faults.values() for fault in of_node]):
            suspects.setdefault(shard_of(row_key, self.datastore.shards), []).append(row_key)
        unsettled = await self._unsettled(suspects, reached)
        for name, of_node in faults.items():
            page.faults[name] += [fault for fault in of_node if fault.place.row_key not in unsettled]
        return sorted(unsettled)

    async def repair(self, faults: Iterable[EntryFault]) -> Repaired:
        """Brings the places of faults to what the cells say, on masters. Raises StorageUnavailable and NotReady."""
        return await self._repairs.repair(faults)

    async def _compare_rows(
        self, page: InspectedRows, nodes: Sequence[AsyncNode], shard: int, reached: Reached, row_keys: Sequence[RowKey]
    ) -> tuple[int, Sequence[RowKey]]:
        """Adds the faults of rows to a page. Returns how many rows it read, and those that it couldn't judge."""
        expected: dict[EntryPlace, IndexEntry] = {}
        read: list[RowKey] = []
        if row_keys:
            async for made in self.cells.of_rows({shard: row_keys}, _untils(reached, [shard])):
                read += made.rows
                page.unreadable |= made.unreadable
                expected |= made.entries
                if len(expected) >= _PAGE_ENTRIES:
                    break
        faults: dict[str, list[EntryFault]] = {}
        for node in nodes:
            here = {place: entry for place, entry in expected.items() if self._is_on(node, place)}
            wanted: dict[int, dict[RowKey, None]] = {}
            for place in here:
                wanted.setdefault(place.shard, {})[place.row_key] = None
            if wanted:
                found = await node.run(
                    index_table.of_rows, self.datastore, self.definition, {n: list(wanted[n]) for n in wanted}
                )
                faults[node.node.name] = missing_or_stale(here, found)
        suspects = rows_of([fault for of_node in faults.values() for fault in of_node])
        unsettled = await self._unsettled({shard: suspects}, reached)
        for name, of_node in faults.items():
            page.faults[name] += [fault for fault in of_node if fault.place.row_key not in unsettled]
        return len(read), sorted(unsettled)

    async def _compare_entries(
        self, page: InspectedEntries, reached: Reached, found: Mapping[EntryPlace, IndexEntry]
    ) -> Sequence[RowKey]:
        """Adds the faults of entries to a page. Returns the rows that it couldn't judge."""
        rows: dict[int, dict[RowKey, None]] = {}
        for place in found:
            rows.setdefault(shard_of(place.row_key, self.datastore.shards), {})[place.row_key] = None
        faults: list[EntryFault] = []
        by_source = {source: list(keys) for source, keys in rows.items()}
        async for made in self.cells.of_rows(by_source, _untils(reached, by_source)):
            page.unreadable |= made.unreadable
            these = set(made.rows) - made.unreadable.keys()
            faults += misplaced(
                made.entries, {place: entry for place, entry in found.items() if place.row_key in these}
            )
        suspects: dict[int, list[RowKey]] = {}
        for row_key in rows_of(faults):
            suspects.setdefault(shard_of(row_key, self.datastore.shards), []).append(row_key)
        unsettled = await self._unsettled(suspects, reached)
        page.faults += [fault for fault in faults if fault.place.row_key not in unsettled]
        return sorted(unsettled)

    async def _unsettled(self, suspects: Rows, reached: Reached) -> set[RowKey]:
        """Returns the suspects that can't be judged: they got cells since, or what was reached is superseded.

        It must be asked after everything else was read.
        """
        unsettled = set[RowKey]()
        for shard, row_keys in suspects.items():
            if not row_keys:
                continue
            if not await self.cells.are_kept(shard, reached[shard]):
                unsettled.update(row_keys)
                continue
            columns, until = self.definition.columns, _lowest(reached[shard])
            unsettled |= await self.cells.read(
                {shard: ADDED_ID_MAX}, entity_table.rows_changed_since, self.datastore, shard, columns, until, row_keys
            )
        return unsettled

    async def _reached(self, nodes: Sequence[AsyncNode], shard: int | None = None) -> dict[int, list[Location]]:
        """Returns the checkpoints of all nodes, of one shard or all. Raises NotReady for a node without one."""
        only = () if shard is None else (shard,)
        answers = await all_or_first_error(
            node.run(checkpoint_table.of_consumer, self.datastore.name, self.definition.consumer, only)
            for node in nodes
        )
        reached: dict[int, list[Location]] = {n: [] for n in only or range(self.datastore.shards)}
        for node, found in zip(nodes, answers, strict=True):
            if lacking := reached.keys() - {checkpoint.shard for checkpoint in found}:
                raise NotReady(f"{node.node.name} has no checkpoint of {self.definition.name} for shard {min(lacking)}")
            for checkpoint in found:
                reached[checkpoint.shard].append(checkpoint.location)
        return reached

    def _is_on(self, node: AsyncNode, place: EntryPlace) -> bool:
        return self.placed.home(place.shard) == node.node.cluster


def _untils(reached: Reached, shards: Iterable[int]) -> dict[int, int]:
    return {shard: _lowest(reached[shard]) for shard in shards}


def _without(rows: Unreadable, entries: Mapping[EntryPlace, IndexEntry]) -> Mapping[EntryPlace, IndexEntry]:
    return {place: entry for place, entry in entries.items() if place.row_key not in rows} if rows else entries


def _counted(nodes: Sequence[AsyncNode], found: Sequence[Mapping[EntryPlace, IndexEntry]]) -> dict[str, int]:
    return {node.node.name: len(here) for node, here in zip(nodes, found, strict=True)}


def _lowest(locations: Iterable[Location]) -> int:
    return min(location.added_id for location in locations)


# Expected entries: what the newest cells of rows make of an index, read on the masters of these rows (I11).
#
# A cell that can't be decoded keeps its own row from being judged, and no other.

_ROWS_AT_ONCE = 250

Rows = Mapping[int, Sequence[RowKey]]
"""Row keys by the shard of the rows."""


class MadeEntries(msgspec.Struct, frozen=True):
    """What some rows make, by place. `unreadable` are those of them that have a cell which can't be decoded, and why.

    They have no entries here.
    """

    rows: Sequence[RowKey]
    entries: Mapping[EntryPlace, IndexEntry]
    unreadable: Mapping[RowKey, str]


class ExpectedEntries:
    """Reads the cells of a datastore, and evaluates a version of an index."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> None:
        self._storage = storage
        self._datastore = datastore
        self._definition = definition

    async def of_rows(self, rows: Rows, untils: Mapping[int, int]) -> AsyncIterator[MadeEntries]:
        """Yields rows in bounded parts, as their logs make them up to an added_id of each shard.

        Raises StorageUnavailable.
        """
        for shards in self._datastore.by_home(rows, lambda shard: shard).values():
            unread = {shard: rows[shard] for shard in shards if rows[shard]}
            while unread:
                wanted = {shard: (untils[shard], row_keys) for shard, row_keys in unread.items()}
                page = await self.read(
                    {shard: untils[shard] for shard in wanted},
                    entity_table.newest_until,
                    self._datastore,
                    wanted,
                    self._definition.columns,
                )
                read = [
                    row_key
                    for shard, row_keys in unread.items()
                    for row_key in row_keys[: len(row_keys) - len(page.unread.get(shard, ()))]
                ]
                async for made in self.of_cells(page.cells, read):
                    yield made
                unread = dict(page.unread)

    async def of_cells(
        self, cells: Iterable[StoredCell], row_keys: Sequence[RowKey] = ()
    ) -> AsyncIterator[MadeEntries]:
        """Yields what the newest cells of rows make, in bounded parts. Rows of `row_keys` may have no cell."""
        rows: dict[RowKey, list[StoredCell]] = {row_key: [] for row_key in row_keys}
        for cell in cells:
            rows.setdefault(cell.row_key, []).append(cell)
        for some in chunks(list(rows), count_max=_ROWS_AT_ONCE):
            bodies: dict[RowKey, Bodies] = {}
            unreadable: dict[RowKey, str] = {}
            for row_key in some:
                try:
                    bodies[row_key] = {cell.column_name: decode_body(cell.body) for cell in rows[row_key]}
                except Corrupt as error:
                    unreadable[row_key] = f"a cell of row {row_key_text(row_key)} can't be read: {error}"
            made = expected_entries(self._definition, self._datastore.shards, bodies)
            yield MadeEntries(some, made, unreadable)
            await asyncio.sleep(0)  # others of this process have their turn

    async def are_kept(self, shard: int, locations: Iterable[Location]) -> bool:
        """Returns whether the shard's log still has what it had up to these locations. Raises StorageUnavailable."""
        head, starts = await self.read({shard: 0}, shard_head.history, self._datastore.name, shard)
        return all(kept_until(at, starts) == at.added_id <= head.added_id for at in locations)

    async def read(self, untils: Mapping[int, int], operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Reads cells of shards of one home up to these added_ids, on its master. Raises ShardsMoved."""
        return await self._storage.master(self._datastore.home(next(iter(untils)))).run(
            shard_head.read_at_home, self._datastore.name, untils, operation, *args
        )


# Repair brings the entries of masters to what the cells say, where their minions can follow (I11).
#
# Replication compares rows by their keys. So a write stops it on a minion that has a row which its master lacks, or
# lacks one which its master has. Such a place is left as it is until the minion is made anew.

_PLACES_AT_ONCE = 100
_ATTEMPTS_MAX = 5
_AGAIN_AFTER_S = 0.05


class Repaired(msgspec.Struct):
    """What became of faults. `written` places are as the cells say.

    `withheld` counts by minion the places whose write would have stopped its replication. The others wait for a later
    pass: their checkpoint moved all the time, its generation is superseded, or a cell of their row can't be decoded.
    """

    written: int = 0
    withheld: Counter[str] = msgspec.field(default_factory=Counter)


@dataclass(eq=False)
class EntryRepairs:
    """Belongs to a version of an index."""

    storage: AsyncStorage
    datastore: Datastore
    definition: IndexDefinition
    cells: ExpectedEntries

    async def repair(self, faults: Iterable[EntryFault]) -> Repaired:
        """Writes what the cells say at the places of faults, on masters.

        Each write is in a transaction in which the checkpoint of the row's shard on that cluster can't move: so the
        cells up to it are what the place must show, whoever else writes. Raises StorageUnavailable and NotReady.
        """
        places: dict[tuple[str, int], list[EntryPlace]] = {}
        for fault in faults:
            source = shard_of(fault.place.row_key, self.datastore.shards)
            home = self.definition.placed(self.datastore).home(fault.place.shard)
            places.setdefault((home, source), []).append(fault.place)
        repaired = Repaired()
        for (cluster, source), here in places.items():
            for some in chunks(here, count_max=_PLACES_AT_ONCE):
                await self._repair(self.storage.master(cluster), source, some, repaired)
        return repaired

    async def _repair(self, master: AsyncNode, source: int, places: Sequence[EntryPlace], repaired: Repaired) -> None:
        """Repairs places of a cluster whose rows are of one shard. What can't be done now is tried again."""
        left, withheld = places, Counter[str]()
        for attempt in range(_ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(_AGAIN_AFTER_S)
            checkpoint = await self._checkpoint(master, source)
            differing, is_behind = await self._differing(master, checkpoint, left)
            if is_behind and attempt < _ATTEMPTS_MAX - 1:
                continue
            withheld = Counter(name for names in differing.values() for name in names)
            free = [place for place in left if place not in differing]
            if await self._write(master, checkpoint, free, repaired):
                left = list(differing)
            if not left:
                return
        repaired.withheld += withheld

    async def _write(
        self, master: AsyncNode, checkpoint: Checkpoint, places: Sequence[EntryPlace], repaired: Repaired
    ) -> bool:
        """Writes places. Returns False, and nothing is written, if the checkpoint moved or is superseded."""
        source = checkpoint.shard
        row_keys = list(dict.fromkeys(place.row_key for place in places))
        expected: dict[EntryPlace, IndexEntry] = {}
        unreadable: set[bytes] = set()
        async for made in self.cells.of_rows({source: row_keys}, {source: checkpoint.location.added_id}):
            expected |= {place: made.entries[place] for place in places if place in made.entries}
            unreadable |= made.unreadable.keys()
        places = [place for place in places if place.row_key not in unreadable]
        if not places:
            return True
        if not await self.cells.are_kept(source, [checkpoint.location]):
            return False
        writes = repairs(places, expected, checkpoint.location)
        script = index_table.overwrites(self.datastore, self.definition, writes)
        if not await master.run(checkpoint_table.write_at, self.datastore.name, checkpoint, script):
            return False
        repaired.written += len(places)
        return True

    async def _checkpoint(self, node: AsyncNode, source: int) -> Checkpoint:
        found = await node.run(checkpoint_table.of_consumer, self.datastore.name, self.definition.consumer, [source])
        if not found:
            raise NotReady(f"{node.node.name}: no checkpoint of shard {source}")
        return found[0]

    async def _differing(
        self, master: AsyncNode, checkpoint: Checkpoint, places: Sequence[EntryPlace]
    ) -> tuple[Mapping[EntryPlace, Sequence[str]], bool]:
        """Returns the places where a minion has a row that its master lacks, or the reverse, with these minions.

        A minion that doesn't answer is believed to become what its master is. One that isn't at the checkpoint can't be
        compared: the second value says that there is one.
        """
        is_behind = False
        names: dict[EntryPlace, list[str]] = {}
        on_master = await master.run(index_table.held, self.datastore, self.definition, places)
        for minion in self.storage.minions(master.node.cluster):
            try:
                at = (await self._checkpoint(minion, checkpoint.shard)).location
                held = await minion.run(index_table.held, self.datastore, self.definition, places)
                after = (await self._checkpoint(minion, checkpoint.shard)).location
            except (StorageUnavailable, NotReady):
                continue
            if at == after == checkpoint.location:
                for place in on_master ^ held:
                    names.setdefault(place, []).append(minion.node.name)
            else:
                is_behind = True
        return names, is_behind


# A sweep compares a selection of an index with its cells, page after page, and yields what each page came to.
#
# It looks in both directions: the rows of the selected shards, then the entries of the selected shards. So a sweep of
# all shards misses nothing. One of a single shard finds what the cells there lack, and what its own tables have too
# much.

_ELEMENT_MAX = 2**16 - 1
_RANGES_MAX = 64


class SweepSelection(msgspec.Struct, frozen=True):
    """What a sweep compares: the rows of shards, the entries of shards, and both within a range of row keys.

    With `row_key` it is this row alone, with its entries in all shards.
    """

    of_rows: Sequence[int]
    of_entries: Sequence[int]
    first: RowKey = FIRST_ROW
    last: RowKey = LAST_ROW
    row_key: RowKey | None = None

    @property
    def steps(self) -> int:
        return len(self.of_rows) + len(self.of_entries)


def everything(datastore: Datastore) -> SweepSelection:
    return SweepSelection(range(datastore.shards), range(datastore.shards))


def one_row(datastore: Datastore, row_key: RowKey) -> SweepSelection:
    """Returns the selection of one row. Its entries may be in any shard."""
    return SweepSelection([shard_of(row_key, datastore.shards)], range(datastore.shards), row_key=row_key)


class SweptPage(msgspec.Struct, frozen=True):
    """A page of a sweep. `faults` is by node. `steps`: how many shards are done with it, in one direction.

    `unreadable` are rows that weren't judged, because a cell of theirs can't be decoded, and why.
    """

    rows: int
    entries: int
    faults: Mapping[str, Sequence[EntryFault]]
    unsettled: Sequence[RowKey]
    unreadable: Mapping[RowKey, str]
    steps: int


async def sweep(
    inspector: IndexInspector, nodes: Sequence[AsyncNode], selection: SweepSelection
) -> AsyncIterator[SweptPage]:
    """Compares the entries that some nodes have, one node of each cluster. Raises StorageUnavailable and NotReady."""
    if selection.row_key is not None:
        row = await inspector.of_rows(nodes, [selection.row_key])
        entries_read = sum(row.entries.values())
        yield SweptPage(row.rows, entries_read, row.faults, row.unsettled, row.unreadable, steps=selection.steps)
        return
    before = row_before(selection.first)
    for shard in selection.of_rows:
        after: RowKey | None = before
        while after is not None:
            rows = await inspector.rows(nodes, shard, after, selection.last)
            after = rows.last
            yield SweptPage(rows.rows, 0, rows.faults, rows.unsettled, rows.unreadable, steps=int(after is None))
    by_cluster = {node.node.cluster: node for node in nodes}
    for shard in selection.of_entries:
        node = by_cluster[inspector.placed.home(shard)]
        beyond: EntryKey | None = BEFORE_ALL if before == FIRST_ROW else (before, _ELEMENT_MAX)
        while beyond is not None:
            entries = await inspector.entries(node, shard, beyond, selection.last)
            beyond = entries.last
            faults, steps = {node.node.name: entries.faults}, int(beyond is None)
            yield SweptPage(0, entries.entries, faults, entries.unsettled, entries.unreadable, steps=steps)


def ranges_of(datastore: Datastore) -> int:
    """Returns how many ranges of row keys the index cleaner has. They are equally wide."""
    return min(_RANGES_MAX, datastore.shards)


def range_of(datastore: Datastore, row_key: RowKey) -> int:
    """Returns the number of the range that has a row key."""
    return _number(row_key) * ranges_of(datastore) >> 128


def bounds_of(datastore: Datastore, number: int) -> tuple[RowKey, RowKey]:
    """Returns the row key before the first one of a range, and its last one."""
    ranges = ranges_of(datastore)
    last = LAST_ROW if number == ranges - 1 else row_before(_row_key((number + 1 << 128) // ranges))
    return row_before(_row_key((number << 128) // ranges)), last


def whole_ranges(datastore: Datastore, selections: Sequence[SweepSelection]) -> list[int]:
    """Returns the numbers of the ranges of which one of these selections is all rows and all entries."""
    every = set(range(datastore.shards))
    spans = [
        (row_before(selection.first), selection.last)
        for selection in selections
        if selection.row_key is None and set(selection.of_rows) == set(selection.of_entries) == every
    ]
    bounds = [bounds_of(datastore, number) for number in range(ranges_of(datastore))]
    return [
        number
        for number, (after, last) in enumerate(bounds)
        if any(begin <= after and last <= end for begin, end in spans)
    ]


async def sweep_span(
    inspector: IndexInspector, nodes: Sequence[AsyncNode], after: RowKey, last: RowKey
) -> AsyncIterator[InspectedSpan]:
    """Compares the rows above `after`, up to `last`, span after span. Raises StorageUnavailable and NotReady.

    A span is as wide as the one before was in the end, so few reads are cut off. It becomes wider where rows are few.
    """
    wide = _number(last) - _number(after)
    while after < last:
        end = _row_key(min(_number(last), _number(after) + wide))
        page = await inspector.span(nodes, after, end)
        wide = max(1, _number(page.last) - _number(after)) * (1 if page.rows > inspector.page_rows // 2 else 2)
        after = page.last
        yield page


def _number(row_key: RowKey) -> int:
    return int.from_bytes(row_key, "big")


def _row_key(number: int) -> RowKey:
    return RowKey(number.to_bytes(16, "big"))
