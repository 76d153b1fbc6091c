"""Exchange: one HTTP request and its response as values, and the errors that problem documents stand for (RFC 9457).

A flow of requests does no I/O: a driver performs it. A flow yields requests and is sent their responses, as a storage
operation yields scripts (schemaless/storage/operation.py). Foreign responses, such as a proxy's, become errors of our
tree, too (I15).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import msgspec

from schemaless.cell import EPOCH, microseconds_since_epoch
from schemaless.errors import (
    CellErased,
    CellMissing,
    Conflict,
    Forbidden,
    Invalid,
    KeyErased,
    LocationGone,
    Malformed,
    Misdirected,
    NotBuilt,
    NotFound,
    NotReady,
    SchemalessError,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
    UnreadableCell,
)
from schemaless.found_cell import ErasedBody
from schemaless.shapes import shape

T = TypeVar("T")
MSGPACK = "application/msgpack"

_decode_json = msgspec.json.decode
_decode_msgpack = msgspec.msgpack.decode


class ClientRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of the client. `path` begins after the host.

    It may be sent again: puts are idempotent, and a POST has an Idempotency-Key.
    """

    method: str
    path: str
    params: Mapping[str, str | list[str]] = {}
    headers: Mapping[str, str] = {}
    content: bytes = b""
    delay_s: float = 0.0
    """How long the driver waits before the first attempt."""
    wait_s: float = 0.0
    """How long the server is asked to wait."""
    is_final: bool = False
    """Whether every answer is final, also a 503: the server has waited as long as it was asked to."""

    def with_headers(self, added: Mapping[str, str]) -> ClientRequest:
        return msgspec.structs.replace(self, headers={**self.headers, **added})


class ClientResponse(msgspec.Struct, frozen=True, gc=False):
    """A response of the API. `headers` are by lower-case name."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def retry_after_s(self) -> float:
        """Seconds of Retry-After, or 0 when there is none, or when it is a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() else 0.0

    def read(self, kind: type[T]) -> T:
        """Decodes the content as `kind`. Raises Unavailable for other content: the host is not our API."""
        decode = _decode_msgpack if MSGPACK in self.headers.get("content-type", "") else _decode_json
        try:
            if "schemaless-buffered" in self.headers or b"erased" in self.content:
                return msgspec.convert(_completed(decode(self.content, type=Any)), shape(kind))
            return decode(self.content, type=shape(kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unavailable(
                f"a response of status {self.status} can't be decoded: {error}",
                hint="check the host: something else than the API answers there",
            ) from error

    def good(self) -> ClientResponse:
        """Returns itself. Raises the error that an unsuccessful response stands for."""
        if not 200 <= self.status < 300:
            raise error_of(self)
        return self


def _completed(value: Any) -> Any:
    """Gives the cells of an answer that wait in a buffer the place that `FoundCell` has for them, and erased ones an
    empty body.
    """
    if isinstance(value, list):
        return list(map(_completed, value))
    if not isinstance(value, dict):
        return value
    if "added_id" in value and "column_name" in value:  # and what a body has is nobody's business
        missing = {"generation": 0, "added_id": 0, "created_at": EPOCH.isoformat()} if value.get("buffered") else {}
        return value | missing | ({"body": {}} if "erased" in value else {})
    return {name: _completed(one) for name, one in value.items()}


Flow = Generator[ClientRequest, ClientResponse, T]

Problem = Mapping[str, Any]

_BY_STATUS: dict[int, type[SchemalessError]] = {
    400: Malformed,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    415: Malformed,
    421: Misdirected,
    422: Malformed,
    429: TooManyRequests,
    501: NotBuilt,
}


def error_of(response: ClientResponse) -> SchemalessError:
    """Returns the error that an unsuccessful response stands for."""
    return error_of_problem(problem_of(response), response.status)


def error_of_problem(problem: Problem, status: int | None = None) -> SchemalessError:
    """Returns the error of a problem document, with the hint that came with it.

    The problem of an item of a batch carries its own status.
    """
    error = _error_of_problem(problem, status)
    if isinstance(hint := problem.get("hint"), str):
        error.hint = hint
    return error


def _error_of_problem(problem: Problem, status: int | None) -> SchemalessError:
    status = problem.get("status", status or 500)
    detail = str(problem.get("detail") or problem.get("title") or f"status {status}")
    if status == 422 and "field" in problem:
        field = str(problem["field"])
        return Invalid(field, detail.removeprefix(f"{field}: "))
    if status == 409 and "resume_at" in problem:
        head, resume_at, generation = (_int(problem, name) for name in ("head", "resume_at", "generation"))
        return LocationGone(detail, head=head, resume_at=resume_at, generation=generation)
    if status == 410 and "erasure" in problem:
        return CellErased(detail, *_erased(problem))
    if status == 409 and "erased" in problem:
        return KeyErased(detail, *_erased(problem["erased"]))
    if status == 409 and problem.get("retryable"):
        return NotReady(detail)
    if status == 404 and is_cell_missing(problem):
        return CellMissing(detail)
    if str(problem.get("type")).endswith("unreadable-cell"):
        return UnreadableCell(detail)
    is_for_good = problem.get("retryable") is False
    return _BY_STATUS.get(status, SchemalessError if is_for_good else Unavailable)(detail)


def _erased(members: Any) -> tuple[str, int]:
    try:
        found = msgspec.convert(members, shape(ErasedBody))
    except msgspec.ValidationError:  # a foreign answer
        found = ErasedBody()
    at = 0 if found.erased_at is None else microseconds_since_epoch(found.erased_at)
    return found.erasure or "", at


def is_cell_missing(problem: Problem) -> bool:
    """Returns whether a cell is missing. A 404 may also mean another name, such as the datastore's."""
    return str(problem.get("type")).endswith("cell-missing")


def problem_of(response: ClientResponse) -> Problem:
    """Returns the members of a problem document, or one made of the first words of any other content."""
    try:
        return response.read(dict[str, Any])
    except Unavailable:
        text = response.content[:200].decode(errors="replace")
        return {"status": response.status, "detail": f"status {response.status}: {text}"}


def is_retryable(response: ClientResponse) -> bool:
    """Returns what the problem document says. A response that says nothing is retryable."""
    return bool(problem_of(response).get("retryable", True))


def _int(problem: Problem, name: str) -> int:
    """Returns an added_id, which the document holds as a number or in a location {"generation", "added_id"}."""
    value = problem.get(name, 0)
    if isinstance(value, Mapping):
        value = value.get("added_id", 0)
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        return 0
