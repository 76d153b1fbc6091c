"""The tail of a server: what it has, and the master of its cluster never got. It is kept on the master, and put again.

Everything is done with the services' account, so a server that a controller fences takes none of it. Each step may be
repeated. What comes of a cell is written after its put, so a cell may be put twice, which changes nothing (I1).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain

import msgspec
import structlog

from schemaless.cell import CellKey, Placed, PutStatus, StoredCell
from schemaless.errors import Busy, NodeRefuses, SchemalessError, StaleTopology, TableMissing
from schemaless.location import ADDED_ID_MAX, GenerationStart
from schemaless.names import ERASE_COLUMN
from schemaless.position import cell_digest
from schemaless.runtime.batching import chunks
from schemaless.runtime.events import Event, emit
from schemaless.sharding import shard_of
from schemaless.storage import (
    append,
    buffer_table,
    conflict_table,
    diverged_table,
    entity_table,
    erasure_table,
    schema,
    shard_head,
)
from schemaless.storage.buffer_table import BufferOutcome, BufferRow, Sizes
from schemaless.storage.diverged_table import NO_BODY, DivergedCell, DivergedKind
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.erasure_table import Erasure
from schemaless.storage.failover import run_on_all
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore

log = structlog.get_logger()

ROWS_MAX = 200
BYTES_MAX = 4 << 20
"""What is read and written at once (I14)."""

Starts = Mapping[int, Sequence[GenerationStart]]
Datastores = Mapping[str, Datastore]
_FoundCell = tuple[DivergedCell, int]
"""A cell of a tail, and since when the server had it, in microseconds."""


def tail_starts(heads: Iterable[Head], known: Starts, present: Starts) -> dict[int, int]:
    """Returns by shard the added_id at which a server's tail begins, without shards that have none.

    `heads` and `known` are the server's own, and `present` has the generations of the master. Below the first of the
    generations that the server doesn't know both have one history. A later generation may begin at a lower added_id.
    """
    starts = {}
    for head in heads:
        own = {start.generation for start in known.get(head.shard, ())}
        others = present.get(head.shard, [GenerationStart(1, 1)])  # a shard that the master lacks is a tail as a whole
        lacking = [start.starts_at for start in others if head.shard not in present or start.generation not in own]
        if lacking and min(lacking) <= head.added_id:
            starts[head.shard] = min(lacking)
    return starts


class Tail:
    """The tail of one server, and the master that `storage` takes for its cluster's."""

    def __init__(self, storage: SyncStorage, server: str) -> None:
        self._storage = storage
        self._server = server
        self._old = storage.nodes[server]
        self._cluster = self._old.node.cluster
        self._master = storage.master(self._cluster)

    def keep(self) -> int:
        """Keeps everything on the master, and returns the epoch under which it is kept. Writes no row twice.

        An empty server, as after its disk was replaced, has no epoch, and nothing to keep.
        """
        try:
            epoch = self._old.run(shard_head.highest_epoch)
        except TableMissing:
            return 0
        datastores = self._old.run(schema.datastores)
        for found in chain(self._stored(datastores), self._buffered(), self._conflicts(datastores)):
            if cells := self._without_erased(datastores, found):
                self._master.run(diverged_table.keep, self._server, epoch, cells)
        emit(Event.TAIL_KEPT)
        return epoch

    def counts(self, epoch: int) -> dict[PutStatus | None, int]:
        """Returns how many of the kept cells have each outcome, under None those that wait."""
        return self._master.run(diverged_table.counts, self._server, epoch)

    def put_again(self, epoch: int) -> None:
        """Puts the kept cells without an outcome where they belong. Those that their home doesn't take go on waiting.

        Raises StorageUnavailable when the master is away.
        """
        datastores = self._master.run(schema.datastores)
        away: set[str] = set()
        after = 0
        while found := self._master.run(diverged_table.waiting, self._server, epoch, after, ROWS_MAX, BYTES_MAX):
            after = max(found)
            groups: dict[tuple[str, str], dict[int, DivergedCell]] = {}
            for number, cell in found.items():
                if (datastore := datastores.get(cell.datastore)) is not None:
                    groups.setdefault((cell.datastore, datastore.home(cell.shard)), {})[number] = cell
            for (name, home), cells in groups.items():
                if home not in away and not self._put(datastores[name], home, cells):
                    away.add(home)

    def _without_erased(self, datastores: Datastores, found: Sequence[_FoundCell]) -> list[DivergedCell]:
        """Returns cells of one datastore as they are kept: without the bodies that an erasure means (I19).

        What any master knows counts: their own may not have heard of an erasure yet. The keys of stored ones stay
        taken. Entries of erasures come again by themselves.
        """
        cells = [(cell, at) for cell, at in found if cell.key.column_name != ERASE_COLUMN]
        if not cells:
            return []
        datastore = datastores[cells[0][0].datastore]
        asked = [(cell.key, at) for cell, at in cells]
        answers = run_on_all(self._storage.masters, erasure_table.covering, datastore.name, asked).at_least_one()
        erasures = [next(filter(None, found), None) for found in zip(*answers, strict=True)]
        taken: dict[int, tuple[Erasure, dict[CellKey, str | None]]] = {}
        for (cell, _), erasure in zip(cells, erasures, strict=True):
            if erasure is not None and cell.kind is DivergedKind.CELL:
                taken.setdefault(erasure.erasure, (erasure, {}))[1][cell.key] = cell.idempotency_key
        for erasure, keys in taken.values():
            home = self._storage.master(self._storage.live(datastore).home(erasure.shard))
            home.run(erasure_table.learn, erasure)
            home.run(erasure_table.erase_page, datastore, erasure, keys)
        return [
            cell if erasure is None else msgspec.structs.replace(cell, body=b"", digest=NO_BODY)
            for (cell, _), erasure in zip(cells, erasures, strict=True)
        ]

    def _stored(self, datastores: Datastores) -> Iterator[list[_FoundCell]]:
        """Yields the tail of each shard's entity table, with the Idempotency-Keys of its cells."""
        for name, datastore in datastores.items():
            known = self._old.run(shard_head.generations_of_all, name)
            present = self._master.run(shard_head.generations_of_all, name)
            heads = self._old.run(shard_head.heads, name)
            starts = tail_starts(heads, known, present)
            for head in heads:
                if head.shard not in starts and (parted := self._parted(datastore, head)) is not None:
                    starts[head.shard] = parted
            for shard, start in starts.items():
                after = start - 1
                while cells := self._page(datastore, shard, after):
                    after = cells[-1].added_id
                    keys = self._old.run(append.idempotency_keys, name, [cell.key for cell in cells])
                    yield [
                        (_stored_cell(name, cell, key), cell.created_at) for cell, key in zip(cells, keys, strict=True)
                    ]

    def _parted(self, datastore: Datastore, head: Head) -> int | None:
        """Returns where the histories of a shard part whose generations are the same, None if nothing is the server's
        own. That is so where a master was opened without this server, which had more.
        """
        if self._is_shared(datastore, head.shard, head.added_id):
            return None
        low, high = 1, head.added_id
        while low < high:
            middle = (low + high) // 2
            if self._is_shared(datastore, head.shard, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_shared(self, datastore: Datastore, shard: int, added_id: int) -> bool:
        """Whether both have the same cell there. Whoever has the same at one place has the same before it."""
        if added_id == 0:
            return True
        bounds = (added_id - 1, 1, (), ADDED_ID_MAX, BYTES_MAX)
        pages = [
            node.run(entity_table.read_page_after, datastore, shard, *bounds) for node in (self._old, self._master)
        ]
        mine, others = (list(map(cell_digest, page.cells)) for page in pages)
        return mine == others

    def _page(self, datastore: Datastore, shard: int, after: int) -> list[StoredCell]:
        bounds = (after, ROWS_MAX, (), ADDED_ID_MAX, BYTES_MAX)
        return self._old.run(entity_table.read_page_after, datastore, shard, *bounds).cells

    def _buffered(self) -> Iterator[list[_FoundCell]]:
        """Yields the rows of the buffer that the master lacks by cell. No put removes those that it has any more."""
        page = partial(buffer_table.page, rows_max=ROWS_MAX, bytes_max=BYTES_MAX)
        for home in self._old.run(buffer_table.homes):
            after, until = 0, self._old.run(buffer_table.newest_id, home)
            while rows := self._old.run(page, home, after, until, Sizes()):
                after = rows[-1].buffer_id
                lacking = self._master.run(buffer_table.take_over, rows)
                found = zip(lacking, self._old.run(buffer_table.cells, lacking) if lacking else (), strict=True)
                by_datastore: dict[str, list[_FoundCell]] = {}
                for row, cell in found:
                    if cell is not None:
                        kept = _unplaced(DivergedKind.BUFFER, row.datastore, cell), row.buffered_at
                        by_datastore.setdefault(row.datastore, []).append(kept)
                yield from by_datastore.values()

    def _conflicts(self, datastores: Datastores) -> Iterator[list[_FoundCell]]:
        """Yields the conflicts that the master lacks. In one history they have the same number."""
        after = 0
        while found := self._old.run(conflict_table.digests, after, ROWS_MAX):
            after = found[-1].conflict_id
            lacking = self._master.run(conflict_table.lacking, found)
            for some in chunks(lacking, bytes_max=BYTES_MAX, size_bytes=lambda one: one.size_bytes):
                conflicts = self._old.run(conflict_table.get, [one.conflict_id for one in some])
                by_datastore: dict[str, list[_FoundCell]] = {}
                for one in some:
                    conflict, shards = conflicts[one.conflict_id], datastores[one.datastore].shards
                    refused = ShardCell(conflict.key, conflict.buffered_body, shard_of(conflict.key.row_key, shards))
                    kept = _unplaced(DivergedKind.CONFLICT, one.datastore, refused), conflict.detected_at
                    by_datastore.setdefault(one.datastore, []).append(kept)
                yield from by_datastore.values()

    def _put(self, datastore: Datastore, home: str, cells: Mapping[int, DivergedCell]) -> bool:
        """Puts cells of one home, and each by itself where they can't be put together. False: the home is away."""
        try:
            self._put_together(datastore, home, cells)
        except SchemalessError as error:
            log.info("cells of a tail wait for their home", home=home, cells=len(cells), why=str(error))
            if isinstance(error, StaleTopology) or not isinstance(error, NodeRefuses | Busy):
                return False
            return len(cells) == 1 or all(self._put(datastore, home, {number: cells[number]}) for number in cells)
        return True

    def _put_together(self, datastore: Datastore, home: str, cells: Mapping[int, DivergedCell]) -> None:
        node, latest = self._storage.master(home), int((time.time() + shard_head.CLOCK_AHEAD_MAX_S) * 1e6)
        places = node.run(entity_table.put_cells, datastore, [cell.cell for cell in cells.values()], latest)
        placed = dict(zip(cells, places, strict=True))
        settled = {number: place for number, place in placed.items() if place.status is not PutStatus.CONFLICT}
        if settled and home != self._cluster:
            settled = self._copied(datastore, home, cells, settled)
        emit(Event.TAIL_PAGE_PUT)
        if settled:
            self._master.run(diverged_table.settle, settled)
        for number, place in placed.items():
            if place.erased is not None:
                self._master.run(diverged_table.settle_erased, number, place)
            elif place.status is PutStatus.CONFLICT:
                cell = cells[number]
                (stored,) = node.run(entity_table.get, datastore, [(cell.shard, cell.key)])
                assert stored is not None, f"the put met a cell under {cell.key}, and no cell goes"
                self._master.run(diverged_table.settle_conflict, number, place, stored.body)

    def _copied(
        self, datastore: Datastore, home: str, cells: Mapping[int, DivergedCell], placed: Mapping[int, Placed]
    ) -> dict[int, Placed]:
        """Buffers second copies of cells that live on another cluster: a cleaner keeps them until a minion there has
        the cell (I5). Returns the cells that have one. The others wait until the other body has left the buffer.
        """
        nobody = buffer_table.NOBODYS_CLAIM
        rows = [
            BufferRow(
                cell.key, cell.body, cell.shard, home, nobody, cause=cell.cause, idempotency_key=cell.idempotency_key
            )
            for cell in (cells[number].cell for number in placed)
        ]
        outcomes = self._master.run(buffer_table.insert, datastore, rows)
        return {
            number: place
            for (number, place), outcome in zip(placed.items(), outcomes, strict=True)
            if outcome is not BufferOutcome.CONFLICT
        }


def _stored_cell(datastore: str, cell: StoredCell, key: str | None) -> DivergedCell:
    digest, place = sha256(cell.body).digest(), (cell.generation, cell.added_id)
    return DivergedCell(DivergedKind.CELL, datastore, cell.shard, cell.key, cell.body, digest, cell.cause, key, *place)


def _unplaced(kind: DivergedKind, datastore: str, cell: ShardCell) -> DivergedCell:
    digest = sha256(cell.body).digest()
    return DivergedCell(kind, datastore, cell.shard, cell.key, cell.body, digest, cell.cause, cell.idempotency_key)
