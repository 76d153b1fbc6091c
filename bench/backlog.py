"""A backlog of large cells that waits in a buffer, and small ones behind it: how soon the cleaner brings them home.

The rows are written as puts write them while a home is away. The cleaner starts when its home is back, so its waiting
until rows are old enough counts, too.
"""

from __future__ import annotations

import base64
import random
import time
import uuid
from collections.abc import Callable, Iterator

from bench.figures import Figure, Values, at_least, at_most
from bench.scale import Scale
from bench.servers import BenchStack, service
from bench.trips import COLUMN
from schemaless.cell import CellKey, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage

HOME, SECONDARY = "a", "b"
LARGE_BYTES = 780_000
SMALL_CELLS = 100
RATE_FLOOR = at_least(20.0)
SMALL_FLOOR = at_most(10.0)
_LOOK_PAUSE_S = 0.1
_WITHIN_S = 600.0


def measure(stack: BenchStack, scale: Scale) -> list[Figure]:
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        home, secondary = storage.master(HOME), storage.master(SECONDARY)
        size_bytes = 0
        for row in _rows(stack, scale.cells_backlogged):
            secondary.run(buffer_table.insert, stack.datastore, [row])
            size_bytes += len(row.body)
        small = list(_rows(stack, SMALL_CELLS, noise_bytes=100))
        secondary.run(buffer_table.insert, stack.datastore, small)
        began = time.monotonic()
        with service(stack, "cleaner", ["cleaner"]):
            small_s = _seconds_until(lambda: _are_home(home, stack, small), began)
            drained_s = _seconds_until(lambda: not secondary.run(buffer_table.waiting), began)
    return [
        Figure("a backlog goes home and is confirmed", "MB/s", Values((size_bytes / 1e6 / drained_s,)), RATE_FLOOR),
        Figure("small cells behind it are at home", "s", Values((small_s,)), SMALL_FLOOR),
    ]


def _rows(stack: BenchStack, count: int, noise_bytes: int = LARGE_BYTES) -> Iterator[BufferRow]:
    """Returns rows whose home is HOME, and whose bodies hardly compress."""
    draw = random.Random(count)
    while count:
        row_key = RowKey(uuid.UUID(int=draw.getrandbits(128), version=4).bytes)
        shard = shard_of(row_key, stack.datastore.shards)
        if stack.datastore.home(shard) == HOME:
            body = encode_body({"noise": base64.b64encode(draw.randbytes(noise_bytes)).decode()})
            yield BufferRow(CellKey(row_key, COLUMN, RefKey(1)), body, shard, HOME, draw.getrandbits(63))
            count -= 1


def _are_home(home: SyncNode, stack: BenchStack, rows: list[BufferRow]) -> bool:
    keys = [(row.shard, row.key) for row in rows]
    return None not in home.run(entity_table.digests, stack.datastore, keys)


def _seconds_until(done: Callable[[], bool], began: float) -> float:
    while not done():
        if time.monotonic() - began > _WITHIN_S:
            raise TimeoutError(f"the backlog did not go home within {_WITHIN_S:.0f} s")
        time.sleep(_LOOK_PAUSE_S)
    return time.monotonic() - began
