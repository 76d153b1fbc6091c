"""Metrics of one process, for Prometheus: requests by route and status, cells put by outcome, nodes and their lag."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, astuple
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from schemaless.facts.consumers import Programs, ProgramSample, tripped
from schemaless.facts.indexes import Counts, Passes
from schemaless.facts.servers import Backlog
from schemaless.index.comparison import EntryFaultKind, FaultCounts
from schemaless.runtime import tracing
from schemaless.runtime.pace import Sampled
from schemaless.runtime.service_metrics import ServiceMetrics, Table, Times, counter, gauge, of_node
from schemaless.runtime.tls import ServedCertificate
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.index_pass_table import MASTERS, IndexPass
from schemaless.storage.translation import refusals

if TYPE_CHECKING:
    from api.state import ApiState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

REQUESTS: Table[Counter[tuple[str, int]]] = {
    "schemaless_api_requests{route, status}": counter("Requests answered.", lambda counts: counts)
}
REQUEST_SECONDS = Times("schemaless_api_request_seconds", "Time to the response.", ("route",))
PUT_STAGE_SECONDS = Times(
    "schemaless_api_put_stage_seconds",
    "Parts of a put: the second copy into a buffer, and the cell at home.",
    ("datastore", "stage"),
)


class Metrics(ServiceMetrics):
    """Requests and puts are counted in plain numbers: Prometheus' own histograms take a lock for each count, which is a
    twentieth of what this process does for a put.
    """

    def __init__(self) -> None:
        super().__init__("api")
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds, self._stages = _TimesCollector(REQUEST_SECONDS), _TimesCollector(PUT_STAGE_SECONDS)
        self.watch(REQUESTS, lambda: [((), self._requests)])
        self.registry.register(self._seconds)
        self.registry.register(self._stages)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts one request. Routes have few names: a path of a request is never one."""
        self._requests[route, status] += 1
        self._seconds.observe((route,), seconds)
        tracing.answered(status)

    def put_stage(self, datastore: str, stage: str, seconds: float) -> None:
        """Counts one part of a put. A batch counts once for each home."""
        self._stages.observe((datastore, stage), seconds)
        tracing.waited(f"put {stage}", seconds)

    def watch_api(self, api: ApiState) -> None:
        self.watch_storage(api.storage)
        self.watch(OF_API, lambda: [((), api)])
        self.watch(NODES, lambda: ((of_node(node), (node, api)) for node in api.storage.nodes.values()))
        self.watch(BUFFERS, lambda: (((one.datastore, one.secondary, one.home), one) for one in api.backlogs.last))

    def watch_certificate(self, certificate: ServedCertificate | None) -> None:
        self.watch(CERTIFICATE, lambda: [] if certificate is None else [((), certificate)])

    def watch_problems(self, samples: Sampled[Counts]) -> None:
        self.watch(PROBLEMS, lambda: ((astuple(version), count) for version, count in samples.last.items()))

    def watch_passes(self, samples: Sampled[Passes]) -> None:
        self.watch(
            ON_MASTERS, lambda: ((astuple(of), one) for (of, node), one in samples.last.items() if node == MASTERS)
        )
        self.watch(
            ON_MINIONS,
            lambda: (((*astuple(of), node), one) for (of, node), one in samples.last.items() if node != MASTERS),
        )

    def watch_programs(self, samples: Sampled[Programs]) -> None:
        self.watch(PROGRAMS, lambda: ((named, one) for named, one in samples.last.items()))


class _TimesCollector(Collector):
    """A histogram of times, by the values of the labels."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._observed: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        """How many times each bucket has, and their sum."""
        self._traced: dict[tuple[tuple[str, ...], int], Exemplar] = {}
        """The newest time of a bucket that is part of a trace."""

    def observe(self, values: tuple[str, ...], seconds: float) -> None:
        observed = self._observed.get(values)
        if observed is None:
            observed = self._observed[values] = [0] * (len(_SECONDS) + 1), [0.0]
        counts, total_s = observed
        bucket = bisect_left(_SECONDS, seconds)
        counts[bucket] += 1
        total_s[0] += seconds
        if (trace := tracing.current_trace()) is not None:
            trace_id, _, span_id = trace.partition("-")
            labels = {"trace_id": trace_id, "span_id": span_id}
            self._traced[values, bucket] = Exemplar(labels, seconds, time.time())

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._times[:2], labels=self._times.labels)
        bounds = [*map(str, _SECONDS), "+Inf"]
        for values, (counts, total_s) in self._observed.items():
            traced: list[Any] = [self._traced.get((values, bucket)) for bucket in range(len(bounds))]
            family.add_metric(values, list(zip(bounds, accumulate(counts), traced, strict=True)), total_s[0])
        return (family,)


OF_API: Table[ApiState] = {
    "schemaless_api_cells_put{status, copies}": counter("Cells put, by outcome.", lambda api: api.writer.counts),
    "schemaless_api_followers": gauge("Requests that follow a log, and open pages.", lambda api: len(api.followers)),
    "schemaless_api_held_shards": gauge(
        "Shards whose heads or tables another session holds.", lambda api: api.writer.held_shards()
    ),
    "schemaless_api_server_refusals{node, code}": counter(
        "Errors of MySQL servers that are nobody's request's fault.", lambda _: refusals.counts
    ),
    "schemaless_api_loop_late_seconds": counter(
        "Time in which the event loop stood still.", lambda api: api.storage.loop_lag.late_s()
    ),
    "schemaless_api_loop_late_longest_seconds": gauge(
        "The longest such time at once.", lambda api: api.storage.loop_lag.longest_s
    ),
    "schemaless_api_queued_repairs{outcome}": counter(
        "Rows of which queries found wrong entries.", lambda api: api.index_repairs.counts
    ),
    "schemaless_api_queued_repairs_waiting": gauge(
        "Rows of which queries found wrong entries, and that aren't compared yet.", lambda api: len(api.index_repairs)
    ),
}
CERTIFICATE: Table[ServedCertificate] = {
    "schemaless_api_certificate_expiration_timestamp_seconds": gauge(
        "When the certificate that is served ends, in seconds since 1970.", lambda certificate: certificate.ends_at
    ),
}
NODES: Table[tuple[AsyncNode, ApiState]] = {
    "schemaless_api_node_up{cluster, node, role}": gauge(
        "Whether a MySQL server answered last time.", lambda at: at[1].read_breaker.answers(at[0])
    ),
    "schemaless_api_node_lag_seconds{cluster, node, role}": gauge(
        "How far it is behind its master. Absent while it doesn't answer.",
        lambda at: at[1].lag.lag_s(at[0]) if at[1].read_breaker.answers(at[0]) else None,
    ),
    "schemaless_api_node_setting_faults{cluster, node, role, setting}": gauge(
        "Settings of a MySQL server that break a promise.",
        lambda at: {fault.name: 1.0 for fault in at[0].settings.faults},
    ),
}
BUFFERS: Table[Backlog] = {
    "schemaless_api_buffer_rows{datastore, secondary, home}": gauge(
        "Buffered cells, counted to 100,000.", lambda one: one.waiting.rows
    ),
    "schemaless_api_buffer_oldest_seconds{datastore, secondary, home}": gauge(
        "How long the oldest buffered cell has waited.", lambda one: one.waiting.oldest_s
    ),
    "schemaless_api_buffer_refused_cells{datastore, secondary, home, error}": gauge(
        "Buffered cells that their home has refused for a minute, with the error of the oldest.",
        lambda one: {one.refused.reason: one.refused.cells} if one.refused else None,
    ),
}
PROBLEMS: Table[int] = {
    "schemaless_api_index_problems{datastore, index, number}": gauge(
        "Values that don't fit the type of their field.", lambda count: count
    ),
}
ON_MASTERS: Table[IndexPass] = {
    "schemaless_api_index_faults{datastore, index, number, kind}": counter(
        "Entries that differed from their cells.", lambda found: _by_kind(found.total)
    ),
    "schemaless_api_index_repairs{datastore, index, number}": counter(
        "Entries that were repaired.", lambda found: found.total.repaired
    ),
    "schemaless_api_index_master_faults{datastore, index, number, kind}": gauge(
        "Entries of masters that differed when they were last compared.", lambda found: _by_kind(found.last)
    ),
    "schemaless_api_index_compared_seconds{datastore, index, number}": gauge(
        "How long ago its last shard was compared.", lambda found: max(0.0, time.time() - found.compared_since / 1e6)
    ),
}
ON_MINIONS: Table[IndexPass] = {
    "schemaless_api_index_minion_faults{datastore, index, number, node, kind}": gauge(
        "Entries of a minion that differed when they were last compared.", lambda found: _by_kind(found.last)
    ),
}
PROGRAMS: Table[ProgramSample] = {
    "schemaless_api_trigger_cells{datastore, program, became}": gauge(
        "Cells of a program by what became of them.", lambda one: asdict(one.summary.counts)
    ),
    "schemaless_api_trigger_oldest_parked_seconds{datastore, program}": gauge(
        "How long the oldest parked cell is parked.", lambda one: _age_s(one.summary.oldest_parked_at)
    ),
    "schemaless_api_trigger_workers{datastore, program}": gauge(
        "Processes that run a program.", lambda one: len(one.workers)
    ),
    "schemaless_api_trigger_tripped_workers{datastore, program}": gauge(
        "Processes whose breaker is open.", lambda one: len(tripped(one.workers))
    ),
    "schemaless_api_trigger_failing_cells{datastore, program}": gauge(
        "Cells whose function failed, and that wait for the next attempt. Retry alone is no failure.",
        lambda one: sum(row.report.erred_count for row in one.workers),
    ),
    "schemaless_api_trigger_paused{datastore, program}": gauge(
        "1 while a program is paused as a whole.", lambda one: one.summary.orders.program.paused
    ),
}
"""What became of the cells of trigger programs. A seek or a generation counts anew."""


def _by_kind(counts: FaultCounts) -> dict[str, int]:
    return {kind: getattr(counts, kind) for kind in EntryFaultKind}


def _age_s(at_us: int | None) -> float:
    return 0.0 if at_us is None else max(0.0, time.time() - at_us / 1e6)
