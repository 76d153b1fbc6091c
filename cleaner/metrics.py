"""CleanerMetrics: what the passes of one cleaner process did, and how long ago each one last succeeded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cleaner.pair import PassName, Swept
from schemaless.runtime.service_metrics import STAGE_SECONDS


class CleanerMetrics(Collector):
    def __init__(self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        registry = registry or CollectorRegistry()
        self._clock = clock
        self._rows: Counter[tuple[str, str, str]] = Counter()
        self._failures: Counter[tuple[str, str, str, str]] = Counter()
        self._succeeded_at: dict[PassName, float] = {}
        self._seconds = Histogram(
            "schemaless_cleaner_pass_seconds",
            "Time of one pass over what a secondary holds for a home.",
            ["secondary", "home", "pass"],
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def swept(self, name: PassName, swept: Swept, seconds: float) -> None:
        """Counts a pass that came to its end."""
        self._seconds.labels(*name).observe(seconds)
        self._succeeded_at[name] = self._clock()
        for outcome, count in msgspec.structs.asdict(swept).items():
            self._rows[name[0], name[1], outcome] += count

    def failed(self, name: PassName, error: str) -> None:
        self._failures[(*name, error)] += 1

    def collect(self) -> Iterable[Metric]:
        pair = ["secondary", "home"]
        rows = CounterMetricFamily("schemaless_cleaner_rows", "Buffer rows by outcome.", labels=[*pair, "outcome"])
        for named, count in self._rows.items():
            rows.add_metric(named, count)
        failures = CounterMetricFamily(
            "schemaless_cleaner_pass_failures", "Passes that failed, by kind of error.", labels=[*pair, "pass", "error"]
        )
        for failed, count in self._failures.items():
            failures.add_metric(failed, count)
        since = GaugeMetricFamily(
            "schemaless_cleaner_pass_age_seconds",
            "How long ago a pass last came to its end. Absent before the first one.",
            labels=[*pair, "pass"],
        )
        for name, succeeded_at in self._succeeded_at.items():
            since.add_metric(name, self._clock() - succeeded_at)
        return (rows, failures, since)
