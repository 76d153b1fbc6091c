"""The server: uvicorn, with a protocol that sends head and body in one write, and that bounds connections (I14).

Heads have a deadline and a size, and clients have to take their responses. Where a process has no room for another
connection, the one that was idle for longest makes room.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.request import PAYLOAD_COMPLETE
from api.http.response import HEAD_TOO_LARGE_KIND, Response, document_response, problem, problem_response
from schemaless.errors import Malformed, Unavailable

STALL_TIMEOUT_S = 15.0
STOP_STALL_TIMEOUT_S = 1.0
"""While the process stops: a reader that takes nothing would keep it from ending."""
TAKEN_BYTES_PER_S_MIN = 2048
"""A reader that takes less of what waits for it is cut off."""
HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 100
FILES_MAX = 20_000
_RESERVED_FILES = 100
"""Of the process's limit of open files: what the program itself, logs and new connections to servers need."""
NO_HTTP = problem_response(Malformed("the request is not valid HTTP"))
NO_ROOM = problem_response(Unavailable("too many connections"))
HEAD_TOO_LARGE = document_response(
    problem(HEAD_TOO_LARGE_KIND, f"path and headers have at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers")
)
_EXTENSIONS: dict[str, dict[object, object]] = {PAYLOAD_COMPLETE: {}}


HANDSHAKE_TIMEOUT_S = 10.0
"""For the TLS of a connection. By itself uvloop waits for a minute."""
_CLOSE_TIMEOUT_S = 1.0
"""For what a client says to the end of its TLS, where another one waits for its place. uvloop waits for 30 seconds."""


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
        self, loop: asyncio.AbstractEventLoop, protocol_factory: Callable[[], CoalescingProtocol], context: Any
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

    async def _shake_hands(self, connection: socket.socket, protocol: CoalescingProtocol) -> None:
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
    """Calls `before_shutdown`, then waits for the requests in flight."""

    def __init__(self, config: uvicorn.Config, *, before_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._before_shutdown()
        await super().shutdown(sockets)


class BoundExceeded(Exception):
    """A head is larger than it may be. The parser ends at it."""


class CoalescingProtocol(HttpToolsProtocol):
    """A uvicorn protocol that sends head and body in one write, and marks a request as complete when its last byte has
    arrived. It holds the bounds of a connection.
    """

    head_timeout_s = 10.0
    connections_max = 1 << 20
    handshakes_max = 1 << 20
    _pauses = 0
    _stall_timeout_s = STALL_TIMEOUT_S
    _head_deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _head_has_begun = False
    _head_bytes = 0
    _head_is_too_large = False
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop)))
        self._idle_since = self.loop.time()
        if len(self.connections) > self.connections_max and not self._make_room():
            self._end(NO_ROOM)
        else:
            self._set_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_head_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self.is_idle:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                self.flow.pause_reading()  # until the request before it has its response
            return
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._end(HEAD_TOO_LARGE)
        elif self._head_deadline is None:  # also for the rest of a payload that nobody reads
            self._set_head_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_has_begun = True

    def on_headers_complete(self) -> None:
        if len(self.headers) > HEADERS_MAX or (self._head_bytes > HEAD_BYTES_MAX and self._size() > HEAD_BYTES_MAX):
            self._head_is_too_large = True
            raise BoundExceeded
        super().on_headers_complete()
        self._in_head = self._head_has_begun = False
        self._unset_head_deadline()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._head_has_begun and self.is_idle and self._head_deadline is None:  # it came behind the request
            self._set_head_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP with a problem document. An earlier request gets its own response first."""
        if self.is_idle or (self.cycle.more_body and not self.cycle.response_started):
            self._end(HEAD_TOO_LARGE if self._head_is_too_large else NO_HTTP)
        elif self.cycle.more_body:
            self.transport.close()
        else:
            self.cycle.keep_alive = False
            self.pipeline.clear()
            self.flow.pause_reading()

    @property
    def is_idle(self) -> bool:
        """True while no request is under way, whether or not its head has begun to arrive."""
        return self.cycle is None or self.cycle.response_complete

    def _size(self) -> int:
        """Returns what the head has without the bytes that arrived with it."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _make_room(self) -> bool:
        """Closes the connection that was idle for longest. False: none is. It counts until it is gone."""
        idle = [
            other
            for other in cast(set[CoalescingProtocol], self.connections)
            if other is not self and other.is_idle and not other.transport.is_closing()
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda other: other._idle_since)
        longest.transport.close()
        self.loop.call_later(_CLOSE_TIMEOUT_S, longest.transport.abort)
        return True

    def _set_head_deadline(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_timeout_s, self._end_if_idle)

    def _unset_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _end_if_idle(self) -> None:
        self._head_deadline = None
        if self.is_idle and not self.transport.is_closing():
            self.transport.close()

    def _end(self, response: Response) -> None:
        """Answers before there is a request, and closes."""
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %d %b\r\n" % (response.status, HTTPStatus(response.status).phrase.encode())
            headers = (*response.headers, (b"content-length", b"%d" % len(response.body)), (b"connection", b"close"))
            fields = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(head + fields + b"\r\n" + response.body)
            self.transport.close()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        cast(dict[str, Any], self.scope)["extensions"] = _EXTENSIONS
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The transport holds more than it should: the reader must take some of it in time (I14)."""
        super().pause_writing()
        self._pauses += 1
        self._look_again(self._pauses, self.transport.get_write_buffer_size())

    def shutdown(self) -> None:
        super().shutdown()
        self._stall_timeout_s = STOP_STALL_TIMEOUT_S
        if self.flow.write_paused:
            self._look_again(self._pauses, self.transport.get_write_buffer_size())

    def _look_again(self, pause: int, left: int) -> None:
        self.loop.call_later(self._stall_timeout_s, self._cut_off_if_stalled, pause, left)

    def _cut_off_if_stalled(self, pause: int, left_before: int) -> None:
        if not self.flow.write_paused or pause != self._pauses:
            return
        left = self.transport.get_write_buffer_size()
        if left_before - left >= TAKEN_BYTES_PER_S_MIN * self._stall_timeout_s:
            self._look_again(pause, left)
        else:
            self.transport.abort()


def protocol_within(*, connections_max: int, head_timeout_s: float, tls: bool = False) -> type[CoalescingProtocol]:
    """Returns the protocol with these bounds. uvicorn makes one for each connection.

    With TLS a tenth of the connections may be handshakes.
    """
    handshakes_max = max(1, connections_max // 10) if tls else 0
    bounds = {
        "connections_max": connections_max - handshakes_max,
        "handshakes_max": handshakes_max,
        "head_timeout_s": head_timeout_s,
    }
    return type("BoundedProtocol", (CoalescingProtocol,), bounds)


def connections_within_limits(to_servers: int) -> int:
    """Returns how many clients may be connected, below the process's limit of open files, which it raises first.

    `to_servers` is the most connections to MySQL.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = FILES_MAX if soft == resource.RLIM_INFINITY else soft
    return max(1, min(limit, FILES_MAX) - to_servers - _RESERVED_FILES)


class CoalescingTransport:
    """A transport that writes once per iteration of the event loop.

    uvicorn writes head and body of a response separately. uvloop makes a system call of each, which wakes the client
    twice for one response.
    """

    __slots__ = ("_loop", "_pieces", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        """Closes after everything written so far."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:  # uvicorn asks for each response: __getattr__ would cost more
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._pieces:
            if not self._transport.is_closing():
                self._transport.write(b"".join(self._pieces))
            self._pieces.clear()
