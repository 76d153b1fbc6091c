"""The index cleaner over the demo's flights: the CPU of one pass, its own and the masters', as a share of five minutes.

The pass runs at full speed, because its CPU doesn't depend on how long it takes. Then an indexer follows the log with
another index, in turns with the cleaner at its default, which compares the first one meanwhile, and without it.

This stack has no minions. A pass over those reads as much and takes MINIONS_SHARE times as long. That part is added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice

from bench.cpu import cpu_by_kind, own_children
from bench.figures import Comparison, Figure, Values, at_most
from bench.filling import fill_ours
from bench.indexing import make_tables, our_rate
from bench.scale import Scale
from bench.servers import BenchStack
from indexer.index_cleaner import MINIONS_SHARE, IndexCleaner
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import StackSettings
from schemaless.demo.loader import BASE, FLIGHTS, REF_KEY, STATUS, fetch_dataset, parse_flight, read_rows
from schemaless.index.definition import IndexDefinition, parse_definition
from schemaless.index.transition import index_writes
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, index_definition_table, index_table, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.index_definition_table import IndexStage, defined
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_log import LogRange

PASS_S = 300.0
WRITES_A_TRANSACTION = 2000
DEFINITION = {
    "name": "flights_by_tailnum",
    "shard_field": "tailnum",
    "fields": [
        {"name": "tailnum", "column": BASE, "path": "tailnum", "type": "string", "length": 16},
        {"name": "time_hour", "column": BASE, "path": "time_hour", "type": "datetime"},
    ],
    "stored": [
        {"name": "carrier", "column": BASE, "path": "carrier", "type": "string", "length": 8},
        {"name": "flight", "column": BASE, "path": "flight", "type": "int"},
        {"name": "origin", "column": BASE, "path": "origin", "type": "string", "length": 8},
        {"name": "dest", "column": BASE, "path": "dest", "type": "string", "length": 8},
    ],
}


def measure(stack: BenchStack, scale: Scale) -> list[Figure | Comparison]:
    definition = parse_definition(DEFINITION)
    fill_flights(stack, scale.flights_cleaned)
    build(stack, definition)
    shares, seconds = [], []
    for _ in range(scale.drains):
        before, began = _cpu(), time.monotonic()
        asyncio.run(_one_pass(stack, definition))
        seconds.append(time.monotonic() - began)
        masters = 100 * (_cpu() - before) / PASS_S * FLIGHTS / scale.flights_cleaned
        shares.append(masters * (1 + 1 / MINIONS_SHARE))
    what = f"a pass over {FLIGHTS:,} flights in {PASS_S:.0f} s"
    return [
        Figure(f"{what}: CPU with the servers' share", "% of a core", Values(tuple(shares)), at_most(5)),
        Figure(f"a pass over {scale.flights_cleaned:,} flights at full speed", "s", Values(tuple(seconds))),
        _beside_another(stack, definition, scale),
    ]


def _beside_another(stack: BenchStack, compared: IndexDefinition, scale: Scale) -> Comparison:
    rates: dict[str, list[float]] = {"with": [], "without": []}
    cells = 2 * scale.flights_cleaned
    define_active(stack, compared)
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        for number in range(scale.drains):
            kinds = [("with", {}), ("without", {"SCHEMALESS_INDEXER_CLEANER_ROWS_PER_S": "0"})]
            for kind, env in kinds if number % 2 else reversed(kinds):
                followed = parse_definition({**DEFINITION, "name": f"{kind}_{number}"})
                make_tables(storage, stack, followed)
                rates[kind].append(our_rate(storage, stack, [followed], cells, env))
    ours, theirs = (Values(tuple(rates[kind])) for kind in ("with", "without"))
    return Comparison("cells that another index takes, beside the cleaner and without it", "cells/s", ours, theirs)


def fill_flights(stack: BenchStack, count: int) -> None:
    shards = stack.datastore.shards

    def cells() -> Iterator[ShardCell]:
        for row in islice(read_rows(fetch_dataset(StackSettings().cache)), count):
            flight = parse_flight(row)
            row_key = RowKey(flight.row_key.bytes)
            for column, body in ((BASE, flight.base), (STATUS, flight.status)):
                key = CellKey(row_key, ColumnName(column), RefKey(REF_KEY))
                yield ShardCell(key, encode_body(body), shard_of(row_key, shards))

    fill_ours(stack, cells())


def build(stack: BenchStack, definition: IndexDefinition) -> None:
    """Writes what an indexer would have written."""
    datastore = stack.datastore
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        make_tables(storage, stack, definition)
        for shard in range(datastore.shards):
            wanted = [LogRange(shard, 0, 1_000_000)]
            (cells,) = storage.master(datastore.home(shard)).run(shard_log.read, datastore, wanted, 1 << 30)
            writes = index_writes(definition, datastore.shards, {}, cells).writes
            for cluster, here in datastore.by_home(writes, lambda write: write.shard).items():
                for part in chunks(here, count_max=WRITES_A_TRANSACTION):
                    script = index_table.upserts(datastore, definition, part)
                    storage.master(cluster).run(index_table.write, script)
            at = Position(shard, 1, len(cells), digest=1)
            for cluster in datastore.clusters:
                arguments = (datastore.name, definition.consumer, [at])
                storage.master(cluster).run(checkpoint_table.make, *arguments)


def define_active(stack: BenchStack, definition: IndexDefinition) -> None:
    active = defined(definition, IndexStage.ACTIVE)
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        for cluster in stack.datastore.clusters:
            storage.master(cluster).run(index_definition_table.bring_to, stack.datastore.name, active)


async def _one_pass(stack: BenchStack, definition: IndexDefinition) -> None:
    async with AsyncStorage(stack.topology) as storage:
        cleaner = IndexCleaner(storage, stack.datastore, lambda: range(stack.datastore.shards), 1e9, pass_period_s=0)
        cleaner.watch([definition])
        for _ in range(stack.datastore.shards):
            await cleaner.step()


def _cpu() -> float:
    """Returns the seconds of CPU that this process and the masters have used."""
    return time.process_time() + cpu_by_kind({"masters": own_children()["masters"]})["masters"]
