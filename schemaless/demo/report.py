"""The demo's report: what is promised beside what was found, a line each, and whether all of it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Line:
    """One assertion. `at_least`: more is right too (calls of a trigger may be repeated)."""

    what: str
    expected: int
    found: int
    note: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.found >= self.expected if self.at_least else self.found == self.expected


def print_lines(console: Console, title: str, lines: Sequence[Line]) -> bool:
    """Whether all lines hold."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    table.add_column("")
    for line in lines:
        expected = f"≥ {line.expected:,}" if line.at_least else f"{line.expected:,}"
        verdict = "[green]holds[/]" if line.holds else "[bold red]FAILS[/]"
        table.add_row(line.what, expected, f"{line.found:,}", verdict, line.note)
    console.print(table)
    return all(line.holds for line in lines)
