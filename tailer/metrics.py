"""TailerMetrics: what one tailer process publishes, how fast, and how far it is behind (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemaless.runtime.service_metrics import STAGE_SECONDS
from schemaless.topology import Datastore
from tailer.shard_progress import HoldCause, TailState
from tailer.shard_queue import ShardQueue


class TailedPartition(Protocol):
    """A partition that the group assigned to this process."""

    partition: int

    @property
    def shards(self) -> ShardQueue | None:
        """Its shards, or None while its log isn't open."""


class TailedDatastore(Protocol):
    """A datastore that this process tails."""

    datastore: Datastore

    @property
    def partitions(self) -> Iterable[TailedPartition]: ...


class Tailing(Protocol):
    """What a tailer process is asked for."""

    @property
    def datastores(self) -> Iterable[TailedDatastore]: ...

    @property
    def unreadable_clusters(self) -> Set[str]: ...

    @property
    def clusters(self) -> Set[str]: ...

    def is_paused(self, datastore: str) -> bool: ...


class TailerMetrics(Collector):
    """Counts transactions as they end. Everything else is read from the tailer when somebody asks."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self._tailing: Tailing | None = None
        self._cells: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._transactions: Counter[tuple[str, str]] = Counter()
        self._joins: Counter[tuple[str, str]] = Counter()
        self._stages = Histogram(
            "schemaless_tailer_stage_seconds",
            "Parts of a pass over a partition: read, wait (for a thread and for Kafka), produce, flush and commit.",
            ["datastore", "stage"],
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        self._children: dict[tuple[str, str], Histogram] = {}
        registry.register(self)

    def watch(self, tailing: Tailing) -> None:
        self._tailing = tailing

    def published(self, datastore: str, cells: int, size_bytes: int, stages: Mapping[str, float]) -> None:
        """Counts a transaction that was committed."""
        self._cells[datastore] += cells
        self._bytes[datastore] += size_bytes
        self._transactions[datastore, "committed"] += 1
        for stage, seconds in stages.items():
            child = self._children.get((datastore, stage))
            if child is None:
                child = self._children[datastore, stage] = self._stages.labels(datastore, stage)
            child.observe(seconds)

    def failed(self, datastore: str, error: str) -> None:
        """Counts a transaction that was not committed, or whose outcome is unknown."""
        self._transactions[datastore, error] += 1

    def joined_anew(self, datastore: str, reason: str) -> None:
        self._joins[datastore, reason] += 1

    def collect(self) -> Iterable[Metric]:
        cells = CounterMetricFamily("schemaless_tailer_cells", "Cells published.", labels=["datastore"])
        for datastore, count in self._cells.items():
            cells.add_metric([datastore], count)
        size = CounterMetricFamily("schemaless_tailer_bytes", "Bytes of their bodies.", labels=["datastore"])
        for datastore, count in self._bytes.items():
            size.add_metric([datastore], count)
        transactions = CounterMetricFamily(
            "schemaless_tailer_transactions",
            "Transactions by outcome: committed, or the kind of error.",
            labels=["datastore", "outcome"],
        )
        for named, count in self._transactions.items():
            transactions.add_metric(named, count)
        joins = CounterMetricFamily(
            "schemaless_tailer_group_joins", "How often the group was joined anew.", labels=["datastore", "reason"]
        )
        for named, count in self._joins.items():
            joins.add_metric(named, count)
        yield from (cells, size, transactions, joins)
        if self._tailing is not None:
            yield from _standing(self._tailing)


def _standing(tailing: Tailing) -> Iterable[Metric]:
    by_partition = ["datastore", "partition"]
    cells = GaugeMetricFamily(
        "schemaless_tailer_lag_cells",
        "Cells that wait to be published. Absent while it isn't known.",
        labels=by_partition,
    )
    seconds = GaugeMetricFamily(
        "schemaless_tailer_lag_seconds",
        "How long the oldest of them has waited. Absent while it isn't known.",
        labels=by_partition,
    )
    tailed = GaugeMetricFamily(
        "schemaless_tailer_partition_open", "1 while the log of a partition is open, 0 before.", labels=by_partition
    )
    partitions = GaugeMetricFamily(
        "schemaless_tailer_partitions", "All partitions of a datastore.", labels=["datastore"]
    )
    paused = GaugeMetricFamily(
        "schemaless_tailer_paused", "1 while an operator has paused a datastore.", labels=["datastore"]
    )
    states = GaugeMetricFamily("schemaless_tailer_shards", "Shards by state.", labels=["datastore", "state"])
    held = GaugeMetricFamily(
        "schemaless_tailer_held_shards", "Shards that aren't published, by cause.", labels=["datastore", "cause"]
    )
    readable = GaugeMetricFamily(
        "schemaless_tailer_cluster_up", "1 while the heads of a cluster can be read.", labels=["cluster"]
    )
    away = tailing.unreadable_clusters
    for cluster in sorted(tailing.clusters):
        readable.add_metric([cluster], float(cluster not in away))
    now = time.time()
    for one in tailing.datastores:
        name = one.datastore.name
        partitions.add_metric([name], one.datastore.partitions)
        paused.add_metric([name], float(tailing.is_paused(name)))
        in_state: Counter[TailState] = Counter()
        by_cause: Counter[HoldCause] = Counter()
        for owned in one.partitions:
            named = [name, str(owned.partition)]
            tailed.add_metric(named, float(owned.shards is not None))
            if owned.shards is None:
                continue
            in_state.update(owned.shards.states())
            by_cause.update(owned.shards.causes())
            homes = {one.datastore.home(shard) for shard in one.datastore.shards_of_partition(owned.partition)}
            if not homes & away:
                cells.add_metric(named, owned.shards.lag_cells())
                since = owned.shards.waiting_since()
                seconds.add_metric(named, 0.0 if since is None else max(0.0, now - since))
        for state in TailState:
            states.add_metric([name, state.name.lower()], in_state[state])
        for cause in HoldCause:
            held.add_metric([name, cause.value], by_cause[cause])
    return (cells, seconds, tailed, partitions, paused, states, held, readable)
