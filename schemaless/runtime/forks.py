"""Forks: what becomes of a process that a function of a program forks while it is called.

It has a copy of the worker's memory and none of its threads. Whatever it did after the call would be done by a second
worker that nobody knows. So it has no connection and no port of the worker's, and ends where it leaves the call.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import traceback
from collections.abc import Coroutine, Generator
from typing import Any

from schemaless.runtime.outputs import settle


class _Here:
    forks = 0
    """How often this process was forked, its parents counted in. It tells processes apart without a system call."""


def part_from_children() -> None:
    """Has every process that is forked from now on part from this one. To be called once."""
    os.register_at_fork(after_in_child=_part)


def caller() -> int:
    """Returns this process for `leave`, before a call."""
    return _Here.forks


def leave(called_by: int, error: BaseException | None) -> None:
    """Returns in the process that made the call, a `caller`. Ends one that was forked since, as `error` would have."""
    if _Here.forks == called_by:
        return
    status = 1
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        status = 0
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        status = error.code
    else:
        traceback.print_exception(error)
    settle()
    os._exit(status)


class InOneProcess:
    """A coroutine that is awaited step by step: a process that is forked in one ends with it."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, Any]:
        called_by = caller()
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = self._coroutine.throw(thrown) if thrown else self._coroutine.send(None)
            except StopIteration as done:
                leave(called_by, None)
                return done.value
            except BaseException as error:
                leave(called_by, error)
                raise
            leave(called_by, None)
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = error


def _count() -> None:
    _Here.forks += 1


os.register_at_fork(after_in_child=_count)


def _part() -> None:
    signal.set_wakeup_fd(-1)  # it is the worker's event loop that would wake up
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and _reaches_others(int(name)):
            os.dup2(nothing, int(name))  # whose number stays taken: an object of the worker's may still close it


def _reaches_others(descriptor: int) -> bool:
    """Whether it is a connection or a port. What joins parent and child, such as a queue, has no address."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        found = socket.socket(fileno=descriptor)
        try:
            return found.family != socket.AF_UNIX or bool(found.getpeername())
        finally:
            found.detach()
    except OSError:
        return False
