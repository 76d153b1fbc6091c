"""ConsumerMetrics: what indexes and trigger programs do in a process, and how far behind they are (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Histogram

from schemaless.consume.host import ConsumerHost
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.names import Stall
from schemaless.runtime.service_metrics import STAGE_SECONDS, Table, TableCollector, Times, counter, gauge
from schemaless.shard_cursor import CursorState
from schemaless.topology import Datastore

STAGE_TIMES = Times(
    "schemaless_consumer_stage_seconds",
    "Parts of the way of a call's oldest cell: wait (from its creation on), call, and commit.",
    ("datastore", "consumer", "stage"),
)


class ConsumerMetrics:
    """The stages of calls are observed as they end. Everything else is read from the hosts when somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hosts: list[tuple[Datastore, ConsumerHost, TriggerHandler | None]] = []
        self._waiting_since: dict[tuple[str, str, int, int], float] = {}
        self._stages = Histogram(*STAGE_TIMES, buckets=STAGE_SECONDS, registry=registry)
        registry.register(TableCollector(HOSTS, lambda: (((at.name,), host) for at, host, _ in self._hosts)))
        registry.register(TableCollector(COUNTED, self._counted))
        registry.register(TableCollector(STANDINGS, self._standings))
        registry.register(TableCollector(CALLS, self._called))

    def watch(self, datastore: Datastore, host: ConsumerHost, program: TriggerHandler | None = None) -> None:
        self._hosts.append((datastore, host, program))
        host.observe(lambda consumer, stage, s: self._stages.labels(datastore.name, consumer, stage).observe(s))

    def _counted(self) -> Iterable[tuple[tuple[str, str], Mapping[str, int]]]:
        counts: dict[tuple[str, str], Counter[str]] = {}
        for datastore, host, _ in self._hosts:
            for consumer, delivery in host.deliveries():
                counts.setdefault((datastore.name, consumer), Counter()).update(asdict(delivery.counts))
        return counts.items()

    def _standings(self) -> Iterable[tuple[tuple[str, str], _Standing]]:
        """Looks only at shards in which something waits."""
        now = time.time()
        found: dict[tuple[str, str], _Standing] = {}
        since_before, self._waiting_since = self._waiting_since, {}
        for datastore, host, _ in self._hosts:
            for consumer, delivery in host.deliveries():
                standing = found.setdefault((datastore.name, consumer), _Standing(host.partitions))
                late = delivery.late()
                standing.states[CursorState.LIVE] += len(delivery.cursors()) - len(late)
                for work in late:
                    state, partition = work.cursor.state, datastore.partition(work.shard)
                    standing.states["paused" if work.is_paused else state.value] += 1
                    head, done = host.heads.get(work.shard), work.cursor.done.added_id
                    if state is CursorState.LOCATING or head is None:
                        standing.known.discard(partition)
                    elif head.added_id > done:
                        key = (datastore.name, consumer, work.shard, done)
                        since = now if work.oldest_us is None else work.oldest_us / 1e6
                        self._waiting_since[key] = since = min(since, since_before.get(key, since))
                        standing.oldest[partition] = min(standing.oldest.get(partition, since), since)
                        standing.cells[partition] += head.added_id - done
        return found.items()

    def _called(self) -> Iterator[tuple[tuple[str, str], TriggerHandler]]:
        for datastore, host, program in self._hosts:
            if program is not None:
                for consumer in host.consumers:
                    yield (datastore.name, consumer), program


class _Standing:
    """How far one consumer is in the shards of this process. `known` are the partitions whose lag is known."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self.states: Counter[str] = Counter({**{state.value: 0 for state in CursorState}, "paused": 0})
        self.known = set(partitions)
        self.cells: Counter[int] = Counter()
        self.oldest: dict[int, float] = {}

    def waited_s(self, partition: int) -> float:
        return max(0.0, time.time() - self.oldest.get(partition, float("inf")))


HOSTS: Table[ConsumerHost] = {
    "schemaless_consumer_member{datastore}": gauge(
        "1 while the group answers, so that calls go on.", lambda host: host.is_member
    ),
    "schemaless_consumer_queued_bytes{datastore}": gauge(
        "Bodies that wait in the queues of the process.", lambda host: host.queued_bytes
    ),
    "schemaless_consumer_partitions{datastore}": gauge(
        "Partitions that the group assigned to the process.", lambda host: len(host.partitions)
    ),
    "schemaless_consumer_stalled{datastore, stall}": gauge(
        "1 while the process calls nothing for that reason.",
        lambda host: {stall: host.stall[0] is stall for stall in (Stall.NO_KAFKA, Stall.NO_PARTITIONS, Stall.REFUSED)},
    ),
}
COUNTED: Table[Mapping[str, int]] = {
    "schemaless_consumer_cells{datastore, consumer}": counter(
        "Cells that were finished.", lambda counts: counts["delivered"]
    ),
    "schemaless_consumer_failures{datastore, consumer}": counter(
        "Reads, calls and commits that failed and were done again.", lambda counts: counts["failures"]
    ),
    "schemaless_consumer_events{datastore, consumer, event}": counter(
        "What came: cells from the topic and from the log, duplicates, holes in the topic, and superseded cells.",
        lambda counts: {name: count for name, count in counts.items() if name not in ("delivered", "failures")},
    ),
}
STANDINGS: Table[_Standing] = {
    "schemaless_consumer_lag_cells{datastore, consumer, partition}": gauge(
        "Cells that aren't finished. Absent while it isn't known.",
        lambda one: {partition: one.cells[partition] for partition in one.known},
    ),
    "schemaless_consumer_lag_seconds{datastore, consumer, partition}": gauge(
        "How long the oldest of them has waited. Absent while it isn't known.",
        lambda one: {partition: one.waited_s(partition) for partition in one.known},
    ),
    "schemaless_consumer_shards{datastore, consumer, state}": gauge(
        "Shards by state. Those that wait for nothing are live.", lambda one: one.states
    ),
}
CALLS: Table[TriggerHandler] = {
    "schemaless_consumer_calls{datastore, consumer, function, outcome}": counter(
        "Calls of functions by outcome.", lambda program: dict(program.attempts)
    ),
    "schemaless_consumer_oldest_call_seconds{datastore, consumer}": gauge(
        "Age of the oldest call in flight. Absent if none is.",
        lambda program: call.age_s if (call := program.oldest_call()) else None,
    ),
    "schemaless_consumer_tripped{datastore, consumer}": gauge(
        "1 while the breaker is open.", lambda program: program.tripped is not None
    ),
}
