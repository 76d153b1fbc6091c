"""Puts that go straight to the storage of whoever is home to a shard, while it moves, and what must hold afterwards."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import SchemalessError, ShardsMoved
from schemaless.storage import entity_table, shard_copy, shard_head, shard_move_table
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from tests.seed import seeded

BODIES = seeded("move_harness")


def new_cell(shard, size=100):
    key = CellKey(RowKey(uuid.uuid4().bytes), ColumnName("BASE"), RefKey(1))
    return ShardCell(key, encode_body({"text": BODIES.randbytes(size).hex()}), shard=shard)


class Putter:
    """Puts cells one after another, and notes which were stored where. A closed shard is asked for again at once."""

    def __init__(self, topology, datastore, shard, pause_s=0.005):
        self._storage = SyncStorage(topology)
        self._datastore = self._storage.live(datastore)
        self._shard = shard
        self._pause_s = pause_s
        self._over = threading.Event()
        self.stored = []
        self.longest_s = 0.0
        self.errors = []
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self):
        self._putting = self._pool.submit(self._run)
        return self

    def __exit__(self, *_):
        self._over.set()
        self._pool.shutdown()
        self._storage.__exit__(None, None, None)
        self._putting.result()

    def _run(self):
        while not self._over.wait(self._pause_s):
            began = time.monotonic()
            cell = new_cell(self._shard)
            while not self._over.is_set():
                try:
                    master = self._storage.master(self._datastore.home(self._shard))
                    (placed,) = master.run(entity_table.put_cells, self._datastore, [cell])
                    self._note(placed, cell, began)
                    break
                except ShardsMoved:
                    self._learn()
                except SchemalessError as error:
                    self.errors.append(error)
                    self._learn()
                    time.sleep(0.05)

    def _note(self, placed, cell, began):
        assert placed.status in (PutStatus.STORED, PutStatus.ALREADY_STORED)
        self.stored.append((placed.added_id, cell))
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _learn(self):
        self._storage.look()
        time.sleep(0.002)


def fill(storage, datastore, shard, count, size=100):
    """Puts cells as the shard's home."""
    master = storage.master(datastore.home(shard))
    for done in range(0, count, 500):
        master.run(entity_table.put_cells, datastore, [new_cell(shard, size) for _ in range(min(500, count - done))])


def verify(storage, datastore, shard, home, former, stored):
    """All acknowledged cells are at home, dense and in order, as they are at the former home, which is closed."""
    target, source = storage.master(home), storage.master(former)
    head, _ = target.run(shard_head.history, datastore.name, shard)
    cells = target.run(entity_table.read_after, datastore, shard, 0, 10**6)
    assert [cell.added_id for cell in cells] == list(range(1, head.added_id + 1))
    assert [cell.created_at for cell in cells] == sorted(cell.created_at for cell in cells)
    places = {cell.key: cell.added_id for cell in cells}
    assert all(places[cell.key] == added_id for added_id, cell in stored), "an acknowledged cell is elsewhere"
    ((closed, old),) = source.run(
        query,
        f"SELECT moved_to, head FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND shard = {shard}",
    )
    assert closed == home
    compared = [node.run(query, shard_copy.digest(datastore, shard, 0, old))[0][0] for node in (target, source)]
    assert compared[0] == compared[1]
    return head


def home_of(storage, datastore, shard):
    """Returns the one home of a shard, as processes learn it. Exactly its head is open."""
    storage.look()
    heads = {
        master.node.cluster: found
        for master in storage.masters
        if (found := master.run(shard_move_table.home_head, datastore.name, shard)) is not None
    }
    (opened,) = [cluster for cluster, found in heads.items() if found.moved_to is None]
    assert storage.live(datastore).home(shard) == opened
    return opened
