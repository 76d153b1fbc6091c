"""Urllib3Transport: the sync client's connections, by urllib3."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

from schemaless.client.attempts import Limits
from schemaless.client.exchange import ClientRequest, ClientResponse
from schemaless.client.transport import target_of, tls_context
from schemaless.config import ClientSettings
from schemaless.errors import Unavailable
from schemaless.runtime.tls import certificate_refusal


class Urllib3Transport:
    """A pool of connections for each host. Idle connections stay open. A child of `fork` makes its own."""

    def __init__(self, settings: ClientSettings, limits: Limits, headers: Mapping[str, str]) -> None:
        self._tls = tls_context(settings)
        self._limits = limits
        self._headers = headers
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._places = threading.BoundedSemaphore(self._limits.connections_max)
        self._pools: dict[str, tuple[urllib3.HTTPConnectionPool, str]] = {}
        self._lock = threading.Lock()

    def place(self) -> AbstractContextManager[object]:
        if self._process != os.getpid():  # parent and child would read each other's answers
            self._begin()
        return self._places

    def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        pool, prefix = self._pools.get(url) or self._make_pool(url)
        connect_s = min(self._limits.connect_timeout_s, timeout_s)
        try:
            response = pool.urlopen(
                request.method,
                prefix + target_of(request),
                body=request.content or None,
                headers={**self._headers, **request.headers},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=connect_s, read=timeout_s),
            )
        except NewConnectionError as error:  # to urllib3 it is a time-out, too
            raise Unavailable(_reason(error)) from error
        except ConnectTimeoutError as error:
            raise Unavailable(f"no connection within {connect_s:.3g} s") from error
        except ReadTimeoutError as error:
            raise Unavailable(f"nothing came within {timeout_s:.3g} s") from error
        except HTTPError as error:
            raise Unavailable(certificate_refusal(error) or _reason(error)) from error
        return ClientResponse(response.status, response.headers, response.data)

    def close(self) -> None:
        for pool, _ in self._pools.values():
            pool.close()

    def _kind_of_connection(self, *, secure: bool) -> type[HTTPConnection]:
        """Returns connections whose sending has the time of an attempt. With urllib3's it has that of connecting."""
        base, sending_s = HTTPSConnection if secure else HTTPConnection, self._limits.attempt_timeout_s

        class Connection(base):  # type: ignore[valid-type, misc]
            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(sending_s)

        return Connection

    def _make_pool(self, url: str) -> tuple[urllib3.HTTPConnectionPool, str]:
        tls = {"ssl_context": self._tls} if url.startswith("https:") else {}
        with self._lock:
            if url not in self._pools:
                pool = urllib3.connection_from_url(url, maxsize=self._limits.connections_max, **tls)
                pool.ConnectionCls = self._kind_of_connection(secure=bool(tls))
                self._pools[url] = pool, urlsplit(url).path
            return self._pools[url]


def _reason(error: HTTPError) -> str:
    """Returns what the library's error is about, without the names of its own objects."""
    inner = error.__cause__ or (error.args[-1] if error.args else None)
    return str(inner) if isinstance(inner, Exception) and str(inner) else str(error)
