"""Restart of an indexer with many indexes and many shards: how soon each shard is at work, and the memory it takes.

Checkpoints of all indexes are planted at the heads, as a long life leaves them. When the process starts, one cell is
put into each of some shards. The figure is the time until every index has finished all of those cells.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from bench.drain import backlog
from bench.figures import Figure, Values, at_most
from bench.filling import fill_ours
from bench.idle import memory_mib
from bench.scale import Scale
from bench.servers import BenchStack, cpu_seconds, service
from bench.trips import COLUMN
from schemaless.cell import CellKey, RefKey, parse_row_key
from schemaless.codec import encode_body
from schemaless.index.definition import IndexDefinition, parse_definition
from schemaless.names import index_consumer
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, index_definition_table, index_table, shard_head, shard_log
from schemaless.storage.entity_table import ShardCell, put_cells
from schemaless.storage.index_definition_table import IndexStage, defined
from schemaless.storage.pymysql_driver import SyncStorage

INDEXES = 20
PROBED_EVERY = 64  # shards
FILLED_CELLS = 20_000
TIMEOUT_S = 120.0
SETTLE_S = 5.0
_DRIVER = "0b5fbe2e-2f6c-4f5b-8d3a-7d2d6a1d3c11"  # of every probe: all entries are in one index shard


def measure(stack: BenchStack, scale: Scale) -> list[Figure]:
    fill_ours(stack, backlog(FILLED_CELLS, stack.datastore.shards))
    took, cpu, memory = [], [], []
    with SyncStorage(stack.topology) as storage, service(stack, "tailer", ["tailer"]):
        _plant(storage, stack)
        time.sleep(SETTLE_S)
        for number in range(scale.drains):
            with service(stack, "indexer", ["indexer"]) as indexer:
                began = time.monotonic()
                _wait(storage, stack, _probe(storage, stack, number + 1))
                took.append(time.monotonic() - began)
                cpu.append(cpu_seconds(indexer))
                memory.append(memory_mib(indexer))
    what = f"{INDEXES} indexes, {stack.datastore.shards} shards"
    return [
        Figure(f"restart, {what}: every probed shard is live", "s", Values(tuple(took)), at_most(30)),
        Figure(f"restart, {what}: CPU until then", "s", Values(tuple(cpu))),
        Figure(f"restart, {what}: resident memory", "MiB", Values(tuple(memory))),
    ]


def _definition(number: int) -> IndexDefinition:
    field = {"name": "driver", "column": COLUMN, "path": "driver", "type": "uuid"}
    return parse_definition({"name": f"restart_{number:02}", "shard_field": "driver", "fields": [field]})


def _plant(storage: SyncStorage, stack: BenchStack) -> None:
    """Makes the indexes, active and finished up to the heads. A table is made only where an entry will be."""
    datastore = stack.datastore
    starts: list[Position] = []
    for cluster in datastore.clusters:
        heads = storage.master(cluster).run(shard_head.heads, datastore.name)
        reached = {head.shard: head.added_id for head in heads}
        digests = storage.master(cluster).run(shard_log.digests, datastore, reached)
        starts += [Position(head.shard, head.generation, head.added_id, digest=digests[head.shard]) for head in heads]
    table_shard = shard_of(parse_row_key(_DRIVER), datastore.shards)
    for number in range(INDEXES):
        definition = _definition(number)
        name = definition.name
        storage.master(datastore.home(table_shard)).run(index_table.create, datastore, table_shard, definition)
        for cluster in datastore.clusters:
            master = storage.master(cluster)
            master.run(index_definition_table.bring_to, datastore.name, defined(definition, IndexStage.ACTIVE))
            master.run(partial(checkpoint_table.make, datastore.name, index_consumer(name), starts, counts=False))


def _probe(storage: SyncStorage, stack: BenchStack, number: int) -> Mapping[int, int]:
    """Puts one cell into each probed shard. Returns their added_ids by shard."""
    datastore = stack.datastore
    body = encode_body({"driver": _DRIVER, "number": number})
    wanted = set(range(0, datastore.shards, PROBED_EVERY))
    cells: list[ShardCell] = []
    for found in backlog(100 * datastore.shards, datastore.shards, seed=number):
        if found.shard in wanted:
            wanted.remove(found.shard)
            cells.append(ShardCell(CellKey(found.key.row_key, COLUMN, RefKey(1000 + number)), body, found.shard))
        if not wanted:
            break
    for cluster, here in datastore.by_home(cells, lambda cell: cell.shard).items():
        storage.master(cluster).run(put_cells, datastore, here)
    shards = {cell.shard for cell in cells}
    heads = [head for cluster in datastore.clusters for head in storage.master(cluster).run(shard_head.heads, "bench")]
    return {head.shard: head.added_id for head in heads if head.shard in shards}


def _wait(storage: SyncStorage, stack: BenchStack, until: Mapping[int, int]) -> None:
    """Returns when every index has finished these shards on every cluster. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    behind = {(number, cluster) for number in range(INDEXES) for cluster in stack.datastore.clusters}
    while behind:
        for number, cluster in tuple(behind):
            consumer = index_consumer(_definition(number).name)
            rows = storage.master(cluster).run(
                checkpoint_table.of_consumer, stack.datastore.name, consumer, sorted(until)
            )
            if all(row.position.added_id >= until[row.shard] for row in rows):
                behind.remove((number, cluster))
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(behind)} of the indexes' checkpoints are behind after {TIMEOUT_S} s")
        time.sleep(0.1)
