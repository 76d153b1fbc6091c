"""Progress of the demo: how far loading, index and programs are, shown on the terminal, and the wait until all is done.

It asks /status, as anybody could. The audit afterwards proves what this only shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from schemaless.client.client import Client
from schemaless.errors import SchemalessError, Unavailable

POLL_S = 0.5
STALL_TIMEOUT_S = 120.0
LINE_EVERY_S = 10.0
LOADED = "cells loaded"
SEE_STATUS = "`schemaless status` says what runs, and `schemaless status --json` names the logs"


class ProgramStopped(SchemalessError):
    hint = "the program's log says more: `schemaless status --json` names it"


@dataclass(frozen=True, slots=True)
class Positions:
    """`head` counts the cells of all shards. `lags` says by consumer how many of them are not finished."""

    head: int = 0
    buffered: int = 0
    lags: Mapping[str, int] = field(default_factory=dict)

    def lag(self, consumer: str) -> int:
        return self.lags.get(consumer, self.head)

    def caught_up(self, consumers: set[str]) -> bool:
        return self.head > 0 and self.buffered == 0 and not any(map(self.lag, consumers))


def read_positions(client: Client) -> Positions:
    """Reads the positions of all consumers. Raises ProgramStopped with the reason of the first shard that stopped."""
    status = client.document("/status")
    lags = {}
    for consumer in status["consumers"]:
        if stopped := consumer["stopped"]:
            first = stopped[0]
            raise ProgramStopped(f"{consumer['consumer']} stopped in shard {first['shard']}: {first['reason']}")
        lags[consumer["consumer"]] = consumer["lag"]
    return Positions(status["heads_sum"], status["buffered"], lags)


def wait_until_caught_up(
    client: Client,
    consumers: set[str],
    show: Callable[[Positions], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Positions:
    """Waits until each consumer has finished every cell and no buffer holds one.

    Raises Unavailable when nothing moves for STALL_TIMEOUT_S.
    """
    before: Positions | None = None
    moved_at = clock()
    while not (now := read_positions(client)).caught_up(consumers):
        show(now)
        if now != before:
            before, moved_at = now, clock()
        elif clock() - moved_at > STALL_TIMEOUT_S:
            lags = {name: now.lag(name) for name in sorted(consumers)} | {"buffers": now.buffered}
            behind = ", ".join(f"{name} {lag}" for name, lag in lags.items() if lag)
            raise Unavailable(
                f"nothing moved for {STALL_TIMEOUT_S:.0f} s; cells still to be done: {behind}", hint=SEE_STATUS
            )
        sleep(POLL_S)
    show(now)
    return now


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


class Board:
    """Progress bars on a terminal, else a line every few seconds, counted in cells. Use it in a `with`."""

    def __init__(self, console: Console, cells: int, consumers: dict[str, str]) -> None:
        """`consumers` maps each consumer to its label."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
        self._console = console
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._load = self._bars.add_task(LOADED, total=cells)
        self._behind = {name: self._bars.add_task(label, total=cells) for name, label in consumers.items()}
        self._labels = consumers
        self._printed_at = time.monotonic()
        self._printed = 0

    def loaded(self, count: int) -> None:
        self._bars.advance(self._load, count)

    def show(self, positions: Positions) -> None:
        for name, task in self._behind.items():
            self._bars.update(task, completed=positions.head - positions.lag(name), total=positions.head or None)
        now = time.monotonic()
        if self._console.is_terminal or now - self._printed_at < LINE_EVERY_S:
            return
        loaded = int(self._bars.tasks[0].completed)
        rate = (loaded - self._printed) / (now - self._printed_at)
        behind = ", ".join(f"{label} {positions.lag(name):,} behind" for name, label in self._labels.items())
        self._console.print(f"{LOADED} {loaded:,} ({rate:,.0f}/s); {behind}", highlight=False, soft_wrap=True)
        self._printed, self._printed_at = loaded, now

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
