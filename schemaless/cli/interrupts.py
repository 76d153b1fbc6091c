"""How commands that run until Ctrl-C hear it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 1.0


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Does what is in it until that ends, or Ctrl-C ends it.

    An interrupt that ends nothing comes again: CPython drops, without a word, what is raised while an `io` object is
    finalized whose close() is in Python, as that of each HTTP answer is. `log --follow` lost one in thirty so.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise KeyboardInterrupt

    is_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_background or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
