"""`python -m tests.faults.halting_tailer STEP SIGNAL ARMED`: a tailer that sends itself a signal at a named step.

It does so once: when it passes the step while the file ARMED exists, which it removes first. A step is an event of
`schemaless/runtime/events.py`, observed from outside before the tailer starts. The tailer itself knows nothing of it.
"""

import signal
import sys
import threading
from pathlib import Path

import tailer.__main__
from schemaless.runtime.events import Event, observing

COMMIT_IN_FLIGHT_S = 0.001

STEPS = {
    "assigned, not yet fenced": Event.LOG_OPENING,
    "fenced, progress not read": Event.LOG_FENCED,
    "progress read": Event.PROGRESS_READ,
    "rows read from MySQL": Event.CELLS_READ,
    "transaction begun": Event.TRANSACTION_BEGUN,
    "cells produced": Event.CELLS_PRODUCED,
    "progress produced": Event.PROGRESS_PRODUCED,
    "flushed": Event.FLUSHED,
    "commit sent": Event.COMMITTING,
    "commit answered": Event.COMMITTED,
    "between two transactions": Event.PASS_FINISHED,
    "revocation begun": Event.PARTITIONS_REVOKED,
    "revoked, not yet notified": Event.PARTITIONS_RELEASED,
}
WHILE_OPENING = ("assigned, not yet fenced", "fenced, progress not read", "progress read")
WHILE_REVOKED = ("revocation begun", "revoked, not yet notified")
IN_A_TRANSACTION = ("transaction begun", "cells produced", "progress produced", "flushed")


def main() -> None:
    step, signal_name, armed = sys.argv[1:]

    def halt() -> None:
        try:
            Path(armed).unlink()
        except FileNotFoundError:
            return
        # To this very thread: sent to the process it may reach others first, and this one would go on meanwhile.
        signal.pthread_kill(threading.get_ident(), signal.Signals[signal_name])

    def observer(event, fields):
        if event is Event.COMMITTING:  # while the request is in flight nobody knows whether it was carried out
            threading.Timer(COMMIT_IN_FLIGHT_S, halt).start()
        else:
            halt()

    with observing(observer, STEPS[step]):
        tailer.__main__.main()


if __name__ == "__main__":
    main()
