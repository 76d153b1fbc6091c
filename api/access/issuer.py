"""Issuer: callers who show a JWT of an OIDC issuer instead of a token of ours. Off unless an issuer is configured.

The issuer's keys are read from it, and again every few minutes. While it is away, those that were read count for an
hour. A JWT is verified by PyJWT, with the algorithm of the key: its own header chooses none.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
import msgspec
import structlog

from schemaless.access import Scope, Token, parse_grant
from schemaless.config import ApiSettings, reach_loopback
from schemaless.errors import Misconfigured, Unauthenticated, Unavailable
from schemaless.runtime.loopback import is_loopback

REFRESH_S = 300.0
RETRY_S = 10.0
"""Between two readings after a failure, and between two for the sake of keys that nobody knows."""
KEYS_AGE_MAX_S = 3600.0
CLOCK_SKEW_S = 30.0
JWT_BYTES_MAX = 8 << 10
DOCUMENT_BYTES_MAX = 1 << 20
KEYS_MAX = 100
WAITING_MAX = 64
"""Requests that wait until the keys were read again. Others get a 503."""
VERIFIED_MAX = 10_000
_TIMEOUT_S = 5.0

_ALGORITHMS = frozenset(
    f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)
) | {"EdDSA"}  # fmt: skip
"""Those with a key of which the issuer alone has the secret half."""
_REQUIRED = ["exp", "iat", "iss", "aud", "sub"]

log = structlog.get_logger()

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns what is at a URL. Raises OSError and httpx.HTTPError."""


class JwtToken(Token, frozen=True):
    """What one JWT allows in one scope. `digest` names issuer and subject: all JWTs of a subject share its limits."""


class IssuerKeys:
    """The public keys of an issuer by their `kid`. Lives on one event loop."""

    def __init__(self, issuer: str, fetch: Fetch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._fetch = fetch
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._read_at = self._tried_at = float("-inf")
        self._reading = asyncio.Lock()
        self._waiting = 0

    async def find(self, kid: str) -> jwt.PyJWK:
        """Returns a key. One that isn't known makes the keys be read again, at most every RETRY_S for all callers.

        Raises Unauthenticated for a key that the issuer doesn't have, and Unavailable while its keys aren't known.
        """
        if kid not in self._keys:
            if self._waiting >= WAITING_MAX:
                raise Unavailable("too many JWTs with unknown keys at once")
            self._waiting += 1
            try:
                await self.read_again()
            finally:
                self._waiting -= 1
        if self._clock() - self._read_at > KEYS_AGE_MAX_S:
            raise Unavailable("the keys of the issuer of JWTs can't be read")
        if kid not in self._keys:
            raise Unauthenticated("the JWT was signed with a key that its issuer doesn't have")
        return self._keys[kid]

    async def read_again(self) -> None:
        """Reads the keys, unless that was tried a moment ago. A failure is logged, and the keys stay."""
        async with self._reading:
            if self._clock() - self._tried_at < RETRY_S:
                return
            self._tried_at = self._clock()
            try:
                self._keys = await self._read()
            except (OSError, httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError, ValueError) as error:
                log.warning("the keys of the issuer of JWTs can't be read", issuer=self._issuer, error=repr(error))
                return
            self._read_at = self._tried_at

    async def run(self) -> None:
        """Reads the keys again and again."""
        while True:
            await self.read_again()
            await asyncio.sleep(REFRESH_S if self._read_at == self._tried_at else RETRY_S)

    async def _read(self) -> dict[str, jwt.PyJWK]:
        """Raises ValueError for what is no answer of this issuer."""
        at = self._issuer.rstrip("/") + "/.well-known/openid-configuration"
        about = msgspec.json.decode(await self._fetch(_safe(at)), type=_Discovery)
        if about.issuer != self._issuer:
            raise ValueError(f"it calls itself {about.issuer!r}")
        found = msgspec.json.decode(await self._fetch(_safe(about.jwks_uri)), type=_KeySet)
        return {str(key["kid"]): usable for key in found.keys[:KEYS_MAX] if (usable := _usable(key)) is not None}


class Issuer:
    """Decides what a JWT allows. `now` counts seconds since the epoch."""

    def __init__(
        self, issuer: str, audience: str, claim: str, keys: IssuerKeys, *, now: Callable[[], float] = time.time
    ) -> None:
        self.keys = keys
        self._issuer = issuer
        self._audience = audience
        self._claim = claim
        self._now = now
        self._verified: dict[bytes, tuple[jwt.PyJWK, tuple[JwtToken, ...]]] = {}
        self._jwt = jwt.PyJWT({"require": _REQUIRED, "enforce_minimum_key_length": True})

    async def find(self, secret: bytes) -> tuple[JwtToken, ...]:
        """Returns what a JWT allows, the widest scope first. Raises Unauthenticated and Unavailable."""
        if len(secret) > JWT_BYTES_MAX:
            raise Unauthenticated(f"a JWT has at most {JWT_BYTES_MAX} bytes")
        try:
            kid = jwt.get_unverified_header(secret).get("kid")
        except jwt.InvalidTokenError:
            raise Unauthenticated("the JWT can't be read") from None
        if not isinstance(kid, str):
            raise Unauthenticated("the JWT doesn't say which key signed it")
        key = await self.keys.find(kid)
        digest = hashlib.sha256(secret).digest()
        by, tokens = self._verified.get(digest, (None, ()))
        if by is not key:  # a signature costs fifty times as much as all else
            tokens = self._verify(secret, key)
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified[digest] = key, tokens
        if not self.holds(tokens[0]):
            raise Unauthenticated("the JWT has expired")
        return tokens

    def holds(self, token: JwtToken) -> bool:
        """Returns whether a JWT that was accepted would be accepted now."""
        return self._now() < token.expires_at / 1e6

    def _verify(self, secret: bytes, key: jwt.PyJWK) -> tuple[JwtToken, ...]:
        try:
            claims = self._jwt.decode(
                secret,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=CLOCK_SKEW_S,
            )
            digest = hashlib.sha256(f"{self._issuer}\0{claims['sub']}".encode()).digest()
            expires_at = int((claims["exp"] + CLOCK_SKEW_S) * 1e6)
            reach: dict[Scope, set[str]] = {}
            for datastore, scope in _grants(claims.get(self._claim)):
                reach.setdefault(scope, set()).add(datastore)
            tokens = tuple(
                JwtToken(
                    digest, str(claims["sub"]), tuple(sorted(reach[scope])), scope, int(claims["iat"] * 1e6), expires_at
                )
                for scope in reversed(Scope)
                if scope in reach
            )
        except (jwt.PyJWTError, ValueError, OverflowError) as error:  # PyJWT lets some claims' errors out
            raise Unauthenticated(f"the JWT isn't valid: {error}") from None
        if not tokens:
            raise Unauthenticated(f"the claim {self._claim!r} of the JWT grants nothing here")
        return tokens


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def issuer_of(settings: ApiSettings) -> Issuer | None:
    """Returns the issuer that is configured. It is asked through the environment's proxy, if it isn't on loopback.

    Raises Misconfigured for settings that would let in others than this API's callers, and for an environment that
    nobody can be asked in.
    """
    issuer = settings.oidc_issuer
    if issuer is None:
        return None
    if not settings.oidc_audience:
        raise Misconfigured("SCHEMALESS_API_OIDC_ISSUER needs SCHEMALESS_API_OIDC_AUDIENCE: the name of this API there")
    try:
        _safe(issuer)
    except ValueError as error:
        raise Misconfigured(f"SCHEMALESS_API_OIDC_ISSUER: {error}") from None
    reach_loopback()
    try:
        client = httpx.AsyncClient()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise Misconfigured(
            f"the issuer of JWTs can't be asked with HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            f" as they are set: {error}"
        ) from None
    return Issuer(issuer, settings.oidc_audience, settings.oidc_claim, IssuerKeys(issuer, fetch_over(client)))


def fetch_over(client: httpx.AsyncClient) -> Fetch:
    """Returns what reads a document of bounded size. A redirect is a failure: the issuer's address is configured."""

    async def fetch(url: str) -> bytes:
        async with asyncio.timeout(_TIMEOUT_S), client.stream("GET", url, follow_redirects=False) as response:
            if response.status_code != 200:
                raise OSError(f"{url}: status {response.status_code}")
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > DOCUMENT_BYTES_MAX:
                    raise OSError(f"{url}: more than {DOCUMENT_BYTES_MAX} bytes")
        return body

    return fetch


def _safe(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        raise ValueError(f"{url!r} must begin with https://")
    return url


def _usable(document: Mapping[str, Any]) -> jwt.PyJWK | None:
    """Returns a key that verifies signatures, or None. A key set may hold others, and kinds that nobody here knows."""
    if not isinstance(document.get("kid"), str) or document.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(dict(document))
    except (jwt.PyJWTError, TypeError, ValueError):
        return None
    return key if key.algorithm_name in _ALGORITHMS else None


def _grants(claim: object) -> Iterable[tuple[str, Scope]]:
    """Yields the grants of a claim: words of a text, or a list of texts. What isn't ours is passed over."""
    words = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    for word in words:
        grant = parse_grant(word) if isinstance(word, str) else None
        if grant is not None:
            yield grant
