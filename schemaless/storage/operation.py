"""A storage operation is a generator: it yields scripts, is sent their results, and returns a value. It does no I/O.

So every operation is written once and run by either driver: asyncmy for the services, PyMySQL for the command line and
the audit. The error of a script is thrown into the operation. By then it is translated and the transaction is rolled
back. What the operation doesn't catch reaches the caller.

Operations are idempotent, so a node may run one again from its start: after Busy (a deadlock, or a lock that was not
given in time), and after a connection was lost with the outcome unknown. Running a put again can't write twice (I1).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar, TypeVarTuple

import msgspec
import stamina

from schemaless.errors import AccountRefused, Busy, NodeRefuses, SchemalessError, StorageUnavailable
from schemaless.storage.sql import Script

T = TypeVar("T")
Args = TypeVarTuple("Args")
Row = tuple[Any, ...]


class Result(msgspec.Struct, frozen=True, gc=False):
    """What one statement returned: its rows (none for a write), and how many rows it changed."""

    rows: Sequence[Row]
    affected: int = 0


Operation = Generator[Script, list[Result], T]
"""One result is sent for each statement of the script that was yielded."""


def query(script: Script) -> Operation[Sequence[Row]]:
    """Returns the rows of a script of one statement."""
    (result,) = yield script
    return result.rows


PAUSE: Script = ""
"""Yielded between pieces of long work, such as comparing large bodies: the driver lets others have their turn (I14).
It is sent no results."""


AGAIN_ON: tuple[type[SchemalessError], ...] = (Busy, StorageUnavailable)
"""The errors after which an idempotent operation is run again."""

ATTEMPTS_MAX = 4
"""How often an operation is run in all, whatever the errors were."""


def runs_again(error: BaseException, again_on: tuple[type[SchemalessError], ...]) -> bool:
    """Returns whether an operation is run again after this error. A server that refuses would refuse again."""
    return isinstance(error, again_on) and not isinstance(error, NodeRefuses | AccountRefused)


def retries(again_on: tuple[type[SchemalessError], ...], timeout_s: float) -> Any:
    """Returns the attempts after a first one that failed, for `for` or `async for`. They begin within `timeout_s`."""
    return stamina.retry_context(
        on=lambda error: runs_again(error, again_on),
        attempts=ATTEMPTS_MAX - 1,
        timeout=timeout_s,
        wait_initial=0.01,
        wait_max=0.2,
    )
