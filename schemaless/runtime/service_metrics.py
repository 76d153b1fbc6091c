"""ServiceMetrics: the metrics of one process, and the port at which it serves them (docs/metrics.md).

Every service has one. Collectors read the state of the process when somebody asks, so most metrics cost nothing
between two scrapes. The port is served by the event loop that the service itself runs on. So a collector never sees
state that changes under it, and a process whose loop hangs is seen as down.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from schemaless.config import MeasuredSettings, program_version, variable_of
from schemaless.errors import Misconfigured
from schemaless.runtime.private_file import read_private_text
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.translation import refusals

log = structlog.get_logger()

STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of every latency of a service."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServiceMetrics:
    """The registry of one process, with what each has: its version, its resources, its event loop and its servers."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        build = Gauge(
            "schemaless_build_info", "1, with what this process is.", ["service", "version"], registry=self.registry
        )
        build.labels(service, program_version()).set(1)

    def watch_storage(self, storage: AsyncStorage) -> None:
        self.registry.register(_StorageCollector(storage))

    @asynccontextmanager
    async def served(self, settings: MeasuredSettings) -> AsyncIterator[None]:
        """Serves `GET /metrics` while the context lasts, if the settings name a port.

        Raises Misconfigured for a port that can't be had. A service enters this before it begins any work.
        """
        if settings.metrics_port is None:
            yield
            return
        from aiohttp import web  # imports that a process without a port doesn't need
        from prometheus_client.aiohttp import make_aiohttp_handler

        token = scrape_token(settings.metrics_host, settings.metrics_token_file)

        shown = make_aiohttp_handler(self.registry)

        async def answer(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("authorization", "").encode(errors="surrogateescape")  # any bytes may come
            if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                return web.Response(status=401, headers={"www-authenticate": "Bearer"}, text="a token is needed\n")
            return await shown(request)

        application = web.Application()
        application.router.add_get("/metrics", answer)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            host, port = settings.metrics_host, settings.metrics_port
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                setting = variable_of(type(settings), "metrics_port")
                raise Misconfigured(f"{setting}: {host}:{port} can't be opened: {error.strerror}") from error
            log.info("metrics are served", addresses=[f"{host}:{port}" for host, port, *_ in runner.addresses])
            yield
        finally:
            await runner.cleanup()


def scrape_token(host: str, file: Path | None) -> str | None:
    """Returns the token that a scraper has to send, None if nobody needs one.

    Raises Misconfigured for a port that is open to a network, and for a file without a token (I17).
    """
    if file is not None:
        if token := (read_private_text(file) or "").strip():
            return token
        raise Misconfigured(f"{file} holds no token, and SCHEMALESS_METRICS_TOKEN_FILE names it")
    if host not in _LOOPBACK:
        raise Misconfigured(
            f"metrics would be open to everybody who reaches {host}: SCHEMALESS_METRICS_TOKEN_FILE has to name a file"
            " with the token that scrapers send"
        )
    return None


class _StorageCollector(Collector):
    """How late the event loop was, and what the MySQL servers did for this process."""

    def __init__(self, storage: AsyncStorage) -> None:
        self._storage = storage

    def collect(self) -> Iterable[Metric]:
        late = CounterMetricFamily("schemaless_service_loop_late_seconds", "Time in which the event loop stood still.")
        late.add_metric([], self._storage.loop_lag.late_s())
        longest = GaugeMetricFamily("schemaless_service_loop_late_longest_seconds", "The longest such time at once.")
        longest.add_metric([], self._storage.loop_lag.longest_s)
        yield from (late, longest)
        labels = ["cluster", "node", "role"]
        operations = CounterMetricFamily(
            "schemaless_service_mysql_operations", "Operations that a MySQL server was asked for.", labels=labels
        )
        seconds = CounterMetricFamily(
            "schemaless_service_mysql_operation_seconds", "Time that they took in all.", labels=labels
        )
        errors = CounterMetricFamily(
            "schemaless_service_mysql_errors", "Operations that failed, by kind of error.", labels=[*labels, "error"]
        )
        for node in self._storage.nodes.values():
            named = [node.node.cluster, node.node.name, node.node.role.value]
            operations.add_metric(named, node.counts.operations)
            seconds.add_metric(named, node.counts.seconds)
            for kind, count in node.counts.errors.items():
                errors.add_metric([*named, kind], count)
        yield from (operations, seconds, errors)
        refused = CounterMetricFamily(
            "schemaless_service_mysql_refusals",
            "Errors of MySQL servers that are no request's fault, by number.",
            labels=["node", "code"],
        )
        for (name, number), count in refusals.counts.items():
            refused.add_metric([name, str(number)], count)
        yield refused
