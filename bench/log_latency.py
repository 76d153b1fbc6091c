"""Latency from an acknowledged put to a record that a committed reader sees, at 500 puts a second, beside Debezium.

The same API, server, load and reader; in turns either the tailer or Debezium's connector, at the poll interval of 10 ms
that its low latency asks for. CPU seconds are those of the one process that brings the log to Kafka.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from confluent_kafka import Message

from bench.cells_log import KeyOf, key_of_cell, settled, visible_records
from bench.debezium import QUICK_POLL, Peer, full_row_images
from bench.figures import Comparison, Figure, Values, at_most, percentile
from bench.paced import Put, put_paced
from bench.scale import Scale
from bench.servers import BenchStack, cpu_seconds, our_api, service
from bench.trips import TripMaker
from schemaless.stack.local import LocalServer

PUTS_PER_S = 500
P50_FLOOR = at_most(12.0)
P99_FLOOR = at_most(50.0)


@dataclass(frozen=True, slots=True)
class _LogRound:
    p50_ms: float
    p99_ms: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Side:
    """Who brings the log to Kafka, where its records are, and how to read a row key from one."""

    running: Callable[[], AbstractContextManager[LocalServer]]
    topics: Sequence[str]
    partitions: int
    key_of: KeyOf


def measure(stack: BenchStack, scale: Scale) -> list[Comparison | Figure]:
    full_row_images(stack)
    trips = TripMaker(seed=6)
    datastore = stack.datastore
    peer = Peer(stack, "latency", QUICK_POLL)
    ours = _Side(lambda: service(stack, "tailer", ["tailer"]), [datastore.topic], datastore.partitions, key_of_cell)
    theirs = _Side(peer.running, peer.topics, 1, _key_of_row)
    with our_api(stack) as port:
        _round(stack, ours, port, trips, scale.warm_up_s / 2)  # the broker's hot paths are compiled meanwhile
        rounds = [
            [_round(stack, side, port, trips, scale.latency_s) for side in (ours, theirs)] for _ in range(scale.drains)
        ]
    mine, others = ([pair[side] for pair in rounds] for side in (0, 1))
    return [
        Figure("acknowledged → record visible: p50", "ms", _values([r.p50_ms for r in mine]), P50_FLOOR),
        Figure("acknowledged → record visible: p99", "ms", _values([r.p99_ms for r in mine]), P99_FLOOR),
        *_beside("p50", "ms", [r.p50_ms for r in mine], [r.p50_ms for r in others]),
        *_beside("p99", "ms", [r.p99_ms for r in mine], [r.p99_ms for r in others]),
        *_beside("CPU of the process", "s", [r.cpu_s for r in mine], [r.cpu_s for r in others]),
    ]


def _round(stack: BenchStack, side: _Side, port: int, trips: TripMaker, seconds: float) -> _LogRound:
    """After as much load that doesn't count: the processes were just started."""
    with (
        side.running() as process,
        visible_records(stack.kafka, side.topics, side.partitions, side.key_of) as records,
    ):
        warm_up = put_paced(port, trips.make(round(seconds * PUTS_PER_S)), puts_per_s=PUTS_PER_S)
        settled(lambda: records, [put.row_key for put in warm_up])
        before = cpu_seconds(process)
        puts = put_paced(port, trips.make(round(seconds * PUTS_PER_S)), puts_per_s=PUTS_PER_S)
        visible = settled(lambda: records, [put.row_key for put in puts])
        took_s = cpu_seconds(process) - before
    late_ms = [_late_ms(put, visible[put.row_key]) for put in puts]
    return _LogRound(percentile(late_ms, 50), percentile(late_ms, 99), took_s)


def _late_ms(put: Put, seen: float) -> float:
    """A record may be seen before the acknowledgement arrives: then no time has passed since."""
    return max(0.0, seen - put.acknowledged) * 1000


def _key_of_row(message: Message) -> str | None:
    value = message.value()
    after = json.loads(value).get("after") if value else None
    return str(uuid.UUID(bytes=base64.b64decode(after["row_key"]))) if after else None


def _beside(what: str, unit: str, mine: Sequence[float], others: Sequence[float]) -> Iterator[Comparison]:
    yield Comparison(f"tailer beside Debezium, {QUICK_POLL.name}: {what}", unit, _values(mine), _values(others))


def _values(figures: Sequence[float]) -> Values:
    return Values(tuple(figures))
