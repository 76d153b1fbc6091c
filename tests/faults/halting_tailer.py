"""`python -m tests.faults.halting_tailer STEP SIGNAL ARMED`: a tailer that sends itself a signal at a named step.

Once: when it passes the step while the file ARMED exists, which it removes first. The tailer itself knows nothing of
it; methods are wrapped from outside before it starts.
"""

import functools
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import tailer.__main__
from schemaless.bus import partition_log
from schemaless.bus.membership import Membership
from schemaless.bus.partition_log import PartitionLog
from schemaless.storage import shard_log
from tailer.datastore_tailer import DatastoreTailer
from tailer.partition_tail import PartitionTail

COMMIT_ON_ITS_WAY_S = 0.001

Halt = Callable[[], None]


def halting(number: signal.Signals, armed: Path) -> Halt:
    def halt() -> None:
        try:
            armed.unlink()
        except FileNotFoundError:
            return
        # To this very thread: sent to the process it may reach others first, and this one would go on meanwhile.
        signal.pthread_kill(threading.get_ident(), number)

    return halt


def before(owner: object, name: str) -> Callable[[Halt], None]:
    def install(halt: Halt) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments, **named):
            halt()
            return original(*arguments, **named)

        setattr(owner, name, wrapped)

    return install


def after(owner: object, name: str) -> Callable[[Halt], None]:
    def install(halt: Halt) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments, **named):
            value = original(*arguments, **named)
            halt()
            return value

        setattr(owner, name, wrapped)

    return install


def after_awaiting(owner: object, name: str) -> Callable[[Halt], None]:
    def install(halt: Halt) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        async def wrapped(*arguments):
            value = await original(*arguments)
            halt()
            return value

        setattr(owner, name, wrapped)

    return install


def while_rows_are_on_their_way(halt: Halt) -> None:
    """Between MySQL's answer and its proof."""
    original = shard_log.read

    def read(*arguments):
        inner = original(*arguments)
        script = next(inner)
        while True:
            results = yield script
            halt()
            try:
                script = inner.send(results)
            except StopIteration as end:
                return end.value

    shard_log.read = read


def while_the_commit_is_on_its_way(halt: Halt) -> None:
    """The request may have left or not, been carried out or not: nobody knows."""
    original = PartitionLog._commit

    def commit(self):
        threading.Timer(COMMIT_ON_ITS_WAY_S, halt).start()
        original(self)

    PartitionLog._commit = commit


STEPS: dict[str, Callable[[Halt], None]] = {
    "assigned, not yet fenced": before(PartitionLog, "_fence"),
    "fenced, progress not read": after(PartitionLog, "_fence"),
    "progress read": after(partition_log, "read_progress"),
    "rows read from MySQL": while_rows_are_on_their_way,
    "transaction begun": before(PartitionLog, "_produce"),
    "cells produced": after(PartitionLog, "_produce"),
    "progress produced": after(PartitionLog, "_produce_progress"),
    "flushed": after(PartitionLog, "_flush"),
    "commit sent": while_the_commit_is_on_its_way,
    "commit answered": after(PartitionLog, "_commit"),
    "between two transactions": after_awaiting(PartitionTail, "step"),
    "revocation begun": before(Membership, "_on_revoke"),
    "revoked, not yet told": after_awaiting(DatastoreTailer, "_release"),
}
WHILE_OPENING = ("assigned, not yet fenced", "fenced, progress not read", "progress read")
WHILE_REVOKED = ("revocation begun", "revoked, not yet told")
IN_A_TRANSACTION = ("transaction begun", "cells produced", "progress produced", "flushed")


def main() -> None:
    step, number, armed = sys.argv[1:]
    STEPS[step](halting(signal.Signals[number], Path(armed)))
    tailer.__main__.main()


if __name__ == "__main__":
    main()
