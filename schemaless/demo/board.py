"""Board: how far loading, index and programs are, as bars on a terminal, else as a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from schemaless.demo.catch_up import Positions

LINE_EVERY_S = 10.0
LOADED = "cells loaded"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


class Board:
    """Use in a `with`. Everything is counted in cells."""

    def __init__(self, console: Console, cells: int, consumers: dict[str, str]) -> None:
        """`consumers`: what to call each consumer."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
        self._console = console
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._load = self._bars.add_task(LOADED, total=cells)
        self._behind = {name: self._bars.add_task(label, total=cells) for name, label in consumers.items()}
        self._labels = consumers
        self._said_at = time.monotonic()
        self._said = 0

    def loaded(self, count: int) -> None:
        self._bars.advance(self._load, count)

    def show(self, positions: Positions) -> None:
        for name, task in self._behind.items():
            self._bars.update(task, completed=positions.head - positions.lag(name), total=positions.head or None)
        if not self._console.is_terminal and time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._say(positions)

    def _say(self, positions: Positions) -> None:
        now = time.monotonic()
        loaded = int(self._bars.tasks[0].completed)
        rate = (loaded - self._said) / (now - self._said_at)
        behind = ", ".join(f"{label} {positions.lag(name):,} behind" for name, label in self._labels.items())
        self._console.print(f"{LOADED} {loaded:,} ({rate:,.0f}/s); {behind}", highlight=False, soft_wrap=True)
        self._said, self._said_at = loaded, now

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
