"""The outputs of a process that waits for nobody who reads them: what can't be written at once is queued, to a bound.

A pipe that nobody reads takes 64 KiB. Then every writer would wait: a request, a pass, a stop. Here only a thread
waits. Lines beyond the bound are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger()

QUEUED_BYTES_MAX = 1 << 20
"""Some thousand lines, of each output."""
TOLD_EVERY_S = 1.0
_SETTLED_WITHIN_S = 1.0
_LOOK_S = 0.01
_POLL_S = 1.0


class LossyOutput(io.RawIOBase):
    """A file descriptor, to which any thread writes without waiting. A regular file is written to at once.

    Nothing is raised for what can't be written: a broken pipe or a full disk costs lines, and no request.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        """Lines that were lost."""
        self._descriptor = descriptor
        self._own = without_waiting(descriptor)
        self._take = _writer(self._own)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begins without anything queued. A child process leaves what its parent queued to the parent."""
        self._lock = threading.RLock()  # a handler of a signal may write while its thread does
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._told, self._told_at = self.dropped, 0.0
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def close(self) -> None:
        """Does nothing: the process has lines to write for as long as it lives."""

    def write(self, data: Any, /) -> int:
        text = bytes(data)
        with self._lock:
            left = text if self._queue else self._write_at_once(text)
            has_room = not self._queue or self._queued_bytes + len(left) <= QUEUED_BYTES_MAX
            if left and (has_room or threading.current_thread() is self._thread):  # which says what was dropped
                self._queue.append(left)
                self._queued_bytes += len(left)
                if self._thread is None:
                    self._write_in_thread()
            elif left:
                self._drop(left)
        return len(text)

    def settle(self) -> None:
        """Waits for a moment until what is queued is written. A process calls this before it ends."""
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while self._queue and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _write_in_thread(self) -> None:
        self._thread = threading.Thread(target=self._write_queued, name="output", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many: the next line tries again
            self._thread = None

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
                dropped, now = self.dropped - self._told, time.monotonic()
                if dropped and (not self._queue or now >= self._told_at + TOLD_EVERY_S):
                    self._told, self._told_at = self.dropped, now
                elif not self._queue:
                    self._thread = None
                    return
                else:
                    continue
            log.warning("nobody read what this process writes, and lines were dropped", lines=dropped, each=True)
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return

    def _write_at_once(self, data: bytes) -> bytes:
        """Returns what there is no room for now."""
        while data:
            try:
                data = data[self._take(data[: select.PIPE_BUF]) :]
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
    except OSError:  # its owner is another user
        pass
    return descriptor


def is_ready(descriptor: int, within_s: float = 0.0) -> bool:
    """Returns whether a write of PIPE_BUF bytes doesn't wait now: it finds room, or an error."""
    polled = select.poll()
    polled.register(descriptor, select.POLLOUT)
    return bool(polled.poll(within_s * 1000))


def _writer(descriptor: int) -> Callable[[bytes], int]:
    """Returns what writes at most PIPE_BUF bytes, or raises BlockingIOError."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        joined = socket.socket(fileno=os.dup(descriptor))
        return lambda data: joined.send(data, socket.MSG_DONTWAIT)

    def write_if_ready(data: bytes) -> int:
        if not is_ready(descriptor):
            raise BlockingIOError
        return os.write(descriptor, data)

    if stat.S_ISREG(mode) or not os.get_blocking(descriptor):
        return lambda data: os.write(descriptor, data)
    return write_if_ready


_texts: list[io.TextIOWrapper] = []


def dropped_lines() -> int:
    """Returns how many lines of both outputs were lost."""
    return sum(text.buffer.dropped for text in _texts)  # type: ignore[attr-defined]


def wait_for_nobody() -> None:
    """Gives this process such outputs, for its log and for whatever else prints.

    To be called before anything keeps the outputs that there were. It may be called again.
    """
    if _texts:
        return
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream is None:  # it is closed, and the next file that is opened would have its number
            os.dup2(nothing := os.open(os.devnull, os.O_WRONLY), descriptor)
            if nothing not in (1, 2):
                os.close(nothing)
        else:
            stream.flush()
        output: Any = LossyOutput(descriptor)
        _texts.append(io.TextIOWrapper(output, "utf-8", "backslashreplace", line_buffering=True))
    sys.stdout, sys.stderr = _texts
    atexit.register(settle)


def settle() -> None:
    """Waits for a moment until all that was written has gone out."""
    for text in _texts:
        text.flush()
        text.buffer.settle()  # type: ignore[attr-defined]
