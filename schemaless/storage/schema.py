"""Makes the tables of schema.sql, and refuses databases of a format that is not known."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from importlib.resources import files

from schemaless.errors import Corrupt, Misconfigured, TableMissing
from schemaless.storage import placement_table
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, SERVICE_PRIVILEGES, Name, Script, literal, sql
from schemaless.storage.table import Table
from schemaless.topology import Datastore

FORMAT_VERSION = 14
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


def install(installation: str) -> Operation[str]:
    """Gives a server's databases the id of their installation, and returns the one that they have: the first counts."""
    yield sql("INSERT IGNORE INTO schemaless.installation (id) VALUES (%s)", installation)
    return str((yield from installation_of()))


def installation_of() -> Operation[str | None]:
    """Returns the id of the installation that a server's databases are of, or None where they have none yet."""
    rows = yield from query("SELECT id FROM schemaless.installation")
    return str(rows[0][0]) if rows else None


def check_format() -> Operation[None]:
    """Raises Misconfigured for a format that this program doesn't know, and TableMissing where the tables are just
    being made.
    """
    found = yield from formats()
    if not found:
        raise TableMissing("the tables of this server aren't made yet")
    if found != [FORMAT_VERSION]:
        raise Misconfigured(
            f"the databases have format {found}, this program knows {FORMAT_VERSION}:"
            " start with empty servers, or use the release that made these databases"
        )


def formats() -> Operation[list[int]]:
    """Returns the format of the server's databases: one, or none while its tables are being made."""
    return [version for (version,) in (yield from query("SELECT version FROM schemaless.format"))]


def create_shard(datastore: Datastore, shard: int) -> Operation[None]:
    """Makes the shard's database and its head, on the master of its home. Idempotent."""
    yield from create_entity_table(datastore, shard)
    yield _section("shard") % {
        "datastore": literal(datastore.name),
        "cluster": literal(datastore.home(shard)),
        "shard": shard,
    }


def create_entity_table(datastore: Datastore, shard: int) -> Operation[None]:
    """Makes the shard's database and the table of its cells. Idempotent."""
    yield _section("entity") % {"database": literal(Name(datastore.database(shard)))}


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


# datastore: which datastores there are. Written to every cluster, so that any one of them can answer.

_INSTALLATION = "COALESCE((SELECT id FROM schemaless.installation), '')"
_DATASTORES = Table("schemaless.datastore", Datastore, moves="NULL", installation=_INSTALLATION)


def insert_datastore(datastore: Datastore) -> Operation[None]:
    """Does nothing when the name exists: the caller then compares what `datastores` returns."""
    yield _DATASTORES.insert([datastore], "INSERT IGNORE", ready=False, created_at=NOW)


def set_ready(name: str) -> Operation[None]:
    yield sql("UPDATE schemaless.datastore SET ready = 1 WHERE name = %s", name)


def datastores(*, ready: bool = True) -> Operation[dict[str, Datastore]]:
    """Returns datastores by name, with ready=False also those whose shards are still being made.

    Every use of a datastore begins here, so the format is checked here. Raises Misconfigured for an unknown one, and
    Corrupt for a row that isn't a datastore.
    """
    yield from check_format()
    try:
        found = yield from _DATASTORES.rows("WHERE ready >= %s ORDER BY name", ready)
        moves = yield from placement_table.placements()
        return {datastore.name: replace(datastore, moves=moves.get(datastore.name, {})) for datastore in found}
    except (TypeError, ValueError) as error:
        raise Corrupt(f"a row of schemaless.datastore is no datastore: {error}") from error


# Where the rows of each table live, and so what becomes of them when a cluster is added or a shard is moved. A table of
# schema.sql that isn't here fails tests/unit/schemaless/storage/test_table_groups.py.


class TableGroup(StrEnum):
    SHARD = "shard"
    """In the shard's own database, or beside it by shard: moves with the shard."""
    HOME = "home"
    """On the cluster that is home to a shard, by shard: moves with the shard."""
    EVERYWHERE = "everywhere"
    """On every cluster: a new one gets them."""
    PLACEMENT = "placement"
    """On every cluster that has shards of the datastore: a cluster gets them with its first shard."""
    SERVER = "server"
    """What one server or one cluster did itself. It stays."""


GROUPS = {
    "entity": TableGroup.SHARD,
    "shard_head": TableGroup.HOME,
    "shard_generation": TableGroup.HOME,
    "idempotency": TableGroup.HOME,
    "parked": TableGroup.HOME,
    "parked_history": TableGroup.HOME,
    "job": TableGroup.HOME,  # of parked cells. Those of an index stay with their checks
    "checkpoint": TableGroup.HOME,  # of a trigger program. Those of an index are PLACEMENT
    "format": TableGroup.EVERYWHERE,
    "installation": TableGroup.EVERYWHERE,
    "datastore": TableGroup.EVERYWHERE,
    "placement": TableGroup.EVERYWHERE,
    "token": TableGroup.EVERYWHERE,
    "tailer_order": TableGroup.EVERYWHERE,
    "challenge": TableGroup.EVERYWHERE,  # of those that have it, one has to answer
    "index_definition": TableGroup.EVERYWHERE,
    "index_build": TableGroup.EVERYWHERE,
    "erasure": TableGroup.EVERYWHERE,  # brought by cleaners. What a row says of its own cluster stays
    "trigger_program": TableGroup.PLACEMENT,
    "trigger_order": TableGroup.PLACEMENT,  # of a whole program, shard -1. Those of a shard are HOME
    "worker": TableGroup.PLACEMENT,
    "index_problem": TableGroup.PLACEMENT,  # where the version of the index was made: its rows never move
    "index_pass": TableGroup.PLACEMENT,
    "index_check": TableGroup.PLACEMENT,
    "index_walk": TableGroup.PLACEMENT,
    "index_forgotten": TableGroup.PLACEMENT,
    "index_write": TableGroup.PLACEMENT,
    "buffer": TableGroup.SERVER,
    "refusal": TableGroup.SERVER,
    "conflict": TableGroup.SERVER,
    "admin_action": TableGroup.SERVER,
    "shard_move": TableGroup.SERVER,
    "diverged": TableGroup.SERVER,
    "appointment": TableGroup.SERVER,  # controllers write it on every server
    "promise": TableGroup.SERVER,
    "topology_order": TableGroup.SERVER,
    "topology_step": TableGroup.SERVER,
    "topology_state": TableGroup.SERVER,
}
