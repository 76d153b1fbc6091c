"""A storage operation is a generator: it yields scripts, is sent their results, and returns a value. It does no I/O.

So every operation is written once and run by either driver: asyncmy for the API and the tailer (its rows come five
to nine times faster), PyMySQL for everything else. An error of a script is thrown into the operation, already
translated and with the transaction rolled back; what it doesn't catch reaches the caller.

Operations are idempotent, so a runner may run one again from its start: after Busy (a deadlock, a lock that was not
given in time), and after a connection was lost with the outcome unknown. Running a put again can't write twice (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from schemaless.errors import Busy, SchemalessError, StorageUnavailable
from schemaless.storage.sql import Script

T = TypeVar("T")
Args = TypeVarTuple("Args")
Row = tuple[Any, ...]


class Result(msgspec.Struct, frozen=True, gc=False):
    """Of one statement: its rows (none for a write) and how many rows it changed."""

    rows: Sequence[Row]
    affected: int = 0


Operation = Generator[Script, list[Result], T]
"""One result is sent for each statement of the script that was yielded."""

Start = Callable[[], Operation[T]]
"""Begins an operation afresh: what a runner is given, because it may run it again."""

AGAIN_ON: tuple[type[SchemalessError], ...] = (Busy, StorageUnavailable)
"""After which errors an idempotent operation is run again."""

ATTEMPTS_MAX = 4
"""Of one operation, all reasons taken together."""


def query(script: Script) -> Operation[Sequence[Row]]:
    """The rows of a script of one statement."""
    (result,) = yield script
    return result.rows
