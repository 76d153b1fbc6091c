"""Urllib3Transport: the sync client's connections, by urllib3."""

from __future__ import annotations

import http.client
import io
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

from schemaless.client.attempts import Limits
from schemaless.client.exchange import ClientRequest, ClientResponse
from schemaless.client.transport import target_of, tls_context
from schemaless.config import ClientSettings
from schemaless.errors import Unavailable
from schemaless.runtime.name_lookup import NameLookups, no_address
from schemaless.runtime.tls import certificate_refusal

_TLS_RECORD_BYTES = 1 << 14
"""TLS sends so much at once. A time-out of the socket counts anew for each."""


class Urllib3Transport:
    """A pool of connections for each host. Idle connections stay open. A child of `fork` makes its own."""

    def __init__(self, settings: ClientSettings, limits: Limits, headers: Mapping[str, str]) -> None:
        self._tls = tls_context(settings)
        self._limits = limits
        self._headers = headers
        self._attempt = _Attempt()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._places = threading.BoundedSemaphore(self._limits.connections_max)
        self._pools: dict[str, tuple[urllib3.HTTPConnectionPool, str]] = {}
        self._lookups = NameLookups()
        self._lock = threading.Lock()

    def place(self) -> AbstractContextManager[object]:
        if self._process != os.getpid():  # parent and child would read each other's answers
            self._begin()
        return self._places

    def send(self, request: ClientRequest, url: str, timeout_s: float) -> ClientResponse:
        pool, prefix = self._pools.get(url) or self._make_pool(url)
        connect_s = min(self._limits.connect_timeout_s, timeout_s)
        self._attempt.ends = time.monotonic() + timeout_s
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
        except HTTPError as error:
            if isinstance(error, ReadTimeoutError) or isinstance(error.args[-1], TimeoutError):
                raise Unavailable(f"no whole answer within {timeout_s:.3g} s") from error
            raise Unavailable(certificate_refusal(error) or _reason(error)) from error
        return ClientResponse(response.status, response.headers, response.data)

    def close(self) -> None:
        for pool, _ in self._pools.values():
            pool.close()

    def _make_pool(self, url: str) -> tuple[urllib3.HTTPConnectionPool, str]:
        tls = {"ssl_context": self._tls} if url.startswith("https:") else {}
        with self._lock:
            if url not in self._pools:
                pool = urllib3.connection_from_url(url, maxsize=self._limits.connections_max, **tls)
                base = HTTPSConnection if tls else HTTPConnection
                pool.ConnectionCls = _bounded_connection(base, self._attempt, self._lookups)
                self._pools[url] = pool, urlsplit(url).path
            return self._pools[url]


class _Attempt(threading.local):
    """The attempt that a thread makes. Its time is that of all its writes and reads together (I14)."""

    ends = 0.0

    def left_s(self) -> float:
        """Returns the seconds that are left. Raises TimeoutError when none are."""
        if (left := self.ends - time.monotonic()) <= 0:
            raise TimeoutError("the time of the attempt is over")
        return left


def _bounded_connection(base: type[HTTPConnection], attempt: _Attempt, lookups: NameLookups) -> type[HTTPConnection]:
    """Returns connections that end with the attempt.

    In urllib3's, each byte begins a new time-out, and the look-up of a host's name has none.
    """

    class BoundedResponse(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            self.fp: Any = io.BufferedReader(_BoundedReader(self.fp.detach(), sock, attempt))

    class BoundedConnection(base):  # type: ignore[valid-type, misc]
        response_class = BoundedResponse

        _dns_host: str  # urllib3's: what is looked up

        def _new_conn(self) -> socket.socket:
            named = self._dns_host
            last: HTTPError | None = None
            try:
                for address in _addresses(self, lookups):
                    self._dns_host = address
                    try:
                        opened: socket.socket = super()._new_conn()
                        return opened
                    except (NewConnectionError, ConnectTimeoutError) as error:
                        last = error
            finally:
                self._dns_host = named  # the certificate has to be of this name
            raise last or NewConnectionError(self, f"{named} has no address")

        def send(self, data: bytes) -> None:
            if self.sock is None:
                self.connect()
            for start in range(0, len(data), _TLS_RECORD_BYTES):
                self.sock.settimeout(attempt.left_s())
                super().send(memoryview(data)[start : start + _TLS_RECORD_BYTES])

        def getresponse(self) -> urllib3.HTTPResponse:
            self.timeout = attempt.left_s()  # to which urllib3 sets the socket's
            response: urllib3.HTTPResponse = super().getresponse()
            return response

    return BoundedConnection


def _addresses(connection: HTTPConnection, lookups: NameLookups) -> list[str]:
    """Returns the addresses of the host to connect to. Raises NewConnectionError."""
    name, timeout_s = connection._dns_host.strip("[]"), float(connection.timeout or 0)
    try:
        return lookups.begin(name).result(timeout_s)
    except TimeoutError:
        error: OSError = no_address(name, timeout_s)
    except OSError as caught:
        error = caught
    raise NewConnectionError(connection, str(error)) from error


class _BoundedReader(io.RawIOBase):
    """What the answer is read from, until the attempt ends."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, attempt: _Attempt) -> None:
        self._raw = raw
        self._sock = sock
        self._attempt = attempt

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._attempt.left_s())
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _reason(error: HTTPError) -> str:
    """Returns what the library's error is about, without the names of its own objects."""
    inner = error.__cause__ or (error.args[-1] if error.args else None)
    return str(inner) if isinstance(inner, Exception) and str(inner) else str(error)
