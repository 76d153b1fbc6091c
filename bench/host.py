"""What the machine's host took meanwhile: on a virtual machine the cores may be lent to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

A = TypeVar("A")

_STEAL = 7  # of the columns in /proc/stat; what follows is counted in earlier ones already (proc(5))


def stolen_during(work: Callable[[], A]) -> tuple[A, float]:
    """What `work` gives, and the share of the machine's CPU time that it did not have meanwhile, in percent."""
    before = _ticks()
    done = work()
    spent = [now - then for then, now in zip(before, _ticks(), strict=True)]
    return done, 100 * spent[_STEAL] / max(1, sum(spent))


def _ticks() -> list[int]:
    """All cores together: user, nice, system, idle, iowait, irq, softirq, steal."""
    total = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(ticks) for ticks in total.split()[1 : _STEAL + 2]]
