"""What the check of a token costs: puts a second and the API's CPU, beside an API that serves loopback without one.

Access never goes off again once there is a token, so the two sides have servers of their own.
"""

from __future__ import annotations

import asyncio

from bench.figures import Comparison, Values, at_least
from bench.load import run_load
from bench.rounds import alternate
from bench.scale import Scale
from bench.servers import BenchStack, api_process, cpu_seconds
from bench.trips import TripMaker, put_request
from schemaless.access import ALL_DATASTORES, Scope
from schemaless.ops.tokens import create_token
from schemaless.stack.local import LocalServer
from schemaless.storage.asyncmy_driver import AsyncStorage

CONNECTIONS = 64
ROUNDS = 3
"""Times as many as of other suites: the difference is small."""
PUTS_PER_S_MAX = 10_000
FLOOR = at_least(0.97)


def measure(checked: BenchStack, open_stack: BenchStack, scale: Scale) -> list[Comparison]:
    secret = asyncio.run(_token(checked))
    trips = TripMaker(seed=6)

    def load(stack: BenchStack, process: LocalServer, port: int, token: str | None) -> tuple[float, float]:
        """Returns puts a second, and the microseconds of CPU that the API took for each."""
        made = trips.make(round(scale.round_s * PUTS_PER_S_MAX))
        requests = [put_request(trip, stack.prefix, token) for trip in made]
        before = cpu_seconds(process)
        outcome = run_load(port, requests, connections=CONNECTIONS, seconds=scale.round_s).expect(201)
        return outcome.rate, 1e6 * (cpu_seconds(process) - before) / len(outcome.latencies_ms)

    with api_process(checked) as ours, api_process(open_stack) as theirs:
        with_token, without = alternate(
            scale.rounds * ROUNDS,
            lambda: load(checked, *ours, secret),
            lambda: load(open_stack, *theirs, None),
        )
    (rates, cpu), (rates_without, cpu_without) = (
        (Values(tuple(rate for rate, _ in rounds)), Values(tuple(each for _, each in rounds)))
        for rounds in (with_token, without)
    )
    return [
        Comparison("puts with a token that is checked, beside none", "puts/s", rates, rates_without, FLOOR),
        Comparison("CPU of the API for a put, with a token and without", "µs", cpu, cpu_without),
    ]


async def _token(stack: BenchStack) -> str:
    async with AsyncStorage(stack.topology) as storage:
        issued = await create_token(storage, "bench", [ALL_DATASTORES], Scope.WRITE, "1d")
    return issued.secret
