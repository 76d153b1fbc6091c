"""Puts through a client library, in a process of its own: how many a second, and the CPU time that the process took.

`run_client` is the caller's side, `python -m bench.client_load` the process. Each put is sent once, as soon as one of
the `at_a_time` before it was answered.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from bench.trips import COLUMN, Trip, TripMaker
from schemaless import AsyncClient, Client

TIMEOUT_S = 300
WARM_UP_PUTS = 200


class ClientPlan(msgspec.Struct, frozen=True):
    """`kind` is one of KINDS. `host` is an API's URL."""

    kind: str
    host: str
    datastore: str
    puts: int
    at_a_time: int
    seed: int


class ClientOutcome(msgspec.Struct, frozen=True):
    puts: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.puts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time of the client's process a put."""
        return 1000 * self.cpu_s / self.puts


def run_client(plan: ClientPlan) -> ClientOutcome:
    return run_process([sys.executable, "-m", "bench.client_load"], msgspec.json.encode(plan))


def run_process(argv: Sequence[str], plan: bytes) -> ClientOutcome:
    """Runs a process that reads its plan and writes its outcome."""
    done = subprocess.run(argv, input=plan, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
    return msgspec.json.decode(done.stdout, type=ClientOutcome)


Put = Callable[[Trip], object]
AsyncPut = Callable[[Trip], Awaitable[object]]


def in_threads(plan: ClientPlan, put: Put, warm_up: Sequence[Trip], trips: Sequence[Trip]) -> ClientOutcome:
    with ThreadPoolExecutor(plan.at_a_time) as threads:
        list(threads.map(put, warm_up))
        clock = _Clock()
        list(threads.map(put, trips))
        return clock.outcome(len(trips))


async def in_tasks(plan: ClientPlan, put: AsyncPut, warm_up: Sequence[Trip], trips: Sequence[Trip]) -> ClientOutcome:
    async def drive(some: Iterator[Trip]) -> None:
        for trip in some:
            await put(trip)

    async def put_all(some: Sequence[Trip]) -> None:
        shared = iter(some)
        await asyncio.gather(*(drive(shared) for _ in range(plan.at_a_time)))

    await put_all(warm_up)
    clock = _Clock()
    await put_all(trips)
    return clock.outcome(len(trips))


class _Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def outcome(self, puts: int) -> ClientOutcome:
        return ClientOutcome(puts, time.perf_counter() - self._wall, time.process_time() - self._cpu)


def client(plan: ClientPlan, *trips: Sequence[Trip]) -> ClientOutcome:
    with Client([plan.host], datastore=plan.datastore) as ours:
        return in_threads(plan, lambda trip: _ours(ours.put_cell(*_cell(trip))), *trips)


def async_client(plan: ClientPlan, *trips: Sequence[Trip]) -> ClientOutcome:
    async def run() -> ClientOutcome:
        async with AsyncClient([plan.host], datastore=plan.datastore) as ours:

            async def put(trip: Trip) -> None:
                _ours(await ours.put_cell(*_cell(trip)))

            return await in_tasks(plan, put, *trips)

    return asyncio.run(run())


def bare_httpx(plan: ClientPlan, *trips: Sequence[Trip]) -> ClientOutcome:
    with httpx.Client(base_url=plan.host, limits=_limits(plan), trust_env=False) as bare:
        return in_threads(plan, lambda trip: bare.put(_path(plan, trip), json=_body(trip)).raise_for_status(), *trips)


def bare_async_httpx(plan: ClientPlan, *trips: Sequence[Trip]) -> ClientOutcome:
    async def run() -> ClientOutcome:
        async with httpx.AsyncClient(base_url=plan.host, limits=_limits(plan), trust_env=False) as bare:

            async def put(trip: Trip) -> None:
                (await bare.put(_path(plan, trip), json=_body(trip))).raise_for_status()

            return await in_tasks(plan, put, *trips)

    return asyncio.run(run())


KINDS = {
    "client": client,
    "async client": async_client,
    "httpx": bare_httpx,
    "async httpx": bare_async_httpx,
}


def _limits(plan: ClientPlan) -> httpx.Limits:
    return httpx.Limits(max_connections=plan.at_a_time, max_keepalive_connections=plan.at_a_time)


def _body(trip: Trip) -> dict[str, Any]:
    return json.loads(trip.json)


def _cell(trip: Trip) -> tuple[Any, str, int, dict[str, Any]]:
    return trip.row_key, COLUMN, trip.ref_key, _body(trip)


def _path(plan: ClientPlan, trip: Trip) -> str:
    return f"/v1/{plan.datastore}/cells/{trip.row_key}/{COLUMN}/{trip.ref_key}"


def _ours(answer: Any) -> None:
    assert answer.status == "stored", answer


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=ClientPlan)
    trips = TripMaker(plan.seed)
    outcome = KINDS[plan.kind](plan, trips.make(WARM_UP_PUTS), trips.make(plan.puts))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
