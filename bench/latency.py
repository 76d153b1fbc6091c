"""Latency from a put's acknowledgement to its effects in the topic, in an index and at a trigger, and the CPU of a put.

All moments are of the machine's monotonic clock, taken by whoever saw the effect. The index is asked right after
every fourth acknowledgement with `after` = the put's location, so its figure is the time until that query answers: the
query evaluates what the index lacks by then. Asking for each would be as much load as the puts are. All processes
together leave little of two cores free, so a round in which the host takes some of them says more of the host: the
report tells how much it took.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cells_log import SETTLE_TIMEOUT_S, settled, visible_records
from bench.cpu import cpu_a_put, cpu_by_kind, own_children
from bench.figures import Figure, Floor, Values, at_most, percentile
from bench.paced import Put, put_paced
from bench.rounds import stolen_during
from bench.scale import Scale
from bench.servers import DATASTORE, BenchStack, our_api, service
from bench.trips import TripMaker

PUTS_PER_S = (200, 500)
PARTITIONS = (8, 2)
P50_FLOOR = at_most(50.0)
INDEX = "by_driver"
DEFINITION = {
    "name": INDEX,
    "shard_field": "driver_uuid",
    "fields": [
        {"name": "driver_uuid", "column": "BASE", "path": "driver_uuid", "type": "uuid"},
        {"name": "requested_at", "column": "BASE", "path": "requested_at", "type": "datetime"},
    ],
}


@dataclass(frozen=True, slots=True)
class _LatencyRound:
    """Seconds from a put, or from its acknowledgement, to what followed.

    `stolen` is a percentage of the CPU time. `cpu_ms` is milliseconds of CPU time a put, by kind of process.
    """

    acknowledged: Sequence[float]
    visible: Sequence[float]
    indexed: Sequence[float]
    called: Sequence[float]
    stolen: float
    cpu_ms: Mapping[str, float]


def measure(stack: BenchStack, scale: Scale) -> list[Figure]:
    trips = TripMaker(seed=5)
    figures: list[Figure] = []
    with our_api(stack) as port, _effects(stack, port) as effects:
        _wait_for_index(port)
        _round(port, effects, trips, PUTS_PER_S[0], scale.warm_up_s)
        for puts_per_s in PUTS_PER_S:
            rounds = [_round(port, effects, trips, puts_per_s, scale.latency_s) for _ in range(scale.rounds)]
            figures += _figures_of(rounds, f"{puts_per_s} puts/s, {stack.datastore.partitions} partitions: ")
    return figures


def _figures_of(rounds: Sequence[_LatencyRound], load: str) -> list[Figure]:
    def cpu(what: str, of: Callable[[_LatencyRound], float]) -> Figure:
        return Figure(load + what, "ms", Values(tuple(map(of, rounds))))

    kinds = sorted(rounds[0].cpu_ms)
    return [
        *_figures(f"{load}put → acknowledged", [r.acknowledged for r in rounds]),
        *_figures(f"{load}acknowledged → record visible", [r.visible for r in rounds], P50_FLOOR),
        *_figures(f"{load}acknowledged → index query answers", [r.indexed for r in rounds], P50_FLOOR),
        *_figures(f"{load}acknowledged → trigger called", [r.called for r in rounds], P50_FLOOR),
        cpu("CPU of a put", lambda r: sum(r.cpu_ms.values())),
        *(cpu(f"CPU of a put: {kind}", lambda r, kind=kind: r.cpu_ms[kind]) for kind in kinds),  # type: ignore[misc]
        Figure(f"{load}CPU time that the host gave to others", "%", Values(tuple(r.stolen for r in rounds))),
    ]


def _round(port: int, effects: _Effects, maker: TripMaker, puts_per_s: int, seconds: float) -> _LatencyRound:
    trips = maker.make(round(seconds * puts_per_s))
    processes = own_children()
    before = cpu_by_kind(processes)
    puts, stolen = stolen_during(lambda: put_paced(port, trips, puts_per_s=puts_per_s, index=INDEX))
    row_keys = [put.row_key for put in puts]
    visible = _since_acknowledged(puts, settled(lambda: effects.records, row_keys))
    called = _since_acknowledged(puts, settled(lambda: _calls(effects.trigger_log), row_keys))
    return _LatencyRound(
        acknowledged=[put.acknowledged - put.sent for put in puts],
        visible=visible,
        indexed=[put.indexed - put.acknowledged for put in puts if put.indexed],
        called=called,
        stolen=stolen,
        cpu_ms=cpu_a_put(before, cpu_by_kind(processes), len(puts)),
    )


@dataclass(frozen=True, slots=True)
class _Effects:
    """`records`: when each was visible, by row key. `trigger_log`: what the trigger program printed."""

    records: Mapping[str, float]
    trigger_log: Path


@contextmanager
def _effects(stack: BenchStack, port: int) -> Iterator[_Effects]:
    """Everything downstream of a put, running."""
    hosts = {"SCHEMALESS_HOSTS": f"http://127.0.0.1:{port}"}
    _define_index(port)
    with (
        service(stack, "tailer", ["tailer"]),
        service(stack, "indexer", ["indexer"]),
        service(
            stack, "consumers", ["consumers", "bench.stamp_trigger", "--datastore", stack.datastore.name], hosts
        ) as consumers,
        visible_records(stack.kafka, [stack.datastore.topic], stack.datastore.partitions) as records,
    ):
        yield _Effects(records, consumers.log)


def _define_index(port: int) -> None:
    _index_call(port, "PUT", json.dumps(DEFINITION))


def _wait_for_index(port: int) -> None:
    """Returns when the index answers queries. Raises TimeoutError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (state := _index_call(port, "GET")["state"]) != "active":
        if time.monotonic() > deadline:
            raise TimeoutError(f"the index is {state} after {SETTLE_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _index_call(port: int, method: str, payload: str | None = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, f"/v1/{DATASTORE}/indexes/{INDEX}", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status < 300, f"{response.status} {text!r}"
    return json.loads(text)  # type: ignore[no-any-return]


def _calls(log: Path) -> Mapping[str, float]:
    """First call for each row, from what the trigger program printed."""
    calls: dict[str, float] = {}
    for line in log.read_text().splitlines():
        match line.split():
            case ["called", row_key, moment]:
                calls.setdefault(row_key, float(moment))
    return calls


def _since_acknowledged(puts: Sequence[Put], moments: Mapping[str, float]) -> list[float]:
    """An effect may be seen before the acknowledgement arrives: then no time has passed since."""
    return [max(0.0, moments[put.row_key] - put.acknowledged) for put in puts]


def _figures(what: str, rounds: Sequence[Sequence[float]], floor: Floor | None = None) -> list[Figure]:
    p50, p99 = (Values(tuple(percentile(seconds, share) * 1000 for seconds in rounds)) for share in (50, 99))
    return [Figure(f"{what}: p50", "ms", p50, floor), Figure(f"{what}: p99", "ms", p99)]
