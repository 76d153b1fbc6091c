"""@trigger: marks a function to be called for every cell of a column, at least once, each row's cells in order.

    @trigger(column="BASE", retry=RetryPolicy(attempts=5), where='status == "done"')
    def bill_rider(row_key): ...        # or (cell), or (cell, context); sync or async

It only marks: the function stays as it is and can be called in tests. An exception means "again later". Retry, Park,
Skip and Stop say exactly what is to happen.
"""

from __future__ import annotations

import inspect
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, StrEnum
from typing import Any, Literal, Never, TypeVar

from schemaless.cell import ColumnName, StoredCell, parse_column_name
from schemaless.codec import decode_body, erasing
from schemaless.errors import Misconfigured
from schemaless.found_cell import FoundCell, found_cell
from schemaless.location import ShardLocation
from schemaless.names import ERASE_COLUMN
from schemaless.triggers.context import Context
from schemaless.triggers.retry_policy import RetryPolicy
from schemaless.triggers.verdicts import DidNotHappen, Doubt, Park, Retry, Skip, Stop, Verdict
from schemaless.where import Where, parse_where

__all__ = [
    "Context", "DidNotHappen", "Doubt", "Park", "ParkMode", "Retry", "RetryPolicy", "Skip", "Stop", "Takes", "Trigger",
    "TriggerCell", "Verdict", "Where", "trigger", "triggers_of",
]  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])
PARALLEL_MAX = 1000
_MARK = "__schemaless_triggers__"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


TriggerCell = FoundCell
"""What a function sees of a cell."""


class ParkMode(StrEnum):
    """What waits behind a parked cell."""

    ROW = "row"  # the later cells of its row
    CELL = "cell"  # nothing


class Takes(Enum):
    """What a function is called with."""

    ROW_KEY = "row_key"
    CELL = "cell"
    CELL_AND_CONTEXT = "cell, context"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A marked function. Without `retry` and `parallel` the settings' values count. `where` decides before the call.

    One for erasures has ERASE_COLUMN as its column. `erased_from`: only those that erase cells of that column.
    """

    name: str
    column: ColumnName
    function: Callable[..., Any]
    takes: Takes
    is_async: bool
    retry: RetryPolicy | None = None
    park: ParkMode = ParkMode.ROW
    max_age_s: float | None = None
    where: Where | None = None
    parallel: int | None = None
    erased_from: ColumnName | None = None

    def wants(self, cell: StoredCell) -> bool:
        """Whether it is called for a cell of its column. Raises SchemalessError for a body that can't be judged."""
        if cell.is_erased:
            return False
        if self.erased_from is not None and self.erased_from not in erasing(cell.body).cells:
            return False
        return self.where is None or self.where.holds(decode_body(cell.body))

    def arguments(self, cell: StoredCell, context: Context) -> tuple[Any, ...]:
        if self.takes is Takes.ROW_KEY:
            return (uuid.UUID(bytes=cell.row_key),)
        if self.takes is Takes.CELL:
            return (found_cell(cell),)
        return (found_cell(cell), context.of_call(self.name, cell.key, ShardLocation(cell.shard, cell.location)))


def trigger(  # noqa: PLR0913  # all but the first are named
    *bare: Never,
    column: str = "",
    retry: RetryPolicy | None = None,
    park: Literal["row", "cell"] | ParkMode = ParkMode.ROW,
    max_age: float | timedelta | None = None,
    name: str | None = None,
    where: str | Sequence[Mapping[str, Any]] | Where | None = None,
    parallel: int | None = None,
    erased: bool = False,
) -> Callable[[Function], Function]:
    """Marks a function. `max_age` is in seconds. `name` replaces the function's own.

    `parallel` calls of it are made at once in a shard, each of another row. With `erased` it is called for erasures of
    cells of the column, or of any. Its cell is then the entry in the log, whose body names the cells that were erased.

    Raises Invalid for a column name or a condition, and Misconfigured for whatever else is wrong.
    """
    if bare or (column == "" and not erased):
        raise Misconfigured('@trigger needs a column, and its name: write @trigger(column="BASE") above the function')
    column_name = parse_column_name(column, "column") if column else None
    if not isinstance(retry, RetryPolicy | None):
        raise Misconfigured(f"@trigger: retry must be a RetryPolicy, not {retry!r}")
    if park not in list(ParkMode):
        raise Misconfigured(f'@trigger: park must be "row" or "cell", not {park!r}')
    if parallel is not None and (type(parallel) is not int or not 1 <= parallel <= PARALLEL_MAX):
        raise Misconfigured(f"@trigger: parallel must be a whole number from 1 to {PARALLEL_MAX}, not {parallel!r}")
    mode, max_age_s = ParkMode(park), _seconds(max_age)
    condition = where if isinstance(where, Where | None) else parse_where(where)

    def mark(function: Function) -> Function:
        if isinstance(function, type) or not callable(function) or not hasattr(function, "__dict__"):
            raise Misconfigured(f"{function!r:.100} can't be a trigger function: mark a function that takes the cell")
        if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
            raise Misconfigured(
                f"trigger function {_named(function)} is a generator: a call of it would run nothing. Take `yield` out"
            )
        own_name: object = getattr(function, "__name__", None) if name is None else name
        if not isinstance(own_name, str) or not _NAME.fullmatch(own_name):
            raise Misconfigured(
                f"@trigger: {own_name!r} can't be the name of a function: give name= of letters, digits and _"
            )
        found = Trigger(
            own_name, ColumnName(ERASE_COLUMN) if erased or column_name is None else column_name, function,
            _takes(function), _is(inspect.iscoroutinefunction, function), retry, mode, max_age_s, condition, parallel,
            column_name if erased else None,
        )  # fmt: skip
        vars(function).setdefault(_MARK, []).append(found)
        return function

    return mark


def _seconds(max_age: object) -> float | None:
    seconds = max_age.total_seconds() if isinstance(max_age, timedelta) else max_age
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):  # type: ignore[operator]
        raise Misconfigured(f"@trigger: max_age must be seconds or a timedelta above zero, not {max_age!r}")
    return float(seconds)  # type: ignore[arg-type]


def _is(kind: Callable[[object], bool], function: object) -> bool:
    """Returns whether a function is of a kind, or the `__call__` of an object that is called like one."""
    return kind(function) or kind(type(function).__call__)


def _named(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def _takes(function: Callable[..., Any]) -> Takes:
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) == 1:
        return Takes.ROW_KEY if parameters[0] == "row_key" else Takes.CELL
    if len(parameters) == 2 and parameters[0] != "row_key" and parameters[1] != "cell":
        return Takes.CELL_AND_CONTEXT
    raise Misconfigured(
        f"trigger function {_named(function)} must take row_key, or cell, or cell and context, in this order."
        f" It takes {', '.join(parameters) or 'nothing'}. A cell has its row_key"
    )


def triggers_of(namespace: Mapping[str, Any]) -> list[Trigger]:
    """Returns the marked functions of a module once each, in the order of their definition.

    Raises Misconfigured for a function that a decorator above the mark has replaced: that one would not be called.
    """
    found: dict[int, list[Trigger]] = {}
    for value in namespace.values():
        if callable(value) and hasattr(value, _MARK):
            if value not in [marked.function for marked in getattr(value, _MARK)]:
                raise Misconfigured(f"another decorator stands above @trigger of {_named(value)}: put @trigger on top")
            found.setdefault(id(value), getattr(value, _MARK))
    return [marked for marks in found.values() for marked in marks]
