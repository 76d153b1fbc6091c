"""Answer: what goes back to the caller, as bytes. Each call makes one; nobody else writes to the connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope

from api.http.content import Format
from api.http.problems import RETRY_AFTER_S, problem_of
from schemaless.errors import SchemalessError

Header = tuple[bytes, bytes]
Send = Callable[[Any], Awaitable[None]]

_VARY = (b"vary", b"accept")
_encode_json = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, frozen=True, gc=False):
    """`headers` are complete but for Content-Length."""

    status: int
    body: bytes
    headers: tuple[Header, ...]


class StreamAnswer(Answer, frozen=True, gc=False):
    """One that goes on. `stream` sends all of it, status and headers too."""

    stream: Callable[[Send], Awaitable[None]]


def stream_answer(stream: Callable[[Send], Awaitable[None]]) -> StreamAnswer:
    return StreamAnswer(200, b"", (), stream)


def problem_answer(error: SchemalessError) -> Answer:
    return document_answer(problem_of(error))


def document_answer(document: dict[str, Any]) -> Answer:
    """A problem document as an answer of its status."""
    headers: tuple[Header, ...] = ((b"content-type", b"application/problem+json"), (b"cache-control", b"no-store"))
    if document["status"] == 503:
        headers += ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    return Answer(document["status"], _encode_json(document), headers)


def good_answer(form: Format, value: Any, *headers: Header, status: int = 200) -> Answer:
    return Answer(status, form.encode(value), (form.header, _VARY, *headers))


async def send_answer(answer: Answer, send: Send) -> None:
    headers = [*answer.headers]
    if answer.status != 304:  # its length would be that of the body left out
        headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def response_of(answer: Answer) -> Response:
    if isinstance(answer, StreamAnswer):
        return _Streaming(answer)
    response = Response(answer.body, answer.status)
    response.raw_headers = [*answer.headers]
    if answer.status != 304:
        response.raw_headers.append((b"content-length", b"%d" % len(answer.body)))
    return response


class _Streaming(Response):
    def __init__(self, answer: StreamAnswer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.stream(send)
