"""Fills tables directly, without HTTP: ours through the entity table's own operation, the plain tier's by INSERT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench import plain_tier
from bench.servers import BenchStack
from bench.trips import COLUMN, Trip
from schemaless.runtime.batching import chunks
from schemaless.storage.entity_table import ShardCell, put_cells
from schemaless.storage.pymysql_driver import SyncStorage

CELLS_PER_TRANSACTION = 1000


def fill_ours(stack: BenchStack, cells: Iterable[ShardCell]) -> None:
    """Writes up to 1000 cells of a shard in one transaction. The clusters work in parallel."""
    by_shard: dict[int, list[ShardCell]] = defaultdict(list)
    for cell in cells:
        by_shard[cell.shard].append(cell)
    datastore = stack.datastore

    with SyncStorage(stack.topology, timeout_s=60) as storage:

        def fill(shard: int) -> None:
            master = storage.master(datastore.home(shard))
            for part in chunks(by_shard[shard], count_max=CELLS_PER_TRANSACTION):
                master.run(put_cells, datastore, part)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(fill, by_shard))


def fill_plain(stack: BenchStack, trips: Sequence[Trip]) -> None:
    masters = stack.masters()
    for number, master in enumerate(masters):
        own = [trip for trip in trips if trip.row_key.int % len(masters) == number]
        connection = plain_tier.connect(master)
        with connection, connection.cursor() as cursor:
            for part in chunks(own, count_max=CELLS_PER_TRANSACTION):
                cursor.executemany(
                    plain_tier.INSERT.format("cell"),
                    [(trip.row_key.bytes, COLUMN, trip.ref_key, trip.json) for trip in part],
                )
                connection.commit()
