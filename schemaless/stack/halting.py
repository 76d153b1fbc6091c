"""SIGSTOP, and whether it has worked: the kernel stops a process thread by thread, after the signal was sent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

HALT_TIMEOUT_S = 10.0
POLL_S = 0.002


def halt(pid: int) -> None:
    """Returns once no thread of the process runs any more; TimeoutError if one still does after `HALT_TIMEOUT_S`."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + HALT_TIMEOUT_S
    while not halted(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs {HALT_TIMEOUT_S} s after SIGSTOP")
        time.sleep(POLL_S)


def halted(pid: int) -> bool:
    """Whether every thread is stopped; a process that is gone isn't."""
    return {_state(thread) for thread in Path(f"/proc/{pid}/task").glob("*")} - {None} == {"T"}


def _state(thread: Path) -> str | None:
    """The kernel's letter for it (proc(5)); None if it has ended meanwhile."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
