"""KnownTokens: the tokens that this process knows, read again every second.

A revocation that was seen once is never forgotten, whatever a cluster says that was away meanwhile.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable

import structlog

from schemaless.access import Token, digest_of, either, now_us
from schemaless.errors import Unauthenticated, Unavailable
from schemaless.ops.tokens import bring_up_to_date, read_tokens
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.everywhere import together
from schemaless.storage.token_table import KEPT_AFTER_EXPIRY_S

log = structlog.get_logger()

REFRESH_S = 1.0
UNKNOWN_PAUSE_S = 0.2
"""Between two readings for the sake of tokens that nobody knows."""
WAITING_MAX = 64
"""Requests with unknown tokens that wait until the tokens were read again. Others get a 503."""


class KnownTokens:
    """`clock` counts microseconds since the epoch, because tokens expire by it."""

    def __init__(self, storage: AsyncStorage | None, *, clock: Callable[[], int] = now_us) -> None:
        self._storage = storage
        self._clock = clock
        self._by_digest: dict[bytes, Token] = {}
        self._refreshing = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._waiting = 0
        self._unasked = frozenset(() if storage is None else storage.topology.clusters)
        self._were_read = False
        self.exist = False
        """Whether any token was ever seen, revoked and expired ones included. Access never goes off again."""

    @property
    def none_exist(self) -> bool:
        """Whether every cluster has said that it has no token. A new cluster knows of none before it is told."""
        return self._were_read and not self.exist and not self._unasked

    def learn(self, tokens: Iterable[Token]) -> None:
        """Adds what clusters show to what is known, and drops what no cluster keeps any more."""
        found = together([self._by_digest, *({token.digest: token} for token in tokens)], either)
        self.exist = self.exist or bool(found)
        oldest = self._clock() - KEPT_AFTER_EXPIRY_S * 1_000_000
        self._by_digest = {digest: token for digest, token in found.items() if token.expires_at >= oldest}
        self._were_read = True

    async def refresh(self) -> None:
        """Reads the tokens. While no cluster answers, those that are known count."""
        if self._storage is None:
            return
        began = time.monotonic()
        answers = await read_tokens(self._storage)
        self._refreshed_at = began
        self._unasked -= answers.found.keys()
        if self._unasked and not self.exist:
            log.warning("nobody is served while it isn't known whether there are tokens", unread=sorted(self._unasked))
        if answers.found:
            self.learn(token for rows in answers.found.values() for token in rows.values())
            await bring_up_to_date(self._storage, answers, self._by_digest)

    async def find(self, secret: bytes) -> Token:
        """Returns the token of a secret. Raises Unauthenticated when none is valid, and Unavailable.

        Reads the tokens again for one that is unknown, at most five times a second for all callers together.
        """
        token = self.known(secret)
        if token is None:
            if self._waiting >= WAITING_MAX:
                raise Unavailable("too many requests with unknown tokens at once")
            asked_at = time.monotonic()
            self._waiting += 1
            try:
                async with self._refreshing:
                    if self._refreshed_at <= asked_at:
                        await asyncio.sleep(self._refreshed_at + UNKNOWN_PAUSE_S - time.monotonic())
                        await self.refresh()
            finally:
                self._waiting -= 1
            token = self.known(secret)
        if token is None:
            raise Unauthenticated("the token isn't known")
        return token

    def known(self, secret: bytes) -> Token | None:
        """Returns the token of a secret without waiting, None for one that is unknown. Raises Unauthenticated."""
        digest = digest_of(secret)
        token = self._by_digest.get(digest)
        if token is None or not hmac.compare_digest(token.digest, digest):
            return None
        now = self._clock()
        if now >= token.expires_at or (token.revoked_at is not None and now >= token.revoked_at):
            raise Unauthenticated("the token has expired" if now >= token.expires_at else "the token was revoked")
        return token

    def hold(self, token: Token | None) -> bool:
        """Returns whether a caller that was admitted with this token, or without one, would be admitted now."""
        if token is None:
            return not self.exist
        known = self._by_digest.get(token.digest)
        return known is not None and self._clock() < known.ends_at
