"""Tokens: issues, reads, revokes and rotates them on the clusters that can be reached (I17).

The first token needs every cluster. So each of them knows that access is on, whichever can be reached later. After that
one reachable cluster is enough. A cluster that was away gets what it missed from the next API process that sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from schemaless.access import ALL_DATASTORES, Scope, Token, issue, merged, now_us, reissue
from schemaless.errors import Corrupt, Forbidden, Invalid, NotFound, SchemalessError, StateConflict, StorageUnavailable
from schemaless.storage import admin_action_table, schema, token_table
from schemaless.storage.admin_action_table import AdminAction
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import Answers, answers_of_all, first_answer

TOKENS_MAX = 1000
"""Rows that a process holds in memory. Each is kept until 30 days after its expiry (I14)."""
SERVICES_LIFETIME = "3650d"
_TIMEOUT_S = 1.5
_WRITE_TIMEOUT_S = 5.0

log = structlog.get_logger()


class Issued(msgspec.Struct, frozen=True):
    """A new token and its secret, which nobody can read again. `unreached` are clusters that don't have it yet."""

    secret: str
    token: Token
    unreached: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Issued({self.token.name!r})"


async def read_tokens(storage: AsyncStorage) -> Answers[list[Token]]:
    """Returns the tokens that each cluster has, from its master or else from a minion."""
    topology = storage.topology
    questions = {
        name: first_answer(
            [storage.nodes[node.name] for node in cluster.nodes],
            lambda node: node.run(token_table.all_rows, timeout_s=_TIMEOUT_S),
        )
        for name, cluster in topology.clusters.items()
    }
    answers = await answers_of_all(questions, tolerated=SchemalessError)
    found: Answers[list[Token]] = Answers()
    found.found = {name: rows for name, (rows, _) in answers.found.items()}
    found.failures = answers.failures
    for name, error in answers.failures.items():
        if isinstance(error, Corrupt):
            log.error("a cluster's tokens can't be read", cluster=name, error=str(error))
    return found


async def bring_up_to_date(storage: AsyncStorage, answers: Answers[list[Token]], known: Mapping[bytes, Token]) -> None:
    """Writes what a cluster lacks of the known tokens and revocations. One that can't be written is tried again."""
    for cluster, rows in answers.found.items():
        own = {row.digest: row for row in rows}
        missing = [token for token in known.values() if own.get(token.digest) != token]
        if missing:
            try:
                await storage.master(cluster).run(token_table.put, missing, timeout_s=_TIMEOUT_S)
            except SchemalessError as error:
                log.info("a cluster lacks tokens", cluster=cluster, missing=len(missing), error=str(error))


async def known_tokens(storage: AsyncStorage) -> dict[bytes, Token]:
    """Returns the tokens of all clusters that answer, by digest. Raises StorageUnavailable when none does."""
    return merged(token for rows in (await read_tokens(storage)).at_least_one() for token in rows)


async def create_token(
    storage: AsyncStorage, name: str, datastores: Iterable[str], scope: str, lifetime: str, issuer: Token | None = None
) -> Issued:
    """Issues a token. `issuer` is the caller's own, and the new one ends with it at the latest.

    Raises Invalid, Forbidden when it doesn't cover the new one, StateConflict when a valid token has that name, and
    StorageUnavailable.
    """
    now = now_us()
    secret, token = issue(name, datastores, scope, lifetime, now)
    if issuer is not None and not issuer.covers(token):
        raise Forbidden(f"the token {issuer.name!r} can't issue one that reaches further than itself")
    if issuer is not None:
        token = msgspec.structs.replace(token, expires_at=min(token.expires_at, issuer.ends_at))
    answers = await read_tokens(storage)
    known = merged(row for rows in answers.at_least_one() for row in rows)
    if answers.failures and not known:
        raise StorageUnavailable(
            "the first token needs every cluster, and these are away: " + ", ".join(sorted(answers.failures))
        )
    if _valid(known, name, now):
        raise StateConflict(f"there is a valid token called {name!r}: revoke or rotate it")
    _require_room(known)
    unreached = await _write(storage, [token])
    if unreached and not known:
        await _write(storage, [msgspec.structs.replace(token, revoked_at=now)])
        raise StorageUnavailable("the first token needs every cluster, and these are away: " + ", ".join(unreached))
    return Issued(secret, token, unreached)


async def revoke_token(storage: AsyncStorage, name: str, issuer: Token | None = None) -> tuple[str, ...]:
    """Revokes a token now. Returns the clusters that couldn't be reached, which learn it when they are back.

    Raises NotFound and StorageUnavailable.
    """
    now = now_us()
    valid = _found(await known_tokens(storage), name, now, issuer)
    return await _write(storage, [msgspec.structs.replace(token, revoked_at=now) for token in valid])


async def rotate_token(storage: AsyncStorage, name: str, overlap_s: int = 0) -> Issued:
    """Issues a token with the same name, reach and lifetime. The old one ends `overlap_s` seconds later."""
    now = now_us()
    known = await known_tokens(storage)
    valid = _found(known, name, now, None)
    _require_room(known)
    secret, token = reissue(max(valid, key=lambda each: each.created_at), now)
    ends_at = now + overlap_s * 1_000_000
    ending = [msgspec.structs.replace(old, revoked_at=min(ends_at, old.ends_at)) for old in valid]
    return Issued(secret, token, await _write(storage, [token, *ending]))


async def issue_for_services(storage: AsyncStorage, name: str) -> Issued:
    """Issues the token of a stack's own commands and programs, in place of an earlier one whose file was lost."""
    try:
        return await create_token(storage, name, (ALL_DATASTORES,), Scope.ADMIN, SERVICES_LIFETIME)
    except StateConflict:
        return await rotate_token(storage, name)


async def record_action(storage: AsyncStorage, action: AdminAction) -> bool:
    """Logs an administrator's action, and writes it to the first master that takes it. It never fails its caller.

    Returns whether a master took it.
    """
    # Each is written, because the log may be its only place.
    shown = {"who": action.who, "what": action.what, "peer": action.peer, "outcome": action.outcome, "each": True}
    log.info("admin action", **shown)
    try:
        await first_answer(storage.masters, lambda node: node.run(admin_action_table.insert, action, timeout_s=1.0))
    except SchemalessError as error:
        log.warning("an admin action is in this log only", error=str(error), **shown)
        return False
    return True


async def list_actions(storage: AsyncStorage, limit: int) -> list[AdminAction]:
    """Returns the last actions of the clusters that answer, newest first. Raises StorageUnavailable when none does."""
    answers = await answers_of_all(
        {master.node.name: master.run(admin_action_table.newest, limit) for master in storage.masters}
    )
    return sorted((action for rows in answers.at_least_one() for action in rows), reverse=True)[:limit]


def anybody() -> Token:
    """Returns what a caller on loopback may do while there is no token: everything."""
    return Token(b"", "anybody on loopback", (ALL_DATASTORES,), Scope.ADMIN, 0, 1 << 62)


async def _write(storage: AsyncStorage, tokens: list[Token]) -> tuple[str, ...]:
    """Returns the clusters that couldn't be reached. Raises StorageUnavailable when none could."""

    questions = {name: _put(storage, name, tokens) for name in storage.topology.clusters}
    answers = await answers_of_all(questions, tolerated=StorageUnavailable)
    answers.at_least_one()
    return tuple(sorted(answers.failures))


async def _put(storage: AsyncStorage, cluster: str, tokens: list[Token]) -> None:
    master = storage.master(cluster)
    await master.run(schema.create_server_tables, timeout_s=_WRITE_TIMEOUT_S)
    await master.run(token_table.put, tokens, timeout_s=_WRITE_TIMEOUT_S)
    await master.run(token_table.remove_old, now_us(), timeout_s=_WRITE_TIMEOUT_S)


def _valid(known: Mapping[bytes, Token], name: str, now: int) -> list[Token]:
    return [token for token in known.values() if token.name == name and now < token.ends_at]


def _found(known: Mapping[bytes, Token], name: str, now: int, issuer: Token | None) -> list[Token]:
    """Returns the valid tokens of a name. Raises NotFound, too, for one that reaches further than `issuer`."""
    valid = [token for token in _valid(known, name, now) if issuer is None or issuer.covers(token)]
    if not valid:
        raise NotFound(f"there is no valid token called {name!r}")
    return valid


def _require_room(known: Mapping[bytes, Token]) -> None:
    if len(known) >= TOKENS_MAX:
        raise Invalid("name", f"there are {TOKENS_MAX} tokens: each is kept until 30 days after its expiry")
