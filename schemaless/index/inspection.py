"""Inspection compares index tables with cells in bounded pages, on any nodes, and repairs them on masters (I11).

An index follows the log, so both sides must be of one moment. An inspector reads the checkpoint of a row's shard first,
then entries and cells, the cells as of that checkpoint. A difference counts if the row got no cell since. Otherwise the
row is looked at again. Only a new generation changes the log up to a checkpoint, so generations are read last (I13).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey
from schemaless.errors import NotReady
from schemaless.index.comparison import (
    FIRST_ROW,
    LAST_ROW,
    EntryFault,
    EntryPlace,
    misplaced,
    missing_or_stale,
    row_after,
    rows_of,
)
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry
from schemaless.index.expected import ExpectedEntries, Rows
from schemaless.index.repair import EntryRepairs, Repaired
from schemaless.location import Location
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, entity_table, entity_walk, index_inspection
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
from schemaless.topology import Datastore

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
        self.datastore = datastore
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
        found = await self.cells.home(shard).run(
            entity_table.row_keys, self.datastore, shard, columns, until, after, self.page_rows
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
        reached = await self._reached_lately(node)
        found = await node.run(
            index_inspection.live_page, self.datastore, self.definition, shard, after, last, self.page_rows
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
            found = await node.run(index_inspection.of_rows, self.datastore, self.definition, {shard: again})
        return page

    async def span(self, nodes: Sequence[AsyncNode], after: RowKey, last: RowKey) -> InspectedSpan:
        """Compares the rows above `after`, up to `last`, with all their entries, in both directions at once.

        Each cell and each entry is read once, in the order of row keys. There is one node of each cluster. Raises
        StorageUnavailable, and NotReady for a node without a checkpoint.
        """
        reached = await self._reached(nodes)  # just now: what cells came after looks different, and is looked at again
        columns = self.definition.columns
        shards = self.datastore.by_home(range(self.datastore.shards), lambda shard: shard)
        columns_max = max(len(columns) + 1, 3 * self.page_rows * len(columns) // (2 * self.datastore.shards))
        cells = await all_or_first_error(
            self._storage.master(cluster).run(
                entity_walk.span,
                self.datastore,
                {shard: _lowest(reached[shard]) for shard in here},
                columns,
                after,
                last,
                columns_max,
            )
            for cluster, here in shards.items()
        )
        last = min(last, *(part.last for part in cells))
        together = min(self.datastore.shards, index_inspection.SHARDS_AT_ONCE)
        entry_bytes = index_inspection.ENTRY_BYTES + self.definition.entry_bytes_max
        entries = await all_or_first_error(
            node.run(
                index_inspection.live_in_span,
                self.datastore,
                self.definition,
                shards[node.node.cluster],
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
        shards = self.datastore.by_home(range(self.datastore.shards), lambda shard: shard)
        found = []
        for node in nodes:
            here: dict[EntryPlace, IndexEntry] = {}
            for some_shards in chunks(shards[node.node.cluster], count_max=index_inspection.SHARDS_AT_ONCE):
                wanted = {shard: row_keys for shard in some_shards}
                here |= await node.run(index_inspection.of_rows, self.datastore, self.definition, wanted)
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
                    index_inspection.of_rows, self.datastore, self.definition, {n: list(wanted[n]) for n in wanted}
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
            unsettled |= await self.cells.home(shard).run(
                entity_table.rows_changed_since, self.datastore, shard, columns, until, row_keys
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

    async def _reached_lately(self, node: AsyncNode) -> Reached:
        """Returns all checkpoints of a node, perhaps as they were a second ago: what came since is looked at again."""
        now = time.monotonic()
        if node.node.name not in self._known or now - self._known[node.node.name][0] > _KNOWN_FOR_S:
            self._known[node.node.name] = now, await self._reached([node])
        return self._known[node.node.name][1]

    def _is_on(self, node: AsyncNode, place: EntryPlace) -> bool:
        return self.datastore.home(place.shard) == node.node.cluster


def _untils(reached: Reached, shards: Iterable[int]) -> dict[int, int]:
    return {shard: _lowest(reached[shard]) for shard in shards}


def _without(rows: Unreadable, entries: Mapping[EntryPlace, IndexEntry]) -> Mapping[EntryPlace, IndexEntry]:
    return {place: entry for place, entry in entries.items() if place.row_key not in rows} if rows else entries


def _counted(nodes: Sequence[AsyncNode], found: Sequence[Mapping[EntryPlace, IndexEntry]]) -> dict[str, int]:
    return {node.node.name: len(here) for node, here in zip(nodes, found, strict=True)}


def _lowest(locations: Iterable[Location]) -> int:
    return min(location.added_id for location in locations)
