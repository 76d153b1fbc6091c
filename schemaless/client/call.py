"""Call and Answer: one HTTP request and its reply as values. A flow of calls does no I/O: a driver performs it.

A flow yields calls and is sent their answers, as a storage operation yields scripts (schemaless/storage/operation.py).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import msgspec

from schemaless.errors import Unavailable

T = TypeVar("T")
MSGPACK = "application/msgpack"
JSON = "application/json"

_decode_json = msgspec.json.decode
_decode_msgpack = msgspec.msgpack.decode


class Call(msgspec.Struct, frozen=True, gc=False):
    """`path` begins after the host. Any call may be sent again: puts are idempotent, a POST has an Idempotency-Key."""

    method: str
    path: str
    params: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    content: bytes = b""
    delay_s: float = 0.0
    """How long to wait before the first attempt."""
    wait_s: float = 0.0
    """How long the server may take on purpose."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """`headers` by lower-case name."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def retry_after_s(self) -> float:
        """Seconds of Retry-After; 0 when there is none, or when it is a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdigit() else 0.0

    def read(self, kind: type[T]) -> T:
        """The content as `kind`. Raises Unavailable when it is no such thing: something else answers there."""
        decode = _decode_msgpack if MSGPACK in self.headers.get("content-type", "") else _decode_json
        try:
            return decode(self.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unavailable(f"an answer of status {self.status} can't be read: {error}") from error

    def members(self) -> dict[str, Any]:
        return self.read(dict[str, Any])


Flow = Generator[Call, Answer, T]
