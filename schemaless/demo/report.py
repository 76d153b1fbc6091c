"""The demo's report: what is promised beside what was found, a line each, and whether all of it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from schemaless.audit.report import AuditReport
from schemaless.demo.catch_up import Positions
from schemaless.demo.flight import BILLED_CARRIER, CELLS, FLIGHTS, FlightCount
from schemaless.demo.loader import LoadCount
from schemaless.demo.programs import CONSUMERS, INDEX, CallLog
from schemaless.names import index_consumer


@dataclass(frozen=True, slots=True)
class Line:
    """One assertion. `at_least`: more is right too, a trigger's call may be repeated."""

    what: str
    expected: int
    found: int
    note: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.found >= self.expected if self.at_least else self.found == self.expected


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the report is made of. `after_load`: positions when the last put was acknowledged; `caught_up_s`: how
    long the rest took from then on."""

    count: FlightCount
    load: LoadCount
    after_load: Positions
    caught_up_s: float
    calls: CallLog
    audit: AuditReport


def lines_of(facts: Facts) -> list[Line]:
    bills = len(facts.calls.bills)
    cells = facts.load.acknowledged + bills
    return [*_put_lines(facts, bills), *_log_lines(facts.audit, cells), *_consumer_lines(facts, FLIGHTS + bills)]


def print_lines(console: Console, lines: Sequence[Line]) -> bool:
    """Whether all lines hold."""
    table = Table(title="audited", title_justify="left")
    table.add_column("what")
    for name in ("expected", "found", ""):
        table.add_column(name, justify="right")
    table.add_column("")
    for line in lines:
        expected = f"≥ {line.expected:,}" if line.at_least else f"{line.expected:,}"
        verdict = "[green]holds[/]" if line.holds else "[bold red]FAILS[/]"
        table.add_row(line.what, expected, f"{line.found:,}", verdict, line.note)
    console.print(table)
    return all(line.holds for line in lines)


def print_rates(console: Console, facts: Facts) -> None:
    load, after = facts.load, facts.after_load
    rate = load.acknowledged / load.seconds if load.seconds else 0.0
    console.print(f"loaded at {rate:,.0f} cells/s in {load.seconds:.0f} s; {load.tried_again:,} puts were tried again")
    lags = ", ".join(f"{label} {after.lag(name):,}" for name, label in CONSUMERS.items())
    console.print(f"behind when the last cell was acknowledged: {lags}; all caught up {facts.caught_up_s:.1f} s later")


def _put_lines(facts: Facts, bills: int) -> Iterator[Line]:
    count, load = facts.count, facts.load
    yield Line("flights in the file", FLIGHTS, count.flights)
    statuses = ", ".join(f"{status} {number:,}" for status, number in sorted(load.by_status.items()))
    yield Line("loaded cells acknowledged", CELLS, load.acknowledged, statuses)
    yield Line("billing's own puts acknowledged", count.billed, bills, f"carrier {BILLED_CARRIER}")


def _log_lines(audit: AuditReport, cells: int) -> Iterator[Line]:
    found = audit.cells()
    yield Line("cells in MySQL, dense, in order", cells, found["mysql"], "= acknowledged")
    yield Line("cells in Kafka", cells, found["topic"], "exactly once, dense, in order")
    yield Line("the same content in both", cells, found["matched"])


def _consumer_lines(facts: Facts, statuses: int) -> Iterator[Line]:
    audit, calls = facts.audit, facts.calls
    index = next((index for index in audit.indexes if index_consumer(index.name) == INDEX), None)
    yield Line("index entries", facts.count.with_tailnum, index.found if index else 0, "flights with a tail number")
    yield Line("index entries as the cells say", facts.count.with_tailnum, index.matched if index else 0)
    finished = {consumer.name: consumer for consumer in audit.consumers}
    for name, label in CONSUMERS.items():
        consumer = finished.get(name)
        cells = consumer.cells if consumer else audit.cells()["head"]
        yield Line(f"cells finished by {label}", cells, consumer.finished if consumer else 0)
    yield Line("STATUS cells seen by census", statuses, len(calls.census), _repeats(calls.census))
    yield Line("calls of census", statuses, calls.census.total(), at_least=True)
    yield Line("flights charged by billing", facts.count.billed, len(calls.charges), _repeats(calls.charges))
    yield Line("conflicts", 0, audit.conflicts)
    yield Line("cells left in buffers", 0, audit.buffered)
    yield Line("findings of the audit", 0, audit.findings.total, f"in {audit.seconds:.0f} s")


def _repeats(calls: Counter[str]) -> str:
    return f"{calls.total() - len(calls):,} repeated"
