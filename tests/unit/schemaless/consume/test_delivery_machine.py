"""A Hypothesis machine of delivery: any history of puts, records, pages, calls, processes and generations (I9, I10).

At the end everything that was held ends, and the processes that are there come to the heads by themselves.
"""

import asyncio
import gc
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from schemaless.shard_cursor import ShardCursor
from tests.unit.schemaless.consume.delivery_world import SHARDS, Process, Shared, Wait

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
ROUNDS_MAX = 300
TURNS = 3  # of the event loop after each rule. Most of what a process awaits takes one

shards = st.sampled_from(SHARDS)
numbers = st.integers(0, 1)
waits = st.sampled_from(Wait)
few = st.integers(1, 6)
mostly = st.sampled_from([True, True, True, False])


class Deliveries(RuleBasedStateMachine):
    """Two processes of one group. The first has all shards at the beginning."""

    @initialize(kind=st.sampled_from([(True, 0.0), (False, 0.0), (False, 0.25)]))
    def begin(self, kind):
        self.loop = asyncio.new_event_loop()
        self.kind = dict(zip(("together", "record_within_s"), kind, strict=True))
        self.shared = Shared()
        self.changes = {}
        self.run(self._begin())

    async def _begin(self):
        self.processes = [Process(self.shared, **self.kind) for _ in range(2)]
        for shard in SHARDS:
            await self.processes[0].gain(shard)

    def run(self, action=None, turns=TURNS):
        async def act():
            if action is not None:
                await action
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(act())

    def who(self, shard, is_owner):
        """Returns the owner of a shard, or the other process. That one may believe that the shard is its own."""
        owner = self.shared.owner[shard]
        return owner if is_owner else next(process for process in self.processes if process is not owner)

    @rule(turns=st.integers(1, 30), seconds=st.sampled_from([0.0, 0.3, 6.0]))
    def go_on(self, turns, seconds):
        self.shared.now += seconds
        self.run(turns=turns)

    # The log and its topic

    @rule(shard=shards, count=few)
    def put(self, shard, count):
        self.shared.put(shard, count)

    @rule(shard=shards, count=few)
    def put_and_hear(self, shard, count):
        self.shared.put(shard, count)
        for process in self.processes:
            process.hear(shard, 1000)
        self.run()

    @rule(shard=shards, lost=st.integers(0, 4))
    def promote(self, shard, lost):
        self.shared.promote(shard, lost)

    @rule(shard=shards, is_owner=mostly, count=few)
    def hear(self, shard, is_owner, count):
        self.who(shard, is_owner).hear(shard, count)
        self.run()

    @rule(shard=shards, is_owner=mostly, by=st.integers(-6, 3))
    def hear_again_or_never(self, shard, is_owner, by):
        self.who(shard, is_owner).move_offset(shard, by)

    @rule(shard=shards, is_owner=mostly)
    def look(self, shard, is_owner):
        self.who(shard, is_owner).look()
        self.run()

    # What is awaited, and fails

    @rule(shard=shards, is_owner=mostly, what=waits)
    def hold(self, shard, is_owner, what):
        self.who(shard, is_owner).held.add(what)

    @rule(shard=shards, is_owner=mostly, what=waits, well=st.booleans())
    def let_end(self, shard, is_owner, what, well):
        self.who(shard, is_owner).let_end(what, well=well)
        self.run()

    @rule(shard=shards, is_owner=mostly, what=waits)
    def fail_next(self, shard, is_owner, what):
        self.who(shard, is_owner).fails.add(what)

    @rule(shard=shards, is_owner=mostly, count=st.integers(0, 3))
    def finish_some(self, shard, is_owner, count):
        self.who(shard, is_owner).finishes[shard] = count

    # The group

    @rule(shard=shards, is_owner=st.booleans())
    def give(self, shard, is_owner):
        """A rebalance gives a shard to a process, or leaves it where it is."""
        if shard not in self.changes:
            self._change(shard, self._give(shard, self.shared.owner[shard], self.who(shard, is_owner)))

    @rule(shard=shards)
    def give_unknowingly(self, shard):
        """The owner hears nothing from the group, which gives the shard to the other process."""
        if shard not in self.changes:
            self._change(shard, self.who(shard, is_owner=False).gain(shard))

    @rule()
    def learn(self):
        if not self.changes:
            for process in self.processes:
                process.learn()
            self.run()

    @rule(shard=shards, is_owner=mostly)
    def confirm(self, shard, is_owner):
        self.who(shard, is_owner).confirm()
        self.run()

    @rule(shard=shards, turns=st.integers(1, 10))
    def doubt(self, shard, turns):
        """The group answers no heartbeat for a while."""
        process = self.who(shard, is_owner=True)
        process.may_call = False
        self.run()  # a call that was begun just before
        process.must_not_call = True
        self.run(turns=turns)
        process.may_call, process.must_not_call = True, False

    @rule(shard=shards, is_owner=mostly, heir=numbers)
    def kill(self, shard, is_owner, heir):
        dead = self.who(shard, is_owner)
        interrupted = set(self.changes)
        self.run(self._kill(dead))
        for each, owner in self.shared.owner.items():
            if owner is dead:
                self._change(each, self.processes[heir].gain(each))
            elif each in interrupted:
                self._change(each, owner.gain(each))

    def _change(self, shard, action):
        async def start():
            self.changes[shard] = asyncio.create_task(action)

        self.run(start())
        self.changes[shard].add_done_callback(lambda _: self.changes.pop(shard))

    async def _give(self, shard, owner, process):
        await owner.suspend(shard)
        if process is owner:
            await process.gain(shard, kept=True)
        else:
            owner.delivery.release([shard])
            await process.gain(shard)

    async def _kill(self, dead):
        await self._end_changes()
        await dead.kill()
        self.processes[self.processes.index(dead)] = Process(self.shared, **self.kind)

    async def _end_changes(self):
        changes = list(self.changes.values())
        for change in changes:
            change.cancel()
        if changes:
            await asyncio.wait(changes)

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "shared"):
            assert not self.shared.wrong, self.shared.wrong

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            if not self.shared.wrong:
                self.run(self._end())
                self.nothing_is_wrong()
        finally:
            self.run(self._kill_all())
            gc.collect()  # what is dropped unfinished ends here: later its locks would find the loop closed
            self.loop.close()

    async def _end(self):
        """Brings one cell more to each shard. It finds what a process that was no owner any longer has moved."""
        for process in self.processes:
            process.fails.clear()
            for what in Wait:
                process.let_end(what, well=True)
        for _ in range(ROUNDS_MAX):
            await asyncio.sleep(0)
        for shard in SHARDS:
            self.shared.put(shard, 1)
        for _ in range(ROUNDS_MAX):
            self.shared.now += 10.0
            for process in self.processes:
                process.learn()
                process.look()
                process.confirm()
            for _ in range(20):
                await asyncio.sleep(0)
            if self._is_done():
                break
        assert self._is_done(), {shard: self._where(shard) for shard in SHARDS}
        for shard in SHARDS:
            found = {cell.location for cell in self.shared.log.cells(shard)}
            assert found <= self.shared.finished[shard]
            assert self.shared.effects[shard] <= found, "what a superseded cell caused stays"

    def _is_done(self):
        return all(owner.is_done(shard) for shard, owner in self.shared.owner.items())

    def _where(self, shard):
        cursor = self.shared.owner[shard].delivery.cursors()[shard]
        return cursor.state, cursor.reason, self.shared.table.rows[shard][1], self.shared.log.heads()[shard]

    async def _kill_all(self):
        await self._end_changes()
        for process in self.processes:
            await process.kill()


def histories(**options):
    common = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    gc.freeze()  # what other tests left in this process would be looked through after each history: seconds, each time
    try:
        run_state_machine_as_test(Deliveries, settings=settings(**common | options))
    finally:
        gc.unfreeze()


@pytest.mark.faults
@pytest.mark.timeout(3600 if LONG else 240)
def test_whatever_happens_every_cell_is_finished_in_order_and_counted_once():
    histories(
        max_examples=5000 if LONG else 75,
        stateful_step_count=60 if LONG else 40,
        phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
        derandomize=not LONG,  # the long run looks for new histories
    )


def test_the_machine_finds_a_cursor_that_takes_from_the_topic_what_is_not_next(monkeypatch):
    monkeypatch.setattr(ShardCursor, "_proven", lambda cursor, cells: cells)
    with pytest.raises((AssertionError, ExceptionGroup)):
        histories(max_examples=100, stateful_step_count=40, phases=[Phase.generate], derandomize=True, database=None)
