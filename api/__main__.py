"""`python -m api`: one API process.

On SIGTERM it drains: /readyz is 503, and all else is served for a while. Then it takes no more requests, ends those
that follow a log, finishes those in flight, and closes its pools.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from contextlib import suppress

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from api.access.admission import refuse_open_port
from api.access.known_tokens import KnownTokens
from api.app import create_app
from api.http.server import ApiLoop, ApiServer, protocol_within
from schemaless.config import HANG_LIMIT_S, ApiSettings, read_settings
from schemaless.errors import SchemalessError
from schemaless.runtime import tracing
from schemaless.runtime.lifecycle import collect_rarely, report_failure
from schemaless.runtime.logs import configure_logging
from schemaless.runtime.loopback import is_loopback
from schemaless.runtime.open_files import clients_within_limit
from schemaless.runtime.outputs import wait_for_nobody
from schemaless.runtime.watchdog import Watchdog
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology

STOP_TIMEOUT_S = 10
CLIENTS_MIN = 16
"""A process with places for fewer serves nobody well."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_RETURNED_BYTES_MIN = 128 << 10


def main() -> int:
    wait_for_nobody()
    try:
        settings = read_settings(ApiSettings)
        configure_logging(settings.log_level, "api", settings.log_format)
        tracing.begin("api", settings.traces)
        app = create_app(settings)
        nodes = sum(len(cluster.nodes) for cluster in app.topology.clusters.values())
        connections_max = clients_within_limit(nodes * settings.connections_max, clients_min=CLIENTS_MIN)
        if not is_loopback(settings.host):
            asyncio.run(require_token(settings))
    except SchemalessError as error:
        report_failure("api", error)
        return 1
    collect_rarely()
    return_large_memory()
    certificate = app.certificate
    protocol = protocol_within(connections_max=connections_max, tls=certificate is not None)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        loop=f"{ApiLoop.__module__}:{ApiLoop.__name__}",
        http=protocol,
        ws="none",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        log_config=None,  # its lines are written as all others are (schemaless/runtime/logs.py)
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )
    server = ApiServer(
        config,
        drain_s=settings.drain_s,
        watchdog=Watchdog(HANG_LIMIT_S),
        before_drain=app.begin_drain,
        before_shutdown=app.stop_following,
    )
    with suppress(KeyboardInterrupt):  # the server raises its signals again when it has stopped
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.run()
    tracing.end()
    return 0 if server.started else STARTUP_FAILURE


def return_large_memory() -> None:
    """Has the allocator give back the memory of large payloads and pages as soon as they are done (glibc only).

    By itself it raises its threshold with the first large piece that is freed, and keeps those of later ones.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES_MIN)
        mallopt(_M_TRIM_THRESHOLD, _RETURNED_BYTES_MIN)


async def require_token(settings: ApiSettings) -> None:
    """Raises Misconfigured when the API would be open to a network."""
    async with AsyncStorage(load_topology(settings.topology)) as storage:
        tokens = KnownTokens(storage)
        await tokens.refresh()
    refuse_open_port(settings.host, tokens)


if __name__ == "__main__":
    sys.exit(main())
