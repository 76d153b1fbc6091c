"""@trigger: marks a function to be called for every cell of a column, at least once and in the order of the shard.

    @trigger(column="BASE")
    def bill_rider(row_key): ...        # or (cell), or (cell, context); sync or async

It only marks: the function stays as it is and can be called in tests. An exception means "again later". Retry, Park,
Skip and Stop say exactly what is to happen. A shard has one call at a time. Calls of different shards may overlap, in
threads for sync functions.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from schemaless.cell import ColumnName, StoredCell, created_at_text, parse_column_name
from schemaless.codec import decode_body
from schemaless.errors import Misconfigured
from schemaless.location import ShardLocation

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "__schemaless_triggers__"


class Verdict(Exception):  # not an error of ours
    """A trigger function raises one to say what is to happen with the cell."""


class Retry(Verdict):
    """Call again after `delay_s` seconds. It does not count as a failed attempt."""

    def __init__(self, delay_s: float = 1.0) -> None:
        super().__init__(f"again in {delay_s} s")
        self.delay_s = delay_s


class _WithReason(Verdict):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Park(_WithReason):
    """Set the cell aside. Parking is not built yet: for now the shard stops with this reason."""


class Skip(_WithReason):
    """The cell needs nothing. Continue with the next function or cell."""


class Stop(_WithReason):
    """Something is wrong beyond this cell. Stop the shard here, with this reason, until somebody resumes it."""


@dataclass(frozen=True, slots=True)
class TriggerCell:
    """What a function sees of a cell. `created_at` is RFC 3339 in UTC. str(location) is SHARD:GENERATION:ADDED_ID."""

    row_key: uuid.UUID
    column_name: str
    ref_key: int
    body: Mapping[str, Any]
    created_at: str
    location: ShardLocation


@dataclass(frozen=True, slots=True)
class Context:
    """`attempt` counts from 1. A cell that was finished just before a crash is called again with attempt 1."""

    program: str
    datastore: str
    attempt: int


class Takes(Enum):
    """What a function is called with."""

    ROW_KEY = "row_key"
    CELL = "cell"
    CELL_AND_CONTEXT = "cell, context"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A marked function."""

    name: str
    column: ColumnName
    function: Callable[..., Any]
    takes: Takes
    is_async: bool

    def arguments(self, cell: StoredCell, context: Context) -> tuple[Any, ...]:
        if self.takes is Takes.ROW_KEY:
            return (uuid.UUID(bytes=cell.row_key),)
        if self.takes is Takes.CELL:
            return (trigger_cell(cell),)
        return (trigger_cell(cell), context)


def trigger(*, column: str) -> Callable[[Function], Function]:
    """Marks a function. Raises Invalid for a column name, Misconfigured for a function that takes something else."""
    name = parse_column_name(column, "column")

    def mark(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) == 1:
            takes = Takes.ROW_KEY if parameters[0] == "row_key" else Takes.CELL
        elif len(parameters) == 2:
            takes = Takes.CELL_AND_CONTEXT
        else:
            raise Misconfigured(f"trigger function {function.__name__} must take row_key, or cell, or cell and context")
        found = Trigger(function.__name__, name, function, takes, inspect.iscoroutinefunction(function))
        vars(function).setdefault(_MARK, []).append(found)
        return function

    return mark


def triggers_of(namespace: Mapping[str, Any]) -> list[Trigger]:
    """Returns the marked functions of a module once each, in the order of their definition."""
    found: dict[int, list[Trigger]] = {}
    for value in namespace.values():
        if callable(value) and hasattr(value, _MARK):
            found.setdefault(id(value), getattr(value, _MARK))
    return [marked for marks in found.values() for marked in marks]


def trigger_cell(cell: StoredCell) -> TriggerCell:
    """Returns what a function sees of a stored cell. Raises Corrupt when the body can't be read."""
    return TriggerCell(
        uuid.UUID(bytes=cell.row_key),
        cell.column_name,
        cell.ref_key,
        decode_body(cell.body),
        created_at_text(cell.created_at),
        ShardLocation(cell.shard, cell.location),
    )
