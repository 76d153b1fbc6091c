"""challenge: what a process writes into its databases before it joins a group. On every cluster.

Tailers that read the same databases answer it with the offsets of their group (I20).
"""

from __future__ import annotations

from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, sql, where

ANSWERED_AT_ONCE = 20
"""How many the tailers answer, the newest ones."""
_KEPT = "INTERVAL 1 HOUR"


def put(datastore: str, nonce: str) -> Operation[None]:
    columns = "(datastore, nonce, made_at)"
    yield sql(f"INSERT IGNORE INTO schemaless.challenge {columns} VALUES (%s, %s, %s)", datastore, nonce, NOW)


def newest() -> Operation[list[tuple[str, str, str]]]:
    """Returns when each of the newest challenges was made, its datastore and its nonce."""
    rows = yield from query(
        "SELECT made_at, datastore, nonce FROM schemaless.challenge ORDER BY made_at DESC LIMIT 1000"
    )
    return [(str(made_at), datastore, nonce) for made_at, datastore, nonce in rows]


def has(datastore: str, nonce: str) -> Operation[bool]:
    """Returns whether somebody wrote this challenge into the databases of this server."""
    return bool((yield from query(f"SELECT 1 FROM schemaless.challenge {where(datastore=datastore, nonce=nonce)}")))


def forget(datastore: str, answered: str) -> Operation[None]:
    """Deletes what was asked long before a challenge that tailers have answered: nobody asks for it any more."""
    moment = f"(SELECT made_at - {_KEPT} FROM schemaless.challenge {where(datastore=datastore, nonce=answered)})"
    for (before,) in (yield from query(f"SELECT {moment}")):
        yield sql("DELETE FROM schemaless.challenge WHERE datastore = %s AND made_at < %s", datastore, str(before))
