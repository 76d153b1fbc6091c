"""CallLog: lines of a process in a file of its own, each in one unbuffered write before the caller goes on.

So the files tell what was done also after processes were killed. Only the last line of one may be torn.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


class CallLog:
    """A line is its fields with tabs between. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None
        self._opening = threading.Lock()

    def add(self, *fields: str) -> None:
        os.write(self._opened(), ("\t".join(fields) + "\n").encode())

    def _opened(self) -> int:
        with self._opening:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{os.getpid()}.tsv"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            return self._file
