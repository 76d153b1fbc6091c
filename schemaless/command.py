"""The entry point of the command `schemaless`: loads it so that Ctrl-C ends it silently, and runs it."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs the command. Ctrl-C ends it as SIGINT does, or with 130: never with a traceback."""
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from schemaless.__main__ import main as run

    try:
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(130)
