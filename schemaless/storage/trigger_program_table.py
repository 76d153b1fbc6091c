"""trigger_program: the functions of a trigger program by column, as the worker that started last has them.

Who lists parked cells needs them: what waits behind a parked cell are cells of the program's columns, and a function
that the program no longer has can't be called again. The latest row of all clusters counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import sql

_TABLE = "schemaless.trigger_program"


class ProgramFunctions(msgspec.Struct, frozen=True):
    """Names of functions by column, in the order in which they are called. `changed_at` is in microseconds."""

    functions: Mapping[str, Sequence[str]]
    version: str
    changed_at: int = 0

    @property
    def names(self) -> set[str]:
        return {name for names in self.functions.values() for name in names}


def put(datastore: str, consumer: str, program: ProgramFunctions) -> Operation[None]:
    """Stores what a worker that starts has."""
    yield sql(
        f"INSERT INTO {_TABLE} (datastore, consumer, functions, version, changed_at)"
        " VALUES (%s, %s, %s, %s, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE functions = VALUES(functions),"
        " version = VALUES(version), changed_at = VALUES(changed_at)",
        datastore,
        consumer,
        msgspec.json.encode(program.functions).decode(),
        program.version[:64],
    )


def get(datastore: str, consumer: str) -> Operation[ProgramFunctions | None]:
    """Returns what this server knows of a program, None if no worker has said so."""
    rows = yield from query(
        f"SELECT functions, version, {MICROSECONDS.format('changed_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
    )
    for functions, version, changed_at in rows:
        return ProgramFunctions(msgspec.json.decode(functions, type=dict[str, list[str]]), version, changed_at)
    return None


def of_datastore(datastore: str) -> Operation[dict[str, ProgramFunctions]]:
    """Returns by consumer what this server knows of all programs."""
    rows = yield from query(
        f"SELECT consumer, functions, version, {MICROSECONDS.format('changed_at')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s ORDER BY consumer", datastore)
    )
    return {
        consumer: ProgramFunctions(msgspec.json.decode(functions, type=dict[str, list[str]]), version, changed_at)
        for consumer, functions, version, changed_at in rows
    }


def newest(found: Iterable[ProgramFunctions | None]) -> ProgramFunctions | None:
    """Returns what counts of the answers of several clusters."""
    known = [one for one in found if one is not None]
    return max(known, key=lambda one: one.changed_at, default=None)
