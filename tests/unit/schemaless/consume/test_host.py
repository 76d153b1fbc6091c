"""The host of consumers: what each consumer of a datastore gets of the partitions that the process has."""

import asyncio
import types

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from schemaless.cell import StoredCell
from schemaless.codec import encode_body, encode_record
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.consume.ports import Effect, Outcome, ShardCheckpoint, StatelessHandler
from schemaless.errors import BusUnavailable, StorageUnavailable
from schemaless.location import Location
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.record import Record
from schemaless.shard_cursor import ProvenPage
from schemaless.storage import shard_head, shard_log
from schemaless.storage.shard_head import Head, Movement
from schemaless.storage.worker_table import WaitingShard
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 2, ("a", "b"))  # shards 0 and 2 are partition 0, with their homes a; 1 and 3 the others
SETTINGS = types.SimpleNamespace(transport="plain")


def record(shard, added_id, partition=None):
    cell = StoredCell(bytes(16), "BASE", added_id, shard, 1, added_id, 0, encode_body({}))
    at = shard % 2 if partition is None else partition
    return Record("t", at, added_id, 0, None, encode_record(cell), {"v": b"1", "kind": b"cell"})


class MemoryMasters:
    """Masters of clusters whose logs hold `heads` cells of each shard."""

    def __init__(self):
        self.heads = dict.fromkeys(range(DATASTORE.shards), 0)
        self.unreachable = set()

    def master(self, cluster):
        async def run(operation, *args, **_):
            await asyncio.sleep(0)
            if cluster in self.unreachable:
                raise StorageUnavailable(f"{cluster} is unreachable")
            if operation is shard_log.follow:
                _, wanted, _ = args
                return {part.position.shard: self._page(part) for part in wanted}
            here = [Head(n, 1, last, 0) for n, last in self.heads.items() if DATASTORE.home(n) == cluster]
            total = Movement(sum(head.added_id for head in here), len(here))
            if operation is shard_head.movement:
                return total
            if operation is shard_head.block_movements:
                return {0: total}
            assert operation is shard_head.heads_in_blocks
            return here

        return types.SimpleNamespace(run=run)

    def _page(self, part):
        shard, after = part.position.shard, part.position.added_id
        last = min(self.heads[shard], after + part.limit)
        cells = [StoredCell(bytes(16), "BASE", n, shard, 1, n, 0, b"") for n in range(after + 1, last + 1)]
        return ProvenPage(cells, Location(1, self.heads[shard]))


class MemoryConsumer(StatelessHandler):
    """A consumer that keeps its checkpoints and what it was given."""

    foreign_code = None
    together = True
    record_within_s = 0.0

    def __init__(self, name):
        self.consumer = name
        self.finished = {}
        self.seen = []
        self.lost = set()
        self.news = asyncio.Event()

    async def read(self, shards):
        return {shard: ShardCheckpoint(self.finished.get(shard, Position(shard, 1, 0, digest=0))) for shard in shards}

    async def move(self, advances, effects):
        self.finished.update({shard: advance.to for shard, advance in advances.items() if shard not in self.lost})
        return frozenset(self.lost & advances.keys())

    async def handle(self, runs):
        self.seen += [(run.shard, cell.added_id) for run in runs for cell in run.cells]
        self.news.set()
        return Effect([Outcome(len(run.cells)) for run in runs])

    async def until_seen(self, *expected):
        while not set(expected) <= set(self.seen):
            self.news.clear()
            await self.news.wait()


@pytest.fixture
async def masters():
    return MemoryMasters()


@pytest.fixture
async def host(masters):
    made = ConsumerHost(masters, DATASTORE, SETTINGS)
    yield made
    await made.revoked(range(DATASTORE.partitions))


async def added(host, name):
    consumer = MemoryConsumer(name)
    await host.add(Consumer(consumer, consumer))
    return consumer


async def test_every_consumer_gets_the_cells_of_assigned_partitions_once(host, masters):
    """Also one that is added later. What the topic brings again, or in a wrong partition, is nobody's."""
    first = await added(host, "index:one")
    await host.assigned([0])
    masters.heads.update({0: 2, 1: 1, 2: 1})
    host.take(0, [record(0, 1), record(1, 1, partition=0), record(0, 2), record(0, 2), record(2, 1)])
    await first.until_seen((0, 1), (0, 2), (2, 1))
    second = await added(host, "index:two")
    await second.until_seen((0, 1), (0, 2), (2, 1))
    assert sorted(first.seen) == sorted(second.seen) == [(0, 1), (0, 2), (2, 1)]


async def test_a_start_is_no_outage(host):
    """Nobody is a member before it has joined. What ends afterwards is said, and once."""
    group = Group()
    host.join(group)
    said = []
    for group.alive in (False, False, True, True, False, False):
        with capture_logs() as logs:
            await host.step()
        said.append([entry["event"].partition(":")[0] for entry in logs])
    assert said == [[], [], ["calls go on"], [], ["calls wait"], []]


async def test_a_refused_account_is_another_stall_than_a_kafka_that_is_away(host):
    """While Kafka answers, what it refused before is no stall."""
    group = Group()
    host.join(group)
    group.refusal = "Kafka at k:9092 refuses the account 'schemaless'"
    assert host.stall[0] is Stall.NO_PARTITIONS
    group.alive = False
    assert host.stall == (Stall.REFUSED, group.refusal)
    group.refusal = None
    assert host.stall[0] is Stall.NO_KAFKA


async def test_a_revoked_partition_is_not_delivered(host, masters):
    """The cell of the partition that stays, which is taken later, shows that the other one would have come."""
    consumer = await added(host, "trigger:p")
    await host.assigned([0, 1])
    await host.revoked([0])
    masters.heads.update({0: 1, 1: 1})
    host.take(0, [record(0, 1)])
    host.take(1, [record(1, 1)])
    await consumer.until_seen((1, 1))
    assert consumer.seen == [(1, 1)]


async def test_what_the_topic_never_brought_is_found_by_the_heads(host, masters):
    """The second look finds shards that have not reached the heads of the first one (I9)."""
    consumer = await added(host, "trigger:p")
    await host.assigned([0])
    masters.heads[0] = 1
    host.take(0, [record(0, 1)])
    await consumer.until_seen((0, 1))
    masters.heads[0] = 3
    await host.step()
    await host.step()
    await consumer.until_seen((0, 1), (0, 2), (0, 3))


async def test_an_unreachable_cluster_holds_up_its_own_shards_only(host, masters):
    """There is a delivery for each home."""
    consumer = await added(host, "trigger:p")
    masters.unreachable.add("a")
    await host.assigned([0, 1])
    masters.heads.update({0: 1, 1: 1})
    host.take(0, [record(0, 1)])
    host.take(1, [record(1, 1)])
    await consumer.until_seen((1, 1))
    assert consumer.seen == [(1, 1)]
    masters.unreachable.clear()
    await consumer.until_seen((0, 1))


class Group:
    """A group that confirms nothing until it is told to."""

    def __init__(self):
        self.confirms = False
        self.alive = True
        self.asked = []
        self.refusal = None

    @property
    def kafka_answers(self):
        return self.alive

    def is_alive(self):
        return self.alive

    async def confirm(self, partitions):
        self.asked.append(set(partitions))
        if not self.confirms:
            raise BusUnavailable("no answer")


async def test_a_lost_shard_begins_anew_when_the_group_has_confirmed_its_partition(host, masters):
    """I10: until then nothing is called for it."""
    consumer = await added(host, "trigger:p")
    group = Group()
    host.join(group)
    await host.assigned([0, 1])
    masters.heads[0] = 1
    host.take(0, [record(0, 1)])
    await consumer.until_seen((0, 1))
    consumer.lost = {0}
    masters.heads[0] = 2
    host.take(0, [record(0, 2)])
    await consumer.until_seen((0, 2))
    await host.step()
    while not group.asked:
        await host.step()
    consumer.lost, consumer.seen = set(), []
    masters.heads.update({0: 3, 1: 1})
    host.take(0, [record(0, 3)])
    await host.step()
    host.take(1, [record(1, 1)])
    await consumer.until_seen((1, 1))
    assert consumer.seen == [(1, 1)]
    group.confirms = True
    await host.step()
    await consumer.until_seen((0, 2), (0, 3))
    assert group.asked[-1] == {0}


async def test_a_host_reports_the_shards_that_wait_and_why(host, masters):
    """Of one that lost its checkpoint, of one whose log contradicts what is known, and of one that fails."""
    consumer = await added(host, "trigger:p")
    await host.assigned([0, 1])
    host._running["trigger:p", "a"].delivery.failing = lambda: [(2, "a1 doesn't answer")]
    consumer.lost = {0}
    masters.heads.update({0: 1, 1: 1})
    host.take(0, [record(0, 1)])
    host.take(1, [record(1, 2)])  # the log has no more than one cell
    for _ in range(2000):
        report = host.report()
        if report.unconfirmed_count and report.refused_count:
            break
        await asyncio.sleep(0)
    assert [(each.consumer, each.shard, each.reason) for each in report.unconfirmed] == [
        ("trigger:p", 0, "another process moved its checkpoint")
    ]
    assert [(each.shard, each.reason) for each in report.refused] == [
        (1, "the topic has cells up to 1:2, but the log ends at 1:1")
    ]
    assert report.failing_shards == (WaitingShard("trigger:p", 2, "a1 doesn't answer"),)
    assert (report.is_member, report.partitions, report.failing_shards_count) == (True, 2, 1)


async def test_a_report_names_the_partitions_and_how_fast_cells_are_finished(host, masters):
    """Which worker has what. A worker that finishes nothing has the rate 0."""
    consumer = await added(host, "trigger:p")
    assert (host.report().assigned, host.report().rate) == ((), 0.0)
    await host.assigned([1, 0])
    masters.heads.update({0: 2})
    host.take(0, [record(0, 1), record(0, 2)])
    await consumer.until_seen((0, 1), (0, 2))
    for _ in range(2000):
        if (report := host.report()).rate:
            break
        await asyncio.sleep(0)
    assert (report.assigned, report.rate > 0) == ((0, 1), True)


async def test_a_shard_that_stopped_or_waits_for_its_checkpoint_is_not_at_work(host, masters):
    """Orders for its records would hide those of the others (schemaless/consume/trigger_worker.py)."""
    consumer = await added(host, "trigger:p")

    async def stop_shard_2(runs):
        return Effect([Outcome(0, stop_reason="out of cards") if run.shard == 2 else Outcome(1) for run in runs])

    consumer.handle, consumer.together = stop_shard_2, False
    masters.heads.update({0: 1, 1: 1, 2: 1})
    await host.assigned([0, 1])
    assert host.at_work("trigger:p") == []
    host.take(0, [record(2, 1)])
    for _ in range(2000):
        await asyncio.sleep(0)
        if sorted(host.at_work("trigger:p")) == [0, 1, 3]:
            break
    assert sorted(host.at_work("trigger:p")) == [0, 1, 3]


async def test_what_a_host_shows_of_its_consumers(host, masters):
    """Finished cells, the lag where it is known, the parts of calls, and a shard that lost its checkpoint."""
    registry = CollectorRegistry()
    metrics = ConsumerMetrics(registry)
    metrics.watch(DATASTORE, host)
    named = {"datastore": "d", "consumer": "index:one"}

    def shown(name, **labels):
        return registry.get_sample_value(f"schemaless_consumer_{name}", named | labels)

    consumer = await added(host, "index:one")
    masters.heads.update({0: 2})
    await host.assigned([0])
    assert shown("lag_cells", partition="0") is None  # no checkpoint is read yet
    assert shown("lag_cells", partition="1") is None  # another process has it
    await consumer.until_seen((0, 1), (0, 2))
    await settled(lambda: shown("cells_total") == 2)
    assert (shown("lag_cells", partition="0"), shown("lag_seconds", partition="0")) == (0, 0)
    assert shown("shards", state="live") == 2
    assert [shown("stage_seconds_count", stage=stage) for stage in ("wait", "call", "commit")] == [1, 1, 1]
    consumer.lost.add(0)
    masters.heads.update({0: 3})
    host.take(0, [record(0, 3)])
    await consumer.until_seen((0, 3))
    await host.step()
    await settled(lambda: shown("shards", state="unconfirmed") == 1)
    assert shown("lag_cells", partition="0") == 1
    assert 0 <= shown("lag_seconds", partition="0") < 3600


async def settled(holds):
    while not holds():  # noqa: ASYNC110 (nobody says when a checkpoint has moved)
        await asyncio.sleep(0)
