"""The write queue of one master: what a locked head costs, and POSTs of one column (I3, I5)."""

import asyncio
from types import SimpleNamespace

import pytest

from api.write import queue
from api.write.queue import BreakerState, HeldShards, MasterWriteQueues
from schemaless.cell import Cell, CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey
from schemaless.errors import (
    Busy,
    LockTimeout,
    NodeRefuses,
    Overloaded,
    SchemalessError,
    ShardsLocked,
    ShardsMoved,
    StorageUnavailable,
    TableMissing,
)
from schemaless.storage import append, buffer_table, post_version, shard_head
from schemaless.storage.asyncmy_driver import Traffic
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.operation import AGAIN_ON
from schemaless.storage.post_version import NewVersion, NextVersion
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 8, 2, ("a",))


class Master:
    """Fails what meets a head of `locked`. `wrote` has the shards of each batch, `ended` the looks at transactions."""

    def __init__(self):
        self.node = SimpleNamespace(name="a1")
        self.locked = set()
        self.wrote = []
        self.again_on = []
        self.asked = 0
        self.error = None
        self.ended = 0
        self.refusal = NodeRefuses("this row")
        self.refuses = lambda items: False

    async def run(self, operation, *args, timeout_s, again_on=AGAIN_ON, traffic=None):
        await asyncio.sleep(0)
        if operation is append.held:
            return [shard for shard in args[1] if shard in self.locked]
        if operation is shard_head.end_idle_holders:
            self.ended += 1
            return []
        self.asked += 1
        if self.error is not None:
            raise self.error
        items = args[-2]
        shards = [item.shard for item in items if getattr(item, "home", "a") == "a"]
        met = self.locked & set(shards)
        if met:
            raise ShardsLocked("locked", met)
        if self.refuses(items):
            raise self.refusal
        self.wrote.append(shards)
        if operation is post_version.put_next:
            self.again_on.append(again_on)
            return [next_version(version, n) for n, version in enumerate(items, start=1)]
        assert operation is buffer_table.put_copies
        return [placed(row.shard) if row.home == "a" else BufferOutcome.INSERTED for row in items]


def placed(shard):
    return Placed(PutStatus.STORED, shard, 1, 42, 99)


def next_version(version, ref_key):
    key = CellKey(version.row_key, version.column_name, RefKey(ref_key))
    return NextVersion(Cell(key, version.body), placed(version.shard), replayed=False)


@pytest.fixture
def master():
    return Master()


@pytest.fixture
async def queues(master):
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters={"a": None, "b": None}),
        master=lambda name: master,
        is_joining=lambda name: False,
    )
    queues = MasterWriteQueues(storage, timeout_s=1.25, open_s=1.0)
    yield queues
    await queues.drain()


def row(shard, home="a"):
    return BufferRow(CellKey(RowKey(bytes([shard] * 16)), ColumnName("BASE"), RefKey(1)), b"body", shard, home, 1)


def version(shard, key=None):
    return NewVersion(shard, RowKey(bytes([shard] * 16)), ColumnName("BASE"), b"body", key)


async def test_a_locked_head_costs_its_own_shard_only(queues, master):
    """One wait, and the others of that batch are stored; from then on nobody waits for that shard."""
    master.locked = {3}
    first = queues.store("a", TRIPS, [row(1)])
    mixed = queues.store("a", TRIPS, [row(2), row(3), row(4)])
    copy = queues.buffer("a", TRIPS, [row(3, home="b")])
    assert await first == [placed(1)]
    stored, locked, also = await mixed
    assert (stored, also) == (placed(2), placed(4))
    assert isinstance(locked, ShardsLocked)
    assert await copy == [BufferOutcome.INSERTED]
    assert queues.held_shards() == 1
    (again,) = await queues.store("a", TRIPS, [row(3)])
    assert isinstance(again, ShardsLocked)
    assert [3 in shards for shards in master.wrote] == [False] * len(master.wrote)
    assert queues.breakers["a"].may_allow()


async def test_shards_that_moved_are_found_one_after_the_other(queues, master):
    """Each transaction of a large batch names its own. However many they are, the others are stored."""
    moved = set(range(1, 7))

    def refuses(items):
        met = sorted(moved.intersection(item.shard for item in items))
        if met:
            raise ShardsMoved("moved", met[:1])
        return False

    master.refuses = refuses
    outcomes = await queues.store("a", TRIPS, [row(shard) for shard in range(8)])
    assert [outcome for outcome in outcomes if isinstance(outcome, Placed)] == [placed(0), placed(7)]
    assert sum(isinstance(outcome, ShardsMoved) for outcome in outcomes) == len(moved)
    assert queues.breakers["a"].may_allow()


async def test_tables_that_are_locked_together_are_found_one_after_the_other(queues, master):
    """A statement names one table. Shards that nobody locks are stored all the same, and no breaker opens."""
    locked = {3, 4}

    def refuses(items):
        met = sorted(locked.intersection(item.shard for item in items))
        if met:
            raise ShardsLocked("locked", met[:1])
        return False

    master.refuses = refuses
    outcomes = await queues.store("a", TRIPS, [row(n) for n in range(1, 6)])
    assert [isinstance(outcome, ShardsLocked) for outcome in outcomes] == [False, False, True, True, False]
    assert queues.breakers["a"].state is BreakerState.CLOSED


async def test_a_head_that_is_free_again_is_found_without_a_put(master):
    """So a rare put to that shard isn't buffered for nothing. Until then idle transactions are looked for."""
    pauses = asyncio.Semaphore(0)
    held = HeldShards(master, TRIPS, timeout_s=1.0, pause=lambda s: pauses.acquire())
    master.locked = {3}
    held.hold({3, 4})
    await held.look()
    assert (held.shards, master.ended) == ({3}, 1)
    master.locked = set()
    await held.look()
    assert (held.shards, master.ended) == (frozenset(), 1)
    await held.close()


async def test_posts_that_wait_are_one_script(queues, master):
    """600 at once to one column: a head is locked a dozen times and not 600 times."""
    master.locked = set()
    await asyncio.gather(*(queues.append("a", TRIPS, version(1)) for _ in range(600)))
    assert sum(map(len, master.wrote)) == 600
    assert len(master.wrote) <= 12


async def test_only_posts_with_an_idempotency_key_are_run_again_after_a_lost_outcome(queues, master):
    """Nothing recognises the version of another one."""
    await asyncio.gather(queues.append("a", TRIPS, version(1)), queues.append("a", TRIPS, version(1, "key")))
    assert sorted(master.again_on, key=len) == [(Busy,), AGAIN_ON]


async def test_a_post_to_a_locked_head_fails_and_others_are_stored(queues, master):
    """503 for that column; POSTs to other shards in the same script are appended once."""
    master.locked = {3}
    (ok,), (locked,) = await asyncio.gather(
        queues.append("a", TRIPS, version(1)), queues.append("a", TRIPS, version(3))
    )
    assert ok.placed.shard == 1
    assert isinstance(locked, ShardsLocked)
    assert locked.retryable
    assert master.wrote.count([1]) == 1


async def test_a_master_that_is_lost_opens_its_breaker(queues, master):
    """Posts and puts share it. Who isn't let through learns what the master said."""
    master.error = StorageUnavailable("down")
    with pytest.raises(StorageUnavailable):
        await queues.append("a", TRIPS, version(1))
    with pytest.raises(StorageUnavailable, match=r"breaker .* is open: down"):
        await queues.store("a", TRIPS, [row(1)])


async def test_a_shard_without_its_table_costs_the_others_nothing(queues, master):
    """Also within one batch of one caller, where they came together. Each cell has its own answer (I5)."""
    master.refusal = TableMissing("no entity")
    master.refuses = lambda items: any(item.shard in (3, 5) for item in items)
    outcomes = await queues.store("a", TRIPS, [row(n % 8) for n in range(400)])
    refused = {n % 8 for n, outcome in enumerate(outcomes) if outcome is master.refusal}
    assert refused == {3, 5}
    assert [outcome for outcome in outcomes if outcome is not master.refusal] == [
        placed(n % 8) for n in range(400) if n % 8 not in refused
    ]
    assert master.asked <= 24


async def test_rows_that_are_refused_fail_alone(queues, master):
    """Seven of one shard, and the rest of the shard is stored: nothing is guessed from so few."""
    rows = [row(3) for _ in range(100)]
    bad = {id(rows[n]) for n in range(0, 70, 10)}
    master.refuses = lambda items: any(id(item) in bad for item in items)
    outcomes = await queues.store("a", TRIPS, rows)
    assert [outcome is master.refusal for outcome in outcomes] == [id(one) in bad for one in rows]


async def test_rows_that_are_refused_side_by_side_cost_no_other_shard_its_cells(queues, master):
    """Whichever they are, some of the first parts have none of them. So the master is known to take others."""
    rows = [row(n // 125) for n in range(1000)]
    bad = set(map(id, rows[:7]))
    master.refuses = lambda items: any(id(item) in bad for item in items)
    outcomes = await queues.store("a", TRIPS, rows)
    assert [outcome is master.refusal for outcome in outcomes] == [id(one) in bad for one in rows]


async def test_a_refused_shard_is_given_up_after_a_few_rows(queues, master):
    """Each costs a transaction, and everybody behind waits."""
    master.refuses = lambda items: any(item.shard == 3 for item in items)
    outcomes = await queues.store("a", TRIPS, [row(n % 2 * 2 + 1) for n in range(800)])
    assert {outcome is master.refusal for outcome in outcomes[1::2]} == {True}
    assert {outcome is master.refusal for outcome in outcomes[::2]} == {False}
    assert master.asked <= 1 + 64


async def test_a_master_that_refuses_all_is_asked_a_few_times(queues, master):
    """And every caller has its error."""
    master.refuses = lambda items: True
    ends = await asyncio.gather(*(queues.store("a", TRIPS, [row(n % 8)]) for n in range(400)), return_exceptions=True)
    assert set(map(id, ends)) == {id(master.refusal)}
    assert master.asked <= 1 + 16 + 8


async def test_refused_copies_cost_the_cells_of_their_master_nothing(queues, master):
    """They are one thing, whose breaker opens."""
    master.refuses = lambda items: any(item.home == "b" for item in items)
    rows = [row(n % 8, "b" if n % 3 else "a") for n in range(90)]
    outcomes = await queues.store("a", TRIPS, rows)
    assert [outcome is master.refusal for outcome in outcomes] == [one.home == "b" for one in rows]
    assert not queues.takes_copies("a")
    assert master.asked <= 9


@pytest.mark.parametrize("error", [StorageUnavailable("away"), Overloaded("no place"), LockTimeout("head")])
async def test_an_error_between_two_parts_keeps_what_was_taken(queues, master, error):
    """The outcome of the others is unknown, and they say so."""
    master.refuses = lambda items: len(items) > 4

    async def run(operation, *args, **options):
        if master.wrote:
            master.error = error
        return await Master.run(master, operation, *args, **options)

    master.run = run
    outcomes = await queues.store("a", TRIPS, [row(n) for n in range(8)])
    assert outcomes == [*(placed(n) for n in range(4)), *[master.error] * 4]


@pytest.mark.parametrize("error", [StorageUnavailable("down"), TableMissing("no buffer")])
async def test_copies_that_wait_while_one_fails_fail_with_it(queues, master, error):
    """They go to another secondary at once. Each would cost its put a round trip, or a time-out."""
    master.error = error
    first = queues.buffer("a", TRIPS, [row(3, home="b")])
    await asyncio.sleep(0)
    second = queues.buffer("a", TRIPS, [row(4, home="b")])
    for waiting in (first, second):
        with pytest.raises(StorageUnavailable):
            await waiting
    assert master.asked == 1


async def test_cells_that_wait_for_a_master_that_is_lost_fail_with_it(queues, master):
    """So each is answered in the time of one time-out (I5)."""
    master.error = StorageUnavailable("down")
    first = queues.store("a", TRIPS, [row(1)])
    await asyncio.sleep(0)
    second = queues.store("a", TRIPS, [row(2)])
    for waiting in (first, second):
        with pytest.raises(StorageUnavailable):
            await waiting
    assert master.asked == 1
    with pytest.raises(StorageUnavailable, match="breaker"):
        queues.append("a", TRIPS, version(1))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Overloaded("no connection was free"), BreakerState.HALF_OPEN),
        (TableMissing("no table"), BreakerState.CLOSED),
        (StorageUnavailable("down"), BreakerState.OPEN),
    ],
)
async def test_what_a_probe_says_of_its_master(master, error, state):
    """A refusal is an answer. That this process has too much to do says nothing."""
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters={"a": None}), master=lambda name: master, is_joining=lambda name: False
    )
    queues = MasterWriteQueues(storage, timeout_s=1.25, open_s=0.0)
    queues.breakers["a"].failed()
    master.error = error
    with pytest.raises(SchemalessError):
        await queues.store("a", TRIPS, [row(1)])
    assert queues.breakers["a"].state is state
    await queues.drain()


class Stalled(Master):
    """A write ends once it was asked twice whether it is there. `silent`: it doesn't say so."""

    def __init__(self, silent):
        super().__init__()
        self.silent = silent
        self.questions = 0
        self.asked_twice = asyncio.Event()

    async def run(self, operation, *args, timeout_s, again_on=AGAIN_ON, traffic=None):
        if traffic is Traffic.WATCH:
            self.questions += 1
            if self.questions == 2:
                self.asked_twice.set()
            if self.silent:
                raise StorageUnavailable("no answer") from TimeoutError()
            return 0
        if operation is buffer_table.put_copies:
            await self.asked_twice.wait()
        return await super().run(operation, *args, timeout_s=timeout_s, again_on=again_on, traffic=traffic)


@pytest.mark.parametrize(
    ("patient", "other_takes", "silent", "given_up"),
    [(False, True, True, True), (True, True, True, False), (False, False, True, False), (False, True, False, False)],
)
async def test_a_silent_master_is_given_up_only_where_its_puts_have_another_place(
    monkeypatch, patient, other_takes, silent, given_up
):
    """Not where two copies are required or no other cluster takes any, nor where it answers. A POST waits for it."""
    monkeypatch.setattr(queue, "ASKED_AFTER_S", 0.0)
    master = Stalled(silent)
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters={"a": None, "b": None}),
        master=lambda name: master,
        is_joining=lambda name: False,
    )
    queues = MasterWriteQueues(storage, timeout_s=1.25, open_s=1.0, patient=patient)
    if not other_takes:
        queues.breakers["b"].failed()
    put = queues.store("a", TRIPS, [row(1)])
    post = queues.append("a", TRIPS, version(2))
    if given_up:
        with pytest.raises(StorageUnavailable, match="silent"):
            await put
        with pytest.raises(StorageUnavailable, match="breaker"):
            queues.store("a", TRIPS, [row(1)])
    else:
        assert [placed.shard for placed in await put] == [1]
    assert [found.placed.shard for found in await post] == [2]
    await queues.drain()
