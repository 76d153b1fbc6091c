"""Harness of test_dense_log.py: writer processes that behave badly, and a checker that knows only the promises.

A writer drives a real operation, script by script, and meddles with it on the way: it waits inside the transaction,
rolls it back instead of committing, repeats keys that others write, and is killed at any moment. What it was told to
be stored it writes down in a file of its own, which outlives it.
"""

import random
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey, StoredCell
from schemaless.codec import encode_body
from schemaless.errors import SchemalessError
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, shard_head
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import Operation
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.storage.sql import Name, commas, sql, time_literal
from schemaless.topology import Datastore, Node

SHARED_KEYS = 300
PutCells = Callable[[Datastore, Sequence[ShardCell]], Operation[list]]


class RolledBackError(Exception):
    """The writer chose to roll back."""


def put_with_the_lock(datastore: Datastore, cells: Sequence[ShardCell]) -> Operation[list]:
    """The real operation."""
    return entity_table.put_cells(datastore, cells)


def put_by_auto_increment(datastore: Datastore, cells: Sequence[ShardCell]) -> Operation[list]:
    """Broken on purpose: MySQL gives the id at the insert and shows it at the commit, in whatever order."""
    inserts = [
        sql(
            "INSERT IGNORE INTO %s.entity (generation, row_key, column_name, ref_key, body, created_at)"
            " VALUES (1, %s, %s, %s, %s, UTC_TIMESTAMP(6))",
            Name(datastore.database(cell.shard)),
            cell.key.row_key,
            cell.key.column_name,
            cell.key.ref_key,
            cell.body,
        )
        for cell in cells
    ]
    yield ";".join(["BEGIN", *inserts])
    yield "DO 0;COMMIT"
    return []


def put_with_the_lock_let_go(datastore: Datastore, cells: Sequence[ShardCell]) -> Operation[list]:
    """Broken on purpose: the head is moved, and its lock given back, before the cells are committed."""
    heads, now = yield from shard_head.lock(datastore.name, [cell.shard for cell in cells])
    counts = {shard: sum(cell.shard == shard for cell in cells) for shard in heads}
    name = sql("%s", datastore.name.encode())
    moved = [
        f"({name},{shard},{head.generation},{head.added_id + counts[shard]},{time_literal(now)})"
        for shard, head in heads.items()
    ]
    yield f"{shard_head.MOVE.format(commas(moved))};COMMIT"
    yield "BEGIN"
    inserts = [
        sql(
            "INSERT INTO %s.entity VALUES (%s, %s, %s, %s, %s, %s, UTC_TIMESTAMP(6), NULL, NULL, NULL)",
            Name(datastore.database(cell.shard)),
            heads[cell.shard].added_id + 1 + [other for other in cells if other.shard == cell.shard].index(cell),
            heads[cell.shard].generation,
            cell.key.row_key,
            cell.key.column_name,
            cell.key.ref_key,
            cell.body,
        )
        for cell in cells
    ]
    yield ";".join([*inserts, "COMMIT"])
    return []


def meddled(operation: Operation[list], rng: random.Random) -> Operation[list]:
    """The same operation, with delays inside its transaction and now and then a rollback for its commit."""
    roll_back = rng.random() < 0.1
    script = next(operation)
    while True:
        delay_s = rng.choice([0, 0, 0.001, 0.004, 0.02])
        if "COMMIT" in script:
            ending = "ROLLBACK" if roll_back else "COMMIT"
            script = script.replace("COMMIT", f"DO SLEEP({delay_s});{ending}")
        results = yield script
        if roll_back and "ROLLBACK" in script:
            raise RolledBackError
        time.sleep(delay_s)
        try:
            script = operation.send(results)
        except StopIteration as stop:
            return stop.value


def write_forever(node: Node, datastore: Datastore, put: PutCells, seed: int, told: Path) -> None:
    """A writer process; it ends by being killed."""
    rng = random.Random(seed)
    server = SyncNode(node)
    with told.open("ab", buffering=0) as file:
        while True:
            cells = [random_cell(rng, datastore) for _ in range(rng.choice([1, 1, 1, 2, 5, 20]))]
            try:
                placed = server.run(meddled, put(datastore, cells), rng)
            except (RolledBackError, SchemalessError):
                continue
            for cell, at in zip(cells, placed, strict=False):
                if at.status is PutStatus.STORED:
                    file.write(b"%d %d %s\n" % (at.shard, at.added_id, cell.key.row_key.hex().encode()))


def random_cell(rng: random.Random, datastore: Datastore) -> ShardCell:
    """A new key, or one of a few that all writers share, with one of two bodies."""
    shared = rng.random() < 0.3
    row = uuid.uuid5(uuid.NAMESPACE_URL, str(rng.randrange(SHARED_KEYS))) if shared else uuid.uuid4()
    key = CellKey(RowKey(row.bytes), ColumnName("BASE"), RefKey(1))
    return ShardCell(key, encode_body({"n": rng.randrange(2)}), shard_of(key.row_key, datastore.shards))


class LogChecker:
    """Of one reader of one shard: what it sees must continue what it saw. Knows I3 and I4, nothing of how."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.violations: list[str] = []
        self.cells: list[StoredCell] = []

    @property
    def after(self) -> int:
        return self.cells[-1].added_id if self.cells else 0

    def see(self, cells: Sequence[StoredCell]) -> None:
        for cell in cells:
            if cell.added_id != self.after + 1:
                self.violations.append(f"{self.name}: hole, {cell.added_id} follows {self.after}")
            if self.cells and cell.created_at < self.cells[-1].created_at:
                self.violations.append(f"{self.name}: created_at falls at {cell.added_id}")
            self.cells.append(cell)

    def see_head(self, head: int) -> None:
        """`head` was shown before the last cells were read, and they were read to their end."""
        if self.after < head:
            self.violations.append(f"{self.name}: head {head} was shown, but only {self.after} can be read")


class WriterGang:
    """Some writer processes; one is killed from time to time, and another takes its place."""

    def __init__(self, context, size: int, start: Callable[[int, Path], tuple], folder: Path) -> None:
        self._context = context
        self._start = start
        self._folder = folder
        self._started = 0
        self._writers = [self._new() for _ in range(size)]

    def kill_one(self, rng: random.Random) -> None:
        victim = rng.randrange(len(self._writers))
        self._writers[victim].kill()
        self._writers[victim].join()
        self._writers[victim] = self._new()

    def kill_all(self) -> None:
        for writer in self._writers:
            writer.kill()
        for writer in self._writers:
            writer.join()

    def told(self) -> list[tuple[int, int, str]]:
        """(shard, added_id, row key) of everything that a writer was told to be stored; a last line may be cut."""
        lines = [line.split() for path in self._folder.glob("told-*") for line in path.read_text().splitlines()]
        return [(int(line[0]), int(line[1]), line[2]) for line in lines if len(line) == 3 and len(line[2]) == 32]

    def _new(self):
        self._started += 1
        told = self._folder / f"told-{self._started}"
        process = self._context.Process(target=write_forever, args=self._start(self._started, told), daemon=True)
        process.start()
        return process


async def read_on(node, datastore: Datastore, shard: int, checker: LogChecker) -> int:
    """One turn of a reader: the head, then everything after what it saw. Returns how many cells were new."""
    heads = await node.run(shard_head.heads, datastore.name)
    cells = await node.run(entity_table.read_after, datastore, shard, checker.after, 100_000)
    checker.see(cells)
    checker.see_head(next(head.added_id for head in heads if head.shard == shard))
    return len(cells)
