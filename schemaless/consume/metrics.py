"""ConsumerMetrics: what indexes and trigger programs do in a process, and how far behind they are (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemaless.consume.host import ConsumerHost
from schemaless.runtime.service_metrics import STAGE_SECONDS
from schemaless.shard_cursor import CursorState
from schemaless.storage.worker_table import OldestCall
from schemaless.topology import Datastore


class CalledProgram(Protocol):
    """The functions of a trigger program, as its handler knows them."""

    @property
    def attempts(self) -> Mapping[tuple[str, str], int]: ...

    @property
    def tripped(self) -> str | None: ...

    def oldest_call(self) -> OldestCall | None: ...


class ConsumerMetrics(Collector):
    """The stages of calls are observed as they end. Everything else is read from the hosts when somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hosts: list[tuple[Datastore, ConsumerHost, CalledProgram | None]] = []
        self._waiting_since: dict[tuple[str, str, int, int], float] = {}
        self._stages = Histogram(
            "schemaless_consumer_stage_seconds",
            "Parts of the way of a call's oldest cell: wait (from its creation on), call, and commit.",
            ["datastore", "consumer", "stage"],
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def watch(self, datastore: Datastore, host: ConsumerHost, program: CalledProgram | None = None) -> None:
        self._hosts.append((datastore, host, program))
        children: dict[tuple[str, str], Histogram] = {}

        def observe(consumer: str, stage: str, seconds: float) -> None:
            child = children.get((consumer, stage))
            if child is None:
                child = children[consumer, stage] = self._stages.labels(datastore.name, consumer, stage)
            child.observe(seconds)

        host.observe(observe)

    def collect(self) -> Iterable[Metric]:
        member = GaugeMetricFamily(
            "schemaless_consumer_member", "1 while the group answers, so that calls go on.", labels=["datastore"]
        )
        queued = GaugeMetricFamily(
            "schemaless_consumer_queued_bytes", "Bodies that wait in the queues of the process.", labels=["datastore"]
        )
        partitions = GaugeMetricFamily(
            "schemaless_consumer_partitions", "Partitions that the group assigned to the process.", labels=["datastore"]
        )
        for datastore, host, _ in self._hosts:
            member.add_metric([datastore.name], float(host.is_member))
            queued.add_metric([datastore.name], host.queued_bytes)
            partitions.add_metric([datastore.name], len(host.partitions))
        yield from (member, queued, partitions)
        yield from self._counted()
        yield from self._lags()
        yield from self._calls()

    def _counted(self) -> Iterable[Metric]:
        labels = ["datastore", "consumer"]
        counts: Counter[tuple[str, str, str]] = Counter()
        for datastore, host, _ in self._hosts:
            for consumer, delivery in host.deliveries():
                for name, count in msgspec.structs.asdict(delivery.counts).items():
                    counts[datastore.name, consumer, name] += count
        delivered = CounterMetricFamily("schemaless_consumer_cells", "Cells that were finished.", labels=labels)
        failures = CounterMetricFamily(
            "schemaless_consumer_failures", "Reads, calls and commits that failed and were done again.", labels=labels
        )
        read = CounterMetricFamily(
            "schemaless_consumer_events",
            "What came: cells from the topic and from the log, duplicates, holes in the topic, and superseded cells.",
            labels=[*labels, "event"],
        )
        for (datastore_name, consumer, name), count in counts.items():
            if name == "delivered":
                delivered.add_metric([datastore_name, consumer], count)
            elif name == "failures":
                failures.add_metric([datastore_name, consumer], count)
            else:
                read.add_metric([datastore_name, consumer, name], count)
        return (delivered, failures, read)

    def _lags(self) -> Iterable[Metric]:
        labels = ["datastore", "consumer", "partition"]
        cells = GaugeMetricFamily(
            "schemaless_consumer_lag_cells", "Cells that aren't finished. Absent while it isn't known.", labels=labels
        )
        seconds = GaugeMetricFamily(
            "schemaless_consumer_lag_seconds",
            "How long the oldest of them has waited. Absent while it isn't known.",
            labels=labels,
        )
        shards = GaugeMetricFamily(
            "schemaless_consumer_shards",
            "Shards by state. Those that wait for nothing are live.",
            labels=["datastore", "consumer", "state"],
        )
        now = time.time()
        since_before, self._waiting_since = self._waiting_since, {}
        for datastore, host, _ in self._hosts:
            standings = _standings(datastore, host)
            for consumer, standing in standings.items():
                for state, count in standing.states.items():
                    shards.add_metric([datastore.name, consumer, state], count)
                for shard, done, oldest_us in standing.late:
                    key = (datastore.name, consumer, shard, done)
                    since = now if oldest_us is None else oldest_us / 1e6
                    self._waiting_since[key] = since = min(since, since_before.get(key, since))
                    partition = datastore.partition(shard)
                    standing.oldest[partition] = min(standing.oldest.get(partition, since), since)
                for partition in host.partitions:
                    if partition not in standing.unknown:
                        named = [datastore.name, consumer, str(partition)]
                        cells.add_metric(named, standing.cells[partition])
                        seconds.add_metric(named, max(0.0, now - standing.oldest.get(partition, now)))
        return (cells, seconds, shards)

    def _calls(self) -> Iterable[Metric]:
        labels = ["datastore", "consumer"]
        attempts = CounterMetricFamily(
            "schemaless_consumer_calls", "Calls of functions by outcome.", labels=[*labels, "function", "outcome"]
        )
        oldest = GaugeMetricFamily(
            "schemaless_consumer_oldest_call_seconds",
            "Age of the oldest call in flight. Absent if none is.",
            labels=labels,
        )
        tripped = GaugeMetricFamily("schemaless_consumer_tripped", "1 while the breaker is open.", labels=labels)
        for datastore, host, program in self._hosts:
            if program is None:
                continue
            for consumer in host.consumers:
                named = [datastore.name, consumer]
                for (function, outcome), count in dict(program.attempts).items():
                    attempts.add_metric([*named, function, outcome], count)
                if (call := program.oldest_call()) is not None:
                    oldest.add_metric(named, call.age_s)
                tripped.add_metric(named, float(program.tripped is not None))
        return (attempts, oldest, tripped)


class _Standing:
    """How far one consumer is in the shards of this process."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter({**{state.value: 0 for state in CursorState}, "paused": 0})
        self.late: list[tuple[int, int, int | None]] = []
        """The shards with unfinished cells: the shard, the last finished added_id, and when the next was created."""
        self.cells: Counter[int] = Counter()
        """By partition, and so are the others."""
        self.oldest: dict[int, float] = {}
        self.unknown: set[int] = set()


def _standings(datastore: Datastore, host: ConsumerHost) -> Mapping[str, _Standing]:
    """Returns the standing of each consumer. It looks only at shards in which something waits."""
    found: dict[str, _Standing] = {}
    for consumer, delivery in host.deliveries():
        standing = found.setdefault(consumer, _Standing())
        late = delivery.late()
        standing.states[CursorState.LIVE] += len(delivery.cursors()) - len(late)
        for work in late:
            state, partition = work.cursor.state, datastore.partition(work.shard)
            standing.states["paused" if work.is_paused else state.value] += 1
            head = host.heads.get(work.shard)
            if state is CursorState.LOCATING or head is None:
                standing.unknown.add(partition)
                continue
            done = work.cursor.done.added_id
            if head.added_id > done:
                standing.cells[partition] += head.added_id - done
                standing.late.append((work.shard, done, work.oldest_us))
    return found
