"""OneWriteProtocol: uvicorn's HTTP protocol, whose answers leave in one write instead of two, and which says when a
request has come as a whole.

uvicorn writes an answer's head and body apart, and uvloop makes a system call of each, which wakes the caller twice
for one answer. Here what is written within one turn of the event loop goes out together.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.request import FOLLOWS, WHOLE

STALL_TIMEOUT_S = 60.0


class OneWriteProtocol(HttpToolsProtocol):
    _pauses = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport, self.loop)))

    def on_message_complete(self) -> None:
        cast(dict[str, Any], self.scope)[WHOLE] = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The reader has more before it than the transport holds willingly: it must take some of it in time (I14)."""
        super().pause_writing()
        self._pauses += 1
        self._look_again(self._pauses, self.transport.get_write_buffer_size())

    def _look_again(self, pause: int, left: int) -> None:
        self.loop.call_later(STALL_TIMEOUT_S, self._cut_off_if_stalled, pause, left)

    def _cut_off_if_stalled(self, pause: int, left_before: int) -> None:
        if not self.flow.write_paused or pause != self._pauses:
            return
        left = self.transport.get_write_buffer_size()
        if left < left_before:
            self._look_again(pause, left)
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """A stream whose reader takes nothing would keep the process from stopping: it can only be cut off."""
        if self.flow.write_paused and FOLLOWS in self.scope:
            self.transport.abort()
        super().shutdown()


class GatheringTransport:
    """A transport in everything, but it writes at the end of the turn."""

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
        """What was written before still goes out."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:  # asked for each answer
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._pieces:
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()
