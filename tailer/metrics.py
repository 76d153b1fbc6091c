"""TailerMetrics: what one tailer process publishes, how fast, and how far it is behind (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Histogram

from schemaless.names import Stall
from schemaless.runtime.service_metrics import STAGE_SECONDS, Table, TableCollector, Times, counter, gauge
from schemaless.topology import Datastore
from tailer.shard_queue import ShardQueue, TailState

if TYPE_CHECKING:
    from tailer.service import TailerService


STAGE_TIMES = Times(
    "schemaless_tailer_stage_seconds",
    "Parts of a pass over a partition: read, wait (for a thread and for Kafka), produce, flush and commit.",
    ("datastore", "stage"),
)


class TailerMetrics:
    """Counts transactions as they end. Everything else is read from the tailer when somebody asks."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self.cells: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.transactions: Counter[tuple[str, str]] = Counter()
        self.joins: Counter[tuple[str, str]] = Counter()
        self._stages = Histogram(*STAGE_TIMES, buckets=STAGE_SECONDS, registry=self._registry)
        self._registry.register(TableCollector(PUBLISHED, lambda: [((), self)]))

    def watch(self, tailing: TailerService) -> None:
        self._registry.register(TableCollector(DATASTORES, lambda: _standings(tailing)))
        self._registry.register(TableCollector(CLUSTERS, lambda: [((), tailing)]))

    def published(self, datastore: str, cells: int, size_bytes: int, stages: Mapping[str, float]) -> None:
        """Counts a transaction that was committed."""
        self.cells[datastore] += cells
        self.bytes[datastore] += size_bytes
        self.transactions[datastore, "committed"] += 1
        for stage, seconds in stages.items():
            self._stages.labels(datastore, stage).observe(seconds)

    def failed(self, datastore: str, error: str) -> None:
        """Counts a transaction that was not committed, or whose outcome is unknown."""
        self.transactions[datastore, error] += 1

    def joined_anew(self, datastore: str, reason: str) -> None:
        self.joins[datastore, reason] += 1


PUBLISHED: Table[TailerMetrics] = {
    "schemaless_tailer_cells{datastore}": counter("Cells published.", lambda of: of.cells),
    "schemaless_tailer_bytes{datastore}": counter("Bytes of their bodies.", lambda of: of.bytes),
    "schemaless_tailer_transactions{datastore, outcome}": counter(
        "Transactions by outcome: committed, or the kind of error.", lambda of: of.transactions
    ),
    "schemaless_tailer_group_joins{datastore, reason}": counter(
        "How often the group was joined anew.", lambda of: of.joins
    ),
}
CLUSTERS: Table[TailerService] = {
    "schemaless_tailer_cluster_up{cluster}": gauge(
        "1 while the heads of a cluster can be read.",
        lambda of: {cluster: cluster not in of.unreadable_clusters for cluster in sorted(of.clusters)},
    ),
}


class _Tailed(NamedTuple):
    """How far this process is with a datastore. `known` are the open partitions whose clusters can all be read."""

    datastore: Datastore
    is_paused: bool
    stalls: Mapping[Stall, str]
    assigned: Sequence[int]
    open: Mapping[int, ShardQueue]
    known: Mapping[int, ShardQueue]
    states: Counter[TailState]
    held: Counter[Stall | None]


def _standings(tailing: TailerService) -> Iterator[tuple[Sequence[object], _Tailed]]:
    for one in tailing.datastores:
        datastore, away, is_paused = one.datastore, tailing.unreadable_clusters, tailing.is_paused(one.datastore.name)
        assigned = [owned.partition for owned in one.partitions]
        opened = {owned.partition: owned.shards for owned in one.partitions if owned.shards is not None}
        known = {
            partition: shards
            for partition, shards in opened.items()
            if not {datastore.home(shard) for shard in datastore.shards_of_partition(partition)} & away
        }
        states: Counter[TailState] = Counter()
        for shards in opened.values():
            states.update(shards.states())
        held = Counter(shard.stall for shards in opened.values() for shard in shards.held())
        yield [datastore.name], _Tailed(datastore, is_paused, one.stalls, assigned, opened, known, states, held)


def _waited_s(shards: ShardQueue) -> float:
    since = shards.waiting_since()
    return 0.0 if since is None else max(0.0, time.time() - since)


DATASTORES: Table[_Tailed] = {
    "schemaless_tailer_lag_cells{datastore, partition}": gauge(
        "Cells that wait to be published. Absent while it isn't known.",
        lambda one: {partition: shards.lag_cells() for partition, shards in one.known.items()},
    ),
    "schemaless_tailer_lag_seconds{datastore, partition}": gauge(
        "How long the oldest of them has waited. Absent while it isn't known.",
        lambda one: {partition: _waited_s(shards) for partition, shards in one.known.items()},
    ),
    "schemaless_tailer_partition_open{datastore, partition}": gauge(
        "1 while the log of a partition is open, 0 before.",
        lambda one: {partition: partition in one.open for partition in one.assigned},
    ),
    "schemaless_tailer_partitions{datastore}": gauge(
        "All partitions of a datastore.", lambda one: one.datastore.partitions
    ),
    "schemaless_tailer_paused{datastore}": gauge(
        "1 while an operator has paused a datastore.", lambda one: one.is_paused
    ),
    "schemaless_tailer_shards{datastore, state}": gauge(
        "Shards by state.", lambda one: {state.name.lower(): one.states[state] for state in TailState}
    ),
    "schemaless_tailer_held_shards{datastore, cause}": gauge(
        "Shards that aren't published, by cause.", lambda one: {stall: one.held[stall] for stall in Stall}
    ),
    "schemaless_tailer_stalled{datastore, stall}": gauge(
        "1 while something isn't published for that reason.",
        lambda one: {stall: stall in one.stalls for stall in Stall},
    ),
}
