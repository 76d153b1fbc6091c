"""Answer: what goes back to the caller, as bytes. Each call makes one; nobody else writes to the connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response as StarletteResponse
from starlette.types import Receive, Scope

from api.http.content import Format
from api.http.problems import RETRY_AFTER_S, problem_of
from schemaless.errors import SchemalessError

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
    """One that goes on. `stream` sends all of it, status and headers too."""

    stream: Callable[[Send], Awaitable[None]]


def stream_response(stream: Callable[[Send], Awaitable[None]]) -> StreamResponse:
    return StreamResponse(200, b"", (), stream)


def problem_response(error: SchemalessError) -> Response:
    return document_response(problem_of(error))


def document_response(document: dict[str, Any]) -> Response:
    """A problem document as an answer of its status."""
    headers: tuple[Header, ...] = ((b"content-type", b"application/problem+json"), (b"cache-control", b"no-store"))
    if document["status"] == 503:
        headers += ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    return Response(document["status"], _encode_json(document), headers)


def ok_response(form: Format, value: Any, *headers: Header, status: int = 200) -> Response:
    return Response(status, form.encode(value), (form.header, _VARY, *headers))


async def send_response(answer: Response, send: Send) -> None:
    headers = [*answer.headers]
    if answer.status != 304:  # its length would be that of the body left out
        headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def response_of(answer: Response) -> StarletteResponse:
    if isinstance(answer, StreamResponse):
        return _Streaming(answer)
    response = StarletteResponse(answer.body, answer.status)
    response.raw_headers = [*answer.headers]
    if answer.status != 304:
        response.raw_headers.append((b"content-length", b"%d" % len(answer.body)))
    return response


class _Streaming(StarletteResponse):
    def __init__(self, answer: StreamResponse) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.stream(send)
