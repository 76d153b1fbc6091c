"""Transport: sets up httpx for both drivers, with connections, time-outs and headers. Limits bound them (I14)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from pydantic import SecretStr

from schemaless.client.attempts import Limits
from schemaless.client.exchange import MSGPACK, ClientRequest, ClientResponse
from schemaless.client.local_stack import local_stack
from schemaless.client.profiles import read_profile
from schemaless.config import ClientSettings, program_version
from schemaless.runtime.private_file import read_private_text
from schemaless.runtime.tls import Tls

T = TypeVar("T")

CHOSEN_PROFILE: ContextVar[str | None] = ContextVar("CHOSEN_PROFILE", default=None)
"""What `schemaless --profile NAME` chose, for all clients of the command."""


def settings_of(hosts: Sequence[str] = (), token: str | None = None) -> ClientSettings:
    """Returns the given hosts and token. What is missing comes from the profile, then from the environment.

    Where nothing names hosts, they are those of the embedded stack that runs here, and so is the token.

    Raises Misconfigured for a profile that doesn't exist, and for a file with a token that others can read.
    """
    settings = ClientSettings()
    given: dict[str, Any] = {}
    name = CHOSEN_PROFILE.get() or settings.profile
    if name:
        profile = read_profile(settings.profiles.expanduser(), name)
        given = {
            "hosts": profile.hosts,
            "token": profile.token and SecretStr(profile.token),
            "ca": Path(profile.ca) if profile.ca else settings.ca,
        }
    elif settings.token is None and settings.token_file is not None:
        kept = read_private_text(settings.token_file)
        given = {"token": SecretStr(kept.strip()) if kept else None}
    if hosts:
        given["hosts"] = tuple(hosts)
    if token is not None:
        given["token"] = SecretStr(token)
    settings = settings.model_copy(update=given)
    if settings.hosts or (stack := local_stack()) is None:
        return settings
    kept = settings.token.get_secret_value() if settings.token else stack.token()
    return settings.model_copy(update={"hosts": tuple(stack.api), "token": SecretStr(kept) if kept else None})


POOL_CONNECTIONS_MAX = 8


class TransportPools(Generic[T]):
    """Transports of httpx with a few connections each, made as they are needed. Threads may share them.

    A pool of httpx looks through all its connections at each event, so one of 64 costs many times as much CPU a request
    as eight of 8.
    """

    def __init__(self, make: Callable[[], T], pools_max: int) -> None:
        self._make = make
        self._pools_max = pools_max
        self._in_flight: dict[T, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[T]:
        """Holds a place in the first pool that has a free connection. If none has, in the one with the least to do."""
        with self._lock:
            free = (pool for pool, requests in self._in_flight.items() if requests < POOL_CONNECTIONS_MAX)
            pool = next(free, None)
            if pool is None and len(self._in_flight) < self._pools_max:
                pool = self._make()
            elif pool is None:
                pool = min(self._in_flight, key=self._in_flight.__getitem__)
            self._in_flight[pool] = self._in_flight.get(pool, 0) + 1
        try:
            yield pool
        finally:
            with self._lock:
                self._in_flight[pool] -= 1

    def all(self) -> list[T]:
        return list(self._in_flight)


def pools_of(given: T | None, kind: Callable[..., T], settings: ClientSettings, limits: Limits) -> TransportPools[T]:
    """Returns pools of transports of one kind, or the one that was given."""
    if given is not None:
        return TransportPools(lambda: given, 1)
    verify = {} if settings.ca is None else {"verify": Tls(str(settings.ca)).context()}
    connections = min(POOL_CONNECTIONS_MAX, limits.connections_max)
    options = {
        **verify,
        "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        "trust_env": False,  # the environment is read in schemaless/config.py only
    }
    return TransportPools(lambda: kind(**options), max(1, limits.connections_max // connections))


def headers_of(settings: ClientSettings) -> dict[str, str]:
    """Returns the headers of every request."""
    headers = {"accept": MSGPACK, "accept-encoding": "gzip, deflate", "user-agent": f"schemaless/{program_version()}"}
    if settings.token is not None:
        headers["authorization"] = f"Bearer {settings.token.get_secret_value()}"
    return headers


def http_request(
    request: ClientRequest, url: str, attempt_timeout_s: float, limits: Limits, headers: Mapping[str, str]
) -> httpx.Request:
    """Returns a request for a transport of httpx. Its client would do more for each request than all of ours does."""
    timeout = httpx.Timeout(attempt_timeout_s, connect=min(limits.connect_timeout_s, attempt_timeout_s))
    return httpx.Request(
        request.method,
        url + request.path,
        params=request.params or None,
        headers={**headers, **request.headers},
        content=request.content or None,
        extensions={"timeout": timeout.as_dict()},
    )


def response_of(response: httpx.Response) -> ClientResponse:
    return ClientResponse(response.status_code, response.headers, response.content)
