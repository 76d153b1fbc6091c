"""The server: uvicorn, with a protocol that sends head and body in one write and cuts off readers that take nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.request import PAYLOAD_COMPLETE

STALL_TIMEOUT_S = 60.0
STOP_STALL_TIMEOUT_S = 1.0
"""While the process stops: a reader that takes nothing would keep it from ending."""
_EXTENSIONS: dict[str, dict[object, object]] = {PAYLOAD_COMPLETE: {}}


class ApiServer(uvicorn.Server):
    """Calls `before_shutdown`, then waits for the requests in flight."""

    def __init__(self, config: uvicorn.Config, *, before_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._before_shutdown()
        await super().shutdown(sockets)


class CoalescingProtocol(HttpToolsProtocol):
    """A uvicorn protocol that sends head and body in one write, and marks a request as complete when its last byte has
    arrived.
    """

    _pauses = 0
    _stall_timeout_s = STALL_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop)))

    def on_message_complete(self) -> None:
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
        if left < left_before:
            self._look_again(pause, left)
        else:
            self.transport.abort()


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
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()
