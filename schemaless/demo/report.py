"""The demo's report: each promise as a line with expected and found numbers, and whether all of them hold."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from schemaless.audit.report import AuditReport
from schemaless.cell import RowKey
from schemaless.demo.failover import Failover
from schemaless.demo.growth import Growth
from schemaless.demo.loader import BILLED_CARRIER, CELLS, FLIGHTS, FlightCount, LoadCount
from schemaless.demo.programs import ADDED_INDEX_NAME, INDEX, CallLog, IndexChange, Outage, ParkedFlights, consumers_of
from schemaless.demo.progress import Positions
from schemaless.errors import NotReady
from schemaless.index.check import check_index, complete_definition
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector, SweepSelection, one_row
from schemaless.names import index_consumer
from schemaless.storage import index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Topology

# Planted damage: entries of an index that the demo changes behind everybody's back, which are then found and repaired.
#
# It does to a table what a person with an SQL client might do. It deletes an entry, changes one, and adds one of a row
# that doesn't exist.

PLANTED = ("ghost", "missing", "stale")


@dataclass(frozen=True, slots=True)
class DamageReport:
    """The kinds of faults that verification named after the damage, how many were repaired, and left after that."""

    named: Sequence[str]
    repaired: int
    left: int


def damage_and_repair(topology: Topology, datastore: Datastore, index: str) -> DamageReport:
    """Plants one fault of each kind on a master, verifies and repairs their rows, and verifies them again.

    Raises StorageUnavailable when a master is unreachable, and NotReady while the index is built or has few entries.
    """

    async def run() -> DamageReport:
        async with AsyncStorage(topology, connections_max=2) as storage:
            definition = await complete_definition(storage, datastore, index)
            inspector = IndexInspector(storage, datastore, definition)

            async def check(selection: SweepSelection, *, repair: bool = False) -> tuple[list[str], int]:
                found = (await check_index(storage, inspector, [selection], repair=repair, minions=False)).masters
                return [fault["kind"] for fault in found.faults], found.counts.repaired

            planted = [one_row(datastore, row_key) for row_key in await _plant(storage, datastore, definition)]
            named = [kind for row in planted for kind in (await check(row))[0]]
            repaired = sum([(await check(row, repair=True))[1] for row in planted])
            left = sum([len((await check(row))[0]) for row in planted])
            return DamageReport(sorted(named), repaired, left)

    return asyncio.run(run())


async def _plant(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> list[RowKey]:
    """Damages the first shard that has entries. Returns the rows."""
    placed = definition.placed(datastore)
    for shard in range(datastore.shards):
        master = storage.master(placed.home(shard))
        if rows := await master.run(_damage, placed, shard, definition):
            return rows
    raise NotReady(f"index {definition.name} has no shard with two entries")


def _damage(datastore: Datastore, shard: int, definition: IndexDefinition) -> Operation[list[RowKey]]:
    table = index_table.table(datastore, shard, definition)
    changed = f"`{definition.keyed[-1].name}`"
    (found,) = yield f"SELECT row_key FROM {table} WHERE live = 1 ORDER BY row_key LIMIT 2"
    if len(found.rows) < 2:
        return []
    missing, stale = (RowKey(row_key) for (row_key,) in found.rows)
    ghost = RowKey(uuid.uuid4().bytes)
    yield f"DELETE FROM {table} WHERE row_key = 0x{missing.hex()}"
    yield f"UPDATE {table} SET {changed} = '2000-01-01' WHERE row_key = 0x{stale.hex()}"
    columns = f"row_key, element, source_generation, source_added_id, live, `{definition.shard_field.name}`"
    yield f"INSERT INTO {table} ({columns}) VALUES (0x{ghost.hex()}, 0, 1, 1, 1, 'NOWHERE')"
    return [missing, stale, ghost]


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
class ErasedPassenger:
    """The versions of a passenger's row, how many of them still have a body, and how long the order and the whole took
    in seconds. Each run of the demo writes one version, and erases it with an entry of the log.
    """

    versions: int
    left: int
    is_complete: bool
    ordered_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load, and what happened meanwhile: nothing in a run that loaded nothing new, or where it can't be done."""

    count: LoadCount
    failover: Failover | None
    outage: Outage | None
    growth: Growth | None


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the report is made of. `after_load` holds the positions when the last put was acknowledged, and
    `caught_up_s` says how long the rest took from then on. `effects` counts the cells about billing's charges. A run
    that loaded nothing new had no incident, and so no `replay`.
    """

    count: FlightCount
    loaded: Loaded
    after_load: Positions
    caught_up_s: float
    calls: CallLog
    effects: int
    audit: AuditReport
    damage: DamageReport
    change: IndexChange
    erased: ErasedPassenger
    replay: ParkedFlights | None = None


def lines_of(facts: Facts) -> list[Line]:
    """Returns every assertion of the report, in the order in which they are printed."""
    count, load, calls, audit = facts.count, facts.loaded.count, facts.calls, facts.audit
    bills = len(calls.bills)
    cells, statuses = load.acknowledged + bills + facts.effects + 2 * facts.erased.versions, FLIGHTS + bills
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
        *_failover_lines(facts.loaded.failover),
        *_growth_lines(facts.loaded.growth),
        *_erased_lines(facts.erased),
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
    if (outage := facts.loaded.outage) is not None:
        lines.insert(0, Line("flights parked by the outage of the card processor", 0, outage.parked))
    return lines


def _failover_lines(failover: Failover | None) -> list[Line]:
    if failover is None:
        return []
    replaced = f"{failover.master} after {failover.seconds:.1f} s, generation {failover.generation}"
    return [
        Line("masters killed for good, and replaced", 1, int(failover.master != failover.lost), replaced),
        Line("lost masters that are back as minions", 1, int(failover.is_back), failover.lost),
    ]


def _growth_lines(growth: Growth | None) -> list[Line]:
    if growth is None:
        return []
    copied = f"{growth.cells:,} cells in {growth.seconds:.0f} s"
    pause = f"longest pause {max(growth.pauses_ms, default=0.0):.0f} ms"
    told = f"{copied}, {pause}, {growth.tried_again:,} puts tried again"
    return [Line(f"shards moved to cluster {growth.cluster}, which was added", growth.wanted, growth.moved, told)]


def _erased_lines(erased: ErasedPassenger) -> list[Line]:
    took = f"asked for in {erased.ordered_s * 1000:.0f} ms, complete after {erased.seconds:.1f} s"
    return [
        Line("bodies of the erased passenger that are left", 0, erased.left),
        Line("erasures that are complete", 1, int(erased.is_complete), took),
    ]


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
    load, after = facts.loaded.count, facts.after_load
    rate = load.acknowledged / load.seconds if load.seconds else 0.0
    console.print(f"loaded at {rate:,.0f} cells/s in {load.seconds:.0f} s; {load.tried_again:,} puts were tried again")
    if (outage := facts.loaded.outage) is not None:
        console.print(
            f"the processor was down for {outage.down_s:.0f} s. billing tripped after {outage.tripped_after_s:.0f} s"
            f" and ran again {outage.recovered_after_s:.1f} s after the processor did: {outage.cause}"
        )
    loaded = consumers_of(facts.change.number if facts.change.seconds is None else 1)
    lags = ", ".join(f"{label} {after.lag(name):,}" for name, label in loaded.items())
    console.print(f"behind when the last cell was acknowledged: {lags}; all caught up {facts.caught_up_s:.1f} s later")


def _repeats(calls: Counter[str]) -> str:
    return f"{calls.total() - len(calls):,} repeated"
