"""token: the tokens that were issued (I17), on every cluster. A revoked one stays, so that it is refused.

A row never changes but for `revoked_at`, which only becomes earlier. So rows of several clusters merge in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from schemaless.access import DAY_S, Scope, Token
from schemaless.errors import Corrupt, TableMissing
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Time, commas, literal, sql

KEPT_AFTER_EXPIRY_S = 30 * DAY_S
"""A row is kept until long after its expiry, which refuses the token anyway. So its removal brings no token back."""
_TIMES = ", ".join(MICROSECONDS.format(column) for column in ("created_at", "expires_at", "revoked_at"))


def all_rows() -> Operation[list[Token]]:
    """Returns all tokens of a server. A server whose tables aren't made yet has none.

    Raises Corrupt for a row that isn't a token. Without it, access might seem to be off.
    """
    try:
        rows = yield from query(f"SELECT digest, name, datastores, scope, {_TIMES} FROM schemaless.token")
    except TableMissing:
        return []
    try:
        return [
            Token(bytes(digest), name, tuple(json.loads(datastores)), Scope(scope), created_at, expires_at, revoked_at)
            for digest, name, datastores, scope, created_at, expires_at, revoked_at in rows
        ]
    except (TypeError, ValueError) as error:
        raise Corrupt(f"a row of schemaless.token is no token: {error}") from error


def put(tokens: Iterable[Token]) -> Operation[None]:
    """Writes tokens as they are now. A revocation that the server knows already stays, if it is the earlier one."""
    rows = commas([_row(token) for token in tokens])
    yield (
        "INSERT INTO schemaless.token"
        " (digest, name, datastores, scope, created_at, expires_at, revoked_at)"
        f" VALUES {rows} ON DUPLICATE KEY UPDATE"
        " revoked_at = LEAST(COALESCE(revoked_at, VALUES(revoked_at)), COALESCE(VALUES(revoked_at), revoked_at))"
    )


def remove_old(now: int) -> Operation[None]:
    """Deletes the rows of tokens that expired long ago. It follows a `put`, so the table is never empty."""
    yield sql("DELETE FROM schemaless.token WHERE expires_at < %s", Time(now - KEPT_AFTER_EXPIRY_S * 1_000_000))


def _row(token: Token) -> str:
    revoked_at = None if token.revoked_at is None else Time(token.revoked_at)
    values = (
        token.digest,
        token.name,
        json.dumps(token.datastores),
        str(token.scope),
        Time(token.created_at),
        Time(token.expires_at),
        revoked_at,
    )
    return f"({commas(list(map(literal, values)))})"
