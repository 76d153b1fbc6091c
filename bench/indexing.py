"""Maintenance of indexes: entries written a second from the log, beside raw multi-row upserts of the same entries.

The raw side knows the entries already. It sends them by PyMySQL in the statements that the indexer uses, one
transaction for each 1000 cells and master, over one connection for each master. It proves nothing, reads no rows before
and stores no checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pymysql
from pymysql.constants import CLIENT

from bench import plain_tier
from bench.figures import Comparison, Values, at_least
from bench.filling import fill_ours
from bench.latency import DEFINITION
from bench.scale import Scale
from bench.servers import BenchStack, service
from bench.trips import TripMaker
from schemaless.cell import StoredCell
from schemaless.index.definition import IndexDefinition, parse_definition
from schemaless.index.transition import index_writes
from schemaless.names import index_consumer
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.storage import checkpoint_table, index_definition_table, index_table, shard_log
from schemaless.storage.index_definition_table import IndexStage, defined
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_log import LogRange
from schemaless.topology import Node

COUNTS = (1, 10)  # indexes in the process
CELLS_A_TRANSACTION = 1000
TIMEOUT_S = 300.0


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    trips = TripMaker(seed=8).make(scale.cells_indexed)
    fill_ours(stack, (trip.cell(stack.datastore.shards) for trip in trips))
    rows = []
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        cells = _log(storage, stack)
        for count in COUNTS:
            ours, raw = [], []
            for number in range(scale.drains):
                definitions = [_definition(f"ours_{count}_{number}_{n}") for n in range(count)]
                others = [_definition(f"raw_{count}_{number}_{n}") for n in range(count)]
                for definition in definitions + others:
                    make_tables(storage, stack, definition)
                ours.append(our_rate(storage, stack, definitions, len(cells)))
                raw.append(_raw_rate(stack, others, cells))
            what = f"{count} index{'es' * (count > 1)}: entries"
            rows.append(Comparison(what, "entries/s", Values(tuple(ours)), Values(tuple(raw)), at_least(0.6)))
    return rows


def _definition(name: str) -> IndexDefinition:
    return parse_definition({**DEFINITION, "name": name})


def _log(storage: SyncStorage, stack: BenchStack) -> list[StoredCell]:
    """Returns all cells, a thousand of each shard in turn, about as an indexer meets them."""
    datastore, pages = stack.datastore, list[tuple[int, list[StoredCell]]]()
    for shard in range(datastore.shards):
        wanted = [LogRange(shard, 0, 1_000_000)]
        (page,) = storage.master(datastore.home(shard)).run(shard_log.read, datastore, wanted, 1 << 30)
        pages += [(number, part) for number, part in enumerate(map(list, chunks(page, count_max=100)))]
    return [cell for _, part in sorted(pages, key=lambda page: page[0]) for cell in part]


def make_tables(storage: SyncStorage, stack: BenchStack, definition: IndexDefinition) -> None:
    for shard in range(stack.datastore.shards):
        storage.master(stack.datastore.home(shard)).run(index_table.create, stack.datastore, shard, definition)


def our_rate(
    storage: SyncStorage,
    stack: BenchStack,
    definitions: Sequence[IndexDefinition],
    cells: int,
    env: Mapping[str, str] | None = None,
) -> float:
    """Returns cells a second that an indexer process takes for some indexes, from the first checkpoint that moved to
    the last.
    """
    name, clusters = stack.datastore.name, stack.datastore.clusters
    beginnings = [Position(shard, 1, 0) for shard in range(stack.datastore.shards)]
    for definition in definitions:
        for cluster in clusters:
            make = partial(checkpoint_table.make, name, index_consumer(definition.name), beginnings, counts=False)
            storage.master(cluster).run(make)  # so it follows the log, and isn't built by row
            storage.master(cluster).run(index_definition_table.bring_to, name, defined(definition, IndexStage.ACTIVE))

    def finished() -> int:
        """Counts cells of the slower cluster."""
        return sum(
            min(
                sum(
                    row.position.added_id
                    for row in storage.master(cluster).run(
                        checkpoint_table.of_consumer, name, index_consumer(definition.name)
                    )
                )
                for cluster in clusters
            )
            for definition in definitions
        )

    wanted = cells * len(definitions)
    deadline, first = time.monotonic() + TIMEOUT_S, None
    with service(stack, "indexer", ["indexer"], env):
        while time.monotonic() < deadline:
            now, count = time.monotonic(), finished()
            if first is None and count:
                first = (now, count)
            if first is not None and count >= wanted:
                return (count - first[1]) / max(0.001, now - first[0])
            time.sleep(0.05)
    raise TimeoutError(f"{finished()} of {wanted} entries were written in {TIMEOUT_S:.0f} s")


def _raw_rate(stack: BenchStack, definitions: Sequence[IndexDefinition], cells: Sequence[StoredCell]) -> float:
    datastore = stack.datastore
    batches = []
    for definition in definitions:
        for part in chunks(cells, count_max=CELLS_A_TRANSACTION):
            by_shard: dict[int, list[StoredCell]] = {}
            for cell in part:
                by_shard.setdefault(cell.shard, []).append(cell)
            writes = [
                write
                for own in by_shard.values()
                for write in index_writes(definition, datastore.shards, {}, own).writes
            ]
            batches.append((definition, datastore.by_home(writes, lambda write: write.shard)))

    def write(master: Node) -> None:
        connection: pymysql.Connection = plain_tier.connect(master, client_flag=CLIENT.MULTI_STATEMENTS)
        with connection, connection.cursor() as cursor:
            for definition, by_home in batches:
                cursor.execute(index_table.upserts(datastore, definition, by_home.get(master.cluster, ())))
                while cursor.nextset():
                    pass
                connection.commit()

    began = time.monotonic()
    with ThreadPoolExecutor(len(stack.masters())) as pool:
        list(pool.map(write, stack.masters()))
    return len(cells) * len(definitions) / (time.monotonic() - began)
