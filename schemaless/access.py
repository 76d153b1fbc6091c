"""Access (I17): what a token is, what it reaches, and how one is made. No I/O.

A token is 256 random bits. Only its SHA-256 digest is stored. A slow hash protects passwords that people choose and
others can guess. Nobody guesses 256 bits, and a slow hash would cost every request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from schemaless.cell import created_at_text
from schemaless.errors import Invalid

ALL_DATASTORES = "*"
PREFIX = "sl_"
DAY_S = 86_400
LIFETIME_DEFAULT = "90d"
LIFETIME_MAX_S = 3_660 * DAY_S

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_DATASTORE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LIFETIME = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": DAY_S}


class Scope(StrEnum):
    """What a caller may do. Each scope includes the ones before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        return _RANK[self] >= _RANK[other]


_RANK = {scope: rank for rank, scope in enumerate(Scope)}


class Token(msgspec.Struct, frozen=True):
    """One issued token. Times are in microseconds since the epoch, UTC. `revoked_at` may lie in the future."""

    digest: bytes
    name: str
    datastores: tuple[str, ...]
    scope: Scope
    created_at: int
    expires_at: int
    revoked_at: int | None = None

    @property
    def ends_at(self) -> int:
        return self.expires_at if self.revoked_at is None else min(self.revoked_at, self.expires_at)

    def reaches(self, datastore: str | None) -> bool:
        """Returns whether it was issued for a datastore. None stands for what belongs to no datastore."""
        return datastore is None or datastore in self.datastores or ALL_DATASTORES in self.datastores

    def covers(self, other: Token) -> bool:
        """Returns whether it may make and revoke the other one: never one that reaches further than itself."""
        return self.scope.includes(other.scope) and all(map(self.reaches, other.datastores))

    def view(self, now: int) -> dict[str, object]:
        """Returns what everybody may know who may list tokens."""
        state = "active" if now < self.ends_at else "expired" if self.expires_at == self.ends_at else "revoked"
        return {
            "name": self.name,
            "datastores": list(self.datastores),
            "scope": str(self.scope),
            "state": state,
            "created_at": created_at_text(self.created_at),
            "expires_at": created_at_text(self.expires_at),
            "revoked_at": None if self.revoked_at is None else created_at_text(self.revoked_at),
        }


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def now_us() -> int:
    return time.time_ns() // 1000


def issue(name: str, datastores: Iterable[str], scope: str, lifetime: str, now: int) -> tuple[str, Token]:
    """Returns a new secret, which is shown once, and its token. Raises Invalid."""
    named = tuple(sorted(set(datastores)))
    if not _NAME.fullmatch(name):
        raise Invalid("name", "must be 1 to 64 letters, digits and _ . @ -")
    if not named or len(named) > 64 or not all(one == ALL_DATASTORES or _DATASTORE.fullmatch(one) for one in named):
        raise Invalid("datastores", f"must be 1 to 64 names of datastores, or {ALL_DATASTORES} for all")
    try:
        granted = Scope(scope)
    except ValueError:
        raise Invalid("scope", f"must be one of {', '.join(Scope)}") from None
    secret = PREFIX + secrets.token_urlsafe(32)
    expires_at = now + parse_lifetime(lifetime, "expires") * 1_000_000
    return secret, Token(digest_of(secret.encode()), name, named, granted, now, expires_at)


def reissue(token: Token, now: int) -> tuple[str, Token]:
    """Returns another secret with the name, reach and lifetime of a token."""
    secret = PREFIX + secrets.token_urlsafe(32)
    lifetime = token.expires_at - token.created_at
    return secret, msgspec.structs.replace(
        token, digest=digest_of(secret.encode()), created_at=now, expires_at=now + lifetime, revoked_at=None
    )


def parse_lifetime(text: str, field: str) -> int:
    """Returns the seconds of "90d", "12h", "30m" or "60s". Raises Invalid."""
    found = _LIFETIME.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LIFETIME_MAX_S:
        raise Invalid(field, f"must be like 90d, 12h, 30m or 60s, and at most {LIFETIME_MAX_S // DAY_S}d")
    return seconds


def parse_grant(text: str) -> tuple[str, Scope] | None:
    """Returns datastore and scope of "schemaless:trips:write", or None for what is no grant of ours."""
    ours, _, rest = text.partition(":")
    datastore, _, scope = rest.partition(":")
    if ours != "schemaless" or scope not in _RANK:
        return None
    if datastore != ALL_DATASTORES and not _DATASTORE.fullmatch(datastore):
        return None
    return datastore, Scope(scope)


def either(token: Token, other: Token) -> Token:
    """Returns one token, of what two clusters have. A revocation that one of them has counts, the earlier of two."""
    revocations = [each.revoked_at for each in (token, other) if each.revoked_at is not None]
    return msgspec.structs.replace(token, revoked_at=min(revocations, default=None))
