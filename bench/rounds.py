"""Alternating rounds: ours, the comparator, ours, the comparator, so that a busy moment hits both.

On a virtual machine the host may lend the cores to others. `stolen_during` measures how much.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.figures import Values
from bench.load import Outcome

A = TypeVar("A")
B = TypeVar("B")


def alternate(rounds: int, ours: Callable[[], A], theirs: Callable[[], B]) -> tuple[list[A], list[B]]:
    """One unmeasured round of each first: pools fill, pages come in, code gets warm."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return [mine for mine, _ in pairs], [other for _, other in pairs]


def rates(outcomes: list[Outcome], each: int = 1) -> Values:
    """Returns responses a second, times `each` for requests that carry several cells."""
    return Values(tuple(outcome.rate * each for outcome in outcomes))


def p50s(outcomes: list[Outcome]) -> Values:
    return Values(tuple(outcome.p50_ms for outcome in outcomes))


_STEAL = 7  # of the columns in /proc/stat; what follows is counted in earlier ones already (proc(5))


def stolen_during(work: Callable[[], A]) -> tuple[A, float]:
    """Returns the result of `work`, and the percentage of CPU time that the host took meanwhile."""
    before = _ticks()
    done = work()
    spent = [now - then for then, now in zip(before, _ticks(), strict=True)]
    return done, 100 * spent[_STEAL] / max(1, sum(spent))


def _ticks() -> list[int]:
    """All cores together: user, nice, system, idle, iowait, irq, softirq, steal."""
    total = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(ticks) for ticks in total.split()[1 : _STEAL + 2]]
