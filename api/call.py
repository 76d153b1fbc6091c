"""Call: one request as the handlers see it. Payloads are read with a bound: what is too large is never held (I14)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from api.answer import Answer
from api.negotiation import Format, answer_format, request_format
from api.parameters import Parameter, parse_query
from schemaless.errors import Malformed, NotFound, TooLarge
from schemaless.sharding import shard_of
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from api.services import Services

Receive = Callable[[], Awaitable[Any]]
Scope = Mapping[str, Any]


class Call:
    """`path` holds the named parts of the path as text, not yet looked at."""

    __slots__ = ("_receive", "_scope", "path", "services")

    def __init__(self, services: Services, scope: Scope, receive: Receive, path: Mapping[str, str]) -> None:
        self.services = services
        self.path = path
        self._scope = scope
        self._receive = receive

    async def datastore(self) -> Datastore:
        """Raises NotFound."""
        return await self.services.catalogue.datastore(self.path["datastore"])

    def header(self, name: bytes) -> bytes:
        """Its value, or nothing; `name` in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

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

    def answer_format(self, *, batch: bool = False) -> Format:
        return answer_format(self.header(b"accept"), batch=batch)

    async def payload(self, bytes_max: int) -> bytes:
        """Raises TooLarge as soon as that is known."""
        length = self.header(b"content-length")
        if length and int(length) > bytes_max:
            raise TooLarge(f"at most {bytes_max} bytes are taken, {int(length)} were announced")
        message = await self._receive()
        if not message.get("more_body") and message["type"] == "http.request":
            return _bounded(message["body"], bytes_max)
        return await self._long_payload(message, bytes_max)

    async def _long_payload(self, message: Mapping[str, Any], bytes_max: int) -> bytes:
        gathered = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise Malformed("the connection ended within the payload")
            gathered += message["body"]
            _bounded(gathered, bytes_max)
            if not message.get("more_body"):
                return bytes(gathered)
            message = await self._receive()


Handler = Callable[[Call], Awaitable[Answer]]


def parse_shard(datastore: Datastore, text: str) -> int:
    """Raises NotFound."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) < datastore.shards):
        raise NotFound(f"datastore {datastore.name} has the shards 0 to {datastore.shards - 1}, none called {text!r}")
    return int(text)


def home_of(datastore: Datastore, row_key: bytes) -> tuple[int, str]:
    """Shard and home cluster of a row."""
    shard = shard_of(row_key, datastore.shards)
    return shard, datastore.home(shard)


def _bounded(payload: bytes | bytearray, bytes_max: int) -> bytes:
    if len(payload) > bytes_max:
        raise TooLarge(f"at most {bytes_max} bytes are taken")
    return payload  # type: ignore[return-value]
