"""Single puts over HTTP, ours beside the plain tier: how many a second at 64 connections, how soon at one."""

from __future__ import annotations

from bench.figures import Comparison, Floor, at_least, at_most
from bench.load import Outcome, run_load
from bench.rounds import alternate, p50s, rates
from bench.scale import Scale
from bench.servers import BenchStack, our_api, plain_api
from bench.trips import TripMaker, put_request

CONNECTIONS = 64
PUTS_PER_S_MAX = 10_000
RATE_FLOOR = at_least(4.0)
LATENCY_FLOOR = at_most(1.3)


def measure(stack: BenchStack, scale: Scale, *, floors: bool) -> list[Comparison]:
    before = stack.cells()
    with our_api(stack) as ours, plain_api(stack) as theirs:
        pair = _Pair(stack, scale, ours, theirs)
        rows = [
            pair.compare(CONNECTIONS, RATE_FLOOR if floors else None),
            pair.compare(1, LATENCY_FLOOR if floors else None),
        ]
    stored = stack.cells() - before
    assert stored == pair.acknowledged, f"{pair.acknowledged} puts acknowledged, {stored} cells stored"
    return rows


class _Pair:
    """The two tiers under the same load. `acknowledged` counts the puts that ours answered with 201."""

    def __init__(self, stack: BenchStack, scale: Scale, ours: int, theirs: int) -> None:
        self._stack = stack
        self._scale = scale
        self._ports = ours, theirs
        self._trips = TripMaker(seed=1)
        self.acknowledged = 0

    def compare(self, connections: int, floor: Floor | None) -> Comparison:
        """Rates of many connections, or the median time of one."""
        ours, theirs = self._ports
        mine, others = alternate(
            self._scale.rounds,
            lambda: self._ours(ours, connections),
            lambda: self._load(theirs, connections, ""),
        )
        copies = f"{self._stack.copies} durable cop{'ies' if self._stack.copies > 1 else 'y'}"
        if connections == 1:
            return Comparison(f"put, {copies}: p50 at one connection", "ms", p50s(mine), p50s(others), floor)
        return Comparison(f"put, {copies}: {connections} connections", "puts/s", rates(mine), rates(others), floor)

    def _ours(self, port: int, connections: int) -> Outcome:
        outcome = self._load(port, connections, self._stack.prefix)
        self.acknowledged += outcome.statuses[201]
        return outcome

    def _load(self, port: int, connections: int, prefix: str) -> Outcome:
        count = round(self._scale.round_s * PUTS_PER_S_MAX / (1 if connections > 1 else 4))
        requests = [put_request(trip, prefix) for trip in self._trips.make(count)]
        return run_load(port, requests, connections=connections, seconds=self._scale.round_s).expect(201)
