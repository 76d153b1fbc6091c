"""Metrics of one process, for Prometheus: requests by route and status, cells put by outcome, nodes and their lag."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client import Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.index.passes import PassSamples
from api.index.problems import ProblemSamples
from api.index.repairs import QueuedRepairs
from api.read.read_breaker import ReadBreaker
from api.read.replica_lag import ReplicaLag
from api.status.backlogs import Backlogs
from api.triggers.samples import TriggerSamples
from schemaless.cell import PutStatus
from schemaless.index.comparison import EntryFaultKind
from schemaless.runtime.loop_lag import LoopLag
from schemaless.runtime.service_metrics import ServiceMetrics
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_pass_table import MASTERS
from schemaless.storage.translation import refusals

PutCounts = Mapping[tuple[PutStatus, int], int]
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Requests and puts are counted in plain numbers: Prometheus' own histograms take a lock for each count, which is a
    twentieth of what this process does for a put.
    """

    def __init__(self) -> None:
        self._process = ServiceMetrics("api")
        self.registry = self._process.registry
        self._requests: Counter[tuple[str, int]] = Counter()
        self._count("schemaless_api_requests", "Requests answered.", ["route", "status"], self._requests)
        self._seconds = _TimesCollector("schemaless_api_request_seconds", "Time to the response.", ["route"])
        self._stages = _TimesCollector(
            "schemaless_api_put_stage_seconds",
            "Parts of a put: the second copy into a buffer, and the cell at home.",
            ["datastore", "stage"],
        )
        self.registry.register(self._seconds)
        self.registry.register(self._stages)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts one request. Routes have few names: a path of a request is never one."""
        self._requests[route, status] += 1
        self._seconds.observe((route,), seconds)

    def put_stage(self, datastore: str, stage: str, seconds: float) -> None:
        """Counts one part of a put. A batch counts once for each home."""
        self._stages.observe((datastore, stage), seconds)

    def watch(
        self,
        storage: AsyncStorage,
        breaker: ReadBreaker,
        lag: ReplicaLag,
        puts: PutCounts,
        held_shards: Callable[[], int],
    ) -> None:
        self._process.watch_storage(storage)
        self.registry.register(_Nodes(storage, breaker, lag))
        self._count("schemaless_api_cells_put", "Cells put, by outcome.", ["status", "copies"], puts)
        self._count(
            "schemaless_api_server_refusals",
            "Errors of MySQL servers that are nobody's request's fault.",
            ["node", "code"],
            refusals.counts,
        )
        self.registry.register(_LoopCollector(storage.loop_lag))
        held = Gauge(
            "schemaless_api_held_shards", "Shards whose heads another transaction holds.", registry=self.registry
        )
        held.set_function(held_shards)

    def watch_backlogs(self, backlogs: Backlogs) -> None:
        self.registry.register(_BacklogCollector(backlogs))

    def watch_problems(self, samples: ProblemSamples) -> None:
        self.registry.register(_ProblemCollector(samples))

    def watch_passes(self, samples: PassSamples) -> None:
        self.registry.register(_PassCollector(samples))

    def watch_repairs(self, repairs: QueuedRepairs) -> None:
        self._count(
            "schemaless_api_queued_repairs", "Rows of which queries found wrong entries.", ["outcome"], repairs.counts
        )
        gauge = Gauge(
            "schemaless_api_queued_repairs_waiting",
            "Rows of which queries found wrong entries, and that aren't compared yet.",
            registry=self.registry,
        )
        gauge.set_function(lambda: len(repairs))

    def watch_triggers(self, samples: TriggerSamples) -> None:
        self.registry.register(_TriggerCollector(samples))

    def watch_followers(self, followers: Sized) -> None:
        gauge = Gauge("schemaless_api_followers", "Requests that follow a log now.", registry=self.registry)
        gauge.set_function(lambda: len(followers))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _count(self, name: str, what: str, labels: Sequence[str], counts: Mapping[tuple[Any, ...], int]) -> None:
        self.registry.register(_CountCollector(name, what, labels, counts))


class _CountCollector(Collector):
    """Counts that something else keeps, by the values of the labels."""

    def __init__(self, name: str, what: str, labels: Sequence[str], counts: Mapping[tuple[Any, ...], int]) -> None:
        self._name = name
        self._what = what
        self._labels = labels
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._what, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric([str(value) for value in values], count)
        return (family,)


class _TimesCollector(Collector):
    """A histogram of times, by the values of the labels."""

    def __init__(self, name: str, what: str, labels: Sequence[str]) -> None:
        self._name = name
        self._what = what
        self._labels = labels
        self._observed: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        """How many times each bucket has, and their sum."""

    def observe(self, values: tuple[str, ...], seconds: float) -> None:
        observed = self._observed.get(values)
        if observed is None:
            observed = self._observed[values] = [0] * (len(_SECONDS) + 1), [0.0]
        counts, total_s = observed
        counts[bisect_left(_SECONDS, seconds)] += 1
        total_s[0] += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        bounds = [*map(str, _SECONDS), "+Inf"]
        for values, (counts, total_s) in self._observed.items():
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total_s[0])
        return (family,)


class _BacklogCollector(Collector):
    """What waits in the buffers, as of the last sample."""

    def __init__(self, backlogs: Backlogs) -> None:
        self._backlogs = backlogs

    def collect(self) -> Iterable[Metric]:
        labels = ["datastore", "secondary", "home"]
        rows = GaugeMetricFamily("schemaless_api_buffer_rows", "Buffered cells, counted to 100,000.", labels=labels)
        oldest = GaugeMetricFamily(
            "schemaless_api_buffer_oldest_seconds", "How long the oldest buffered cell has waited.", labels=labels
        )
        refused = GaugeMetricFamily(
            "schemaless_api_buffer_refused_cells",
            "Buffered cells that their home has refused for a minute, with the error of the oldest.",
            labels=[*labels, "error"],
        )
        for secondary, sample in self._backlogs.samples.items():
            for (datastore, home), waiting in sample.waiting.items():
                rows.add_metric([datastore, secondary, home], waiting.rows)
                oldest.add_metric([datastore, secondary, home], waiting.oldest_s)
            for (datastore, home), found in sample.refused.items():
                refused.add_metric([datastore, secondary, home, found.reason], found.cells)
        return (rows, oldest, refused)


class _TriggerCollector(Collector):
    """What became of the cells of trigger programs, as of the last sample. A seek or a generation counts anew."""

    def __init__(self, samples: TriggerSamples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        labels = ["datastore", "program"]
        cells = GaugeMetricFamily(
            "schemaless_api_trigger_cells",
            "Cells of a program by what became of them.",
            labels=[*labels, "became"],
        )
        oldest = GaugeMetricFamily(
            "schemaless_api_trigger_oldest_parked_seconds", "How long the oldest parked cell is parked.", labels=labels
        )
        workers = GaugeMetricFamily("schemaless_api_trigger_workers", "Processes that run a program.", labels=labels)
        tripped = GaugeMetricFamily(
            "schemaless_api_trigger_tripped_workers", "Processes whose breaker is open.", labels=labels
        )
        failing = GaugeMetricFamily(
            "schemaless_api_trigger_failing_cells",
            "Cells whose function failed, and that wait for the next attempt. Retry alone is no failure.",
            labels=labels,
        )
        paused = GaugeMetricFamily(
            "schemaless_api_trigger_paused", "1 while a program is paused as a whole.", labels=labels
        )
        now_us = time.time_ns() // 1000
        for (datastore, program), sample in self._samples.programs.items():
            for became, count in msgspec.structs.asdict(sample.summary.counts).items():
                cells.add_metric([datastore, program, became], count)
            parked_at = sample.summary.oldest_parked_at
            oldest.add_metric([datastore, program], 0 if parked_at is None else max(0, now_us - parked_at) / 1e6)
            workers.add_metric([datastore, program], sample.workers)
            tripped.add_metric([datastore, program], sample.tripped)
            failing.add_metric([datastore, program], sample.failing)
            paused.add_metric([datastore, program], float(sample.summary.pause.paused))
        return (cells, oldest, workers, tripped, failing, paused)


class _ProblemCollector(Collector):
    """Values that don't fit the types of indexes, as of the last sample."""

    def __init__(self, samples: ProblemSamples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        labels = ["datastore", "index", "number"]
        family = GaugeMetricFamily(
            "schemaless_api_index_problems", "Values that don't fit the type of their field.", labels=labels
        )
        for version, count in self._samples.counts.items():
            family.add_metric([version.datastore, version.name, str(version.number)], count)
        return (family,)


class _PassCollector(Collector):
    """What the index cleaner found and repaired, as of the last sample."""

    def __init__(self, samples: PassSamples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        labels = ["datastore", "index", "number"]
        faults = CounterMetricFamily(
            "schemaless_api_index_faults", "Entries that differed from their cells.", labels=[*labels, "kind"]
        )
        repaired = CounterMetricFamily("schemaless_api_index_repairs", "Entries that were repaired.", labels=labels)
        since = GaugeMetricFamily(
            "schemaless_api_index_compared_seconds",
            "How long ago its last shard was compared.",
            labels=labels,
        )
        on_masters = GaugeMetricFamily(
            "schemaless_api_index_master_faults",
            "Entries of masters that differed when they were last compared.",
            labels=[*labels, "kind"],
        )
        on_minions = GaugeMetricFamily(
            "schemaless_api_index_minion_faults",
            "Entries of a minion that differed when they were last compared.",
            labels=[*labels, "node", "kind"],
        )
        for (version, node), found in self._samples.passes.items():
            named = [version.datastore, version.name, str(version.number)]
            if node != MASTERS:
                for kind in EntryFaultKind:
                    on_minions.add_metric([*named, node, kind.value], getattr(found.last, kind))
                continue
            for kind in EntryFaultKind:
                faults.add_metric([*named, kind.value], getattr(found.total, kind))
                on_masters.add_metric([*named, kind.value], getattr(found.last, kind))
            repaired.add_metric(named, found.total.repaired)
            since.add_metric(named, max(0.0, time.time() - found.compared_since / 1e6))
        return (faults, repaired, since, on_masters, on_minions)


class _LoopCollector(Collector):
    """How late the event loop of this process was."""

    def __init__(self, loop_lag: LoopLag) -> None:
        self._loop_lag = loop_lag

    def collect(self) -> Iterable[Metric]:
        late = CounterMetricFamily("schemaless_api_loop_late_seconds", "Time in which the event loop stood still.")
        late.add_metric([], self._loop_lag.late_s())
        longest = GaugeMetricFamily("schemaless_api_loop_late_longest_seconds", "The longest such time at once.")
        longest.add_metric([], self._loop_lag.longest_s)
        return (late, longest)


class _Nodes(Collector):
    """Read when asked: nothing to keep up to date."""

    def __init__(self, storage: AsyncStorage, breaker: ReadBreaker, lag: ReplicaLag) -> None:
        self._storage = storage
        self._breaker = breaker
        self._lag = lag

    def collect(self) -> Iterable[Metric]:
        labels = ["cluster", "node", "role"]
        up = GaugeMetricFamily("schemaless_api_node_up", "Whether a MySQL server answered last time.", labels=labels)
        lag = GaugeMetricFamily(
            "schemaless_api_node_lag_seconds",
            "How far it is behind its master. Absent while it doesn't answer.",
            labels=labels,
        )
        faults = GaugeMetricFamily(
            "schemaless_api_node_setting_faults",
            "Settings of a MySQL server that break a promise.",
            labels=[*labels, "setting"],
        )
        for node in self._storage.nodes.values():
            named = [node.node.cluster, node.node.name, node.node.role.value]
            answers = self._breaker.answers(node)
            up.add_metric(named, float(answers))
            if answers:
                lag.add_metric(named, self._lag.lag_s(node))
            for fault in node.settings.faults:
                faults.add_metric([*named, fault.name], 1.0)
        return (up, lag, faults)
