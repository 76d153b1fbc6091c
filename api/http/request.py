"""Request: what a handler reads of one HTTP request: its path, query, headers and payload.

Payloads are read within a bound each, and within a bound on all of a process together (I14). A small payload comes in
one message and is covered by the bound on concurrent requests. Only longer ones are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from api.http.content import Format, request_format, response_format
from api.http.parameters import Parameter, parse_query
from api.http.response import Response
from schemaless.errors import Malformed, TooLarge, Unavailable
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from api.state import ApiState

Receive = Callable[[], Awaitable[Any]]
Scope = MutableMapping[str, Any]
FOLLOWS = "schemaless.follows"
"""A scope with it belongs to a call that follows a log."""
HEADERS_ONLY = "schemaless.headers_only"
WHOLE = "schemaless.whole"
"""A scope with it belongs to a request whose payload has come to its end."""


class Request:
    """`path` holds the named parts of the path as text, not yet looked at."""

    __slots__ = ("_headers", "_payload", "_receive", "_scope", "path", "state")

    def __init__(self, state: ApiState, scope: Scope, receive: Receive, path: Mapping[str, str]) -> None:
        self.state = state
        self.path = path
        self._scope = scope
        self._receive = receive
        self._headers: dict[bytes, bytes] | None = None
        self._payload: Payload | None = None

    async def datastore(self) -> Datastore:
        """Raises NotFound."""
        return await self.state.catalogue.datastore(self.path["datastore"])

    def header(self, name: bytes) -> bytes:
        """Its value, or nothing; `name` in lower case. The first one counts."""
        headers = self._headers
        if headers is None:
            headers = self._headers = dict(reversed(self._scope["headers"]))
        return headers.get(name, b"")

    @property
    def raw_query(self) -> bytes:
        return bytes(self._scope["query_string"])

    def query(self, *known: Parameter[Any]) -> dict[str, str]:
        """Raises Invalid for parameters that are not among `known`, repeated or malformed."""
        raw = self._scope["query_string"]
        return parse_query(raw, known) if raw else {}

    def request_format(self, *, batch: bool = False) -> Format:
        """Raises UnsupportedMedia."""
        return request_format(self.header(b"content-type"), self.header(b"content-encoding"), batch=batch)

    def response_format(self, *, batch: bool = False) -> Format:
        return response_format(self.header(b"accept"), batch=batch)

    async def payload(self, bytes_max: int) -> bytes:
        """Raises TooLarge, Malformed or Unavailable."""
        self._payload = Payload(self._receive, self.state.payload_budget)
        return await self._payload.read(
            bytes_max,
            self.header(b"content-length"),
            self.state.settings.payload_timeout_s,
            whole=WHOLE in self._scope,
        )

    def follows(self) -> None:
        """Says so to the entrance and to the server's protocol."""
        self._scope[FOLLOWS] = True

    @property
    def headers_only(self) -> bool:
        """It was a HEAD."""
        return HEADERS_ONLY in self._scope

    async def unless_hung_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, or as much of it as is done when the caller's connection ends."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._hung_up())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def finish(self) -> None:
        """The answer is made: what the payload took of the process's bounds is free again."""
        if self._payload is not None and self._payload.held_bytes:
            self.state.payload_budget.give_back(self._payload.held_bytes)


Handler = Callable[[Request], Awaitable[Response]]


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
