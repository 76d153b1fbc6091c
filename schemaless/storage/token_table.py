"""token: the tokens that were issued (I17), on every cluster. A revoked one stays, so that it is refused.

A row never changes but for `revoked_at`, which only becomes earlier. So rows of several clusters merge in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemaless.access import DAY_S, Token
from schemaless.errors import Corrupt, TableMissing
from schemaless.storage.operation import Operation
from schemaless.storage.sql import Time, commas, literals, sql
from schemaless.storage.table import Table

KEPT_AFTER_EXPIRY_S = 30 * DAY_S
"""A row is kept until long after its expiry, which refuses the token anyway. So its removal brings no token back."""
_TABLE = Table("schemaless.token", Token)


def all_rows() -> Operation[dict[bytes, Token]]:
    """Returns all tokens of a server by digest. A server whose tables aren't made yet has none.

    Raises Corrupt for a row that isn't a token. Without it, access might seem to be off.
    """
    try:
        return {token.digest: token for token in (yield from _TABLE.rows())}
    except TableMissing:
        return {}
    except (TypeError, ValueError) as error:
        raise Corrupt(f"a row of schemaless.token is no token: {error}") from error


def put(tokens: Iterable[Token]) -> Operation[None]:
    """Writes tokens as they are now. A revocation that the server knows already stays, if it is the earlier one."""
    yield (
        f"{_TABLE.insert(tokens)} ON DUPLICATE KEY UPDATE"
        " revoked_at = LEAST(COALESCE(revoked_at, VALUES(revoked_at)), COALESCE(VALUES(revoked_at), revoked_at))"
    )


def add(token: Token, instead_of: Iterable[Token], now: int) -> Operation[bool]:
    """Inserts a token unless another valid one has its name, beside those that it comes instead of. Returns whether it
    is there. Callers come one after the other, because each locks the row of the format.
    """
    values = _TABLE.values(token)
    beside = literals(*[each.digest for each in (token, *instead_of)])
    *_, found, _ = yield (
        "BEGIN;SELECT version FROM schemaless.format FOR UPDATE;"
        f"INSERT IGNORE INTO schemaless.token ({commas([*values])}) SELECT {literals(*values.values())[1:-1]} FROM DUAL"
        + sql(
            " WHERE NOT EXISTS (SELECT 1 FROM schemaless.token WHERE name = %s AND expires_at > %s"
            " AND COALESCE(revoked_at > %s, TRUE)",
            token.name,
            Time(now),
            Time(now),
        )
        + f" AND digest NOT IN {beside});"
        + sql("SELECT 1 FROM schemaless.token WHERE digest = %s;COMMIT", token.digest)
    )
    return bool(found.rows)


def remove_old(now: int) -> Operation[None]:
    """Deletes the rows of tokens that expired long ago. It follows a `put`, so the table is never empty."""
    yield sql("DELETE FROM schemaless.token WHERE expires_at < %s", Time(now - KEPT_AFTER_EXPIRY_S * 1_000_000))
