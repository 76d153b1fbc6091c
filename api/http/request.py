"""Call: one request as the handlers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from api.http.body import Payload, Receive
from api.http.content import Format, request_format, response_format
from api.http.parameters import Parameter, parse_query
from api.http.response import Response
from schemaless.errors import NotFound
from schemaless.sharding import shard_of
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from api.state import ApiState

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


def parse_shard(datastore: Datastore, text: str) -> int:
    """Raises NotFound."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) < datastore.shards):
        raise NotFound(f"datastore {datastore.name} has the shards 0 to {datastore.shards - 1}, none called {text!r}")
    return int(text)


def home_of(datastore: Datastore, row_key: bytes) -> tuple[int, str]:
    """Shard and home cluster of a row."""
    shard = shard_of(row_key, datastore.shards)
    return shard, datastore.home(shard)
