"""Both clients: puts a second and CPU of the client's process a put, with 1, 8 and 64 at a time.

In turns with them: httpx alone, which sends the same bodies to the same API, and boto3 on DynamoDB Local.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.client_load import WARM_UP_PUTS, ClientOutcome, ClientPlan, run_client
from bench.dynamodb_local import CannotRun, DynamoDB, dynamodb_local
from bench.figures import Comparison, Figure, Values, at_least, at_most
from bench.scale import Scale
from bench.servers import BenchStack, our_api
from bench.trips import TripMaker

AT_A_TIME = (1, 8, 64)
CPU_FLOOR = at_most(0.4)
RATE_FLOOR = at_least(1.0)
TURNED_FLOOR = at_most(1.0)

Run = Callable[[str, int], ClientOutcome]


def measure(stack: BenchStack, scale: Scale, folder: Path) -> list[Comparison | Figure]:
    with our_api(stack) as port, ExitStack() as peers:
        seeds = itertools.count(1)
        dynamodb: DynamoDB | None = None
        try:
            dynamodb = peers.enter_context(dynamodb_local(folder))
        except CannotRun as error:
            print(f"without DynamoDB Local: {error}", file=sys.stderr)

        def run(kind: str, at_a_time: int) -> ClientOutcome:
            puts = scale.client_puts // (4 if at_a_time == 1 else 1)
            seed = next(seeds)
            if kind == "boto3":
                assert dynamodb is not None
                trips = TripMaker(seed)
                return dynamodb.put(trips.make(WARM_UP_PUTS), trips.make(puts), at_a_time)
            return run_client(ClientPlan(kind, f"http://127.0.0.1:{port}", stack.datastore.name, puts, at_a_time, seed))

        rows: list[Comparison | Figure] = []
        for at_a_time in AT_A_TIME:
            rows += _rows(run, scale, at_a_time, with_boto3=dynamodb is not None)
        return rows


def _rows(run: Run, scale: Scale, at_a_time: int, *, with_boto3: bool) -> list[Comparison | Figure]:
    kinds = ["client", "async client", "httpx", "async httpx", *(["boto3"] if with_boto3 else [])]
    rounds = [{kind: run(kind, at_a_time) for kind in kinds} for _ in range(scale.rounds)]

    def rate(kind: str) -> Values:
        return Values(tuple(found[kind].rate for found in rounds))

    def cpu(kind: str) -> Values:
        return Values(tuple(found[kind].cpu_ms for found in rounds))

    many = f"{at_a_time} at a time"
    last = at_a_time == max(AT_A_TIME)
    rows: list[Comparison | Figure] = [
        Comparison(
            f"AsyncClient, {many}, beside Client", "puts/s", rate("async client"), rate("client"),
            RATE_FLOOR if last else None,
        ),
        Comparison(
            "the same: CPU a put", "ms", cpu("async client"), cpu("client"), TURNED_FLOOR if last else None
        ),
        Figure(f"Client, {many}: CPU a put", "ms", cpu("client"), CPU_FLOOR),
        Figure(f"AsyncClient, {many}: CPU a put", "ms", cpu("async client"), CPU_FLOOR),
    ]  # fmt: skip
    for ours, theirs, name in (
        ("client", "httpx", "Client"),
        ("async client", "async httpx", "AsyncClient"),
        ("client", "boto3", "Client"),
    ):
        if theirs in kinds:
            rows.append(Comparison(f"{name}, {many}, beside {theirs}", "puts/s", rate(ours), rate(theirs)))
            rows.append(Comparison("the same: CPU a put", "ms", cpu(ours), cpu(theirs)))
    return rows
