"""Tokens: issues, reads, revokes and rotates them on the clusters that can be reached (I17).

The first token needs every cluster. So each of them knows that access is on, whichever can be reached later. After that
one reachable cluster is enough. A cluster that was away gets what it missed from the next API process that sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from schemaless.access import ALL_DATASTORES, Scope, Token, either, issue, now_us, reissue
from schemaless.errors import Corrupt, Forbidden, Invalid, NotFound, SchemalessError, StateConflict, StorageUnavailable
from schemaless.storage import admin_action_table, schema, token_table
from schemaless.storage.admin_action_table import AdminAction
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.everywhere import bring_up, read_everywhere, together, write_everywhere
from schemaless.storage.failover import Answers, ask_masters, first_answer, nobody_answers

TOKENS_MAX = 1000
"""Rows that a process holds in memory. Each is kept until 30 days after its expiry (I14)."""
SERVICES_LIFETIME = "3650d"
_TIMEOUT_S = 1.5
_WRITE_TIMEOUT_S = 5.0
_FIRST = "the first token needs every cluster, and some are away"

Tokens = Mapping[bytes, Token]
"""By digest."""

log = structlog.get_logger()


class Issued(msgspec.Struct, frozen=True):
    """A new token and its secret, which nobody can read again. `unreached` are clusters that don't have it yet."""

    secret: str
    token: Token
    unreached: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Issued({self.token.name!r})"


async def read_tokens(storage: AsyncStorage) -> Answers[Tokens]:
    """Returns by digest the tokens that each cluster has, from its master or else from a minion."""
    answers: Answers[Tokens] = await read_everywhere(
        storage, lambda node: node.run(token_table.all_rows, timeout_s=_TIMEOUT_S), tolerated=SchemalessError
    )
    for name, error in answers.failures.items():
        if isinstance(error, Corrupt):
            log.error("a cluster's tokens can't be read", cluster=name, error=str(error))
    return answers


async def bring_up_to_date(storage: AsyncStorage, answers: Answers[Tokens], known: Tokens) -> None:
    """Writes what a cluster lacks of the known tokens and revocations. One that can't be written is tried again."""
    await bring_up(
        storage, answers.found, known, lambda master, rows: master.run(token_table.put, rows, timeout_s=_TIMEOUT_S)
    )


async def known_tokens(storage: AsyncStorage) -> dict[bytes, Token]:
    """Returns the tokens of all clusters that answer, by digest. Raises StorageUnavailable when none does."""
    return together((await read_tokens(storage)).at_least_one(), either)


async def create_token(
    storage: AsyncStorage, name: str, datastores: Iterable[str], scope: str, lifetime: str, issuer: Token | None = None
) -> Issued:
    """Issues a token. `issuer` is the caller's own, and the new one ends with it at the latest.

    Raises Invalid, Forbidden when it doesn't cover the new one, StateConflict when a valid token has that name, and
    StorageUnavailable.
    """
    now = now_us()
    secret, token = issue(name, datastores, scope, lifetime, now)
    if issuer is not None:
        if not issuer.covers(token):
            raise Forbidden(f"the token {issuer.name!r} can't issue one that reaches further than itself")
        token = msgspec.structs.replace(token, expires_at=min(token.expires_at, issuer.ends_at))
    answers = await read_tokens(storage)
    known = together(answers.at_least_one(), either)
    if answers.failures and not known:
        raise nobody_answers(answers.failures.values(), _FIRST)
    if _valid(known, name, now):
        raise StateConflict(f"there is a valid token called {name!r}: revoke or rotate it")
    _require_room(known)
    if not await _add(storage, token):
        raise StateConflict(f"a token called {name!r} was issued just now: revoke or rotate it")
    revoked = msgspec.structs.replace(token, revoked_at=now)
    try:
        unreached = await _write(storage, [token])
    except StorageUnavailable:  # nobody has its secret, and its name has to be free again
        await _write(storage, [revoked])
        raise
    if unreached and not known:
        await _write(storage, [revoked])
        away = [storage.master(name).refused or StorageUnavailable(f"cluster {name} is away") for name in unreached]
        raise nobody_answers(away, _FIRST)
    return Issued(secret, token, unreached)


async def revoke_token(storage: AsyncStorage, name: str, issuer: Token | None = None) -> tuple[str, ...]:
    """Revokes a token now. Returns the clusters that couldn't be reached, which learn it when they are back.

    Raises NotFound and StorageUnavailable.
    """
    now = now_us()
    valid = _found(await known_tokens(storage), name, now, issuer)
    return await _write(storage, [msgspec.structs.replace(token, revoked_at=now) for token in valid])


async def rotate_token(storage: AsyncStorage, name: str, overlap_s: int = 0) -> Issued:
    """Issues a token with the same name, reach and lifetime. The old one ends `overlap_s` seconds later.

    Raises NotFound, StateConflict when another rotation came first, and StorageUnavailable.
    """
    now = now_us()
    known = await known_tokens(storage)
    valid = _found(known, name, now, None)
    _require_room(known)
    secret, token = reissue(max(valid, key=lambda each: each.created_at), now)
    ends_at = now + overlap_s * 1_000_000
    ending = [msgspec.structs.replace(old, revoked_at=min(ends_at, old.ends_at)) for old in valid]
    if not await _add(storage, token, instead_of=valid):
        raise StateConflict(f"the token {name!r} was rotated just now")
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
    answers = await ask_masters(
        storage, storage.topology.clusters, admin_action_table.newest, limit, tolerated=StorageUnavailable
    )
    return sorted((action for rows in answers.at_least_one() for action in rows), reverse=True)[:limit]


def anybody() -> Token:
    """Returns what a caller on loopback may do while there is no token: everything."""
    return Token(b"", "anybody on loopback", (ALL_DATASTORES,), Scope.ADMIN, 0, 1 << 62)


async def _add(storage: AsyncStorage, token: Token, instead_of: Iterable[Token] = ()) -> bool:
    """Adds a token on the first master that answers, so that of several with one name one is issued. Returns False
    where another one came first. Raises StorageUnavailable when no master answers.
    """
    failures = []
    for master in storage.masters:
        try:
            await master.run(schema.create_server_tables, timeout_s=_WRITE_TIMEOUT_S)
            return await master.run(token_table.add, token, tuple(instead_of), now_us(), timeout_s=_WRITE_TIMEOUT_S)
        except StorageUnavailable as error:
            log.info("a cluster can't be asked whether a token's name is free", error=str(error))
            failures.append(error)
    raise nobody_answers(failures, "no master can say whether the token's name is free")


async def _write(storage: AsyncStorage, tokens: list[Token]) -> tuple[str, ...]:
    """Returns the clusters that couldn't be reached. Raises StorageUnavailable when none could."""

    async def put(master: AsyncNode) -> None:
        await master.run(schema.create_server_tables, timeout_s=_WRITE_TIMEOUT_S)
        await master.run(token_table.put, tokens, timeout_s=_WRITE_TIMEOUT_S)
        await master.run(token_table.remove_old, now_us(), timeout_s=_WRITE_TIMEOUT_S)

    return tuple(await write_everywhere(storage.masters, put))


def _valid(known: Tokens, name: str, now: int) -> list[Token]:
    return [token for token in known.values() if token.name == name and now < token.ends_at]


def _found(known: Tokens, name: str, now: int, issuer: Token | None) -> list[Token]:
    """Returns the valid tokens of a name. Raises NotFound, too, for one that reaches further than `issuer`."""
    valid = [token for token in _valid(known, name, now) if issuer is None or issuer.covers(token)]
    if not valid:
        raise NotFound(f"there is no valid token called {name!r}")
    return valid


def _require_room(known: Tokens) -> None:
    if len(known) >= TOKENS_MAX:
        raise Invalid("name", f"there are {TOKENS_MAX} tokens: each is kept until 30 days after its expiry")
