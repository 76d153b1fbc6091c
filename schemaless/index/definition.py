"""The definition of an index, parsed and validated from its JSON object. Nothing invalid gets past this module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import yaml

from schemaless.cell import ColumnName, parse_column_name
from schemaless.errors import Invalid, Malformed
from schemaless.index.values import (
    DOES_NOT_FIT,
    FROM_JSON,
    SHARD_FIELD_TYPES,
    FieldType,
    Value,
    json_writer,
    to_json,
)
from schemaless.names import index_consumer, index_table_name
from schemaless.topology import Datastore, Placement
from schemaless.where import AllOf, Comparison, Where, parse_where

Choice = TypeVar("Choice", bound=StrEnum)

LENGTH_DEFAULT = 255
LENGTH_MAX = 768  # code points; 3072 bytes, what a key of MySQL holds
KEYED_MAX = 14  # a key of MySQL has 16 columns, and row key and element are two
STORED_MAX = 48
NUMBER_MAX = 999_999_999  # of versions: the name of a table has 64 characters, and that of an index up to 48
_KEY_BYTES_MAX = 3072
_KEY_OVERHEAD = 16 + 2  # row key and element
_ROW_BYTES_MAX = 16 << 10  # of one entry, far below what a row of InnoDB holds
ELEMENTS_MAX = 1000
"""How many elements of an array an index has. A longer array counts as none: it is null, and no part of it is there."""

_ELEMENT_BYTES_MAX = 3072  # of one entry where a row has many: what one cell changes is one statement's size
_PATH_CHARACTERS_MAX = 256
_TEXT_CHARACTERS_MAX = 64 << 10

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_PATH = re.compile(r"[^.\[\]\s]+(\[\])?(\.[^.\[\]\s]+(\[\])?)*")
RESERVED = frozenset(
    {"order", "desc", "limit", "cursor", "fields", "include", "verify", "explain", "after", "wait", "read_from"}
    | {"row_key", "element", "source_generation", "source_added_id", "live"}
)
"""Query parameters and the table's own columns: a field of such a name could not be asked for."""

_BYTES = {FieldType.UUID: 16, FieldType.DECIMAL: 18, FieldType.BOOL: 1}


@dataclass(frozen=True, slots=True)
class Field:
    """`length`: code points of a string, bytes of bytes, 0 for other types.

    `array`: how many parts of the path lead to the array that has a value in each element. None for a single value.
    """

    name: str
    column: ColumnName
    path: tuple[str, ...]
    type: FieldType
    length: int = 0
    array: int | None = None
    _from_json: Callable[[Any, int], Value | None] = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_from_json", FROM_JSON[self.type])  # looked up once: each value of a cell needs it

    @property
    def bytes_max(self) -> int:
        """The most bytes that it takes in an index table's row. Strings are kept as UTF-8."""
        if self.type is FieldType.STRING:
            return 4 * self.length
        return self.length if self.type is FieldType.BYTES else _BYTES.get(self.type, 8)

    def convert(self, found: Any) -> Value | None:
        """Returns the typed value of what a body holds, or None when it is missing or doesn't fit."""
        try:
            return self._from_json(found, self.length)
        except DOES_NOT_FIT:
            return None

    def document(self) -> dict[str, Any]:
        parts = [part + "[]" * (n == self.array) for n, part in enumerate(self.path, start=1)]
        described = {"name": self.name, "column": self.column, "path": ".".join(parts), "type": str(self.type)}
        return {**described, "length": self.length} if self.length else described


@dataclass(frozen=True)
class IndexDefinition:
    """`keyed[0]` is the shard field. `fields` is the order of an entry's values.

    `where` has literals of its fields' types, as entries have values. `number` says which version of the
    name it is. Each version has tables and a consumer of its own. `homes` are the homes of the shards that had moved
    when it was made: its entries and problems stay there.
    """

    name: str
    keyed: tuple[Field, ...]
    stored: tuple[Field, ...] = ()
    where: Where | None = None
    number: int = 1
    homes: Mapping[int, str] = dataclass_field(default_factory=dict, compare=False)

    def placed(self, datastore: Datastore) -> Datastore:
        """Returns the datastore with the homes that its shards had when this version was made."""
        return placed_at(datastore, self.homes)

    @property
    def table(self) -> str:
        return index_table_name(self.name, self.number)

    @property
    def consumer(self) -> str:
        return index_consumer(self.name, self.number)

    @property
    def shard_field(self) -> Field:
        return self.keyed[0]

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return self.keyed + self.stored

    @cached_property
    def columns(self) -> frozenset[ColumnName]:
        """The source columns: only their cells can change an entry."""
        return frozenset(field.column for field in self.fields)

    @cached_property
    def array_positions(self) -> Sequence[int]:
        """Returns where an entry has the values of elements. Without any, a row has one entry at most."""
        return [position for position, field in enumerate(self.fields) if field.array is not None]

    @cached_property
    def positions(self) -> Mapping[ColumnName, Sequence[int]]:
        """Returns by source column where the values of its fields stand in an entry."""
        found: dict[ColumnName, list[int]] = {}
        for position, field in enumerate(self.fields):
            found.setdefault(field.column, []).append(position)
        return found

    @cached_property
    def entry_bytes_max(self) -> int:
        """The most bytes that the values of one entry take."""
        return sum(field.bytes_max for field in self.fields)

    @cached_property
    def json_writers(self) -> Sequence[tuple[str, Callable[[Any], Any] | None]]:
        """Returns the names of the fields, each with what makes JSON of its values, None where nothing has to."""
        return [(field.name, json_writer(field.type)) for field in self.fields]

    @cached_property
    def canonical_text(self) -> str:
        """The JSON in which definitions are kept."""
        return json.dumps(self.document(), ensure_ascii=True)

    def field(self, name: str) -> Field:
        """Returns the field of a name. Raises Invalid."""
        for field in self.fields:
            if field.name == name:
                return field
        known = ", ".join(field.name for field in self.fields)
        raise Invalid(name, f"is no field of the index {self.name}: it has {known}")

    def _shown(self, name: str, value: Value) -> Value:
        shown: Value = to_json(self.field(name).type, value)
        return shown

    def document(self) -> dict[str, Any]:
        """Returns the object that `parse_definition` reads, in its one canonical form."""
        shown: dict[str, Any] = {
            "name": self.name,
            "shard_field": self.shard_field.name,
            "fields": [field.document() for field in self.keyed],
        }
        if self.stored:
            shown["stored"] = [field.document() for field in self.stored]
        if self.where is not None:
            shown["where"] = _where_document(self.where.with_literals(self._shown))
        return shown


def placed_at(datastore: Datastore, homes: Mapping[int, str]) -> Datastore:
    """Returns the datastore with these homes of shards, whatever moved since."""
    moves = {n: Placement(datastore.name, n, 0, home, None, 0) for n, home in homes.items()}
    return replace(datastore, moves=moves)


def load_definition(text: str) -> IndexDefinition:
    """Parses YAML or JSON. Raises Malformed or Invalid."""
    if len(text) > _TEXT_CHARACTERS_MAX:
        raise Malformed(f"an index definition has at most {_TEXT_CHARACTERS_MAX} characters")
    try:
        return parse_definition(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # some dates and numbers are no YAMLError
        raise Malformed(f"neither YAML nor JSON: {error}") from error


def dump_definition(definition: IndexDefinition) -> str:
    """Returns the JSON in which definitions are kept."""
    return definition.canonical_text


def parse_definition(document: Any, number: int = 1) -> IndexDefinition:
    """Parses the JSON object. Raises Invalid, which names the member that is wrong."""
    members = _members(document, "definition", {"name", "shard_field", "fields"}, {"stored", "where"})
    name = _name(members["name"], "name")
    keyed = _fields(members["fields"], "fields", KEYED_MAX)
    stored = _fields(members.get("stored", []), "stored", STORED_MAX)
    _verify_fields(keyed, stored, members["shard_field"])
    bare = IndexDefinition(name, keyed, stored)
    return IndexDefinition(name, keyed, stored, _where(members.get("where", []), bare), number)


def _members(document: Any, at: str, required: set[str], optional: set[str]) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise Invalid(at, "must be an object")
    for member in document:
        if member not in required | optional:
            raise Invalid(f"{at}.{member}", f"is no member: there are {', '.join(sorted(required | optional))}")
    for member in sorted(required):
        if member not in document:
            raise Invalid(f"{at}.{member}", "is missing")
    return document


def _name(value: Any, at: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise Invalid(at, "must match [a-z][a-z0-9_]{0,47}")
    return value


def parse_index_name(text: str) -> str:
    """Parses the name of an index. Raises Invalid."""
    return _name(text, "name")


def _fields(value: Any, at: str, most: int) -> tuple[Field, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise Invalid(at, f"must be a list of at most {most} objects")
    return tuple(_field(item, f"{at}[{n}]") for n, item in enumerate(value))


def _field(value: Any, at: str) -> Field:
    members = _members(value, at, {"name", "column", "path", "type"}, {"length"})
    name = _name(members["name"], f"{at}.name")
    if name in RESERVED:
        raise Invalid(f"{at}.name", f"{name!r} is a word of the query language: take another name")
    kind = _one_of(FieldType, members["type"], f"{at}.type")
    column = parse_column_name(members["column"], f"{at}.column")
    path = members["path"]
    if not isinstance(path, str) or not _PATH.fullmatch(path) or len(path) > _PATH_CHARACTERS_MAX:
        raise Invalid(f"{at}.path", "must be member names with dots between them, and [] behind the name of an array")
    if path.count("[]") > 1:
        raise Invalid(f"{at}.path", "has [] twice: an index has the elements of one array, not those of arrays in it")
    array = path[: path.index("[]")].count(".") + 1 if "[]" in path else None
    length = members.get("length")
    if kind not in (FieldType.STRING, FieldType.BYTES):
        if length is not None:
            raise Invalid(f"{at}.length", "belongs to string and bytes only")
        length = 0
    elif length is None:
        length = LENGTH_DEFAULT
    elif isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LENGTH_MAX:
        raise Invalid(f"{at}.length", f"must be an integer from 1 to {LENGTH_MAX}")
    return Field(name, column, tuple(path.replace("[]", "").split(".")), kind, length, array)


def _one_of(kind: type[Choice], value: Any, at: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        raise Invalid(at, "must be one of " + ", ".join(kind)) from None


def _verify_fields(keyed: Sequence[Field], stored: Sequence[Field], shard_field: Any) -> None:
    """Raises Invalid for a name that is there twice, for the shard field, or for fields that MySQL can't hold."""
    names = [field.name for field in (*keyed, *stored)]
    for name in names:
        if names.count(name) > 1:
            raise Invalid("fields", f"{name} is there twice: give each field a name of its own")
    if not keyed or keyed[0].name != shard_field:
        raise Invalid("shard_field", "must be the name of the first of fields")
    if keyed[0].type not in SHARD_FIELD_TYPES:
        raise Invalid("shard_field", "must be of type " + ", ".join(sorted(SHARD_FIELD_TYPES)))
    arrays = {(field.column, field.path[: field.array]) for field in (*keyed, *stored) if field.array is not None}
    if len(arrays) > 1:
        shown = " and ".join(sorted(f"{column}: {'.'.join(path)}[]" for column, path in arrays))
        raise Invalid("fields", f"have [] of several arrays ({shown}): an index has the elements of one array")
    in_key = _KEY_OVERHEAD + sum(field.bytes_max + 2 for field in keyed)
    if in_key > _KEY_BYTES_MAX:
        raise Invalid("fields", f"a key may take {in_key} bytes; MySQL allows {_KEY_BYTES_MAX}: lower a length")
    in_row = in_key + sum(field.bytes_max + 2 for field in stored)
    if in_row > _ROW_BYTES_MAX:
        raise Invalid("stored", f"an entry may take {in_row} bytes; the limit is {_ROW_BYTES_MAX}: lower a length")
    if arrays and in_row > _ELEMENT_BYTES_MAX:
        raise Invalid(
            "fields",
            f"an entry may take {in_row} bytes; with [] the limit is {_ELEMENT_BYTES_MAX}: lower a length",
        )


def _where(given: Any, bare: IndexDefinition) -> Where | None:
    """Parses `where`, a list or text. `bare` is the index without it: names in it are fields."""
    if given == []:
        return None

    def typed(name: str, literal: Value) -> Value:
        field = bare.field(name)
        value = field.convert(literal)
        if value is None:
            raise Invalid("where", f"{literal!r} is no {field.type}, which {name} is")
        return value

    where = parse_where(given)
    for name in where.names:
        bare.field(name)
    where = where.with_literals(typed)
    shown = _where_document(where.with_literals(bare._shown))
    try:
        parse_where(shown)
    except Invalid as error:
        raise Invalid("where", f"is too long as it is kept, which is {shown}: shorten it") from error
    return where


def _where_document(where: Where) -> Any:
    """Returns the list where a condition is a list of comparisons that all must hold, else its text."""
    expression = where.expression
    parts = expression.parts if isinstance(expression, AllOf) else (expression,)
    comparisons = [part for part in parts if isinstance(part, Comparison)]
    if len(comparisons) < len(parts):
        return str(where)
    return [{"field": part.path[0], "op": str(part.operator), "value": part.literal} for part in comparisons]
