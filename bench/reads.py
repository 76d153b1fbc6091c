"""Newest-version reads over HTTP at 64 connections, ours beside the plain tier, of the same rows with two versions."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import replace

from bench.figures import Comparison, at_least
from bench.filling import fill_ours, fill_plain
from bench.load import Outcome, run_load
from bench.rounds import alternate, rates
from bench.scale import Scale
from bench.servers import BenchStack, our_api, plain_api
from bench.trips import TripMaker, newest_request

CONNECTIONS = 64
READS_PER_S_MAX = 15_000
FLOOR = at_least(3.0)


def measure(stack: BenchStack, scale: Scale, *, floors: bool) -> list[Comparison]:
    first = TripMaker(seed=2).make(scale.rows_read)
    trips = [*first, *(replace(trip, ref_key=2) for trip in first)]
    fill_ours(stack, (trip.cell(stack.datastore.shards) for trip in trips))
    fill_plain(stack, trips)
    rows = [trip.row_key for trip in first]
    with our_api(stack) as ours, plain_api(stack) as theirs:
        mine, others = alternate(
            scale.rounds,
            lambda: _load(ours, rows, scale, stack.prefix),
            lambda: _load(theirs, rows, scale, ""),
        )
    floor = FLOOR if floors else None
    what = f"newest version: {CONNECTIONS} connections"
    return [Comparison(what, "reads/s", rates(mine), rates(others), floor)]


def _load(port: int, rows: Sequence[uuid.UUID], scale: Scale, prefix: str) -> Outcome:
    wanted = random.choices(rows, k=round(scale.round_s * READS_PER_S_MAX))
    requests = [newest_request(row_key, prefix) for row_key in wanted]
    return run_load(port, requests, connections=CONNECTIONS, seconds=scale.round_s).expect(200)
