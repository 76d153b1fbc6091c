"""`python -m tests.faults.halting_worker STEP SIGNAL ARMED …`: a worker that sends itself a signal at a named step.

It does so once: when it passes the step while the file ARMED exists, which it removes first. A step is an event of
`schemaless/runtime/events.py`, observed from outside before the worker starts. With the signal `CLOCK` its wall clock
jumps an hour ahead at the step. What follows ARMED are the arguments of `python -m consumers`.
"""

import signal
import sys
import threading
import time
from pathlib import Path

from schemaless.consume import trigger_worker
from schemaless.runtime.events import Event, observing

LATER_S = 0.002
CLOCK_JUMP_NS = 3600 * 10**9

STEPS = {
    "before the call": Event.CALL_BEGINS,
    "during the call": Event.CALL_BEGINS,
    "after the call": Event.CALL_ENDED,
    "parked, not yet stored": Event.CELL_PARKED,
    "replay begun": Event.REPLAY_BEGINS,
    "checkpoint not yet sent": Event.CHECKPOINTS_MOVING,
    "checkpoint in flight": Event.CHECKPOINTS_MOVING,
    "checkpoint moved": Event.CHECKPOINTS_MOVED,
}
LIVE_STEPS = tuple(step for step in STEPS if step != "replay begun")
REPLAY_STEPS = tuple(step for step in STEPS if step != "parked, not yet stored")


def main() -> None:
    step, signal_name, armed, *arguments = sys.argv[1:]
    true_time_ns, jump_ns = time.time_ns, [0]

    def halt() -> None:
        try:
            Path(armed).unlink()
        except FileNotFoundError:
            return
        if signal_name == "CLOCK":
            jump_ns[0] = CLOCK_JUMP_NS
        else:  # to this very thread: sent to the process it may reach others first, and this one would go on meanwhile
            signal.pthread_kill(threading.get_ident(), signal.Signals[signal_name])

    def observer(event, fields):
        if step in ("during the call", "checkpoint in flight"):
            threading.Timer(LATER_S, halt).start()
        else:
            halt()

    time.time_ns = lambda: true_time_ns() + jump_ns[0]
    sys.argv = [sys.argv[0], *arguments]
    with observing(observer, STEPS[step]):
        trigger_worker.main()


if __name__ == "__main__":
    main()
