"""The outputs of a process that waits for nobody who reads them: what can't be written at once is queued, to a bound.

A pipe that nobody reads takes 64 KiB, and then whoever writes a line stands: a request, a pass, a stop. Here a thread
stands instead of them. Lines beyond the bound are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from typing import Any

import structlog

log = structlog.get_logger()

QUEUED_BYTES_MAX = 1 << 20
"""Some thousand lines, of each output."""
_SETTLED_WITHIN_S = 1.0
_LOOK_S = 0.01
_POLL_S = 1.0


class LossyOutput(io.RawIOBase):
    """A file descriptor, to which any thread writes without waiting.

    Nothing is raised for what can't be written: a broken pipe or a full disk costs lines, and no request.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        """Lines that were lost."""
        self._descriptor = descriptor
        self._own = without_waiting(descriptor)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begins without anything queued. A child process leaves what its parent queued to the parent."""
        self._lock = threading.RLock()  # a handler of a signal may write while its thread does
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._told = self.dropped
        self._writes = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        text = bytes(data)
        with self._lock:
            left = text if self._queue else self._write_at_once(text)
            if left and self._queued_bytes + len(left) > QUEUED_BYTES_MAX:
                self._drop(left)
            elif left:
                self._queue.append(left)
                self._queued_bytes += len(left)
                if not self._writes:
                    self._writes = True
                    threading.Thread(target=self._write_queued, name="output", daemon=True).start()
        return len(text)

    def settle(self) -> None:
        """Waits for a moment until what is queued is written. A process calls this before it ends."""
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while self._queue and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _write_queued(self) -> None:
        while True:
            is_ready(self._own, _POLL_S)
            with self._lock:
                left = self._write_at_once(self._queue[0])
                self._queued_bytes -= len(self._queue[0]) - len(left)
                if left:
                    self._queue[0] = left
                    continue
                self._queue.popleft()
                if self._queue:
                    continue
                self._writes = False
                dropped, self._told = self.dropped - self._told, self.dropped
            if dropped:
                log.warning("nobody read what this process writes, and lines were dropped", lines=dropped)
            return

    def _write_at_once(self, data: bytes) -> bytes:
        """Returns what there is no room for now."""
        while data and is_ready(self._own):
            try:
                data = data[os.write(self._own, data[: select.PIPE_BUF]) :]
            except BlockingIOError:
                break
            except OSError:
                self._drop(data)
                return b""
        return data

    def _drop(self, data: bytes) -> None:
        self.dropped += data.count(b"\n")


def without_waiting(descriptor: int) -> int:
    """Returns a descriptor of the same pipe or terminal that never waits, or the same one for anything else.

    O_NONBLOCK of a descriptor is that of all processes that have it, so this one is opened anew.
    """
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # it is closed, or its owner is another user
        pass
    return descriptor


def is_ready(descriptor: int, within_s: float = 0.0) -> bool:
    """Returns whether a write of PIPE_BUF bytes doesn't wait now: it finds room, or an error."""
    polled = select.poll()
    polled.register(descriptor, select.POLLOUT)
    return bool(polled.poll(within_s * 1000))


_outputs: list[LossyOutput] = []


def dropped_lines() -> int:
    """Returns how many lines of both outputs were lost."""
    return sum(output.dropped for output in _outputs)


def wait_for_nobody() -> None:
    """Gives this process such outputs, for its log and for whatever else prints. It may be called again."""
    if _outputs:
        return
    sys.stdout, sys.stderr = _text_of(1), _text_of(2)
    atexit.register(settle)


def settle() -> None:
    """Waits for a moment until what is queued is written."""
    for output in _outputs:
        output.settle()


def _text_of(descriptor: int) -> Any:
    _outputs.append(output := LossyOutput(descriptor))
    return io.TextIOWrapper(output, "utf-8", "backslashreplace", line_buffering=True)
