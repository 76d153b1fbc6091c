"""Makes the tables of schema.sql, and refuses databases of a format that is not known."""

from __future__ import annotations

import re
from importlib.resources import files

from schemaless.errors import Misconfigured
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import SERVICE_PRIVILEGES, Name, Script, literal
from schemaless.topology import Datastore

FORMAT_VERSION = 7
"""Of the server's database and of every shard database: a shard is made only where the server's is known."""

_SECTION = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def create_server_tables() -> Operation[None]:
    """Makes the tables of a server. Idempotent. Raises Misconfigured for a format that this program doesn't know."""
    yield _section("server")
    yield (
        f"INSERT INTO schemaless.format SELECT {FORMAT_VERSION} FROM DUAL"
        " WHERE NOT EXISTS (SELECT * FROM schemaless.format)"
    )
    yield from check_format()


def check_format() -> Operation[None]:
    """Raises Misconfigured for a format that this program doesn't know."""
    rows = yield from query("SELECT version FROM schemaless.format")
    if [tuple(row) for row in rows] != [(FORMAT_VERSION,)]:
        raise Misconfigured(
            f"the databases have format {[row[0] for row in rows]}, this program knows {FORMAT_VERSION}:"
            " start with empty servers, or use the release that made these databases"
        )


def create_shard(datastore: Datastore, shard: int) -> Operation[None]:
    """Makes the shard's database and its head, on the master of its home. Idempotent."""
    yield _section("shard") % {
        "database": literal(Name(datastore.database(shard))),
        "datastore": literal(datastore.name),
        "shard": shard,
    }


def grant_datastore(datastore: Datastore, account: str) -> Operation[None]:
    """Gives an account, as CURRENT_USER() names it, the datastore's databases. Idempotent. Only administrators may."""
    user, _, host = account.rpartition("@")
    databases = Name(datastore.name.replace("_", "\\_") + "\\_%")  # an underscore alone stands for any character
    yield f"GRANT {SERVICE_PRIVILEGES} ON {literal(databases)}.* TO '{user}'@'{host}'"


def current_account() -> Operation[str]:
    """Returns the account that this connection was let in as."""
    ((account,),) = yield from query("SELECT CURRENT_USER()")
    return str(account)


def _section(name: str) -> Script:
    text = files("schemaless.storage").joinpath("schema.sql").read_text()
    parts = _SECTION.split(text)
    body = dict(zip(parts[1::2], parts[2::2], strict=True))[name]
    lines = [line for line in body.splitlines() if not line.startswith("--")]
    return "\n".join(lines).strip().removesuffix(";")
