"""The whole embedded stack under single puts: how many a second it takes, and what each process spends on one.

Two minions a cluster, both API processes, one index and two trigger programs. The stack runs from a checkout of its
own, so that two versions of the code are measured in turns: both stacks are up, and only one of them has load. The CPU
of a put counts until every consumer has caught up, so nobody saves by being late.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.cpu import cpu_a_put, cpu_by_kind
from bench.figures import Comparison, Figure, Values
from bench.latency import DEFINITION, INDEX
from bench.load import run_load
from bench.scale import Scale
from bench.trips import TripMaker, put_request
from schemaless.stack.supervision import checkout_folder

CONNECTIONS = 64
PUTS_PER_S_MAX = 4_000  # requests are made before a round begins
CONSUMERS = 3  # the index and two programs
CAUGHT_UP_TIMEOUT_S = 120.0
UP_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class StackRound:
    """`cpu_ms` is the CPU time of a put by kind of process, in milliseconds."""

    puts_per_s: float
    p50_ms: float
    cpu_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckoutStack:
    """A running embedded stack. `pids` are those of each kind of process."""

    api: Sequence[str]
    datastore: str
    pids: Mapping[str, Sequence[int]]

    def load(self, trips: TripMaker, seconds: float, *, is_cold: bool = False) -> StackRound:
        """Puts over all API processes, and waits until every consumer has finished the cells. A cold one may buffer."""
        each = CONNECTIONS // len(self.api)
        count = round(seconds * PUTS_PER_S_MAX / len(self.api))
        prefix = f"/v1/{self.datastore}"
        plans = [(urlsplit(url).port, [put_request(trip, prefix) for trip in trips.make(count)]) for url in self.api]
        before = cpu_by_kind(self.pids)
        with ThreadPoolExecutor(len(plans)) as pool:
            loads = [
                pool.submit(run_load, port, requests, connections=each, seconds=seconds)
                for port, requests in plans
                if port is not None
            ]
            outcomes = [load.result() if is_cold else load.result().expect(201) for load in loads]
        self.wait_until_caught_up()
        puts = sum(len(outcome.latencies_ms) for outcome in outcomes)
        spent = cpu_a_put(before, cpu_by_kind(self.pids), puts)
        return StackRound(sum(o.rate for o in outcomes), max(o.p50_ms for o in outcomes), spent)

    def wait_until_caught_up(self) -> None:
        """Returns when no consumer is behind and no buffer holds a cell. Raises TimeoutError."""
        deadline = time.monotonic() + CAUGHT_UP_TIMEOUT_S
        while True:
            status = httpx.get(f"{self.api[0]}/v1/{self.datastore}/status", timeout=10.0).json()
            lags = [consumer["lag"] for consumer in status["consumers"]]
            if len(lags) == CONSUMERS and not any(lags) and not status["buffered"]:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"behind after {CAUGHT_UP_TIMEOUT_S:.0f} s: {lags}, {status['buffered']} buffered")
            time.sleep(0.5)


@contextmanager
def running_checkout(checkout: Path, folder: Path) -> Iterator[CheckoutStack]:
    """Runs the embedded stack of a checkout from a folder, with an index and a second trigger program."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["/usr/bin/env", f"SCHEMALESS_HOME={folder}", str(checkout / ".venv/bin/python"), "-m", "schemaless"]

    def run(*arguments: str) -> None:
        argv = [*command, *arguments]
        subprocess.run(argv, cwd=checkout, stdout=subprocess.DEVNULL, check=True, timeout=UP_TIMEOUT_S)

    try:
        run("up")
        endpoints = json.loads((folder / "endpoints.json").read_bytes())
        (datastore,) = endpoints["datastores"]
        api = endpoints["api"]
        url = f"{api[0]}/v1/{datastore}/indexes/{INDEX}"
        httpx.put(url, json=DEFINITION, timeout=30.0).raise_for_status()
        with (folder / "stamp_trigger.log").open("wb") as log:
            argv = [*command, "triggers", "run", "bench.stamp_trigger", "--datastore", datastore]
            program = subprocess.Popen(argv, cwd=checkout, stdout=log, stderr=log)
        try:
            stack = CheckoutStack(api, datastore, _pids(endpoints, program.pid))
            yield stack
        finally:
            program.terminate()
            program.wait(30)
    finally:
        run("down")


def _pids(endpoints: Mapping[str, Any], program: int) -> dict[str, list[int]]:
    pids: dict[str, list[int]] = defaultdict(list)
    for process in endpoints["processes"]:
        pids[process["role"]].append(process["pid"])
    pids["consumers"].append(program)
    return pids


def measure(folder: Path, scale: Scale, beside: Path | None) -> list[Comparison | Figure]:
    """Measures this checkout, in turns with the one in `beside`. A kind of process that only one has is in the sum."""
    checkouts = [checkout_folder(), *([beside] if beside else [])]
    with ExitStack() as running:
        stacks = [
            running.enter_context(running_checkout(checkout.resolve(), folder / str(number)))
            for number, checkout in enumerate(checkouts)
        ]
        makers = [TripMaker(seed=7) for _ in stacks]
        for stack, trips in zip(stacks, makers, strict=True):
            stack.load(trips, scale.stack_warm_up_s, is_cold=True)
        rounds = [
            [stack.load(trips, scale.latency_s) for stack, trips in zip(stacks, makers, strict=True)]
            for _ in range(scale.rounds)
        ]
    sides = [[pair[number] for pair in rounds] for number in range(len(stacks))]
    spent = sides[0][0].cpu_ms
    shared = [kind for kind in spent if all(kind in side[0].cpu_ms for side in sides)]
    kinds = sorted(shared, key=lambda kind: -spent[kind])
    rows: list[tuple[str, str, list[Values]]] = [
        (f"puts, {CONNECTIONS} connections", "puts/s", [_values([r.puts_per_s for r in side]) for side in sides]),
        ("put: p50", "ms", [_values([r.p50_ms for r in side]) for side in sides]),
        ("CPU of a put", "ms", [_values([sum(r.cpu_ms.values()) for r in side]) for side in sides]),
        *(
            (f"CPU of a put: {kind}", "ms", [_values([r.cpu_ms[kind] for r in side]) for side in sides])
            for kind in kinds
        ),
    ]
    if beside is None:
        return [Figure(what, unit, values[0]) for what, unit, values in rows]
    return [Comparison(what, unit, values[0], values[1]) for what, unit, values in rows]


def _values(figures: Sequence[float]) -> Values:
    return Values(tuple(figures))
