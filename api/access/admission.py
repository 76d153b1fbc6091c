"""Admission: the one place that decides whether a request is served: its host, its origin, its token and its rate.

The dispatcher asks it before anything else looks at a request. Each Route names the scope that it needs.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache

from starlette.types import Scope as AsgiScope

from api.access.issuer import Issuer, JwtToken
from api.access.known_tokens import KnownTokens
from schemaless.access import ALL_DATASTORES, Scope, Token
from schemaless.config import ApiSettings
from schemaless.errors import (
    Forbidden,
    ForeignOrigin,
    Malformed,
    Misconfigured,
    Misdirected,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from schemaless.runtime import loopback

ANY = "*"
_DOTS_OF_JWT = 2
"""A token of ours has none."""
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_DOCUMENTS = frozenset(("/docs", "/openapi.json"))
_DOCS_FILES = "/docs/files/"
"""What the page /docs loads. A caller who may see the page may have them."""
_UI, _UI_FILES = "/ui", "/ui/files/"
"""The page has to be there before a token can be typed into it. It shows nothing by itself."""


class Admission:
    def __init__(self, settings: ApiSettings, tokens: KnownTokens, issuer: Issuer | None = None) -> None:
        self._tokens = tokens
        self._issuer = issuer
        self._rates = RateLimit(settings.requests_per_second_max)
        self._hosts = frozenset(name.lower() for name in (*loopback.NAMES, settings.host, *settings.hosts))
        self._origins = frozenset(origin.encode() for origin in settings.origins)
        self._public = frozenset(settings.public_paths)
        self._is_local = loopback.is_loopback(settings.host)
        self._behind_proxy = settings.behind_proxy

    async def admit(self, scope: AsgiScope, path: str, needed: Scope, datastore: str | None) -> Token | None:
        """Returns the caller's token, or None where none is needed.

        Raises Misdirected, ForeignOrigin, Unauthenticated, Forbidden, TooManyRequests, Malformed and Unavailable.
        """
        host, origin, authorization = _headers_of(scope["headers"])
        server = scope.get("server")
        address = server[0] if server else ""
        if host or scope.get("http_version") == "1.1":
            # A page that names this address by a host name of its own must not reach us (DNS rebinding).
            if not host:
                raise Misdirected("the request names no server: HTTP/1.1 needs a Host header")
            name = _name_of(host)
            if name not in self._hosts and name != address and ANY not in self._hosts:
                raise Misdirected(f"{name!r} is no name of this server")
        if origin and scope["method"] not in _READING:
            self._check_origin(origin, host, scope["scheme"])
        if self._is_public(path, scope["method"]):
            return None
        if self._tokens.exist or self._issuer is not None:
            return await self._authorized(authorization, needed, datastore)
        # While there is no token, loopback alone is served.
        if not self._tokens.none_exist:
            raise Unavailable("not every cluster has said yet that there is no token, so nobody is served")
        if not self._is_local or _is_foreign(address):
            raise Unauthenticated("there is no token yet, so only loopback is served: make one on the server")
        client = scope.get("client")
        if client and not self._behind_proxy:
            self._rates.count(client[0])
        return None

    async def grants(self, authorization: bytes) -> Sequence[Token]:
        """Returns the caller's one token of ours, or a JWT's token for each of its scopes, the widest first."""
        kind, _, secret = authorization.partition(b" ")
        if kind.lower() != b"bearer" or not secret:
            raise Unauthenticated("every request needs a token")
        secret = secret.strip()
        if self._issuer is not None and secret.count(b".") == _DOTS_OF_JWT:
            return await self._issuer.find(secret)
        return (self._tokens.known(secret) or await self._tokens.find(secret),)

    async def _authorized(self, authorization: bytes, needed: Scope, datastore: str | None) -> Token:
        tokens = await self.grants(authorization)
        self._rates.count(tokens[0].digest)
        for token in tokens:
            if token.scope.includes(needed) and token.reaches(datastore):
                return token
        token = tokens[0]
        if not token.scope.includes(needed):
            raise Forbidden(f"the token {token.name!r} has scope {token.scope}, and this needs {needed}")
        what = "everything" if datastore == ALL_DATASTORES else f"datastore {datastore!r}"
        raise Forbidden(f"the token {token.name!r} was not issued for {what}")

    def _is_public(self, path: str, method: str) -> bool:
        if path == _UI or path.startswith(_UI_FILES):
            return method in _READING
        return path in self._public or (path.startswith(_DOCS_FILES) and "/docs" in self._public)

    def hold(self, token: Token | None) -> bool:
        """Returns whether a caller that was admitted with this token, or without one, would be admitted now."""
        if self._issuer is None:
            return self._tokens.hold(token)
        if token is None:
            return False
        return self._issuer.holds(token) if isinstance(token, JwtToken) else self._tokens.hold(token)

    def _check_origin(self, origin: bytes, host: bytes, scheme: str) -> None:
        own = scheme.encode() + b"://" + host
        if origin != own and origin not in self._origins:
            raise ForeignOrigin("a page of another origin can't write here")


def _headers_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes, bytes]:
    """Returns Host, Origin and Authorization. Raises Malformed and Unauthenticated for two of a kind."""
    host: bytes | None = None
    origin = authorization = b""
    for name, value in headers:
        if name == b"host":
            if host is not None:
                raise Malformed("there are two Host headers")
            host = value
        elif name == b"authorization":
            if authorization:
                raise Unauthenticated("there are two Authorization headers: send one")
            authorization = value
        elif name == b"origin":
            origin = value
    return host or b"", origin, authorization


def scope_of_other(path: str, method: str) -> tuple[Scope, str | None]:
    """Returns what a request of no route of ours needs: one that a user added, the documentation, or nobody's.

    Its method decides the scope. Nobody knows which datastores a user's route reaches, so it needs a token for all.
    """
    needed = Scope.READ if method in _READING else Scope.WRITE
    if path in _DOCUMENTS or path.startswith(_DOCS_FILES):
        return needed, None
    parts = path.split("/")
    return needed, parts[2] if len(parts) > 3 and parts[1] == "v1" else ALL_DATASTORES


def refuse_open_port(host: str, tokens: KnownTokens) -> None:
    """Raises Misconfigured for an address beyond loopback while there is no token."""
    if tokens.none_exist and not loopback.is_loopback(host):
        raise Misconfigured(
            f"SCHEMALESS_API_HOST is {host}, and there is no token, so everybody could read and write: make one with"
            " `schemaless token create NAME --datastore '*' --scope admin`, or listen on 127.0.0.1"
        )


@lru_cache(maxsize=64)
def _is_foreign(address: str) -> bool:
    return _is_address(address) and not ipaddress.ip_address(address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_HOST = re.compile(r"(?:\[([0-9a-f:.%]+)\]|([^:\[\]]*))(?::[0-9]*)?")


@lru_cache(maxsize=256)
def _name_of(host: bytes) -> str:
    """Returns the name of "name:port", "1.2.3.4:port" or "[::1]:port" in lower case, or all of what is none of them."""
    text = host.decode("latin-1").lower()
    found = _HOST.fullmatch(text)
    return (found[1] or found[2]) if found else text


# RateLimit: how many requests a caller may send in a second to this process (I14).
#
# It counts as a leaky bucket does: each request moves the caller's time on by its share of a second. A caller whose
# time is a second ahead of the clock is refused until the clock has caught up.

CALLERS_MAX = 10_000
BURST_S = 1.0


class RateLimit:
    """Without `requests_per_s` nobody is limited."""

    def __init__(self, requests_per_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._share_s = 1.0 / requests_per_s if requests_per_s else 0.0
        self._clock = clock
        self._times: dict[Hashable, float] = {}

    def count(self, caller: Hashable) -> None:
        """Counts a request. Raises TooManyRequests."""
        if not self._share_s:
            return
        now = self._clock()
        at = max(self._times.get(caller, now), now) + self._share_s
        if at > now + max(BURST_S, self._share_s):
            raise TooManyRequests(f"at most {1 / self._share_s:g} requests a second are served to one caller")
        if len(self._times) >= CALLERS_MAX:
            self._times = {name: time_ for name, time_ in self._times.items() if time_ > now}
        self._times[caller] = at
