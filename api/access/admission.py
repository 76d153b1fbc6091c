"""Admission: the one place that decides whether a request is served: its host, its origin, its token and its rate.

The dispatcher asks it before anything else looks at a request. Each Route names the scope that it needs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache

from starlette.types import Scope as AsgiScope

from api.access.issuer import Issuer, JwtToken
from api.access.known_tokens import KnownTokens
from api.access.rate_limit import RateLimit
from schemaless.access import ALL_DATASTORES, Scope, Token
from schemaless.config import ApiSettings
from schemaless.errors import (
    Forbidden,
    ForeignOrigin,
    Malformed,
    Misconfigured,
    Misdirected,
    Unauthenticated,
    Unavailable,
)

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY = "*"
_DOTS_OF_JWT = 2
"""A token of ours has none."""
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_DOCUMENTS = frozenset(("/docs", "/openapi.json"))
_DOCS_FILES = "/docs/files/"
"""What the page /docs loads. A caller who may see the page may have them."""


class Admission:
    def __init__(self, settings: ApiSettings, tokens: KnownTokens, issuer: Issuer | None = None) -> None:
        self._tokens = tokens
        self._issuer = issuer
        self._rates = RateLimit(settings.requests_per_second_max)
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK_NAMES, settings.host, *settings.hosts))
        self._origins = frozenset(origin.encode() for origin in settings.origins)
        self._public = frozenset(settings.public_paths)
        self._is_local = is_loopback(settings.host)
        self._behind_proxy = settings.behind_proxy

    async def admit(self, scope: AsgiScope, path: str, needed: Scope, datastore: str | None) -> Token | None:
        """Returns the caller's token, or None where none is needed.

        Raises Misdirected, ForeignOrigin, Unauthenticated, Forbidden, TooManyRequests, Malformed and Unavailable.
        """
        host, origin, authorization = _headers_of(scope["headers"])
        server = scope.get("server")
        address = server[0] if server else ""
        if host:
            self._check_host(host, address)
        if origin and scope["method"] not in _READING:
            self._check_origin(origin, host, scope["scheme"])
        if path in self._public or (path.startswith(_DOCS_FILES) and "/docs" in self._public):
            return None
        if self._tokens.exist or self._issuer is not None:
            return await self._authorized(authorization, needed, datastore)
        self._check_open(address)
        client = scope.get("client")
        if client and not self._behind_proxy:
            self._rates.count(client[0])
        return None

    async def _authorized(self, authorization: bytes, needed: Scope, datastore: str | None) -> Token:
        """A caller has one token of ours, or a JWT, which is one token for each of its scopes, the widest first."""
        kind, _, secret = authorization.partition(b" ")
        if kind.lower() != b"bearer" or not secret:
            raise Unauthenticated("every request needs a token")
        secret = secret.strip()
        if self._issuer is not None and secret.count(b".") == _DOTS_OF_JWT:
            tokens: Sequence[Token] = await self._issuer.find(secret)
        else:
            tokens = (self._tokens.known(secret) or await self._tokens.find(secret),)
        self._rates.count(tokens[0].digest)
        for token in tokens:
            if token.scope.includes(needed) and token.reaches(datastore):
                return token
        token = tokens[0]
        if not token.scope.includes(needed):
            raise Forbidden(f"the token {token.name!r} has scope {token.scope}, and this needs {needed}")
        what = "everything" if datastore == ALL_DATASTORES else f"datastore {datastore!r}"
        raise Forbidden(f"the token {token.name!r} was not issued for {what}")

    def hold(self, token: Token | None) -> bool:
        """Returns whether a caller that was admitted with this token, or without one, would be admitted now."""
        if self._issuer is None:
            return self._tokens.hold(token)
        if token is None:
            return False
        return self._issuer.holds(token) if isinstance(token, JwtToken) else self._tokens.hold(token)

    def _check_host(self, host: bytes, address: str) -> None:
        """A page that names this address by a host name of its own must not reach us (DNS rebinding)."""
        name = _name_of(host)
        if name not in self._hosts and name != address and ANY not in self._hosts:
            raise Misdirected(f"{name!r} is no name of this server")

    def _check_origin(self, origin: bytes, host: bytes, scheme: str) -> None:
        own = scheme.encode() + b"://" + host
        if origin != own and origin not in self._origins:
            raise ForeignOrigin("a page of another origin can't write here")

    def _check_open(self, address: str) -> None:
        """While there is no token, loopback alone is served."""
        if not self._tokens.none_exist:
            raise Unavailable("not every cluster has said yet that there is no token, so nobody is served")
        if not self._is_local or _is_foreign(address):
            raise Unauthenticated("there is no token yet, so only loopback is served: make one on the server")


def _headers_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes, bytes]:
    """Returns Host, Origin and Authorization. Raises Malformed and Unauthenticated for two of a kind."""
    host = origin = authorization = b""
    for name, value in headers:
        if name == b"host":
            if host:
                raise Malformed("there are two Host headers")
            host = value
        elif name == b"authorization":
            if authorization:
                raise Unauthenticated("there are two Authorization headers: send one")
            authorization = value
        elif name == b"origin":
            origin = value
    return host, origin, authorization


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
    if tokens.none_exist and not is_loopback(host):
        raise Misconfigured(
            f"SCHEMALESS_API_HOST is {host}, and there is no token, so everybody could read and write: make one with"
            " `schemaless token create NAME --datastore '*' --scope admin`, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


@lru_cache(maxsize=64)
def _is_foreign(address: str) -> bool:
    return _is_address(address) and not ipaddress.ip_address(address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=256)
def _name_of(host: bytes) -> str:
    """Returns the name of "name:port", "1.2.3.4:port" or "[::1]:port", in lower case."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
