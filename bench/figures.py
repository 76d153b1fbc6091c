"""Figures of a benchmark: values of alternating rounds, their median and spread, and the floor that they must meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Floor:
    """A bound that a figure should keep: `at_least`, or `at_most`."""

    bound: float
    upper: bool

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.upper else value >= self.bound

    def text(self, unit: str) -> str:
        return f"{'≤' if self.upper else '≥'} {number(self.bound)}{unit}"


def at_least(bound: float) -> Floor:
    return Floor(bound, upper=False)


def at_most(bound: float) -> Floor:
    return Floor(bound, upper=True)


@dataclass(frozen=True, slots=True)
class Values:
    """One figure, once a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def __str__(self) -> str:
        """Median and spread."""
        if len(self.rounds) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.rounds))} to {number(max(self.rounds))})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our figure beside a comparator's. `floor` bounds the ratio of ours to theirs."""

    what: str
    unit: str
    ours: Values
    theirs: Values
    floor: Floor | None = None

    @property
    def ratios(self) -> Values:
        """The ratio of each round, whose halves ran one after the other on the same machine."""
        return Values(tuple(a / b for a, b in zip(self.ours.rounds, self.theirs.rounds, strict=True)))

    @property
    def verdict(self) -> str:
        return _verdict(self.floor, self.ratios.median)

    def cells(self) -> list[str]:
        """Row of the report."""
        floor = self.floor.text("") if self.floor else "none"
        return [self.what, self.unit, str(self.ours), str(self.theirs), str(self.ratios), floor, self.verdict]


@dataclass(frozen=True, slots=True)
class Figure:
    """A value without a comparator. `floor` bounds the value."""

    what: str
    unit: str
    values: Values
    floor: Floor | None = None

    @property
    def verdict(self) -> str:
        return _verdict(self.floor, self.values.median)

    def cells(self) -> list[str]:
        """Row of the report."""
        floor = self.floor.text(f" {self.unit}") if self.floor else "none"
        return [self.what, self.unit, str(self.values), "", "", floor, self.verdict]


MET, NOT_MET = "met", "**NOT met**"


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values, no percentile")
    ranked = sorted(values)
    rank = max(1, -(-len(ranked) * percent // 100))
    return ranked[int(rank) - 1]


def number(value: float) -> str:
    """Returns a number with as many digits as a noisy machine deserves."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _verdict(floor: Floor | None, value: float) -> str:
    if floor is None:
        return ""
    return MET if floor.met_by(value) else NOT_MET
