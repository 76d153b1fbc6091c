"""Batch puts of 100 over HTTP beside raw multi-row INSERTs of such rows: same shard tables, same durable writes.

The raw side has its rows ready, gives added_ids from a counter and locks nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench import raw_limits
from bench.figures import Comparison, Values, at_least
from bench.load import run_load
from bench.rounds import alternate
from bench.scale import Scale
from bench.servers import BenchStack, make_shards, our_api
from bench.trips import TripMaker, batch_request
from schemaless.runtime.batching import chunks

BATCH_CELLS = 100
CELLS_PER_S_MAX = 30_000
WRITERS = (1, 8)
FLOOR = at_least(0.6)


def measure(stack: BenchStack, scale: Scale, *, floors: bool) -> list[Comparison]:
    raw = make_shards(stack.topology, stack.administrators, replace(stack.datastore, name="raw"))
    trips = TripMaker(seed=3)
    count = round(scale.round_s * CELLS_PER_S_MAX)

    def over_http(port: int, writers: int) -> float:
        requests = [batch_request(part, stack.prefix) for part in chunks(trips.make(count), count_max=BATCH_CELLS)]
        outcome = run_load(port, requests, connections=writers, seconds=scale.round_s).expect(200)
        return outcome.rate * BATCH_CELLS

    def by_hand(writers: int) -> float:
        cells = [trip.cell(raw.shards) for trip in trips.make(count)]
        batches = list(chunks(cells, count_max=BATCH_CELLS))
        return raw_limits.write_rate(stack, raw, batches, writers=writers, seconds=scale.round_s)

    rows = []
    with our_api(stack) as port:
        for writers in WRITERS:
            mine, others = alternate(scale.rounds, partial(over_http, port, writers), partial(by_hand, writers))
            what = f"batches of {BATCH_CELLS}, {_copies(stack)}: {writers} at a time"
            floor = FLOOR if floors else None
            rows.append(Comparison(what, "cells/s", Values(tuple(mine)), Values(tuple(others)), floor))
    return rows


def _copies(stack: BenchStack) -> str:
    return "1 durable copy" if stack.copies == 1 else f"{stack.copies} durable copies"
