"""ApiServer: uvicorn's server, which waits for the calls in hand when it stops, and ends those that never would."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn


class ApiServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, before_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._before_shutdown()
        await super().shutdown(sockets)
