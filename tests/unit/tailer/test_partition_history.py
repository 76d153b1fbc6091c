"""What a tailer publishes of a shard that loses continuity: all of the present history, or nothing (I7, I13, I16)."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import ClassVar

import pytest
from structlog.testing import capture_logs

from schemaless.bus.partition_log import Progress, beginning
from schemaless.errors import StorageUnavailable
from schemaless.location import GenerationStart, Location
from schemaless.position import Position, cell_digest
from schemaless.shard_cursor import ProvenPage
from schemaless.storage import shard_head, shard_log
from schemaless.topology import Datastore
from tailer import partition_tail
from tailer.metrics import TailerMetrics
from tailer.partition_tail import PartitionTail
from tailer.shard_queue import TailState
from tests.shard_histories import Log, log_of, position
from tests.unit.tailer.test_owned_partition import AtOnce

DATASTORE = Datastore("trips", 1, 1, ("a",))


class Servers:
    """A cluster of which both nodes show the same log, unless one lags or is away. Answers as a ClusterReader does."""

    def __init__(self, log):
        self.log = log
        self.shown = None
        """What the node that is read shows, where it isn't the master."""
        self.master_is_away = False

    async def run(self, operation, datastore, asked=None, *more, timeout_s=None):
        return self._answer(self.shown or self.log, operation, asked)

    async def ask_master(self, operation, datastore, asked, *more):
        if self.master_is_away:
            raise StorageUnavailable("away")
        return self._answer(self.log, operation, asked)

    def _answer(self, log, operation, asked):
        if operation is shard_log.follow:
            return {0: log.read(asked[0].position, asked[0].limit)}
        if operation is shard_head.moment:
            return shard_head.Moment(
                0, [shard_head.Head(0, log.head.generation, log.head.added_id, 0)], {0: log.starts}
            )
        assert operation is shard_log.digests
        (added_id,) = asked.values()
        return {0: position(0).digest if not added_id else cell_digest(log.cells[added_id - 1])}


class Topic:
    """What was published, in order, and the progress that the last transaction recorded."""

    stages_s: ClassVar[dict[str, float]] = {}
    record_bytes_max = 4 << 20
    throttled_s = 0.0

    def __init__(self, published=None):
        self.records = []
        self.progress = published or beginning(0)

    def publish(self, cells):
        self.records += cells
        last = cells[-1]
        self.progress = Position(0, last.generation, last.added_id, digest=cell_digest(last))
        return {0: self.progress}

    def announce(self, begun):
        ((_, start, digest),) = begun
        self.records.append(start)
        self.progress = Position(0, start.generation, start.starts_at - 1, digest=digest)
        return [self.progress]

    def history(self):
        """Returns the cells that a reader has at the end. Each record was the next one, or an announced generation."""
        at, cells = Location(1, 0), []
        for record in self.records:
            if isinstance(record, GenerationStart):
                assert record.generation > at.generation
                assert record.starts_at <= at.added_id + 1
                at = Location(record.generation, record.starts_at - 1)
                del cells[at.added_id :]
            else:
                assert record.location == Location(at.generation, at.added_id + 1)
                at = record.location
                cells.append(record)
        return tuple(cells)


@pytest.fixture(autouse=True, scope="module")
def small_transactions():
    """Without pauses."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 10)
        patched.setattr(partition_tail, "TRANSACTION_BYTES_MAX", 1000)
        patched.setattr(partition_tail, "PAUSE_MAX_S", 0.0)
        yield


def tail_of(servers, topic):
    context = SimpleNamespace(readers={"a": servers}, publishing=AtOnce(), metrics=TailerMetrics())
    tail = PartitionTail(DATASTORE, topic, Progress({0: topic.progress}, {}, set()), context)
    tail.heads_moved({0: (servers.shown or servers.log).head})
    return tail


async def drain(tail):
    """Steps until nothing is due. Returns the shard."""
    for _ in range(20):
        if tail.shards.idle:
            return tail.shards[0]
        await tail.step()
    raise AssertionError("no end")


async def test_of_two_generations_the_later_one_may_start_lower():
    """What a reader of the log meets is announced, and no generation that the later one hides."""
    log = log_of(2)
    topic = Topic()
    await drain(tail_of(Servers(log), topic))
    log = log.grown().promoted(4).promoted(3).grown()
    assert log.starts[1:] == (GenerationStart(2, 4), GenerationStart(3, 3))
    await drain(tail_of(Servers(log), topic))
    assert topic.records[2:] == [GenerationStart(3, 3), log.cells[2]]
    assert topic.progress == Position(0, 3, 3, digest=cell_digest(log.cells[2]))


CHANGES = (
    Log.grown,  # (1,3)
    lambda log: log.promoted(3),
    Log.grown,  # (2,3)
    lambda log: log.promoted(2),
    Log.grown,  # (3,2)
)


async def test_every_interleaving_of_growth_promotions_and_takeovers_publishes_the_whole_log():
    for events in itertools.product(["changed", "stepped", "taken-over"], repeat=7):
        servers, topic, changes = Servers(log_of(2)), Topic(), iter(CHANGES)
        tail = tail_of(servers, topic)
        for event in events:
            if event == "changed":
                servers.log = next(changes, lambda log: log)(servers.log)
                tail.heads_moved({0: servers.log.head})
            elif event == "stepped":
                await tail.step()
            else:
                tail = tail_of(servers, topic)
        await drain(tail)
        assert topic.history() == servers.log.cells, events


@pytest.mark.parametrize("written", [1, 4, 7], ids=["below", "the same number", "beyond"])
async def test_a_master_that_was_restored_is_refused_however_far_it_has_grown(written):
    """No tailer looked in between. Nothing is published, and the command that ends it is named."""
    topic = Topic(position(10))
    log = log_of(10).restored(6)
    for _ in range(written):
        log = log.grown(ref_key=7)
    servers = Servers(log)
    with capture_logs() as logged:
        tail = tail_of(servers, topic)
        shard = await drain(tail)
    assert (shard.state, topic.records) == (TailState.REFUSED, [])
    assert "tailer new-generation trips --shard 0" in logged[0]["what_to_do"]
    servers.log = log.generation_opened(7)
    tail.heads_moved({0: servers.log.head})
    await drain(tail)
    assert topic.records == [GenerationStart(2, 7), *servers.log.cells[6:]]


async def test_a_master_that_is_whole_again_is_published_again(monkeypatch):
    """The lost cells were brought back: the next question to the master finds them."""
    monkeypatch.setattr(partition_tail, "CORRUPT_RETRY_S", 0.0)
    servers, topic = Servers(log_of(10).restored(6).grown(ref_key=7)), Topic(position(10))
    tail = tail_of(servers, topic)
    assert (await drain(tail)).state is TailState.REFUSED
    servers.log = log_of(11)
    tail.heads_moved({0: servers.log.head})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await drain(tail)
    assert topic.records == [servers.log.cells[10]]


async def test_a_minion_that_lags_is_no_other_history():
    """It shows fewer cells than were published, or an earlier generation: the shard waits, and nothing is logged."""
    for shown in (log_of(2), log_of(4)):
        log = log_of(4).promoted(4).grown()
        servers, topic = Servers(log), Topic(Position(0, 2, 3, digest=position(3).digest))
        servers.shown = shown
        tail = tail_of(servers, topic)
        tail.heads_moved({0: log.head})
        with capture_logs() as logged:
            await tail.step()
            await tail.step()
        assert tail.shards[0].state is TailState.BACKING_OFF
        assert (topic.records, logged) == ([], [])


async def test_of_a_minion_with_another_history_than_its_master_nothing_is_published():
    """The master's cells are: it holds what was published. It is said once."""
    servers, topic = Servers(log_of(11)), Topic(position(10))
    servers.shown = log_of(6)
    for _ in range(5):
        servers.shown = servers.shown.grown(ref_key=7)
    with capture_logs() as logged:
        tail = tail_of(servers, topic)
        shard = await drain(tail)
        servers.log = servers.log.grown()
        tail.heads_moved({0: servers.log.head})
        await tail.step()
    assert (shard.state, topic.records) == (TailState.CAUGHT_UP, list(servers.log.cells[10:]))
    assert [entry["event"] for entry in logged] == ["a minion has another history than its master"]


async def test_a_position_without_a_digest_is_taken_by_its_number_once():
    """What is published next carries one."""
    log = log_of(3)
    topic = Topic(Position(0, 1, 2))
    await drain(tail_of(Servers(log), topic))
    assert topic.records == [log.cells[2]]
    assert topic.progress == position(3)


@pytest.mark.parametrize("missing", [{2}, {1, 2, 3}], ids=["between", "all"])
async def test_a_page_that_is_not_dense_is_reported_and_nothing_of_it_is_published(missing):
    """I3: cells are missing between others, or a node shows none though its head promises some."""
    servers, topic = Servers(log_of(3)), Topic()
    answer = servers._answer

    def with_a_hole(log, operation, asked):
        page = answer(log, operation, asked)[0]
        return {0: ProvenPage([found for found in page.cells if found.added_id not in missing], page.head)}

    servers._answer = with_a_hole
    with capture_logs() as logged:
        shard = await drain(tail_of(servers, topic))
    assert (shard.state, topic.records) == (TailState.BACKING_OFF, [])
    assert [entry["event"] for entry in logged] == ["shard is not tailed"]


async def test_without_its_master_a_doubtful_shard_waits():
    """Nobody else can say whether a node lags or another history is there."""
    servers, topic = Servers(log_of(10).restored(6).grown(ref_key=7)), Topic(position(10))
    servers.master_is_away = True
    assert (await drain(tail_of(servers, topic))).state is TailState.BACKING_OFF
