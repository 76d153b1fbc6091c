"""The server: uvicorn, with connections of ours (api/http/connection.py), as many as there are files for (I14)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import uvicorn
import uvloop

from api.http.connection import Connection
from schemaless.runtime.lifecycle import CLOSE_TIMEOUT_S
from schemaless.runtime.watchdog import Watchdog

_SIGNALS_EVERY_S = 0.05
"""How often a drain looks for a signal that ends it."""
HANDSHAKE_TIMEOUT_S = 10.0
"""For the TLS of a connection. By itself uvloop waits for a minute."""


class ApiLoop(uvloop.Loop):
    """The event loop of an API process."""

    async def create_server(self, protocol_factory: Any, *arguments: Any, **options: Any) -> Any:
        context = options.pop("ssl", None)
        if context is not None:
            handshakes = TlsHandshakes(self, protocol_factory, context)
            return await super().create_server(lambda: handshakes, *arguments, **options)
        return await super().create_server(protocol_factory, *arguments, **options)


class TlsHandshakes(asyncio.Protocol):
    """The connections of one port until their TLS is there. It makes the protocol of a connection afterwards.

    Each holds a file of the process, so they are bounded (I14). A new one takes the place of the longest under way. A
    loop's own TLS server would tell nobody of them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol_factory: Callable[[], Connection], context: Any
    ) -> None:
        self._loop = loop
        self._protocol_factory = protocol_factory
        self._context = context
        self._under_way: dict[asyncio.Task[None], None] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        protocol = self._protocol_factory()
        if len(self._under_way) >= protocol.handshakes_max:
            longest = next(iter(self._under_way))
            del self._under_way[longest]
            longest.cancel()
        elif len(self._under_way) + len(protocol.connections) >= protocol.connections_max + protocol.handshakes_max:
            transport.abort()  # clients that are on their way out have all places
            return
        connection = _taken_over(transport)
        handshake = self._loop.create_task(self._shake_hands(connection, protocol))
        self._under_way[handshake] = None
        handshake.add_done_callback(lambda done: self._is_over(done, connection))

    async def _shake_hands(self, connection: socket.socket, protocol: Connection) -> None:
        with suppress(OSError):  # time-outs and errors of TLS are some
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )

    def _is_over(self, handshake: asyncio.Task[None], connection: socket.socket) -> None:
        self._under_way.pop(handshake, None)
        connection.close()  # the transport keeps it open if there is one


def _taken_over(transport: asyncio.Transport) -> socket.socket:
    """Returns the connection of a transport, which has read nothing of it, and ends the transport."""
    try:
        connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    finally:
        transport.abort()
    connection.setblocking(False)
    return connection


class ApiServer(uvicorn.Server):
    """On SIGTERM it calls `before_drain`, and serves for `drain_s` while load balancers take it out. Each response then
    closes its connection. At last it calls `before_shutdown`, and waits for the requests in flight. SIGINT ends the
    drain.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain_s: float,
        watchdog: Watchdog,
        before_drain: Callable[[], None],
        before_shutdown: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._watchdog = watchdog
        self._before_drain = before_drain
        self._before_shutdown = before_shutdown

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._watchdog.start()
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        finish_timeout_s = cast(int, self.config.timeout_graceful_shutdown)
        self._watchdog.end_within(self._drain_s + finish_timeout_s + 2 * CLOSE_TIMEOUT_S)
        self._before_drain()
        cast(type[Connection], self.config.http_protocol_class).is_draining = True
        for connection in cast(set[Connection], self.server_state.connections):
            connection.drain()
        for _ in range(round(self._drain_s / _SIGNALS_EVERY_S)):
            if signal.SIGINT in self._captured_signals:
                break
            await asyncio.sleep(_SIGNALS_EVERY_S)
        self.force_exit = False  # that signal ended the drain, and another one ends the requests in flight
        self._before_shutdown()
        await super().shutdown(sockets)


def protocol_within(*, connections_max: int, tls: bool = False) -> type[Connection]:
    """Returns the protocol with these bounds. uvicorn makes one for each connection.

    With TLS a tenth of the connections may be handshakes.
    """
    handshakes_max = max(1, connections_max // 10) if tls else 0
    bounds = {"connections_max": connections_max - handshakes_max, "handshakes_max": handshakes_max}
    return type("BoundedConnection", (Connection,), bounds)
