"""AiohttpTransport: the asyncio client's connections, by aiohttp."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from schemaless.client.attempts import Limits
from schemaless.client.exchange import ClientRequest, ClientResponse
from schemaless.client.transport import target_of, tls_context
from schemaless.config import ClientSettings
from schemaless.errors import Unavailable
from schemaless.runtime.name_lookup import NameLookups, no_address
from schemaless.runtime.tls import certificate_refusal

_AT_ONCE_MAX_BYTES = 1 << 20
"""More is written in pieces, between which other tasks run. aiohttp warns of more."""


class AiohttpTransport:
    """Connections of one event loop. A session belongs to a loop, so it is made when the first request is sent."""

    def __init__(self, settings: ClientSettings, limits: Limits, headers: Mapping[str, str]) -> None:
        self._tls = tls_context(settings)
        self._limits = limits
        self._headers = headers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession
        self._end_of_loop: AsyncGenerator[None] | None = None
        self._places: asyncio.Semaphore

    def place(self) -> AbstractAsyncContextManager[object]:
        # A session of a loop that has ended can't be closed any more.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._end_of_loop = None
            self._places = asyncio.Semaphore(self._limits.connections_max)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # the places are the limit
                    ssl=self._tls or True,
                    resolver=_BoundedResolver(self._limits.connect_timeout_s),
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._places

    async def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        connect_s = min(self._limits.connect_timeout_s, timeout_s)
        content = request.content
        if self._session.closed:
            raise Unavailable("the client was closed")
        if self._end_of_loop is None:
            self._end_of_loop = _closed_with_its_loop(self._session)
            await anext(self._end_of_loop)
        try:
            async with self._session.request(
                request.method,
                URL(url + target_of(request), encoded=True),
                data=io.BytesIO(content) if len(content) > _AT_ONCE_MAX_BYTES else content or None,
                headers={**self._headers, **request.headers},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
                allow_redirects=False,
            ) as response:
                return ClientResponse(response.status, response.headers, await response.read())
        except aiohttp.ConnectionTimeoutError as error:
            raise Unavailable(f"no connection within {connect_s:.3g} s") from error
        except TimeoutError as error:
            raise Unavailable(f"no whole answer within {timeout_s:.3g} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(certificate_refusal(error) or str(error) or type(error).__name__) from error

    async def close(self) -> None:
        if self._loop is not None:
            self._loop = None
            await self._session.close()


class _BoundedResolver(AbstractResolver):
    """Looks names up within a time. aiohttp's takes the threads of the event loop, whose end waits for them."""

    def __init__(self, timeout_s: float) -> None:
        self._lookups = NameLookups()
        self._timeout_s = timeout_s

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            async with asyncio.timeout(self._timeout_s):
                addresses = await asyncio.wrap_future(self._lookups.begin(host))
        except TimeoutError as error:
            raise no_address(host, self._timeout_s) from error
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=numeric,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing is kept."""


async def _closed_with_its_loop(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    """Closes the session when its event loop ends: asyncio.run closes the generators that its tasks began.

    A program that never closes its client, or calls asyncio.run again, would be warned of each session.
    """
    try:
        yield
    finally:
        await session.close()
