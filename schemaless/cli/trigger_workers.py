"""TriggerWorkers: the processes of `schemaless triggers run`, kept running until SIGTERM or Ctrl-C.

With `--watch` they start again when a source file changes. A program that fails at once then waits for the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from schemaless.errors import Misconfigured

_RESTART_PAUSE_S = 1.0
_BROKEN_WITHIN_S = 5.0  # a worker that ends so soon after its start would end again
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
_FILES_MAX = 5_000


class WorkerProcess(Protocol):
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(slots=True)
class _Place:
    """One of the workers. Without a process it starts again at `restart_at`, or at the next change of the sources."""

    process: WorkerProcess | None
    began: float
    restart_at: float | None = None


class SourceFiles:
    """The Python files of a module's folder and of those below. Hidden folders and environments aren't looked at."""

    def __init__(self, module: str) -> None:
        """Raises Misconfigured when there is no such file, or when the folder has too many."""
        self._folder = _file_of(module).resolve().parent
        self._seen = self._times()

    def have_changed(self) -> bool:
        """Returns whether one was written, made or deleted since the last call."""
        before, self._seen = self._seen, self._times()
        return before != self._seen

    def _times(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for folder, below, names in os.walk(self._folder):
            below[:] = [n for n in below if n[0] != "." and not os.path.exists(os.path.join(folder, n, "pyvenv.cfg"))]
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        found[path] = os.stat(path).st_mtime_ns
                    except FileNotFoundError:
                        continue  # an editor replaces it
            if len(found) > _FILES_MAX:
                raise Misconfigured(f"--watch: {self._folder} has more than {_FILES_MAX} Python files")
        return found


def _file_of(module: str) -> Path:
    """Returns the file of a module without importing it."""
    if module.endswith(".py"):
        candidates = [Path(module)]
    else:
        path = Path(*module.split("."))
        bases = ["", *sys.path]
        candidates = [Path(base, file) for base in bases for file in (path.with_suffix(".py"), path / "__init__.py")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise Misconfigured(f"--watch: there is no file of the module {module}")


class TriggerWorkers:
    """`start` starts one process. `sources` are watched, if given."""

    def __init__(
        self,
        start: Callable[[], WorkerProcess],
        count: int,
        sources: SourceFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._sources = sources
        self._clock = clock
        self._began = clock()
        self._places = [_Place(start(), self._began) for _ in range(count)]
        self._stopping = False

    def run(self) -> int:
        """Returns the exit status: that of a worker which can't even start, else 0."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            self._stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            while not self._stopping:
                if (status := self.step()) is not None:
                    return status
                time.sleep(_POLL_S)
            return 0
        finally:
            self.stop()

    def step(self) -> int | None:
        """Looks once at every worker and at the sources. Returns the exit status with which the command ends, if so."""
        now = self._clock()
        if self._sources is not None and self._sources.have_changed():
            print("a source file has changed: the workers start again", file=sys.stderr)
            self.stop()
            self._places = [_Place(self._start(), now) for _ in self._places]
            return None
        for place in self._places:
            if place.process is None:
                if place.restart_at is not None and now >= place.restart_at:
                    place.process, place.began = self._start(), now
                continue
            status = place.process.poll()
            if status is None:
                continue
            if self._sources is None and now - self._began < _BROKEN_WITHIN_S:
                return status
            place.process, place.restart_at = None, now + _RESTART_PAUSE_S
            if self._sources is not None and now - place.began < _BROKEN_WITHIN_S:
                place.restart_at = None
                print("a worker ended at once: it starts again when a source file changes", file=sys.stderr)
        return None

    def stop(self) -> None:
        """Ends all workers, after their last calls."""
        processes = [place.process for place in self._places if place.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
