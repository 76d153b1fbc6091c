"""Reads of cells that were acknowledged and aren't at home yet, because their home was away.

From a home's failure until all that was buffered for it is settled there, a read of it looks into the buffers, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import structlog

from api.read.reader import Reader, Served, WantedCell, read_many
from schemaless.cell import CellKey, ColumnName, RowKey, StoredCell
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.facts.buffers import settle
from schemaless.ops.datastores import Catalogue
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferSelection
from schemaless.storage.entity_table import CellPage
from schemaless.storage.everywhere import for_each_cluster
from schemaless.storage.failover import ask_masters
from schemaless.topology import Datastore, Placement, Role

T = TypeVar("T")

log = structlog.get_logger()

_PERIOD_S = 0.5
_LOOK_S = 1.0
"""How long one look goes on: a buffer has thousands of rows under load, and is read in pages."""
_PAUSE_MAX_S = 30.0
_TIMEOUT_S = 1.0


class Unsettled:
    """The homes that were away, and what buffers have for them.

    A process that starts doesn't know what happened before, so all are unsettled until it has looked. So is a shard
    that moves: its puts may have been buffered while no home was open for it.
    """

    def __init__(self, storage: AsyncStorage, catalogue: Catalogue, answers: Callable[[str], bool]) -> None:
        """`answers` returns whether a server, by name, answered when it was last asked."""
        self._storage = storage
        self._catalogue = catalogue
        self._answers = answers
        self._noted_at: dict[str, float] = {}
        self._settled: dict[str, int] = {}
        """The epoch of a home's master under which all that was buffered for it was there."""
        self._arrived: dict[tuple[str, int], Placement] = {}
        """Of shards that moved, what was so when all that was buffered for them was at home."""

    def __contains__(self, home: str) -> bool:
        return self._settled.get(home) != self._storage.epoch(home) or not self._storage.is_open(home)

    def may_have(self, datastore: Datastore, shard: int) -> bool:
        """Returns whether cells of a shard may be in a buffer only."""
        move = datastore.moves.get(shard)
        return datastore.home(shard) in self or (
            move is not None and self._arrived.get((datastore.name, shard)) is not move
        )

    def note(self, home: str) -> None:
        """A cell was buffered for a home, or the home is away."""
        self._noted_at[home] = time.monotonic()
        self._settled.pop(home, None)

    async def cells(self, datastore: Datastore, home: str, wanted: BufferSelection) -> tuple[list[StoredCell], Served]:
        """Returns what the buffers that answer have of a row, each cell once, by column and ref_key."""
        shard = shard_of(wanted.row_key, datastore.shards)
        # The buffer of a home that a shard moved to may have cells that were put before.
        others = self._others("" if shard in datastore.moves else home)
        answers = await ask_masters(
            self._storage, others, buffer_table.selected, datastore, shard, wanted, timeout_s=_TIMEOUT_S
        )
        for cluster, error in answers.failures.items():
            log.info("a buffer can't be read", cluster=cluster, error=str(error))
        found = {cell.key: cell for cells in answers.found.values() for cell in cells}
        return sorted(found.values(), key=lambda cell: cell.key), Served(Role.MASTER, home, 0.0)

    async def run(self) -> None:
        """Notes what is away, and settles what isn't any more."""
        await for_each_cluster(self._storage, self._keep)

    async def _keep(self, home: str) -> None:
        epoch, looks_at, pause_s = self._storage.epoch(home), 0.0, _PERIOD_S
        while True:
            known, epoch = epoch, self._storage.epoch(home)
            away = not self._storage.is_open(home) or not self._answers(self._storage.master(home).node.name)
            if away:
                self.note(home)
            if away or epoch != known:
                looks_at, pause_s = 0.0, _PERIOD_S
            elif (
                (home in self or self._unsettled_moves(home))
                and time.monotonic() >= looks_at
                and not await self._settle(home)
            ):
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)  # a row that its home refuses may wait for ever
                looks_at = time.monotonic() + pause_s
            await asyncio.sleep(_PERIOD_S)

    def _others(self, home: str) -> list[str]:
        """Returns the clusters that may have buffer rows of a home: one that is just joining has no table for them."""
        storage = self._storage
        return [name for name in storage.topology.clusters if name != home and not storage.has_no_master(name)]

    def _unsettled_moves(self, home: str) -> dict[tuple[str, int], Placement]:
        """Returns the shards that have moved to a home since it was settled. Those that may go again are never."""
        return {
            key: move
            for name, moves in self._storage.placements.items()
            for move in moves.values()
            if move.home == home and move.coming is None and self._arrived.get(key := (name, move.shard)) is not move
        }

    async def _settle(self, home: str) -> bool:
        """Looks once whether all that waits is at home. Returns whether it could be judged, and is."""
        epoch, noted_at, moved = self._storage.epoch(home), self._noted_at.get(home), self._unsettled_moves(home)
        others = self._others(home)
        try:
            waiting = await ask_masters(self._storage, others, buffer_table.waiting, timeout_s=_TIMEOUT_S, tolerated=())
            names = {name for found in waiting.found.values() for name, waits_for in found if waits_for == home}
            names |= {name for name, moves in self._storage.placements.items() if moves}  # rows may name earlier homes
            for name in sorted(names):
                datastore = await self._catalogue.datastore(name)
                await settle(self._storage, datastore, _LOOK_S, lambda: False, homes=(home,))
        except SchemalessError as error:
            log.info("a home isn't settled", home=home, why=str(error))
            return False
        if self._noted_at.get(home) == noted_at:
            self._settled[home] = epoch
        self._arrived |= moved
        return True


def merged(stored: Sequence[StoredCell], buffered: Iterable[StoredCell]) -> list[StoredCell]:
    """Returns the cells of both, by column and ref_key. What is at home counts."""
    found = {cell.key: cell for cell in buffered} | {cell.key: cell for cell in stored}
    return sorted(found.values(), key=lambda cell: cell.key)


def newest_of_columns(cells: Iterable[StoredCell]) -> list[StoredCell]:
    """Returns the newest cell that is left of each column, of cells in the order of their ref_keys. Where none is left
    it returns the newest that was erased.
    """
    found: dict[ColumnName, StoredCell] = {}
    for cell in cells:
        if not cell.is_erased or cell.column_name not in found or found[cell.column_name].is_erased:
            found[cell.column_name] = cell
    return list(found.values())


class CellReader:
    """Reads cells, a column or a row: from their home, and from the buffers while the home is unsettled.

    A minion's answer is completed by buffers, too: its master gave none, and may have lost what the minion never had.
    Where a minion was asked for, nothing is completed.
    """

    def __init__(self, reader: Reader, unsettled: Unsettled) -> None:
        self._reader = reader
        self._unsettled = unsettled

    async def exact(
        self, datastore: Datastore, key: CellKey, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """Returns one cell, or None. Raises StorageUnavailable."""
        wanted = BufferSelection(key.row_key, key.column_name, key.ref_key, key.ref_key)
        cell, served, buffered = await self._with_buffered(
            datastore, wanted, read_from, self._reader.exact(datastore, key, read_from), None
        )
        return cell or next(iter(buffered), None), served

    async def newest(
        self, datastore: Datastore, row_key: RowKey, column_name: ColumnName, read_from: Role | None
    ) -> tuple[StoredCell | None, Served]:
        """Returns the newest version of a column, or None. Raises StorageUnavailable."""
        cell, served, buffered = await self._with_buffered(
            datastore,
            BufferSelection(row_key, column_name),
            read_from,
            self._reader.newest(datastore, row_key, column_name, read_from),
            None,
        )
        found = newest_of_columns(merged([cell] if cell else [], buffered))
        return found[-1] if found else None, served

    async def row(
        self, datastore: Datastore, row_key: RowKey, bytes_max: int, read_from: Role | None
    ) -> tuple[list[StoredCell], Served]:
        """Returns the newest version of every column of a row. Raises TooLarge and StorageUnavailable."""
        shard = shard_of(row_key, datastore.shards)
        read = self._reader.read_shard(
            datastore, shard, entity_table.row, datastore, shard, row_key, bytes_max, read_from=read_from
        )
        cells, served, buffered = await self._with_buffered(datastore, BufferSelection(row_key), read_from, read, [])
        return newest_of_columns(merged(cells, buffered)), served

    async def versions(
        self,
        datastore: Datastore,
        wanted: BufferSelection,
        descending: bool,
        limit: int,
        bytes_max: int,
        read_from: Role | None,
    ) -> tuple[CellPage, Served]:
        """Returns versions of a column. Raises StorageUnavailable."""
        assert wanted.column_name is not None, "versions are those of a column"
        shard, bounds = shard_of(wanted.row_key, datastore.shards), (wanted.least, wanted.most)
        column = wanted.row_key, wanted.column_name
        read = self._reader.read_shard(
            datastore,
            shard,
            entity_table.versions,
            *(datastore, shard, column, bounds, descending, limit, bytes_max),
            read_from=read_from,
        )
        page, served, buffered = await self._with_buffered(datastore, wanted, read_from, read, CellPage([], None))
        if not buffered:
            return page, served
        # Behind the last cell of a page that goes on, the home may have more: what is buffered there comes later.
        last = page.following
        within = [
            cell for cell in buffered if last is None or (cell.ref_key > last if descending else cell.ref_key < last)
        ]
        cells = merged(page.cells, within)[:: -1 if descending else 1]
        following = cells[limit].ref_key if len(cells) > limit else last
        return CellPage(cells[:limit], following), served

    async def many(
        self, datastore: Datastore, wanted: Sequence[WantedCell], read_from: Role | None, bytes_max: int
    ) -> tuple[list[StoredCell | None], Served]:
        """Returns the cells in order, None for a missing one. Raises TooLarge or StorageUnavailable."""
        cells, served = await read_many(self._reader, datastore, wanted, read_from, bytes_max)
        if read_from is Role.MINION:
            return cells, served

        async def completed(key: WantedCell, cell: StoredCell | None) -> StoredCell | None:
            shard = shard_of(key.row_key, datastore.shards)
            if (cell is not None and key.ref_key is not None) or not self._may_lack(datastore, shard, served):
                return cell
            bounds = () if key.ref_key is None else (key.ref_key, key.ref_key)
            selection = BufferSelection(key.row_key, key.column_name, *bounds)
            buffered = await self._buffered(datastore, shard, selection, read_from)
            found = newest_of_columns(merged([cell] if cell else [], buffered))
            return found[-1] if found else None

        pairs = zip(wanted, cells, strict=True)
        return list(await asyncio.gather(*(completed(key, cell) for key, cell in pairs))), served

    async def _with_buffered(
        self,
        datastore: Datastore,
        wanted: BufferSelection,
        read_from: Role | None,
        read: Awaitable[tuple[T, Served]],
        nothing: T,
    ) -> tuple[T, Served, list[StoredCell]]:
        """Returns what the home says, and what buffers have. A home that says nothing has nothing, if a buffer has
        something and nobody wanted the word of its master or of a minion. Raises StorageUnavailable otherwise.
        """
        shard = shard_of(wanted.row_key, datastore.shards)
        try:
            found, served = await read
        except StorageUnavailable:
            if read_from is not None or not self._unsettled.may_have(datastore, shard):
                raise
            buffered, served = await self._unsettled.cells(datastore, datastore.home(shard), wanted)
            if not buffered:
                raise
            return nothing, served, buffered
        if read_from is Role.MINION or not self._may_lack(datastore, shard, served):
            return found, served, []
        return found, served, await self._buffered(datastore, shard, wanted, read_from)

    def _may_lack(self, datastore: Datastore, shard: int, served: Served) -> bool:
        """Returns whether an answer may lack what only a buffer has."""
        return served.role is Role.MINION or self._unsettled.may_have(datastore, shard)

    async def _buffered(
        self, datastore: Datastore, shard: int, wanted: BufferSelection, read_from: Role | None
    ) -> list[StoredCell]:
        """Returns what buffers have, without what the home erased: the body may go from a buffer a moment later."""
        buffered, _ = await self._unsettled.cells(datastore, datastore.home(shard), wanted)
        if not buffered:
            return []
        keys = [cell.key for cell in buffered]
        erased, _ = await self._reader.read_shard(
            datastore, shard, entity_table.erased_of, datastore, shard, keys, read_from=read_from
        )
        return [cell for cell in buffered if cell.key not in erased]
