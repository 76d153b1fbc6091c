"""Building an index: by row beside the log, and what a build at its default throttle costs puts.

The indexer covers the demo's flights once by walking over the rows, and once by reading the log from its beginning. The
walk doesn't rest there, however slow its commits are, because the log has no such limit. In the second part puts arrive
at a steady pace, in turns while an index is built and while none is.
"""

from __future__ import annotations

import asyncio
import time

from bench.cleaning import DEFINITION, fill_flights
from bench.figures import Comparison, Values, at_least, at_most, percentile
from bench.indexing import TIMEOUT_S, make_tables, our_rate
from bench.paced import put_paced
from bench.scale import Scale
from bench.servers import BenchStack, our_api, service
from bench.trips import TripMaker
from schemaless.index.catalogue import build_progress, create_index, find_index, throttle_index
from schemaless.index.definition import IndexDefinition, parse_definition
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.pymysql_driver import SyncStorage

PUTS_PER_S = 200
CELL_BYTES = 430
"""What a cell of a flight takes on its master, with its keys, as information_schema tells."""

POOL_MIB_MIN = 6
"""Both servers refuse a buffer pool below 5 MiB."""


def small_pool_mib(scale: Scale) -> int:
    """Returns a tenth of what the cells take on each of two masters."""
    return max(POOL_MIB_MIN, round(scale.flights_cleaned * CELL_BYTES / 10 / (1 << 20)))


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    fill_flights(stack, scale.flights_cleaned)
    cells, by_row, by_log = 2 * scale.flights_cleaned, [], []
    with SyncStorage(stack.topology, timeout_s=60) as storage:
        for number in range(scale.drains):
            followed = _definition(f"log_{number}")
            make_tables(storage, stack, followed)
            by_log.append(our_rate(storage, stack, [followed], cells))
            by_row.append(asyncio.run(_built(stack, _definition(f"row_{number}"))))
    alone, beside = [], []
    trips = TripMaker(seed=14)
    with our_api(stack) as port, service(stack, "indexer", ["indexer"]):
        for number in range(scale.rounds):
            for p99s, is_building in ((alone, False), (beside, True)):
                if is_building:
                    asyncio.run(_create(stack, _definition(f"beside_{number}")))
                puts = put_paced(port, trips.make(round(PUTS_PER_S * scale.latency_s)), puts_per_s=PUTS_PER_S)
                p99s.append(1000 * percentile([put.acknowledged - put.sent for put in puts], 99))
                asyncio.run(_all_active(stack, number, is_building))
    return [
        Comparison(
            f"{cells:,} cells covered by row, beside the log",
            "cells/s",
            Values(tuple(by_row)),
            Values(tuple(by_log)),
            at_least(2.0),
        ),
        Comparison(
            f"{PUTS_PER_S} puts/s while an index is built, and while none is: p99",
            "ms",
            Values(tuple(beside)),
            Values(tuple(alone)),
            at_most(1.2),
        ),
    ]


def _definition(name: str) -> IndexDefinition:
    return parse_definition({**DEFINITION, "name": name})


async def _create(stack: BenchStack, definition: IndexDefinition) -> None:
    async with AsyncStorage(stack.topology) as storage:
        await create_index(storage, stack.datastore, definition)


async def _built(stack: BenchStack, definition: IndexDefinition) -> float:
    """Returns cells a second that a walk covers, from the first progress to the last cell."""
    await _create(stack, definition)
    began, first, total = time.monotonic(), None, 0
    async with AsyncStorage(stack.topology) as storage:
        await throttle_index(storage, stack.datastore, definition.name, {"build_commit_max_s": 60.0})
        with service(stack, "indexer", ["indexer"]):
            while (now := time.monotonic()) < began + TIMEOUT_S:
                index = await find_index(storage, stack.datastore, definition.name)
                progress = await build_progress(storage, stack.datastore, index)
                total = progress.total or total
                if first is None and 0 < progress.done < total:
                    first = (now, progress.done)
                if index.is_complete or 0 < total <= progress.done:  # once it is active, nothing shows its total
                    since, done = first or (began, 0)
                    return (total - done) / max(0.001, now - since)
                await asyncio.sleep(0.05)
    raise TimeoutError(f"{definition.name} wasn't built in {TIMEOUT_S:.0f} s")


async def _all_active(stack: BenchStack, number: int, is_building: bool) -> None:
    """Waits until the index of a round is built."""
    deadline = time.monotonic() + TIMEOUT_S
    async with AsyncStorage(stack.topology) as storage:
        while is_building and not (await find_index(storage, stack.datastore, f"beside_{number}")).is_complete:
            if time.monotonic() > deadline:
                raise TimeoutError(f"beside_{number} wasn't built in {TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)
