"""ServiceMetrics: the metrics of one process, and the port at which it serves them (docs/metrics.md).

Every service has one. Collectors read the state of the process when somebody asks, so most metrics cost nothing
between two scrapes. The port is served by the event loop that the service itself runs on. So a collector never sees
state that changes under it, and a process whose loop hangs is seen as down.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from schemaless.config import MeasuredSettings, program_version, variable_of
from schemaless.errors import Misconfigured
from schemaless.runtime import kafka_access
from schemaless.runtime.loop_lag import LoopLag
from schemaless.runtime.loopback import is_loopback
from schemaless.runtime.outputs import dropped_lines
from schemaless.runtime.tls import read_private_text
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, NodeCounts
from schemaless.storage.translation import refusals
from schemaless.topology import Role

T = TypeVar("T")
log = structlog.get_logger()

STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of every latency of a service."""


class ServiceMetrics:
    """The registry of one process, with what each has: its version, its resources, its event loop and its servers."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.watch(BUILD, lambda: [((service, program_version()), 1)])

    def watch_storage(self, storage: AsyncStorage) -> None:
        self.watch(OF_PROCESS, lambda: [((), storage.loop_lag)])
        self.watch(OF_SERVERS, lambda: ((of_node(node), node.counts) for node in storage.nodes.values()))

    def watch(self, table: Table[T], items: Items[T]) -> None:
        self.registry.register(TableCollector(table, items))

    @asynccontextmanager
    async def served(self, settings: MeasuredSettings) -> AsyncIterator[None]:
        """Serves `GET /metrics` while the context lasts, if the settings name a port.

        `GET /healthz` is there for a supervisor, which needs no token: a process whose event loop hangs doesn't answer.

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

        async def is_alive(_: web.Request) -> web.StreamResponse:
            return web.json_response({"status": "alive"})

        application = web.Application()
        application.router.add_get("/healthz", is_alive)
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
    if not is_loopback(host):
        raise Misconfigured(
            f"metrics would be open to everybody who reaches {host}: SCHEMALESS_METRICS_TOKEN_FILE has to name a file"
            " with the token that scrapers send"
        )
    return None


# Tables: a metric is a row. Its name has its labels, and it says what it is and where its value comes from.

Values = float | Mapping[Any, float] | None
"""One value, none while it isn't known, or values by those of the row's last labels."""


class Row(NamedTuple, Generic[T]):
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    what: str
    value: Callable[[T], Values]


Table = Mapping[str, Row[T]]
"""Metrics of the same items, by names without the `_total` of counters: `schemaless_a_counter{first_label, second}`."""
Items = Callable[[], Iterable[tuple[Sequence[object], T]]]
"""Finds what a table is about when somebody asks, each with the values of the labels that its metrics begin with."""


class Times(NamedTuple):
    """A histogram of times."""

    name: str
    what: str
    labels: tuple[str, ...]


def gauge(what: str, value: Callable[[T], Values]) -> Row[T]:
    return Row(GaugeMetricFamily, what, value)


def counter(what: str, value: Callable[[T], Values]) -> Row[T]:
    return Row(CounterMetricFamily, what, value)


class TableCollector(Collector, Generic[T]):
    def __init__(self, table: Table[T], items: Items[T]) -> None:
        self._table = table
        self._items = items

    def collect(self) -> Iterable[Metric]:
        found = list(self._items())
        for shown, row in self._table.items():
            name, _, named = shown.rstrip("}").partition("{")
            family = row.kind(name, row.what, labels=named.split(", ") if named else ())
            for labels, item in found:
                values = row.value(item)
                for more, value in values.items() if isinstance(values, Mapping) else [((), values)]:
                    if value is not None:
                        each = (*labels, *(more if isinstance(more, tuple) else (more,)))
                        family.add_metric([str(label) for label in each], float(value))
            yield family


BUILD: Table[int] = {"schemaless_build_info{service, version}": gauge("1, with what this process is.", lambda one: one)}
OF_PROCESS: Table[LoopLag] = {
    "schemaless_service_loop_late_seconds": counter(
        "Time in which the event loop stood still.", lambda loop_lag: loop_lag.late_s()
    ),
    "schemaless_service_loop_late_longest_seconds": gauge(
        "The longest such time at once.", lambda loop_lag: loop_lag.longest_s
    ),
    "schemaless_service_output_dropped": counter(
        "Lines of the log and of what functions print that were dropped, because nobody read them in time.",
        lambda _: dropped_lines(),
    ),
    "schemaless_service_mysql_refusals{node, code}": counter(
        "Errors of MySQL servers that are no request's fault, by number.", lambda _: refusals.counts
    ),
    "schemaless_service_kafka_refusals{broker, account}": counter(
        "How often a broker of Kafka refused the account of this process.", lambda _: kafka_access.refusals
    ),
}
OF_SERVERS: Table[NodeCounts] = {
    "schemaless_service_mysql_operations{cluster, node, role}": counter(
        "Operations that a MySQL server was asked for.", lambda counts: counts.operations
    ),
    "schemaless_service_mysql_operation_seconds{cluster, node, role}": counter(
        "Time that they took in all.", lambda counts: counts.seconds
    ),
    "schemaless_service_mysql_errors{cluster, node, role, error}": counter(
        "Operations that failed, by kind of error.", lambda counts: counts.errors
    ),
}


def of_node(node: AsyncNode) -> tuple[str, str, Role]:
    """Returns the labels of a server."""
    return node.node.cluster, node.node.name, node.role
