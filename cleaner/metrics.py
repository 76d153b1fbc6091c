"""CleanerMetrics: what the passes of one cleaner process did, and how long ago each one last succeeded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from cleaner.pair import PassName, Swept
from schemaless.runtime.service_metrics import STAGE_SECONDS, Table, TableCollector, Times, counter, gauge

PASS_SECONDS = Times(
    "schemaless_cleaner_pass_seconds",
    "Time of one pass over what a secondary holds for a home.",
    ("secondary", "home", "pass"),
)


class CleanerMetrics:
    def __init__(self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        registry = registry or CollectorRegistry()
        self.rows: Counter[tuple[str, str, str]] = Counter()
        self.failures: Counter[tuple[str, str, str, str]] = Counter()
        self._clock = clock
        self._succeeded_at: dict[PassName, float] = {}
        self._seconds = Histogram(*PASS_SECONDS, buckets=STAGE_SECONDS, registry=registry)
        registry.register(TableCollector(PASSES, lambda: [((), self)]))

    def swept(self, name: PassName, swept: Swept, seconds: float) -> None:
        """Counts a pass that came to its end."""
        self._seconds.labels(*name).observe(seconds)
        self._succeeded_at[name] = self._clock()
        for outcome, count in msgspec.structs.asdict(swept).items():
            self.rows[name[0], name[1], outcome] += count

    def failed(self, name: PassName, error: str) -> None:
        self.failures[(*name, error)] += 1

    def ages_s(self) -> dict[PassName, float]:
        """Returns how long ago each pass last came to its end."""
        return {name: self._clock() - succeeded_at for name, succeeded_at in self._succeeded_at.items()}


PASSES: Table[CleanerMetrics] = {
    "schemaless_cleaner_rows{secondary, home, outcome}": counter("Buffer rows by outcome.", lambda of: of.rows),
    "schemaless_cleaner_pass_failures{secondary, home, pass, error}": counter(
        "Passes that failed, by kind of error.", lambda of: of.failures
    ),
    "schemaless_cleaner_pass_age_seconds{secondary, home, pass}": gauge(
        "How long ago a pass last came to its end. Absent before the first one.", lambda of: of.ages_s()
    ),
}
