"""The breaker: how soon calls go on after an outage, whatever else waits in the shards. The clock is the test's."""

import itertools

import pytest

from schemaless import trigger
from schemaless.cell import CellKey
from schemaless.codec import decode_body, encode_body
from schemaless.config import BreakerMode
from schemaless.consume.breaker import PROBE_FIRST_S, PROBE_MAX_S, ROWS_KEPT, Breaker
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.storage.entity_table import ShardCell
from schemaless.testing.memory_program import MemoryEntityTable, MemoryProgram
from schemaless.testing.trigger_kit import MemoryWorker, memory_settings
from schemaless.topology import Datastore
from schemaless.triggers.decorator import triggers_of
from tests.unit.schemaless.consume.parking_world import row_key

SHARDS = 16
RECOVERY_S = 5.0


class Outage:
    """A program over 16 shards whose `charge` fails while the processor is down. `note` never fails."""

    def __init__(self, **options):
        datastore = Datastore("d", SHARDS, SHARDS, ("a",))
        table = MemoryEntityTable(datastore, clock_us=lambda: 1_000_000)
        self.server = MemoryProgram("trigger:test", datastore, table)
        self.is_down, self.charged, self.written = True, [], 0

        @trigger(column="BASE", name="charge", where="is_ours == true", **options)
        def charge(cell):
            self.charged.append(cell.row_key)
            if self.is_down:
                raise ConnectionError

        @trigger(column="NOTE", name="note")
        def note(cell):
            pass

        by_column = {}
        for found in triggers_of({"charge": charge, "note": note}):
            by_column.setdefault(found.column, []).append(found)
        settings = memory_settings(attempts_max=100, retry_delay_s=0.5, retry_delay_max_s=10.0)
        self.worker = MemoryWorker(self.server, TriggerProgram("test", by_column, "v1"), 1, settings, now=100.0)

    def write(self, shard, count=1, *, column="BASE", is_ours=True):
        for _ in range(count):
            self.written += 1
            key = CellKey(row_key(self.written).bytes, column, self.written)
            self.server.table.put_cells([ShardCell(key, encode_body({"is_ours": is_ours}), shard)])

    async def trip(self):
        self.write(0, 12)
        await self.worker.pass_by(20)
        assert self.worker.handler.tripped

    async def seconds_to_recovery(self):
        """Returns how long no call succeeds after the processor is up again."""
        self.is_down, began_at = False, self.worker.now
        while self.worker.handler.tripped:
            assert self.worker.now < began_at + 60, "it doesn't recover"
            await self.worker.pass_by(0.1, steps=5)
        return self.worker.now - began_at

    async def check_all_called(self):
        await self.worker.pass_by(2)
        ours = [
            cell.row_key
            for shard in range(SHARDS)
            for cell in self.server.table.read_after(shard, 0, 1 << 20)
            if cell.column_name == "BASE" and decode_body(cell.body)["is_ours"]
        ]
        assert {key.bytes for key in self.charged} == set(ours)
        assert self.server.parked == {}
        assert sum(row.counts.seen for row in self.server.checkpoints.values()) == self.written


@pytest.mark.parametrize("others", ["filtered", "of another function", "none"])
async def test_calls_go_on_soon_whatever_waits_in_other_shards(others):
    """A probe that calls nothing, or another function, would tell nothing of the outage and take its time."""
    outage = Outage()
    await outage.trip()
    for shard in range(SHARDS) if others != "none" else ():
        outage.write(shard, 20, column="NOTE" if others == "of another function" else "BASE", is_ours=False)
    await outage.worker.pass_by(10)
    assert await outage.seconds_to_recovery() <= RECOVERY_S
    await outage.check_all_called()


async def test_cells_that_no_function_is_called_for_wait_for_no_probe():
    """Their checkpoints move on while the breaker is open."""
    outage = Outage()
    await outage.trip()
    for shard in range(1, SHARDS):
        outage.write(shard, 50, is_ours=False)
    await outage.worker.pass_by(1)
    assert outage.worker.handler.tripped
    assert {outage.server.checkpoints[shard].counts.filtered for shard in range(1, SHARDS)} == {50}


async def test_a_shard_that_fell_silent_keeps_no_other_from_its_probe():
    """Here it was paused by a person while it was the next one to probe."""
    outage = Outage()
    await outage.trip()
    outage.write(1)
    await outage.worker.pass_by(0.2)
    outage.worker.delivery.pause(lambda shard: shard == 1)
    assert await outage.seconds_to_recovery() <= RECOVERY_S / 2


async def test_an_outage_is_tried_at_growing_intervals():
    """At most twice as long each time, and never so long that calls go on late."""
    outage, tried = Outage(), []
    await outage.trip()
    outage.charged.clear()
    for _ in range(400):
        before = len(outage.charged)
        await outage.worker.pass_by(0.05, steps=3)
        tried += [outage.worker.now] * (len(outage.charged) - before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert max(gaps) <= PROBE_MAX_S + 0.2
    assert len(tried) <= 20 / PROBE_MAX_S + 1


def test_the_intervals_between_probes_grow_to_a_bound():
    now = 0.0
    breaker = Breaker(BreakerMode.PROBE, lambda: now)
    for row in range(10):
        breaker.failed("f", row.to_bytes(16), "ConnectionError")
    assert breaker.is_tripped
    taken = []
    while now < 30:
        if breaker.take_probe():
            taken.append(now)
        now += 0.01
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *taken])]
    assert gaps == pytest.approx([PROBE_FIRST_S] + [PROBE_MAX_S] * (len(gaps) - 1), abs=0.02)
    assert 4 * PROBE_MAX_S < RECOVERY_S, "some probes may meet poison"


def failures_until_it_trips(breaker, clock, rows, every_s):
    """Fails for one row after the other. Returns how many calls it takes, at most three for each."""
    for calls, row in enumerate([*rows] * 3, 1):
        clock[0] += every_s
        if breaker.failed("charge", bytes([row]), "ConnectionError"):
            return calls
    return None


def test_an_outage_trips_a_program_that_makes_few_calls():
    """Ten rows fail and none succeeds, but never ten within ten seconds: their retries are seconds apart."""
    clock = [0.0]
    breaker = Breaker(BreakerMode.PROBE, lambda: clock[0])
    assert failures_until_it_trips(breaker, clock, range(12), every_s=5.0) == 10


def test_few_failures_with_a_good_call_between_them_trip_nothing():
    """Each good call shows that there is no outage, so what failed long before it counts for nothing."""
    clock = [0.0]
    breaker = Breaker(BreakerMode.PROBE, lambda: clock[0])
    for turn in range(10):
        assert failures_until_it_trips(breaker, clock, range(5 * turn, 5 * turn + 3), every_s=5.0) is None
        breaker.succeeded("charge", bytes([200]))


def test_the_last_rows_count_however_many_fail():
    """Three causes, none of them half of the rows, trip nothing. What is remembered of them is bounded."""
    breaker = Breaker(BreakerMode.PROBE, lambda: 0.0)
    rows = iter(range(10 * ROWS_KEPT))
    for row, kind in zip(rows, itertools.cycle(["Refused", "Denied", "Lost"]), strict=False):
        assert not breaker.failed("charge", row.to_bytes(16), kind)
        if row > 2 * ROWS_KEPT:
            break
    while not breaker.failed("charge", next(rows).to_bytes(16), "Lost"):
        pass
    assert breaker.cause == f"charge fails with Lost for {ROWS_KEPT // 2} of {ROWS_KEPT} rows"


def test_failures_of_a_whole_afternoon_are_no_outage():
    """A row counts for ten minutes, also where nothing succeeds because nothing else is called."""
    clock = [0.0]
    breaker = Breaker(BreakerMode.PROBE, lambda: clock[0])
    assert failures_until_it_trips(breaker, clock, range(12), every_s=70.0) is None
