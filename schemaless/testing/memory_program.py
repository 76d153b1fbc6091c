"""MemoryProgram: what MySQL keeps of one trigger program, in memory: checkpoints and records of parked cells.

It implements the ports of delivery and of the trigger handler. tests/contract/ holds them and the real ones to one
suite. Scripts are texts that only this module writes and runs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import RLock

import msgspec

from schemaless.cell import (
    CellKey,
    ColumnName,
    Erased,
    Placed,
    PutStatus,
    RefKey,
    RowKey,
    StoredCell,
    erasure_id,
)
from schemaless.codec import Erasing, encode_body, same_body
from schemaless.consume.parked_store import is_kept
from schemaless.consume.ports import Advance, Mark, Predecessor, Script, ShardCheckpoint
from schemaless.errors import Corrupt, LocationGone, Misconfigured, StorageUnavailable, TooLarge
from schemaless.location import ADDED_ID_MAX, FIRST_GENERATION, GenerationStart, Location
from schemaless.names import ERASE_COLUMN
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, verify_position
from schemaless.shapes import shape
from schemaless.shard_cursor import ProvenPage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts
from schemaless.storage.entity_table import NEWEST_BYTES_MAX, CellPage, NewestRows, ShardCell
from schemaless.storage.parked_table import ATTEMPTS_KEPT, ERROR_CHARACTERS_MAX, Ending, Order, ParkedCell
from schemaless.storage.shard_head import Head, Movement
from schemaless.topology import Datastore

_HISTORY_KEPT = 1_000


class MemoryCheckpoint(msgspec.Struct):
    """The row of one shard's checkpoint, as schemaless/storage/checkpoint_table.py describes it."""

    position: Position
    version: int = 0
    stopped: str | None = None
    counted_from: int = 0
    finished: int = 0
    counts: CellCounts = NO_COUNTS
    worker: int | None = None
    begun: bool = False
    kills: int = 0


class MemoryProgram:
    """Outlives its workers, which are `present` by number until they stop properly. Threads may share it.

    `is_away`: nothing of it can be read or written. `now` is its clock in seconds, which its workers move.
    """

    row_cells_max = 100
    """How many cells of a row are read at once."""

    def __init__(self, consumer: str, datastore: Datastore, table: MemoryEntityTable) -> None:
        self.consumer = consumer
        self.datastore = datastore
        self.table = table
        self.lock = RLock()
        self.is_away = False
        self.now = 0.0
        self.present: set[int] = set()
        self.checkpoints = {
            shard: MemoryCheckpoint(Position(shard, 1, 0, digest=BEGINNING_DIGEST)) for shard in range(datastore.shards)
        }
        self.parked: dict[tuple[int, int], ParkedCell] = {}
        self.history: deque[tuple[int, Ending]] = deque(maxlen=_HISTORY_KEPT)
        self._orders = 0
        self._again_at: dict[tuple[int, int], float] = {}

    def heads(self) -> dict[int, Head]:
        with self.lock:
            return {head.shard: head for head in self.table.heads()}

    def records(self) -> list[ParkedCell]:
        """Returns all records, by shard and added_id, with their errors."""
        with self.lock:
            return [self.parked[key] for key in sorted(self.parked)]

    def again_in_us(self, record: ParkedCell) -> int:
        """Returns how long it is until the next attempt of a record is due."""
        return max(0, round((self._again_at[record.shard, record.added_id] - self.now) * 1e6))

    def order(self, record: ParkedCell, order: Order) -> None:
        """Orders something for a record, as a person does."""
        with self.lock:
            self._orders += 1
            self._change((record.shard, record.added_id), ordered=order, due_at=self._orders)

    def due(self) -> list[ParkedCell]:
        """Returns the records with orders."""
        return [record for record in self.records() if record.ordered is not None]

    def require(self) -> None:
        if self.is_away:
            raise StorageUnavailable("the store is away")

    def run_script(self, script: Script) -> None:
        """Runs what MemoryParkedStore has written."""
        for statement in filter(None, script.split(";")):
            name, *arguments = statement.split()
            if name == "put":
                self._put(msgspec.msgpack.decode(bytes.fromhex(arguments[0]), type=shape(ParkedCell)))
                continue
            if name == "erase":
                self._erase(bytes.fromhex(arguments[0]), arguments[1:])
                continue
            shard, added_id = map(int, arguments[:2])
            if name == "keep":
                self.history.append((added_id, Ending(arguments[2])))
            elif name == "delete":
                self._end((shard, added_id), Ending(arguments[2]))
            elif name == "delete_from":
                for key in [key for key in self.parked if key[0] == shard and key[1] >= added_id]:
                    self._end(key, Ending(arguments[2]))
            elif name == "unmark":
                self._change((shard, added_id), begun=False, kills=int(arguments[2]))
            else:
                self._change((shard, added_id), **({"begun": True} if name == "begin" else {"holds_row": False}))

    def _erase(self, row_key: bytes, cells: Sequence[str]) -> None:
        for record in self.records():
            if record.row_key == row_key and f"{record.column_name}:{record.ref_key}" in cells:
                self._orders += 1
                order = {"ordered": record.ordered or Order.RETRY, "due_at": self._orders}
                self._change((record.shard, record.added_id), error="", **order)

    def _end(self, key: tuple[int, int], ending: Ending) -> None:
        record = self.parked.pop(key, None)
        if record is not None and is_kept(record):
            self.history.append((record.added_id, ending))

    def _change(self, key: tuple[int, int], **changes: object) -> None:
        if key in self.parked:
            self.parked[key] = msgspec.structs.replace(self.parked[key], **changes)

    def _put(self, record: ParkedCell) -> None:
        before = self.parked.get((record.shard, record.added_id))
        self._again_at[record.shard, record.added_id] = self.now + record.again_in_us / 1e6
        kept = before if before is not None and before.ordered is Order.DISCARD else None
        self.parked[record.shard, record.added_id] = msgspec.structs.replace(
            record,
            error=record.error[:ERROR_CHARACTERS_MAX],
            attempted_at=list(record.attempted_at[-ATTEMPTS_KEPT:]),
            ordered=kept and kept.ordered,
            due_at=kept and kept.due_at,
            job=before and before.job,
            order_reason=before and before.order_reason,
        )


class MemoryCheckpoints:
    """The checkpoints as one worker knows them. `moving` is called before they move and after that."""

    def __init__(self, program: MemoryProgram, worker: int, moving: Callable[[str], None] = lambda point: None) -> None:
        self.consumer = program.consumer
        self._program = program
        self._worker = worker
        self._moving = moving
        self._known: dict[int, int] = {}

    async def read(self, shards: Iterable[int]) -> dict[int, ShardCheckpoint]:
        with self._program.lock:
            self._program.require()
            rows = {shard: self._program.checkpoints[shard] for shard in shards}
            self._known.update({shard: row.version for shard, row in rows.items()})
            return {shard: self._checkpoint(row) for shard, row in rows.items()}

    async def move(self, advances: Mapping[int, Advance], effects: Mapping[str, Script]) -> frozenset[int]:
        self._moving("before the checkpoint")
        with self._program.lock:
            self._program.require()
            rows = self._program.checkpoints
            lost = frozenset(
                shard
                for shard in advances
                if rows[shard].version != self._known[shard] or rows[shard].stopped is not None
            )
            script = ";".join(filter(None, [*effects.values(), *(advance.effect for advance in advances.values())]))
            if not (lost and script):
                for shard in advances.keys() - lost:
                    self._move(rows[shard], advances[shard])
                    self._known[shard] = rows[shard].version
                self._program.run_script(script)
        self._moving("after the checkpoint")
        return lost

    async def give_away(self, shards: Iterable[int]) -> None:
        with self._program.lock:
            self._program.require()
            for row in [self._program.checkpoints[shard] for shard in shards]:
                if row.worker == self._worker:
                    row.worker, row.begun = None, False

    def _checkpoint(self, row: MemoryCheckpoint) -> ShardCheckpoint:
        predecessor, kills = Predecessor.LEFT, row.kills
        if row.worker == self._worker:
            predecessor = Predecessor.OURSELVES
        elif row.worker in self._program.present:
            predecessor, kills = Predecessor.DIED, row.kills + row.begun
        return ShardCheckpoint(row.position, row.stopped, (), predecessor, kills, row.counted_from)

    def _move(self, row: MemoryCheckpoint, to: Advance) -> None:
        row.version += 1
        row.position, row.stopped, row.worker = to.to, to.stop_reason, self._worker
        if to.restart:
            row.counted_from, row.finished, row.counts = to.to.added_id, 0, NO_COUNTS
        else:
            row.finished, row.counts = row.finished + to.finished, row.counts + to.counts
        mark = to.mark or Mark(begun=False)
        row.begun, row.kills = mark.begun, mark.kills
        if row.counts.seen != row.finished:
            raise Corrupt(f"the counts don't add up: {row.counts} of {row.finished} cells")


class MemoryHomeLog:
    """The logs of all shards, as delivery reads them."""

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program

    async def read(self, wanted: Mapping[int, Position], limit: int) -> Mapping[int, ProvenPage | LocationGone]:
        with self._program.lock:
            self._program.require()
            return {shard: self._page(position, limit) for shard, position in wanted.items()}

    def _page(self, position: Position, limit: int) -> ProvenPage | LocationGone:
        table, at = self._program.table, position.added_id
        head, starts = table.history(position.shard)
        there = table.read_after(position.shard, at - 1, 1) if at else []
        found = BEGINNING_DIGEST if not at else cell_digest(there[0]) if there else None
        try:
            verify_position(position, found, starts, head.location)
        except LocationGone as gone:
            return gone
        page = table.read_after(position.shard, at, limit)
        return ProvenPage(page, Location(head.generation, head.added_id), None if page else found)


class MemoryParkedStore:
    """Reads records and rows, and writes the scripts that MemoryProgram runs."""

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program

    async def of_shards(self, shards: Iterable[int]) -> Mapping[int, Sequence[ParkedCell]]:
        found: dict[int, list[ParkedCell]] = {}
        with self._program.lock:
            self._program.require()
            wanted = set(shards)
            for record in self._program.records():
                if record.shard in wanted:
                    read = msgspec.structs.replace(record, error="", again_in_us=self._program.again_in_us(record))
                    found.setdefault(record.shard, []).append(read)
        return found

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        with self._program.lock:
            self._program.require()
            cells = self._program.table.read_after(shard, after, until, columns, until)
            return [cell for cell in cells if cell.row_key == row_key][: self._program.row_cells_max]

    async def forget_calls(self, row_key: RowKey) -> None:
        """Nobody keeps reports here."""

    def erase(self, row_key: bytes, erasing: Erasing) -> Script:
        named = [f"{column}:{ref_key}" for column, ref_keys in erasing.cells.items() for ref_key in ref_keys]
        return f"erase {row_key.hex()} {' '.join(named)}"

    def put(self, record: ParkedCell) -> Script:
        return f"put {msgspec.msgpack.encode(record).hex()}"

    def begin(self, record: ParkedCell) -> Script:
        return f"begin {record.shard} {record.added_id}"

    def unmark(self, record: ParkedCell) -> Script:
        return f"unmark {record.shard} {record.added_id} {record.kills}"

    def release_row(self, record: ParkedCell) -> Script:
        return f"release_row {record.shard} {record.added_id}"

    def keep(self, record: ParkedCell, ending: Ending) -> Script:
        return f"keep {record.shard} {record.added_id} {ending.value}"

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        return f"delete {record.shard} {record.added_id} {ending.value}"

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        return f"delete_from {shard} {added_id} {ending.value}"


# MemoryEntityTable: the shards of a datastore in memory, for unit tests of everything that builds on the store.
#
# It keeps I1, I3, I4 and I13 as the real tables do: tests/contract/ runs one suite over both. Its methods have the
# names and the parameters of the operations in schemaless/storage/entity_table.py and shard_head.py, without the
# datastore.


class MemoryEntityTable:
    """All shards of one datastore, as the only cluster of its placement has them. Not to be shared by threads.

    `clock_us` returns microseconds since the epoch, and may go backwards.
    """

    def __init__(self, datastore: Datastore, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._clock_us = clock_us
        self._logs: list[list[StoredCell]] = [[] for _ in range(datastore.shards)]
        self._heads = [Head(shard, FIRST_GENERATION, 0, 0) for shard in range(datastore.shards)]
        self._starts = [[GenerationStart(FIRST_GENERATION, 1)] for _ in range(datastore.shards)]
        self._cells: dict[tuple[int, CellKey], StoredCell] = {}

    def put_cells(self, cells: Sequence[ShardCell]) -> list[Placed]:
        """Returns one outcome for each, in order."""
        now = self._clock_us()
        return [self._put(cell, now) for cell in cells]

    def erase(
        self, shard: int, row_key: RowKey, cells: Mapping[ColumnName, Sequence[RefKey]], erasure: int = 1
    ) -> StoredCell:
        """Empties the bodies of cells of a row, at least one, and returns the entry in the log that says so (I19)."""
        now = self._clock_us()
        body = encode_body({"erasure": erasure_id(erasure), "cells": cells})
        number = 1 + len(self._column(shard, row_key, ColumnName(ERASE_COLUMN)))
        entry = CellKey(row_key, ColumnName(ERASE_COLUMN), RefKey(number))
        self._put(ShardCell(entry, body, shard), now)
        by = Erased(erasure, self._cells[shard, entry].created_at)
        for key in [CellKey(row_key, column, ref_key) for column, named in cells.items() for ref_key in named]:
            stub = msgspec.structs.replace(self._cells[shard, key], body=b"", erased=by)
            self._cells[shard, key] = self._logs[shard][stub.added_id - 1] = stub
        return self._cells[shard, entry]

    def open_generation(self, shard: int, starts_at: int) -> None:
        """Does what a promoted minion does (I13): cells from `starts_at` on are lost, new ones get a new generation."""
        head = self._heads[shard]
        for lost in self._logs[shard][starts_at - 1 :]:
            del self._cells[shard, lost.key]
        del self._logs[shard][starts_at - 1 :]
        self._heads[shard] = Head(shard, head.generation + 1, starts_at - 1, head.last_created_at)
        self._starts[shard].append(GenerationStart(head.generation + 1, starts_at))

    def get(self, keys: Sequence[tuple[int, CellKey]]) -> list[StoredCell | None]:
        """Returns the cells under (shard, key), in order, None where there is none."""
        return [self._cells.get(key) for key in keys]

    def newest(self, columns: Sequence[tuple[int, RowKey, ColumnName]]) -> list[StoredCell | None]:
        """Returns the cell with the highest ref_key of each (shard, row key, column), in order.

        A version that was erased is returned only where no other one is left.
        """
        return [self._newest_of(*column, ADDED_ID_MAX) for column in columns]

    def newest_until(
        self,
        rows: Mapping[int, tuple[int, Sequence[RowKey]]],
        columns: Iterable[str],
        bytes_max: int = NEWEST_BYTES_MAX,
    ) -> NewestRows:
        """Returns the newest cells of rows as the log makes them up to an added_id, in no order within a row.

        `rows`: by shard, that added_id and its row keys. It reads the rows in this order, as long as their bodies have
        at most `bytes_max` bytes together, but at least the first one.
        """
        names = sorted(columns)
        left, cells, unread = bytes_max, list[StoredCell](), dict[int, list[RowKey]]()
        wanted = [(shard, row_key) for shard, (_, row_keys) in rows.items() for row_key in row_keys]
        for position, (shard, row_key) in enumerate(wanted):
            newest = [self._newest_of(shard, row_key, ColumnName(name), rows[shard][0]) for name in names]
            found = [cell for cell in newest if cell is not None and not cell.is_erased]
            left -= sum(len(cell.body) for cell in found)
            if unread or (left < 0 and position):
                unread.setdefault(shard, []).append(row_key)
            else:
                cells += found
        return NewestRows(cells, unread)

    def row(self, shard: int, row_key: RowKey, bytes_max: int) -> list[StoredCell]:
        """Returns the newest version of every column of a row, by column name."""
        names = sorted({cell.column_name for cell in self._logs[shard] if cell.row_key == row_key} - {ERASE_COLUMN})
        newest = [self._newest_of(shard, row_key, name, ADDED_ID_MAX) for name in names]
        found = [cell for cell in newest if cell is not None]
        if _page(found, len(found), bytes_max).following is not None:
            raise TooLarge(f"the row has more than {bytes_max} bytes")
        return found

    def versions(
        self,
        shard: int,
        column: tuple[RowKey, ColumnName],
        ref_keys: tuple[int, int],
        descending: bool,
        limit: int,
        bytes_max: int,
    ) -> CellPage:
        """Returns versions of one column, with a ref_key from the first of `ref_keys` to the second, both included."""
        low, high = ref_keys
        found = [cell for cell in self._column(shard, *column) if low <= cell.ref_key <= high]
        return _page(sorted(found, key=_ref_key, reverse=descending), limit, bytes_max)

    def read_after(
        self, shard: int, after: int, limit: int, columns: Iterable[str] = (), until: int = ADDED_ID_MAX
    ) -> list[StoredCell]:
        """Returns at most `limit` cells with an added_id above `after` and up to `until`, in added_id order.

        Where `columns` are named, cells of others are left out.
        """
        wanted = set(columns)
        return [cell for cell in self._logs[shard][after:until] if not wanted or cell.column_name in wanted][:limit]

    def first_since(self, shard: int, created_at: int, head: int) -> int:
        """Returns the lowest added_id up to `head` whose created_at is not earlier, or head + 1."""
        return bisect_left([cell.created_at for cell in self._logs[shard][:head]], created_at) + 1

    def heads(self) -> list[Head]:
        """Returns the heads of all shards, by shard."""
        return list(self._heads)

    def heads_of(self, shards: Collection[int]) -> list[Head]:
        """Returns the heads of these shards, by shard, without those that don't exist."""
        return [head for head in self._heads if head.shard in shards]

    def movement(self) -> Movement:
        """Returns the sums that change whenever a head moves."""
        return Movement(sum(head.added_id for head in self._heads), sum(head.generation for head in self._heads))

    def generations(self, shard: int) -> list[GenerationStart]:
        """Returns where each generation of a shard begins, by generation."""
        return list(self._starts[shard])

    def history(self, shard: int) -> tuple[Head, list[GenerationStart]]:
        """Returns head and generations of one shard. Raises Misconfigured when there is no such shard."""
        if shard >= len(self._heads):
            raise Misconfigured(f"shard {shard} does not live here")
        return self._heads[shard], self.generations(shard)

    def _put(self, cell: ShardCell, now: int) -> Placed:
        stored = self._cells.get((cell.shard, cell.key))
        if stored is not None:
            is_same = not stored.is_erased and same_body(cell.body, stored.body)
            status = PutStatus.ALREADY_STORED if is_same else PutStatus.CONFLICT
        else:
            status = PutStatus.STORED
            head = self._heads[cell.shard]
            stored = StoredCell(
                *(cell.key.row_key, cell.key.column_name, cell.key.ref_key),
                shard=cell.shard,
                generation=head.generation,
                added_id=head.added_id + 1,
                created_at=max(now, head.last_created_at),
                body=cell.body,
                cause=cell.cause,
            )
            self._heads[cell.shard] = Head(cell.shard, head.generation, stored.added_id, stored.created_at)
            self._logs[cell.shard].append(stored)
            self._cells[cell.shard, cell.key] = stored
        return Placed(status, cell.shard, stored.generation, stored.added_id, stored.created_at, stored.erased)

    def _newest_of(self, shard: int, row_key: RowKey, column_name: ColumnName, until: int) -> StoredCell | None:
        found = [cell for cell in self._column(shard, row_key, column_name) if cell.added_id <= until]
        return max(found, key=lambda cell: (not cell.is_erased, cell.ref_key), default=None)

    def _column(self, shard: int, row_key: RowKey, column_name: ColumnName) -> list[StoredCell]:
        return [c for c in self._logs[shard] if (c.row_key, c.column_name) == (row_key, column_name)]


def _page(cells: Sequence[StoredCell], limit: int, bytes_max: int) -> CellPage:
    fitting = size = 0
    for cell in cells[:limit]:
        size += len(cell.body)
        if size > bytes_max and fitting:
            break
        fitting += 1
    return CellPage(list(cells[:fitting]), cells[fitting].ref_key if fitting < len(cells) else None)


def _ref_key(cell: StoredCell) -> int:
    return cell.ref_key
