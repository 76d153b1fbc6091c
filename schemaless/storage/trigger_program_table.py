"""trigger_program: which program owns a name, and its functions by column, as the worker that started last has them.

Who lists parked cells needs them: what waits behind a parked cell are cells of the program's columns, and a function
that the program no longer has can't be called again. The latest row of all clusters counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import sql

ORIGIN_CHARACTERS_MAX = 500
_TABLE = "schemaless.trigger_program"
_COLUMNS = f"consumer, functions, version, {MICROSECONDS.format('changed_at')}, origin"


class ProgramFunctions(msgspec.Struct, frozen=True):
    """Names of functions by column, in the order in which they are called. `changed_at` is in microseconds.

    `origin` is the module or file of the program, empty where nobody said so.
    """

    functions: Mapping[str, Sequence[str]]
    version: str
    changed_at: int = 0
    origin: str = ""

    @property
    def names(self) -> set[str]:
        return {name for names in self.functions.values() for name in names}


def claim(
    datastore: str, consumer: str, program: ProgramFunctions, seen: ProgramFunctions | None = None
) -> Operation[bool]:
    """Stores what a worker that starts has. Returns False if the name belongs to another program than its own.

    `seen` is the owner that the worker knows of, and replaces. So of two programs that start at once, one gets False.
    """
    origins = sql("origin IN (%s, %s)", program.origin, program.origin if seen is None else seen.origin)
    columns = ("functions", "version", "changed_at", "origin")  # the last one last: the condition reads it
    yield sql(
        f"INSERT INTO {_TABLE} (datastore, consumer, functions, version, changed_at, origin)"
        " VALUES (%s, %s, %s, %s, UTC_TIMESTAMP(6), %s) ON DUPLICATE KEY UPDATE ",
        datastore,
        consumer,
        msgspec.json.encode(program.functions).decode(),
        program.version[:64],
        program.origin,
    ) + ", ".join(f"{column} = IF({origins}, VALUES({column}), {column})" for column in columns)
    stored = yield from get(datastore, consumer)
    return stored is not None and stored.origin == program.origin


def get(datastore: str, consumer: str) -> Operation[ProgramFunctions | None]:
    """Returns what this server knows of a program, None if no worker has said so."""
    rows = yield from query(
        f"SELECT {_COLUMNS} FROM {_TABLE}" + sql(" WHERE datastore = %s AND consumer = %s", datastore, consumer)
    )
    return _program(*rows[0][1:]) if rows else None


def of_datastore(datastore: str) -> Operation[dict[str, ProgramFunctions]]:
    """Returns by consumer what this server knows of all programs."""
    rows = yield from query(
        f"SELECT {_COLUMNS} FROM {_TABLE}" + sql(" WHERE datastore = %s ORDER BY consumer", datastore)
    )
    return {consumer: _program(*columns) for consumer, *columns in rows}


def newest(found: Iterable[ProgramFunctions | None]) -> ProgramFunctions | None:
    """Returns what counts of the answers of several clusters."""
    known = [one for one in found if one is not None]
    return max(known, key=lambda one: one.changed_at, default=None)


def _program(functions: str, version: str, changed_at: int, origin: str) -> ProgramFunctions:
    return ProgramFunctions(msgspec.json.decode(functions, type=dict[str, list[str]]), version, changed_at, origin)
