"""Response: what goes back to the caller, as bytes.

Owns the one table from error class to HTTP status, and the problem documents (RFC 9457).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from api.http.budget import Held, Steps
from api.http.content import Format
from schemaless.cell import StoredCell, created_at_text
from schemaless.codec import BODY_BYTES_MAX, cell_view
from schemaless.errors import (
    AccountRefused,
    BusUnavailable,
    Busy,
    CellErased,
    CellMissing,
    Conflict,
    Corrupt,
    DuplicateKey,
    Fenced,
    Forbidden,
    Invalid,
    InvalidRequest,
    KeyErased,
    LocationGone,
    Malformed,
    Misconfigured,
    Misdirected,
    NeedsLockedHeads,
    NotBuilt,
    NotFound,
    NotReady,
    Overloaded,
    SchemalessError,
    StorageUnavailable,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
    UnreadableCell,
    UnsupportedMedia,
)

log = structlog.get_logger()

RETRY_AFTER_S = 1
RESPONSE_BYTES_MAX = 16 << 20
"""The largest response. A page ends before it, and what has no pages is a 413."""
PIECE_BYTES = 256 << 10
"""The most of a response that waits in a connection for a client to take it."""
TYPE_PREFIX = "urn:schemaless:problem:"

Header = tuple[bytes, bytes]
Send = Callable[[Any], Awaitable[None]]

_VARY = (b"vary", b"accept")
_encode_json = msgspec.json.Encoder().encode


class Response(msgspec.Struct, frozen=True, gc=False):
    """`headers` are complete but for Content-Length."""

    status: int
    body: bytes
    headers: tuple[Header, ...]


class StreamResponse(Response, frozen=True, gc=False):
    """A response without end. `stream` sends all of it, status and headers too."""

    stream: Callable[[Send], Awaitable[None]]


def stream_response(stream: Callable[[Send], Awaitable[None]]) -> StreamResponse:
    return StreamResponse(200, b"", (), stream)


def problem_response(error: SchemalessError) -> Response:
    return document_response(problem_of(error), *error.headers)


def document_response(document: dict[str, Any], *more: Header) -> Response:
    """Returns a problem document as the response of its status. What may be sent again says when."""
    headers: tuple[Header, ...] = (
        (b"content-type", b"application/problem+json"),
        (b"cache-control", b"no-store"),
        *more,
    )
    if document["status"] in (429, 503) and document["retryable"]:
        headers += ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    return Response(document["status"], _encode_json(document), headers)


def ok_response(form: Format, value: Any, *headers: Header, status: int = 200) -> Response:
    return Response(status, form.encode(value), (form.header, _VARY, *headers))


async def send_response(response: Response, send: Send, *, headers_only: bool = False) -> None:
    headers = [*response.headers]
    if response.status != 304:  # its length would be that of the body left out
        headers.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if headers_only else response.body
    end = 0
    while len(body) - end > PIECE_BYTES:  # the client takes a large response piece by piece
        start, end = end, end + PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": True})
        await asyncio.sleep(0)  # what is written in one turn of the loop is sent at its end (api/http/server.py)
    await send({"type": "http.response.body", "body": body[end:] if end else body})


class ProblemKind(msgspec.Struct, frozen=True):
    """How a class of errors is shown. `name` completes the problem's `type`."""

    status: int
    name: str
    title: str


KINDS: dict[type[BaseException], ProblemKind] = {
    Malformed: ProblemKind(400, "malformed", "The payload can't be parsed"),
    Invalid: ProblemKind(422, "invalid", "A part of the request is wrong"),
    TooLarge: ProblemKind(413, "too-large", "The request is too large"),
    UnsupportedMedia: ProblemKind(415, "unsupported-media-type", "The media type is not known here"),
    InvalidRequest: ProblemKind(400, "invalid-request", "The request is wrong"),
    Unauthenticated: ProblemKind(401, "unauthenticated", "There is no valid token"),
    Forbidden: ProblemKind(403, "forbidden", "The caller may not do this"),
    Misdirected: ProblemKind(421, "misdirected", "The request is for another server"),
    CellMissing: ProblemKind(404, "cell-missing", "There is no such cell"),
    NotFound: ProblemKind(404, "not-found", "There is nothing of that name"),
    CellErased: ProblemKind(410, "cell-erased", "The body of that cell was erased"),
    KeyErased: ProblemKind(409, "key-erased", "The body under that key was erased"),
    Conflict: ProblemKind(409, "conflict", "Another body stands under that key"),
    LocationGone: ProblemKind(409, "location-gone", "The location can't be read from"),
    NotReady: ProblemKind(409, "not-ready", "It is not ready to answer yet"),
    NotBuilt: ProblemKind(501, "not-built", "In the contract, not built yet"),
    Unavailable: ProblemKind(503, "unavailable", "Something needed is away"),
    TooManyRequests: ProblemKind(429, "too-many-requests", "This caller sends too much at once"),
    Busy: ProblemKind(503, "busy", "The database gave way to other work"),
    UnreadableCell: ProblemKind(500, "unreadable-cell", "A stored cell can't be read"),
    Fenced: ProblemKind(503, "fenced", "Another process has taken over"),
    SchemalessError: ProblemKind(500, "internal", "The server is at fault"),
}
NO_SUCH_PATH = ProblemKind(404, "no-such-path", "There is no such path")
HEAD_TOO_LARGE_KIND = ProblemKind(431, "head-too-large", "The request's head is too large")
METHOD_NOT_ALLOWED = ProblemKind(405, "method-not-allowed", "The path takes other methods")


_OF_SERVERS = (
    StorageUnavailable,
    BusUnavailable,
    Overloaded,
    Busy,
    Fenced,
    Misconfigured,
    Corrupt,
    DuplicateKey,
    NeedsLockedHeads,
)
"""Errors whose texts may name servers or have SQL: for the log. Strangers see AccountRefused.shown, by /readyz."""
_LOGGED = "the log of the API process says which server it was, and why"
_HIDDEN_HINT = f"try again after a moment: {_LOGGED}"
"""Instead of hints that send people to the server that the message names."""
_HIDDEN_FAULT_HINT = "an operator has to act: the log of the API process says what is wrong"
_HIDDEN_PUT_HINT = f"put the same cell again: it is not known to be durable, and may still appear; {_LOGGED}"
_LOG_PERIOD_S = 1.0
_logged_at: dict[str, float] = {}


def log_hidden(kind: ProblemKind, detail: str) -> None:
    """Logs a detail that no caller is shown, at most one of a kind in a second: an outage has thousands."""
    now = time.monotonic()
    if now - _logged_at.get(kind.name, -_LOG_PERIOD_S) >= _LOG_PERIOD_S:
        _logged_at[kind.name] = now
        log.warning("a request failed for a reason that its caller is not shown", problem=kind.name, error=detail)


def kind_of(error: SchemalessError) -> ProblemKind:
    """Returns the kind of the nearest class in the tree."""
    return next(KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)


def problem_of(error: SchemalessError) -> dict[str, Any]:
    """Returns the members of an error's problem document."""
    kind = kind_of(error)
    detail = str(error)
    if isinstance(error, UnreadableCell):
        log.error("a stored cell can't be read", error=detail)
    elif isinstance(error, _OF_SERVERS):
        log_hidden(kind, detail)
        detail = (isinstance(error, AccountRefused) and error.shown) or kind.title
    document = problem(kind, detail, retryable=error.retryable)
    if hint := _hint_of(error):
        document["hint"] = hint
    if isinstance(error, Invalid):
        document["field"] = error.field
    elif isinstance(error, LocationGone):
        document |= {"head": error.head, "resume_at": error.resume_at, "generation": error.generation}
    elif isinstance(error, CellErased):
        document |= _erased_view(error)
    elif isinstance(error, KeyErased):
        document["erased"] = _erased_view(error)
    return document


def _erased_view(error: CellErased | KeyErased) -> dict[str, Any]:
    return {"erasure": error.erasure, "erased_at": created_at_text(error.erased_at)}


def problem_of_put(error: SchemalessError) -> dict[str, Any]:
    """Returns the members of the problem of a put. Nobody knows what came of one that a server failed."""
    document = problem_of(error)
    if isinstance(error, _OF_SERVERS) and error.retryable:
        document["hint"] = _HIDDEN_PUT_HINT
    return document


def _hint_of(error: SchemalessError) -> str:
    if error.hint == Misconfigured.hint:
        return _HIDDEN_FAULT_HINT
    if isinstance(error, _OF_SERVERS) and error.retryable and not isinstance(error, Overloaded):
        return _HIDDEN_HINT
    return error.hint


def problem(kind: ProblemKind, detail: str, *, retryable: bool = False) -> dict[str, Any]:
    return {
        "type": TYPE_PREFIX + kind.name,
        "title": kind.title,
        "status": kind.status,
        "detail": detail or kind.title,
        "retryable": retryable,
    }


# Cells in responses: the JSON shape of a cell, and lists of cells within a bound of bytes (I14).

T = TypeVar("T")

_ITEM_BYTES_MAX = 2 * BODY_BYTES_MAX
"""About what one item may have when it is encoded: a conflict has two bodies."""
_BESIDE_BYTES_MAX = 64 << 10
"""About what a response has beside its items."""


async def views_within(
    items: Sequence[T], view: Callable[[T], dict[str, Any]], form: Format, bytes_max: int, held: Held | None = None
) -> list[msgspec.Raw]:
    """Encodes the first items, as many as fit, but at least one: bodies are larger than they are stored.

    It ends before an item that can't be read. `held` makes room as soon as they outgrow what it has. It is None where
    the caller has reserved enough. Raises UnreadableCell if the first item can't be read, and Unavailable.
    """
    views: list[msgspec.Raw] = []
    size = 0
    has_room = held is None
    steps = Steps()
    for item in items:
        try:
            encoded = form.encode_one(view(item))
        except UnreadableCell:
            if views:
                break
            raise
        if views and size + len(encoded) > bytes_max:
            break
        if held is not None and not has_room and not held.covers(size + len(encoded)):
            del encoded  # it would be held while this request waits for room
            await held.reserve(min(bytes_max, len(items) * _ITEM_BYTES_MAX) + _BESIDE_BYTES_MAX)
            has_room = True
            encoded = form.encode_one(view(item))
        size += len(encoded)
        views.append(msgspec.Raw(encoded))
        await steps.after(len(encoded))
    return views


async def all_views(
    cells: Iterable[StoredCell | None], form: Format, bytes_max: int, held: Held
) -> list[msgspec.Raw | None]:
    """Encodes all cells, None for a missing one. Raises TooLarge when they don't fit into one response, Unavailable
    when there is no room for it, and UnreadableCell.
    """
    found = list(cells)
    existing = [cell for cell in found if cell is not None]
    views = await views_within(existing, cell_view, form, bytes_max, held)
    if len(views) < len(existing):
        cell_view(existing[len(views)])  # it tells if this one can't be read
        raise TooLarge(f"the response would have more than {bytes_max} bytes: ask for less at once")
    following = iter(views)
    return [None if cell is None else next(following) for cell in found]
