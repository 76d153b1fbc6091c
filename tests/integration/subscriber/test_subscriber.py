"""The checked subscriber on real servers: from history to the topic without hole or repeat, whatever happens to it."""

import asyncio
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import islice

import pytest
from confluent_kafka import OFFSET_END
from confluent_kafka.admin import AdminClient, NewPartitions

from schemaless import Client, Subscriber
from schemaless.bus.topics import ensure_topics
from schemaless.errors import Invalid, Misconfigured, NotFound, Unavailable
from schemaless.location import Location
from tests.consumer_harness import heads
from tests.integration.tailer.test_tailer import open_generation
from tests.log_harness import new_cell, put, restore, run_sql, running_tailers, wait_for_records, write_for
from tests.topic_harness import delete_before, produce_foreign
from tests.waiting import LIMIT_S, until

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def tailed(request, running, kafka, make_datastore):
    """A fresh datastore for each test of this file; one tailer for all of them."""
    tests = [test for test in request.session.items if test.path == request.path]
    made = [make_datastore(shards=4, partitions=2) for _ in tests]
    for one in made:
        ensure_topics(kafka, one)
    with running_tailers(1, running.path, kafka, made[0], datastores=",".join(one.name for one in made)):
        yield iter(made)


@pytest.fixture
def datastore(tailed):
    return next(tailed)


@pytest.fixture
def follow(api, kafka, datastore):
    """follow(**options) -> Subscriber, closed at the end."""
    opened = []
    client = Client([f"http://127.0.0.1:{api.port}"], datastore=datastore.name)

    def start(**options):
        subscriber = Subscriber(kafka, datastore.name, **{"client": client, "look_pause_s": 0.5, **options})
        opened.append(subscriber)
        return subscriber

    yield start
    for subscriber in opened:
        subscriber.close()
    client.close()


class Kept:
    """What a user has, by shard: locations, given up again when a batch says so; and the positions beside them."""

    def __init__(self):
        self.locations = defaultdict(list)
        self.positions = {}
        self.changes = []

    def store(self, batch):
        stood = self.positions.get(batch.shard)
        assert stood is None or stood.location == batch.after
        kept = self.locations[batch.shard]
        if batch.change is not None:
            self.changes.append(batch.change)
            del kept[len(kept) - batch.change.superseded :]
        kept += [cell.location.location for cell in batch.cells]
        self.positions[batch.shard] = batch.position

    def follow(self, subscriber, wanted):
        """Until it has as many cells of each shard as wanted; then nothing more may come at once."""
        self.follow_until(subscriber, lambda: self.heads() == wanted)
        return self

    def follow_until(self, subscriber, holds):
        def followed():
            if not (held := holds()) and (batch := subscriber.poll(0.2)) is not None:
                self.store(batch)
            return held

        until(followed, lambda: (self.heads(), subscriber.counts))

    def heads(self):
        return {shard: len(kept) for shard, kept in self.locations.items() if kept}

    def assert_dense(self):
        for kept in self.locations.values():
            assert [location.added_id for location in kept] == list(range(1, len(kept) + 1))


def filled(storage, datastore):
    return {shard: head for shard, head in heads(storage, datastore).items() if head}


def put_and_wait(storage, kafka, datastore, count):
    put(storage, datastore, [new_cell(datastore, shard=n % datastore.shards) for n in range(count)])
    wait_for_records(kafka, datastore, sum(filled(storage, datastore).values()))


@pytest.mark.parametrize("history", ["topic", "log"])
async def test_history_goes_over_to_the_topic_while_cells_are_written(
    storage, async_storage, kafka, datastore, follow, history
):
    """I9: six writers, a subscriber that begins in the middle: each cell once, in order, with its body."""
    await asyncio.to_thread(put_and_wait, storage, kafka, datastore, 4)  # the tailer runs
    writing = asyncio.create_task(write_for(async_storage, datastore, seconds=1.5))
    await asyncio.sleep(0.5)
    subscriber = follow(history=history, look_pause_s=5.0)
    kept = Kept()
    while not writing.done():
        batch = await asyncio.to_thread(subscriber.poll, 0.1)
        if batch is not None:
            assert all("n" in cell.body for cell in batch.cells)
            kept.store(batch)
    await asyncio.to_thread(kept.follow, subscriber, filled(storage, datastore))
    kept.assert_dense()
    assert sum(map(len, kept.locations.values())) == writing.result() + 4 == subscriber.counts.given
    assert (subscriber.counts.from_log > 0) == (history == "log")


def test_raised_partitions_change_nothing(storage, kafka, datastore, follow):
    """I8: a subscriber that begins afterwards knows where the shards are, and misses none. In a group, too."""
    put_and_wait(storage, kafka, datastore, 8)
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_partitions([NewPartitions(datastore.topic, 3)])[datastore.topic].result()
    for options in ({}, {"group": datastore.name, "positions": lambda shards: {}}):
        kept = Kept().follow(subscriber := follow(**options), filled(storage, datastore))
        kept.assert_dense()
        assert (subscriber.counts.given, subscriber.counts.foreign) == (8, 0)


def test_what_was_cut_off_from_the_topic_is_read_from_the_log(storage, kafka, datastore, follow):
    """Shards with and without records that are left: from the first cell on, without a hole."""
    put_and_wait(storage, kafka, datastore, 40)
    for partition in range(2):
        delete_before(kafka, datastore, 12, partition)
    put(storage, datastore, [new_cell(datastore, shard=0)])
    kept = Kept().follow(subscriber := follow(), filled(storage, datastore))
    kept.assert_dense()
    counts = subscriber.counts
    assert (counts.given, counts.from_log > 0) == (41, True)


def test_a_topic_of_which_nothing_is_left_is_no_loss(storage, kafka, datastore, follow):
    """No record tells of the hole: the heads do."""
    put_and_wait(storage, kafka, datastore, 8)
    for partition in range(2):
        delete_before(kafka, datastore, OFFSET_END, partition)
    Kept().follow(follow(), filled(storage, datastore)).assert_dense()


def test_records_that_are_dropped_or_repeated_on_the_way_change_nothing(storage, kafka, datastore, follow):
    """Half of the records never arrive, some arrive twice, foreign ones lie between."""
    chance = random.Random(7)
    subscriber = follow()
    consume = subscriber._reader.consume

    def lossy(wait_s):
        return [r for r in consume(wait_s) for _ in range(chance.choice((0, 0, 1, 1, 1, 2)))]

    subscriber._reader.consume = lossy
    put(storage, datastore, [new_cell(datastore) for _ in range(30)])
    produce_foreign(kafka, datastore, [b"", b"\xc1", b"\x80" * 100] * 20)
    put(storage, datastore, [new_cell(datastore) for _ in range(30)])
    Kept().follow(subscriber, filled(storage, datastore)).assert_dense()
    counts = subscriber.counts
    assert counts.given == 60
    assert counts.foreign > 0
    assert counts.from_log > 0
    assert "not a cell record" in str(subscriber.foreign[0])


def test_a_new_generation_is_told_and_what_it_superseded_is_taken_back(storage, kafka, datastore, follow):
    """I13: as the user has it at the end, the log is what MySQL holds."""
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
    kept = Kept().follow(subscriber := follow(), {0: 5})
    open_generation(storage.master(datastore.home(0)), datastore, 4)
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(3)])
    kept.follow_until(subscriber, lambda: len(kept.locations[0]) >= 6)
    assert kept.locations[0] == [Location(1, 1), Location(1, 2), Location(1, 3), *[Location(2, n) for n in (4, 5, 6)]]
    assert [(change.generation, change.starts_at, change.superseded) for change in kept.changes] == [(2, 4, 2)]
    again = Kept().follow(follow(), {0: 6})
    assert again.locations == kept.locations


def test_a_position_is_where_the_next_process_goes_on(storage, kafka, datastore, follow):
    """Nothing comes twice, and the topic is read from where it is worth it; positions without offsets will do, too."""
    put_and_wait(storage, kafka, datastore, 40)
    first = Kept().follow(follow(), filled(storage, datastore))
    put_and_wait(storage, kafka, datastore, 12)
    second = follow(positions=first.positions)
    first.follow(second, filled(storage, datastore)).assert_dense()
    counts = second.counts
    assert (counts.given, counts.from_log, counts.duplicates) == (12, 4, 4), "one cell of each log proved its position"
    assert counts.unproven_positions == 0
    put_and_wait(storage, kafka, datastore, 4)
    third = follow(positions={shard: position.location for shard, position in first.positions.items()})
    assert {(cell.shard, cell.added_id) for cell in islice(third.cells(), 4)} == {(shard, 14) for shard in range(4)}
    assert third.counts.unproven_positions == 4
    third.stop()
    assert list(third) == []


def test_a_restored_master_that_grew_again_is_refused_until_a_generation_is_opened(storage, kafka, datastore, follow):
    """I16: also by a process that was away meanwhile. Then it has what MySQL holds, whatever it had before."""
    put_and_wait(storage, kafka, datastore, 24)
    before = filled(storage, datastore)
    kept = Kept().follow(live := follow(), before)
    master = storage.master(datastore.home(0))
    restore(master, datastore, 0, 4)
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
    for subscriber in (live, follow(positions=kept.positions)):
        until(lambda subscriber=subscriber: subscriber.poll(0.1) is None and subscriber.refused)
        assert "another cell is at 1:6" in subscriber.refused[0]
        assert subscriber.positions()[0].location == Location(1, 6)
        assert subscriber.refused.keys() == {0}
    rewrite_generation(master, datastore, 5)
    kept.follow(live, before | {0: 9})
    assert kept.locations[0] == [*[Location(1, n) for n in range(1, 5)], *[Location(2, n) for n in range(5, 10)]]
    assert [(change.generation, change.starts_at, change.superseded) for change in kept.changes] == [(2, 5, 2)]
    assert live.refused == {}
    again = follow(positions=kept.positions)
    assert again.poll(1.0) is None
    assert (again.refused, again.counts.unproven_positions) == ({}, 0)


def rewrite_generation(master, datastore, starts_at):
    """What opening a generation does to shard 0 after a restore: the cells written since belong to it."""
    where = f"datastore = '{datastore.name}' AND shard = 0"
    run_sql(
        master,
        "BEGIN;"
        f"UPDATE {datastore.database(0)}.entity SET generation = 2 WHERE added_id >= {starts_at};"
        f"UPDATE schemaless.shard_head SET generation = 2 WHERE {where};"
        f"INSERT INTO schemaless.shard_generation VALUES ('{datastore.name}', 0, 2, {starts_at}, UTC_TIMESTAMP(6));"
        "COMMIT",
    )


def test_it_begins_at_the_end_or_at_a_time(storage, kafka, datastore, follow):
    """What was written before is not given out; what comes then is, without a hole."""
    put_and_wait(storage, kafka, datastore, 8)
    time.sleep(0.01)
    moment = datetime.now(UTC)
    at_end = follow(start="end")
    assert at_end.poll(1.0) is None
    put_and_wait(storage, kafka, datastore, 4)
    for subscriber in (at_end, follow(start=moment)):
        found = set()
        while len(found) < 4:
            batch = subscriber.poll(TIMEOUT_S)
            found |= {(cell.shard, cell.added_id) for cell in batch.cells}
        assert found == {(shard, 3) for shard in range(4)}


def test_a_group_shares_the_partitions_and_hands_them_over(storage, kafka, datastore, follow):
    """Two members, one leaves: the other goes on from the positions that were stored."""
    kept, lock = Kept(), threading.Lock()

    def positions(shards):
        with lock:
            return {shard: kept.positions[shard] for shard in shards if shard in kept.positions}

    def work(subscriber):
        for batch in subscriber:
            with lock:
                kept.store(batch)

    members = [follow(group=f"{datastore.name}.g", positions=positions) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, member) for member in members]
        try:
            until(lambda: [len(member.positions()) for member in members] == [2, 2])
            put_and_wait(storage, kafka, datastore, 40)
            until(lambda: kept.heads() == filled(storage, datastore))
            members[0].stop()
            working[0].result(LIMIT_S)
            members[0].close()
            put_and_wait(storage, kafka, datastore, 40)
            until(lambda: kept.heads() == filled(storage, datastore))
        finally:
            for member in members:
                member.stop()
        working[1].result(LIMIT_S)
    kept.assert_dense()
    assert sum(member.counts.given for member in members) == 80


def follow_for_ever(subscriber, kept):
    while True:
        if (batch := subscriber.poll(0.2)) is not None:
            kept.store(batch)


def test_hosts_that_do_not_answer_are_told_and_nothing_is_lost(storage, kafka, datastore, follow):
    """A hole can't be filled: the error says so; when the hosts are back, the same subscriber goes on."""
    subscriber = follow()
    put_and_wait(storage, kafka, datastore, 40)
    kept = Kept()
    read, answers = subscriber._history.read, iter([False, True])

    def sometimes(wanted):
        if next(answers, True):
            return read(wanted)
        raise Unavailable("no answer")

    subscriber._history.read = sometimes
    consume = subscriber._reader.consume
    subscriber._reader.consume = lambda wait_s: consume(wait_s)[3:]
    with pytest.raises(Unavailable):
        follow_for_ever(subscriber, kept)
    kept.follow(subscriber, filled(storage, datastore)).assert_dense()


def test_what_can_not_be_followed_is_refused(api, kafka, datastore):
    """No such datastore or partition; a group without a way to find positions."""
    hosts = [f"http://127.0.0.1:{api.port}"]
    with Client(hosts, datastore="nobody") as client, pytest.raises(NotFound):
        Subscriber(kafka, "nobody", client=client)
    with Client(hosts, datastore=datastore.name) as client:
        with pytest.raises(Misconfigured, match="positions"):
            Subscriber(kafka, datastore.name, client=client, group="g")
        with pytest.raises(Invalid, match="from 0 to 1"):
            Subscriber(kafka, datastore.name, client=client, partitions=[2])
