"""MemoryProgram: what MySQL keeps of one trigger program, in memory: checkpoints and records of parked cells.

It implements the ports of delivery and of the trigger handler. tests/contract/ holds them and the real ones to one
suite. Scripts are texts that only this module writes and runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import RLock

import msgspec

from schemaless.cell import StoredCell
from schemaless.consume.parked_store import is_kept
from schemaless.consume.ports import Advance, Mark, Predecessor, Script, ShardCheckpoint
from schemaless.errors import Corrupt, LocationGone, StorageUnavailable
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, verify_position
from schemaless.shard_cursor import ProvenPage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts
from schemaless.storage.parked_history_table import Ending
from schemaless.storage.parked_table import ATTEMPTS_KEPT, ERROR_CHARACTERS_MAX, Order, ParkedCell
from schemaless.storage.shard_head import Head
from schemaless.testing.entity_table import MemoryEntityTable
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

    `is_away`: nothing of it can be read or written.
    """

    row_cells_max = 100
    """How many cells of a row are read at once."""

    def __init__(self, consumer: str, datastore: Datastore, table: MemoryEntityTable) -> None:
        self.consumer = consumer
        self.datastore = datastore
        self.table = table
        self.lock = RLock()
        self.is_away = False
        self.present: set[int] = set()
        self.checkpoints = {
            shard: MemoryCheckpoint(Position(shard, 1, 0, digest=BEGINNING_DIGEST)) for shard in range(datastore.shards)
        }
        self.parked: dict[tuple[int, int], ParkedCell] = {}
        self.history: deque[tuple[int, Ending]] = deque(maxlen=_HISTORY_KEPT)
        self._orders = 0

    def heads(self) -> dict[int, Head]:
        with self.lock:
            return {head.shard: head for head in self.table.heads()}

    def records(self) -> list[ParkedCell]:
        """Returns all records, by shard and added_id, with their errors."""
        with self.lock:
            return [self.parked[key] for key in sorted(self.parked)]

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
                self._put(msgspec.msgpack.decode(bytes.fromhex(arguments[0]), type=ParkedCell))
                continue
            shard, added_id = map(int, arguments[:2])
            if name == "delete":
                self._end((shard, added_id), Ending(arguments[2]))
            elif name == "delete_from":
                for key in [key for key in self.parked if key[0] == shard and key[1] >= added_id]:
                    self._end(key, Ending(arguments[2]))
            elif name == "unmark":
                self._change((shard, added_id), begun=False, kills=int(arguments[2]))
            else:
                self._change((shard, added_id), **({"begun": True} if name == "begin" else {"holds_row": False}))

    def _end(self, key: tuple[int, int], ending: Ending) -> None:
        record = self.parked.pop(key, None)
        if record is not None and is_kept(record):
            self.history.append((record.added_id, ending))

    def _change(self, key: tuple[int, int], **changes: object) -> None:
        if key in self.parked:
            self.parked[key] = msgspec.structs.replace(self.parked[key], **changes)

    def _put(self, record: ParkedCell) -> None:
        before = self.parked.get((record.shard, record.added_id))
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
                    found.setdefault(record.shard, []).append(msgspec.structs.replace(record, error=""))
        return found

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        with self._program.lock:
            self._program.require()
            cells = self._program.table.read_after(shard, after, until, columns, until)
            return [cell for cell in cells if cell.row_key == row_key][: self._program.row_cells_max]

    def put(self, record: ParkedCell) -> Script:
        return f"put {msgspec.msgpack.encode(record).hex()}"

    def begin(self, record: ParkedCell) -> Script:
        return f"begin {record.shard} {record.added_id}"

    def unmark(self, record: ParkedCell) -> Script:
        return f"unmark {record.shard} {record.added_id} {record.kills}"

    def release_row(self, record: ParkedCell) -> Script:
        return f"release_row {record.shard} {record.added_id}"

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        return f"delete {record.shard} {record.added_id} {ending.value}"

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        return f"delete_from {shard} {added_id} {ending.value}"
