"""The demo's report: each promise as a line with expected and found numbers, and whether all of them hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from schemaless.audit.report import AuditReport
from schemaless.demo.flights import BILLED_CARRIER, CELLS, FLIGHTS, FlightCount
from schemaless.demo.incident import Outage, ParkedFlights
from schemaless.demo.loader import LoadCount
from schemaless.demo.planted_damage import PLANTED, DamageReport
from schemaless.demo.programs import ADDED_INDEX_NAME, INDEX, CallLog, IndexChange, consumers_of
from schemaless.demo.progress import Positions
from schemaless.names import index_consumer


@dataclass(frozen=True, slots=True)
class Line:
    """One assertion. With `at_least` more is right too, because a trigger's call may be repeated."""

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
    """The facts that the report is made of. `after_load` holds the positions when the last put was acknowledged, and
    `caught_up_s` says how long the rest took from then on. `effects` counts the cells about billing's charges. A run
    that loaded nothing new had no incident: no `replay`, and no `outage` either, which some stacks never have.
    """

    count: FlightCount
    load: LoadCount
    after_load: Positions
    caught_up_s: float
    calls: CallLog
    effects: int
    audit: AuditReport
    damage: DamageReport
    change: IndexChange
    outage: Outage | None = None
    replay: ParkedFlights | None = None


def lines_of(facts: Facts) -> list[Line]:
    """Returns every assertion of the report, in the order in which they are printed."""
    count, load, calls, audit = facts.count, facts.load, facts.calls, facts.audit
    bills = len(calls.bills)
    cells, statuses = load.acknowledged + bills + facts.effects, FLIGHTS + bills
    found = audit.cells()
    by_status = ", ".join(f"{status} {number:,}" for status, number in sorted(load.by_status.items()))
    indexes = {index_consumer(index.name, index.number): index for index in audit.indexes}
    index, added = indexes.get(INDEX), indexes.get(index_consumer(ADDED_INDEX_NAME, facts.change.number))
    consumers = {consumer.name: consumer for consumer in audit.consumers}
    finished = [
        Line(f"cells finished by {label}", consumer.cells, consumer.finished)
        if (consumer := consumers.get(name))
        else Line(f"cells finished by {label}", found["head"], 0)
        for name, label in consumers_of(facts.change.number).items()
    ]
    return [
        Line("flights in the file", FLIGHTS, count.flights),
        Line("loaded cells acknowledged", CELLS, load.acknowledged, by_status),
        Line("billing's own puts acknowledged", count.billed, bills, f"carrier {BILLED_CARRIER}"),
        Line("cells about billing's charges", 2 * count.billed, facts.effects, "intents and outcomes", at_least=True),
        Line("cells in MySQL, dense, in order", cells, found["mysql"], "= acknowledged"),
        Line("cells in Kafka", cells, found["topic"], "exactly once, dense, in order"),
        Line("the same content in both", cells, found["matched"]),
        Line("index entries", count.with_tailnum, index.found if index else 0, "flights with a tail number"),
        Line("index entries as the cells say", count.with_tailnum, index.matched if index else 0),
        Line("entries of the added index", count.flights, added.found if added else 0, "made while the flights loaded"),
        Line("entries of the added index as the cells say", count.flights, added.matched if added else 0),
        Line("version of the added index that answers", 2, facts.change.number, _changed(facts.change), at_least=True),
        Line(
            "planted faults that verification named", len(PLANTED), _named(facts.damage), ", ".join(facts.damage.named)
        ),
        Line("planted faults repaired", len(PLANTED), facts.damage.repaired),
        Line("planted faults left", 0, facts.damage.left),
        *finished,
        Line("STATUS cells seen by census", statuses, len(calls.census), _repeats(calls.census)),
        Line("calls of census", statuses, calls.census.total(), at_least=True),
        Line("flights charged by billing", count.billed, len(calls.charges), _repeats(calls.charges)),
        *_incident_lines(facts),
        Line("conflicts", 0, audit.conflicts),
        Line("cells left in buffers", 0, audit.buffered),
        Line("findings of the audit", 0, audit.findings.total, f"in {audit.seconds:.0f} s"),
    ]


def _changed(change: IndexChange) -> str:
    return "changed before" if change.seconds is None else f"changed and switched to in {change.seconds:.0f} s"


def _named(damage: DamageReport) -> int:
    return len(set(damage.named) & set(PLANTED))


def _incident_lines(facts: Facts) -> list[Line]:
    if facts.replay is None:
        return []
    replay = facts.replay
    lines = [
        Line("flights parked by billing", 1, replay.parked, replay.reason),
        Line("parked flights called again, and charged", 1, replay.done),
        Line("flights still parked", 0, replay.left),
    ]
    if facts.outage is not None:
        lines.insert(0, Line("flights parked by the outage of the card processor", 0, facts.outage.parked))
    return lines


def print_lines(console: Console, lines: Sequence[Line]) -> bool:
    """Prints all lines, and returns whether they hold."""
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
    if facts.outage is not None:
        outage = facts.outage
        console.print(
            f"the processor was down for {outage.down_s:.0f} s. billing tripped after {outage.tripped_after_s:.0f} s"
            f" and ran again {outage.recovered_after_s:.1f} s after the processor did: {outage.cause}"
        )
    loaded = consumers_of(facts.change.number if facts.change.seconds is None else 1)
    lags = ", ".join(f"{label} {after.lag(name):,}" for name, label in loaded.items())
    console.print(f"behind when the last cell was acknowledged: {lags}; all caught up {facts.caught_up_s:.1f} s later")


def _repeats(calls: Counter[str]) -> str:
    return f"{calls.total() - len(calls):,} repeated"
