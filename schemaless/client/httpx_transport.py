"""Transports of httpx that a program gives its client, such as httpx.MockTransport in its tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext

import httpx

from schemaless.client.exchange import ClientRequest, ClientResponse
from schemaless.client.transport import target_of
from schemaless.errors import Unavailable
from schemaless.runtime.tls import certificate_refusal


class HttpxTransport:
    def __init__(self, given: httpx.BaseTransport, headers: Mapping[str, str]) -> None:
        self._given = given
        self._headers = headers

    def place(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        try:
            response = self._given.handle_request(_outgoing(request, url, timeout_s, self._headers))
            try:
                response.read()
            finally:
                response.close()  # a response that can't be decompressed would keep its connection
        except httpx.RequestError as error:
            raise _no_answer(error) from error
        return ClientResponse(response.status_code, response.headers, response.content)

    def close(self) -> None:
        self._given.close()


class AsyncHttpxTransport:
    def __init__(self, given: httpx.AsyncBaseTransport, headers: Mapping[str, str]) -> None:
        self._given = given
        self._headers = headers

    def place(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        try:
            response = await self._given.handle_async_request(_outgoing(request, url, timeout_s, self._headers))
            try:
                await response.aread()
            finally:
                await response.aclose()  # as above
        except httpx.RequestError as error:
            raise _no_answer(error) from error
        return ClientResponse(response.status_code, response.headers, response.content)

    async def close(self) -> None:
        await self._given.aclose()


def _outgoing(request: ClientRequest, url: str, timeout_s: float, headers: Mapping[str, str]) -> httpx.Request:
    return httpx.Request(
        request.method,
        url + target_of(request),
        headers={**headers, **request.headers},
        content=request.content or None,
        extensions={"timeout": httpx.Timeout(timeout_s).as_dict()},
    )


def _no_answer(error: httpx.RequestError) -> Unavailable:
    return Unavailable(certificate_refusal(error) or repr(error))
