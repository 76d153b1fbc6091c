"""Steps: a long piece of work of one request lets the process do other things in between (I14)."""

from __future__ import annotations

import asyncio

STEP_BYTES_MAX = 64 << 10
"""Bytes of JSON or MessagePack that are parsed, compared or rendered before others get their turn.

One body is never split, so a step has at most this and the largest body.
"""


class Steps:
    """Counts the work of one request."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    async def after(self, bytes_done: int) -> None:
        """Says that so many bytes were worked on since the last call. Others have their turn once it is enough."""
        self._bytes += bytes_done
        if self._bytes >= STEP_BYTES_MAX:
            self._bytes = 0
            await asyncio.sleep(0)
