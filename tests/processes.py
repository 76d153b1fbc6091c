"""Processes that tests start, and that don't outlive them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import LIMIT_S


@contextmanager
def stopping(process: subprocess.Popen) -> Iterator[None]:
    """Stops a process at the end of the block. Raises TimeoutExpired for one that stays, and kills it."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
