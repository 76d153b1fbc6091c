"""A cold table: its name and the struct of its rows, and from these the select list, decoding, inserts and upserts.

A column is called as the field. The field's type says how it is stored: an int called `at` or `..._at` is a
DATETIME(6) in microseconds since the epoch, and tuples, lists, mappings and structs are JSON. A column that the struct
lacks, such as the datastore, is named where it is needed. Hot scripts are written by hand, beside their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, NewType, TypeVar, get_args, get_type_hints

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, Time, commas, literals, sql

T = TypeVar("T")
_Written = tuple[str, str, Callable[[Any], object] | None]


class _Column(msgspec.Struct, frozen=True):
    """How one field is read. `written`: its column, its name, and how its value becomes one that `literal` takes."""

    select: Script
    reads: Callable[[Any], Any] | None = None
    written: Sequence[_Written] = ()

    def decode(self, values: Iterator[Any]) -> Any:
        value = next(values)
        return value if self.reads is None or value is None else self.reads(value)


class Table(Generic[T]):
    """A table whose rows are structs.

    `others`: by field the name of its column, an expression that is only read, or the Table of a struct whose fields
    are columns here.
    """

    def __init__(self, name: str, row: Callable[..., T], **others: Script | Table[Any]) -> None:
        self.name = name
        self._row = row
        self._fields = {
            field: stored if isinstance(stored := others.get(field, field), Table) else _column(field, kind, stored)
            for field, kind in get_type_hints(row).items()
        }
        self.select: Script = commas([field.select for field in self._fields.values()])
        """The select list of a row, which `decode` reads."""
        self.written: Sequence[_Written] = [
            (column, f"{field}.{path}" if isinstance(stored, Table) else path, writes)
            for field, stored in self._fields.items()
            for column, path, writes in stored.written
        ]
        self._getters = [attrgetter(path) for _, path, _ in self.written]

    def decode(self, values: Iterable[Any]) -> T:
        """Returns a row. Raises ValueError or TypeError for values that are none."""
        each = iter(values)
        return self._row(*[field.decode(each) for field in self._fields.values()])

    def rows(self, tail: Script = "", *values: object) -> Operation[list[T]]:
        """Returns the rows that the rest of a SELECT finds, with these values in it."""
        found = yield from query(sql(f"SELECT {self.select} FROM {self.name} {tail}", *values))
        return [self.decode(row) for row in found]

    def by(self, key: Script, tail: Script = "", *values: object) -> Operation[dict[Any, T]]:
        """Returns the rows that the rest of a SELECT finds, by a column or an expression."""
        found = yield from query(sql(f"SELECT {key},{self.select} FROM {self.name} {tail}", *values))
        return {row[0]: self.decode(row[1:]) for row in found}

    def values(self, row: T) -> dict[str, object]:
        """Returns the values of a row's columns, as `literal` takes them."""
        return {
            column: value if (value := get(row)) is None or writes is None else writes(value)
            for (column, _, writes), get in zip(self.written, self._getters, strict=True)
        }

    def insert(self, rows: Iterable[T], verb: Script = "INSERT", /, **others: object) -> Script:
        """Returns a statement that inserts rows, at least one.

        `others` are columns which all of them have alike, that the struct lacks, or has with another value.
        """
        written = [self.values(row) | others for row in rows]
        values = commas([literals(*row.values()) for row in written])
        return f"{verb} INTO {self.name} ({commas(list(written[0]))}) VALUES {values}"

    def upsert(self, rows: Iterable[T], changed: Iterable[str], /, **others: object) -> Script:
        """Returns a statement that inserts rows, and takes the columns `changed` over into those that exist."""
        taken = commas([f"{name} = VALUES({name})" for name in changed])
        return f"{self.insert(rows, **others)} ON DUPLICATE KEY UPDATE {taken}"

    def newest(self, row: T, /, **others: object) -> Script:
        """Returns a statement that writes a row, unless a row with a later `changed_at` is there."""
        newer = "VALUES(changed_at) > changed_at"
        names = [name for name, _, _ in self.written if name != "changed_at"]
        # Assigned from left to right: the condition reads changed_at, so that comes last.
        taken = commas([f"{name} = IF({newer}, VALUES({name}), {name})" for name in names])
        latest = "changed_at = GREATEST(changed_at, VALUES(changed_at))"
        return f"{self.insert([row], **others)} ON DUPLICATE KEY UPDATE {taken},{latest}"


def _column(field: str, kind: Any, stored: Script) -> _Column:
    kinds = [each for each in get_args(kind) if each is not NoneType] if NoneType in get_args(kind) else [kind]
    plain = kinds[0].__supertype__ if isinstance(kinds[0], NewType) else kinds[0]
    select, reads = stored, None
    writes: Callable[[Any], object] | None = None
    if plain is int and (field == "at" or field.endswith("_at")):
        select, writes = MICROSECONDS.format(stored), Time
    elif plain in (bool, float) or (isinstance(plain, type) and issubclass(plain, Enum)):
        reads = plain
    elif plain not in (int, str, bytes):
        reads, writes = msgspec.json.Decoder(plain).decode, lambda value: msgspec.json.encode(value).decode()
    return _Column(select, reads, [(stored, field, writes)] if stored.isidentifier() and stored != "NULL" else [])
