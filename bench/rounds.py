"""Alternating rounds: ours, the comparator, ours, the comparator; so that a busy moment hits both."""

from __future__ import annotations

from collections.abc import Callable
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
    """Answers a second; times `each`, for requests that carry several cells."""
    return Values(tuple(outcome.rate * each for outcome in outcomes))


def p50s(outcomes: list[Outcome]) -> Values:
    return Values(tuple(outcome.p50_ms for outcome in outcomes))
