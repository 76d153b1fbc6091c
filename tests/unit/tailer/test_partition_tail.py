"""What a tail does when one cluster is away, and how long it waits between two transactions."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import ClassVar

import pytest

from schemaless.bus.partition_log import LogState, Progress
from schemaless.cell import StoredCell
from schemaless.errors import (
    BusUnavailable,
    LockTimeout,
    Misconfigured,
    NodeRefuses,
    Overloaded,
    StorageUnavailable,
    TableMissing,
)
from schemaless.location import Location
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.shard_cursor import ProvenPage
from schemaless.topology import Datastore
from tailer import partition_tail
from tailer.partition_tail import PartitionTail, TailerContext, TailerSlots
from tests.unit.tailer.test_owned_partition import AtOnce, until

DATASTORE = Datastore("trips", 2, 1, ("a", "b"))  # shard 0 lies in cluster a, shard 1 in cluster b
HOUR_S = 3600.0


class FakeLog:
    """Publishes at once. Each transaction takes `took_s` of the loop's clock."""

    state = LogState.OPEN
    settling_s = throttled_s = 0.0
    record_bytes_max = 4 << 20
    stages_s: ClassVar[dict[str, float]] = {}

    def __init__(self):
        self.published = []
        self.takes = 1000

    def publish(self, cells):
        if len(cells) > self.takes:
            raise BusUnavailable("too many")
        self.published.append([(cell.shard, cell.added_id) for cell in cells])
        return {cell.shard: Position(cell.shard, cell.generation, cell.added_id) for cell in cells}


class Cluster:
    """A cluster that answers with as many cells as are asked for, up to its shards' heads, or with an error."""

    def __init__(self, heads, failure=None):
        self.heads = heads
        self.failure = failure
        self.asked = 0

    async def run(self, operation, datastore, wanted, bytes_max, *, timeout_s):
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return {part.position.shard: self._page(part.position, part.limit) for part in wanted}

    def _page(self, at, limit):
        head = self.heads[at.shard]
        cells = [cell(at.shard, n) for n in range(at.added_id + 1, min(head, at.added_id + limit) + 1)]
        return ProvenPage(cells, Location(1, head))

    async def ask_master(self, operation, datastore, wanted, bytes_max):
        raise self.failure


def cell(shard, added_id):
    return StoredCell(bytes(16), "BASE", added_id, shard, 1, added_id, 0, b"")


@pytest.fixture(autouse=True)
def small_transactions(monkeypatch):
    """Without pauses."""
    monkeypatch.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 10)
    monkeypatch.setattr(partition_tail, "PAUSE_MAX_S", 0.0)


def tail_of(clusters, published, *, datastore=DATASTORE):
    context = TailerContext(
        SimpleNamespace(),
        clusters,
        lambda name: {},
        lambda name: False,
        TailerSlots(1),
        AtOnce(),
        TailerSlots(1),
        AtOnce(),
        AtOnce(),
        asyncio.sleep,
    )
    log = FakeLog()
    progress = {shard: Position(shard, 1, added_id) for shard, added_id in published.items()}
    return PartitionTail(datastore, log, Progress(progress, {}, set()), context), log


async def test_what_fails_is_tried_smaller_down_to_one_cell(monkeypatch):
    """Also where more shards than that are behind. What succeeds carries more the next time."""
    monkeypatch.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 20)
    heads, datastore = {0: 8, 1: 8, 2: 8}, Datastore("trips", 3, 1, ("a",))
    tail, log = tail_of({"a": Cluster(heads)}, dict.fromkeys(heads, 0), datastore=datastore)
    tail.heads_moved({shard: Location(1, 8) for shard in heads})
    log.takes, sizes = 1, []
    while not log.published:
        sizes.append(tail.cells_max)
        with suppress(BusUnavailable):
            await tail.step()
    assert sizes == [20, 10, 5, 2, 1]
    log.takes = 1000
    while len(log.published) < 5:
        await tail.step()
    assert [len(cells) for cells in log.published] == [1, 2, 4, 8, 9]


@pytest.mark.parametrize(
    ("takes_s", "throttled_s", "sizes"),
    [
        (lambda count: 1.5, 0.0, [1, 2, 4, 8]),
        (lambda count: 1.5 * count, 0.0, [1, 2]),
        (lambda count: 1.5, 0.5, [1]),
    ],
)
async def test_a_slow_transaction_grows_where_that_makes_cells_cheaper(monkeypatch, takes_s, throttled_s, sizes):
    """Where it takes as long whatever it carries. Not where it takes longer in proportion, or a quota is used up."""
    monkeypatch.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 8)
    tail, log = tail_of({"a": Cluster({0: 1000})}, {0: 0})
    tail.heads_moved({0: Location(1, 1000)})
    tail.cells_max, log.throttled_s, now, publish = 1, throttled_s, [0.0], log.publish

    def publish_slowly(cells):
        now[0] += takes_s(len(cells))
        return publish(cells)

    monkeypatch.setattr(log, "publish", publish_slowly)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    tail._may_grow = False
    for _ in range(20):
        await tail.step()
    assert sorted({len(cells) for cells in log.published}) == sizes


@pytest.fixture
def retries_never(monkeypatch):
    """Whoever waits for a retry waits for longer than the test."""
    monkeypatch.setattr(partition_tail, "RETRY_S", HOUR_S)


@pytest.mark.parametrize(
    "failure",
    [
        StorageUnavailable("no node answers"),
        Misconfigured("its tables are missing"),
        Overloaded("no connection was free"),
    ],
)
async def test_a_cluster_that_is_away_delays_no_other_clusters_cells(retries_never, failure):
    """The shards of one cluster back off, and twenty cells of the other one are published one by one. So they do where
    it is this process that has too much to do.
    """
    away, here = Cluster({0: 3}, failure), Cluster({1: 0})
    tail, log = tail_of({"a": away, "b": here}, {0: 0, 1: 0})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tail.run())
        tail.heads_moved({0: Location(1, 3)})
        for number in range(1, 21):
            here.heads[1] = number
            tail.heads_moved({1: Location(1, number)})
            await until(lambda: len(log.published) == number)  # noqa: B023
        tail.stop()
    assert log.published == [[(1, number)] for number in range(1, 21)]
    assert away.asked == 1


class RefusingCluster(Cluster):
    """A cluster that refuses to read some shards, and each read of others beside them."""

    def __init__(self, heads, refused, error):
        super().__init__(heads)
        self.refused, self.error = refused, error

    async def run(self, operation, datastore, wanted, bytes_max, *, timeout_s):
        pages = await super().run(operation, datastore, wanted, bytes_max, timeout_s=timeout_s)
        if self.refused & pages.keys():
            raise self.error
        return pages


@pytest.mark.parametrize("error", [LockTimeout(0, "held"), TableMissing("not there"), NodeRefuses("1034: damaged")])
async def test_a_shard_that_a_server_refuses_to_read_holds_up_itself_only(monkeypatch, retries_never, error):
    """I15: the others of its cluster are published. It is asked again alone, until it is read."""
    heads, datastore = dict.fromkeys(range(8), 2), Datastore("trips", 8, 1, ("a",))
    cluster = RefusingCluster(heads, {5}, error)
    tail, log = tail_of({"a": cluster}, dict.fromkeys(heads, 0), datastore=datastore)
    tail.heads_moved({shard: Location(1, 2) for shard in heads})
    while not tail.shards.idle:
        await tail.step()
    published = {shard for cells in log.published for shard, _ in cells}
    assert published == heads.keys() - {5}
    (held,) = tail.shards.held()
    assert (held.shard, held.stall) == (5, Stall.BLOCKED if isinstance(error, LockTimeout) else Stall.REFUSED)
    cluster.refused, asked = set(), cluster.asked
    tail.shards._move(held, held.due())
    tail.heads_moved({shard: Location(1, 2 if shard == 5 else 3) for shard in heads})
    cluster.heads.update({shard: 3 for shard in heads if shard != 5})
    while not tail.shards.idle:
        await tail.step()
    assert [(5, 1), (5, 2)] in log.published
    assert cluster.asked == asked + 2


async def test_a_server_that_refuses_one_shard_after_the_other_is_left_for_a_while(retries_never):
    """It isn't asked for each of them."""
    heads, datastore = dict.fromkeys(range(64), 2), Datastore("trips", 64, 1, ("a",))
    cluster = RefusingCluster(heads, heads.keys(), NodeRefuses("another format"))
    tail, log = tail_of({"a": cluster}, dict.fromkeys(heads, 0), datastore=datastore)
    tail.heads_moved({shard: Location(1, 2) for shard in heads})
    while not tail.shards.idle:
        await tail.step()
    assert log.published == []
    assert cluster.asked < len(heads)


async def test_a_master_that_is_away_when_it_is_asked_delays_no_other_clusters_cells(retries_never):
    """A shard whose head is in doubt backs off, too."""
    away, here = Cluster({}, Misconfigured("its tables are missing")), Cluster({1: 1})
    tail, log = tail_of({"a": away, "b": here}, {0: 7, 1: 0})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tail.run())
        tail.heads_moved({0: Location(1, 3), 1: Location(1, 1)})
        await until(lambda: log.published)
        tail.stop()


async def test_after_its_retry_a_cluster_is_read_again(monkeypatch):
    """Backing off ends by itself, without news of a head."""
    monkeypatch.setattr(partition_tail, "RETRY_S", 0.0)
    away = Cluster({0: 3}, StorageUnavailable("no node answers"))
    tail, log = tail_of({"a": away}, {0: 0})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tail.run())
        tail.heads_moved({0: Location(1, 3)})
        await until(lambda: away.asked)
        away.failure = None
        await until(lambda: log.published)
        tail.stop()
    assert log.published == [[(0, 1), (0, 2), (0, 3)]]


class HoledMinion(Cluster):
    """A minion that lacks the first cell. Its master has all, or lacks it, too, or is away."""

    def __init__(self, heads, master):
        super().__init__(heads)
        self.master = master

    async def run(self, operation, datastore, wanted, bytes_max, *, timeout_s):
        pages = await super().run(operation, datastore, wanted, bytes_max, timeout_s=timeout_s)
        for page in pages.values():
            page.cells[:] = [found for found in page.cells if found.added_id != 1]
        return pages

    async def ask_master(self, operation, datastore, wanted, bytes_max):
        return await self.master.run(operation, datastore, wanted, bytes_max, timeout_s=1.0)


@pytest.mark.parametrize(
    ("master", "published"),
    [
        (Cluster({0: 3}), [[(0, 1), (0, 2), (0, 3)]]),
        (HoledMinion({0: 3}, None), []),
        (Cluster({0: 3}, StorageUnavailable("it does not answer")), []),
    ],
)
async def test_what_a_minion_lacks_is_read_from_its_master(master, published):
    """A cell that both lack, or nobody else can show, holds up its shard."""
    tail, log = tail_of({"a": HoledMinion({0: 3}, master)}, {0: 0})
    tail.heads_moved({0: Location(1, 3)})
    for _ in range(3):
        await tail.step()
    assert log.published == published
    assert [shard.stall for shard in tail.shards.held()] == ([] if published else [Stall.NOT_DENSE])


class SlowPace:
    """Says that transactions are dear, so that every pause is longer than the test."""

    pause_s = HOUR_S

    def __init__(self, **bounds):
        pass

    def took(self, seconds):
        pass


@pytest.fixture
def busy_machine(monkeypatch):
    monkeypatch.setattr(partition_tail, "Pace", SlowPace)


async def turns():
    """Many more turns of the loop than a pass takes."""
    for _ in range(200):
        await asyncio.sleep(0)


async def published_before_a_pause(tail, log, heads):
    """Returns what is published until the tail pauses."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tail.run())
        tail.heads_moved(heads)
        await until(lambda: log.published)
        await turns()
        tail.stop()
    return log.published


async def test_under_load_cells_gather_for_the_next_transaction(busy_machine):
    """Cells that come after a transaction wait for the pause to end."""
    cluster = Cluster({1: 3})
    tail, log = tail_of({"b": cluster}, {1: 0})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tail.run())
        tail.heads_moved({1: Location(1, 3)})
        await until(lambda: log.published)
        cluster.heads[1] = 4
        tail.heads_moved({1: Location(1, 4)})
        await turns()
        tail.stop()
    assert len(log.published) == 1


async def test_a_backlog_does_not_wait(busy_machine):
    """While the cells of a whole transaction wait, there is no pause."""
    tail, log = tail_of({"b": Cluster({1: 45})}, {1: 0})
    published = await published_before_a_pause(tail, log, {1: Location(1, 45)})
    assert [len(cells) for cells in published] == [10, 10, 10, 10, 5][: len(published)]
    assert len(published) >= 4


async def test_every_cluster_gets_its_pass_before_a_pause(busy_machine):
    """A pass is of one cluster, so shards of the other one would else wait for a whole pause."""
    tail, log = tail_of({"a": Cluster({0: 1}), "b": Cluster({1: 1})}, {0: 0, 1: 0})
    published = await published_before_a_pause(tail, log, {0: Location(1, 1), 1: Location(1, 1)})
    assert published == [[(0, 1)], [(1, 1)]]
