"""Payloads: read with a bound each, and with a bound on all of a process together (I14).

A small payload comes in one message and is covered by the bound on calls in hand; only longer ones are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from schemaless.errors import Malformed, TooLarge, Unavailable

Receive = Callable[[], Awaitable[Any]]


class PayloadBudget:
    """Bytes of long payloads that a process may hold at once."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, count: int) -> None:
        """Raises Unavailable."""
        if count > self._left:
            raise Unavailable("this process holds as many large payloads as it may")
        self._left -= count

    def give_back(self, count: int) -> None:
        self._left += count


class Payload:
    """Of one call. `held_bytes` were taken from the budget, and are to be given back when the call is over."""

    __slots__ = ("_budget", "_receive", "held_bytes")

    def __init__(self, receive: Receive, budget: PayloadBudget) -> None:
        self.held_bytes = 0
        self._receive = receive
        self._budget = budget

    async def read(self, bytes_max: int, announced: bytes, timeout_s: float, *, whole: bool = False) -> bytes:
        """`announced`: Content-Length, if there is one; `whole`: all of it has come. Raises TooLarge as soon as that
        is known, Malformed when the payload ends early or doesn't come in time, Unavailable.
        """
        if announced and int(announced) > bytes_max:
            raise TooLarge(f"at most {bytes_max} bytes are taken, {int(announced)} were announced")
        if whole:  # a timer that nothing waits for would cost as much as parsing a small body
            return await self._read(bytes_max)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(bytes_max)
        except TimeoutError:
            raise Malformed(f"the payload was not there after {timeout_s} s") from None

    async def _read(self, bytes_max: int) -> bytes:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return _bounded(message["body"], bytes_max)
        return await self._read_on(message, bytes_max)

    async def _read_on(self, message: Any, bytes_max: int) -> bytes:
        gathered = bytearray()
        while message["type"] == "http.request":
            self._budget.take(len(message["body"]))
            self.held_bytes += len(message["body"])
            gathered += message["body"]
            _bounded(gathered, bytes_max)
            if not message.get("more_body"):
                return bytes(gathered)
            message = await self._receive()
        raise Malformed("the connection ended within the payload")


def _bounded(payload: Any, bytes_max: int) -> bytes:
    if len(payload) > bytes_max:
        raise TooLarge(f"at most {bytes_max} bytes are taken")
    return payload  # type: ignore[no-any-return]
