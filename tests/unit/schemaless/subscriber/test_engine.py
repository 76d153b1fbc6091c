"""What a subscriber gives out: all cells of a shard's log, once and in order, whatever the topic lacks or repeats."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from schemaless.cell import StoredCell
from schemaless.codec import encode_body, encode_record
from schemaless.errors import LocationGone
from schemaless.found_cell import found_cell
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest, verify_position
from schemaless.record import Announcement, Record
from schemaless.shard_cursor import ProvenPage
from schemaless.storage.entity_table import ShardCell
from schemaless.subscriber.engine import FollowedShards, GenerationChange, ReadLog
from schemaless.testing.memory_program import MemoryEntityTable
from schemaless.topology import Datastore

BODY = encode_body({"n": 1})


BEGINNING = Position(0, 1, 0)


def cell(added_id, generation=1, shard=0):
    return StoredCell(b"r" * 16, "BASE", added_id, shard, generation, added_id, created_at=0, body=BODY)


def position_of(found):
    return Position(found.shard, found.generation, found.added_id, digest=cell_digest(found))


def record(found, offset=0, partition=0):
    if isinstance(found, StoredCell):
        value, kind = encode_record(found), b"erased" if found.is_erased else b"cell"
    elif isinstance(found, Announcement):
        members = {"shard": found.shard, "generation": found.generation, "starts_at": found.starts_at}
        value, kind = msgpack.packb(members), b"generation"
    else:
        value, kind = found, b"cell"
    return Record("t", partition, offset, 0, None, value, {"v": b"1", "kind": kind})


class Log:
    """The log API over an entity table in memory."""

    def __init__(self, shards=1, clock_us=0):
        self.table = MemoryEntityTable(Datastore("d", shards, 1, ("a",)), clock_us=lambda: clock_us)
        self.asked = []

    def grow(self, last, shard=0):
        """Adds cells until the head is `last`."""
        first = self.table.history(shard)[0].added_id + 1
        new = [cell(n, shard=shard) for n in range(first, last + 1)]
        self.table.put_cells([ShardCell(found.key, found.body, shard) for found in new])
        return self

    def supersede(self, starts_at):
        """Opens a generation: the cells from `starts_at` on are lost."""
        self.table.open_generation(0, starts_at)
        return self

    def cells(self, shard=0):
        return self.table.read_after(shard, 0, 10_000)

    def found(self):
        """The cells as a subscriber gives them out."""
        return [found_cell(stored) for stored in self.cells()]

    def answer(self, wanted: ReadLog):
        self.asked += [(str(at.location), wanted.limit) for at in wanted.positions]
        return {at.shard: self.read(at, wanted.limit) for at in wanted.positions}

    def read(self, at, limit):
        head, starts = self.table.history(at.shard)
        there = self.table.read_after(at.shard, at.added_id - 1, 1) if at.added_id else ()
        found = cell_digest(there[0]) if there else None if at.added_id else BEGINNING_DIGEST
        try:
            verify_position(at, found, starts, head.location)
        except LocationGone as gone:
            return gone
        return ProvenPage(self.table.read_after(at.shard, at.added_id, limit), head.location, found)

    def heads(self):
        return {head.shard: Location(head.generation, head.added_id) for head in self.table.heads()}


class Reader:
    """A subscriber without Kafka. `kept`: what a user has after every batch and every change."""

    def __init__(self, log, at=BEGINNING, shards=1, partitions=1, to_end=False):
        self.log = log
        self.followed = FollowedShards(shards, partitions)
        self.kept = {shard: [] for shard in range(shards)}
        self.changes = []
        self.positions = []
        self.at = {}
        for partition in range(partitions):
            numbers = range(partition, shards, partitions)
            starts = [structs.replace(at, shard=number) for number in numbers]
            self.followed.begin(partition, 0, starts, to_end=to_end)
            self.run(self.followed.catch_up(numbers))

    def run(self, steps):
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return self
            answer = self.log.answer(step) if isinstance(step, ReadLog) else self._keep(step)

    def take(self, *found):
        return self.run(self.followed.take([record(one, offset) for offset, one in enumerate(found)]))

    def look(self, times=2):
        """Two, because a head counts from one look to the next."""
        for _ in range(times):
            self.run(self.followed.look(self.log.heads(), {0}))
        return self

    def _keep(self, batch):
        kept = self.kept[batch.shard]
        if batch.change is not None:
            self.changes.append(batch.change)
            del kept[len(kept) - batch.change.superseded :]
        assert not (batch.change and batch.cells)
        assert batch.after == self.at.get(batch.shard, batch.after)
        self.at[batch.shard] = batch.position.location
        kept.extend(batch.cells)
        self.positions.append(batch.position)

    def added_ids(self, shard=0):
        return [(found.generation, found.added_id) for found in self.kept[shard]]


def dense(*added_ids, generation=1):
    return [(generation, n) for n in added_ids]


def test_a_dense_topic_is_given_out_without_asking_the_log():
    """The cheap way is the usual one."""
    log = Log().grow(5)
    reader = Reader(log).take(*log.cells())
    assert (reader.added_ids(), log.asked) == (dense(1, 2, 3, 4, 5), [])


def test_a_hole_is_filled_from_the_log_before_going_on():
    """I9: higher than the next is a hole, lower a duplicate."""
    log = Log().grow(7)
    reader = Reader(log).take(cell(1), cell(2), cell(2), cell(5), cell(4), cell(6))
    assert reader.added_ids() == dense(1, 2, 3, 4, 5, 6)
    assert log.asked == [("1:2", 4)], "up to the last record that was brought"
    counts = reader.followed.counts
    assert (counts.given, counts.from_log, counts.holes, counts.duplicates) == (6, 4, 1, 1)


def test_a_cell_without_a_body_holds_its_place():
    """Its body was erased before it was published (I19): it is given out, and says so."""
    log = Log().grow(5)
    cells = [structs.replace(found, body=b"") if found.added_id == 3 else found for found in log.cells()]
    reader = Reader(log).take(*cells)
    assert (reader.added_ids(), log.asked) == (dense(1, 2, 3, 4, 5), [])
    assert [found.added_id for found in reader.kept[0] if found.erased] == [3]


def test_what_the_topic_never_brought_is_found_by_the_heads():
    """The last cells of a quiet shard: no later record shows that they are missing."""
    log = Log().grow(5)
    reader = Reader(log).take(cell(1))
    assert reader.look().added_ids() == dense(1, 2, 3, 4, 5)
    assert reader.look().added_ids() == dense(1, 2, 3, 4, 5)


def test_a_partition_that_is_not_read_to_its_end_is_not_overdue():
    """Its records are still to come: the log is left alone."""
    log = Log().grow(5)
    reader = Reader(log)
    for _ in range(3):
        reader.run(reader.followed.look(log.heads(), set()))
    assert log.asked == []


def test_positions_tell_where_to_go_on():
    """The last batch of a partition carries its offset; from there, nothing is missing and nothing comes twice."""
    log = Log(shards=2).grow(3, shard=0).grow(3, shard=1)
    mixed = [log.cells(shard)[n] for n in range(3) for shard in (0, 1)]
    reader = Reader(log, shards=2).take(*mixed)
    assert [(p.shard, p.added_id, p.offset) for p in reader.positions] == [(0, 3, 0), (1, 3, 6)]
    assert {n: p.added_id for n, p in reader.followed.positions().items()} == {0: 3, 1: 3}


def test_foreign_records_are_counted_and_named():
    """Bytes that are no record, and cells of a shard that has no place here."""
    reader = Reader(Log()).take(b"", cell(1, shard=1), cell(1))
    assert (reader.added_ids(), reader.followed.counts.foreign) == (dense(1), 2)
    assert [found.offset for found in reader.followed.foreign] == [0, 1]


def test_a_forged_cell_costs_time_and_nothing_else():
    """The log doesn't know it: it is not given out, and the shard goes on by its log."""
    log = Log().grow(4)
    reader = Reader(log).take(cell(1), cell(2), cell(1_000_000))
    assert (reader.added_ids(), reader.followed.counts.unproven) == (dense(1, 2, 3, 4), 1)
    assert "the topic has cells up to 1:1000000" in reader.followed.refused()[0]
    log.grow(5)
    assert reader.look().take(cell(5)).added_ids() == dense(1, 2, 3, 4, 5)
    assert reader.followed.refused() == {}
    assert reader.take(cell(6, generation=9)).added_ids() == dense(1, 2, 3, 4, 5)


def test_a_log_that_is_not_dense_is_refused():
    """That contradicts I3: nothing is guessed."""
    log = Log().grow(4)
    log.read = lambda at, limit: ProvenPage([cell(1), cell(3), cell(4)], Location(1, 4))
    reader = Reader(log).take(cell(4))
    assert reader.added_ids() == []
    assert "not dense" in reader.followed.refused()[0]


def test_a_generation_takes_back_what_it_superseded():
    """I13: told with the position to store, then its own cells come."""
    log = Log().grow(5).supersede(4).grow(5)
    old = [cell(n) for n in range(1, 6)]
    reader = Reader(log).take(*old, Announcement(0, 2, 4), cell(4, 2), cell(5, 2))
    assert reader.kept[0] == log.found()
    assert reader.changes == [GenerationChange(2, 4, superseded=2)]
    assert [str(position) for position in reader.positions[1:]] == ["2:3", str(position_of(log.cells()[-1]))]


def test_a_generation_that_begins_without_loss_is_told():
    """Nothing is superseded; announced again, it is told once."""
    log = Log().grow(1).supersede(2).grow(2)
    reader = Reader(log).take(cell(1), Announcement(0, 2, 2), Announcement(0, 2, 2), cell(2, 2))
    assert (reader.added_ids(), reader.changes) == ([(1, 1), (2, 2)], [GenerationChange(2, 2, superseded=0)])


@pytest.mark.parametrize("new_cells", [0, 1, 4])
def test_a_reader_at_a_superseded_location_is_told_by_the_log(new_cells):
    """The announcement was cut off from the topic, or lies before where it is read from."""
    log = Log().grow(5).supersede(4).grow(3 + new_cells)
    reader = Reader(log).take(*[cell(n) for n in range(1, 6)])
    reader.look()
    reader.take(log.grow(4 + new_cells).cells()[-1])
    reader.look()
    assert reader.kept[0] == log.found()
    assert sum(change.superseded for change in reader.changes) == 2


def test_a_batch_has_one_generation():
    """A page of the log that spans several is split, with a change before each."""
    log = Log().grow(2).supersede(3).grow(4).supersede(5).grow(5)
    reader = Reader(log, to_end=True)
    assert reader.kept[0] == log.found()
    assert reader.changes == [GenerationChange(2, 3, superseded=0), GenerationChange(3, 5, superseded=0)]
    assert [str(position.location) for position in reader.positions] == ["1:2", "2:2", "2:4", "3:4", "3:5"]


def test_of_two_generations_the_later_one_may_start_lower():
    """I13: a reader that was away for both takes back what either superseded."""
    log = Log().grow(10).supersede(9).grow(9).supersede(7).grow(8)
    reader = Reader(log, at=Position(0, 1, 10))
    assert reader.changes == [GenerationChange(3, 7, superseded=4)]
    assert reader.added_ids() == [(3, 7), (3, 8)]


def test_a_node_that_is_behind_takes_nothing_back():
    """A minion's log ends before the reader: its answer is no reason to go back."""
    log = Log().grow(2)
    reader = Reader(log, at=Position(0, 1, 5)).take(cell(8))
    assert (reader.added_ids(), reader.changes) == ([], [])
    log.grow(8)
    assert reader.look().added_ids() == dense(6, 7, 8)


def stored(log, added_id):
    """The position of a reader that has read the log up to a cell."""
    return structs.replace(position_of(log.cells()[added_id - 1]), offset=7)


@pytest.mark.parametrize("to_end", [False, True])
@pytest.mark.parametrize("head", [10, 15])
def test_a_restored_master_that_grew_again_gives_out_nothing_until_a_generation_is_opened(to_end, head):
    """I16: the numbers of the position are there, and another cell. The generation then brings all of its cells."""
    at = stored(Log().grow(10), 10)
    restored = Log(clock_us=7).grow(head)
    reader = Reader(restored, at=at, to_end=to_end).take(*restored.cells()[10:]).look()
    assert reader.kept[0] == []
    assert reader.followed.positions()[0].location == Location(1, 10)
    assert "another cell is at 1:10: this log has another history" in reader.followed.refused()[0]
    assert reader.followed.counts.refused == 1
    restored.supersede(7).grow(head)
    reader.look(1)
    assert reader.changes == [GenerationChange(2, 7, superseded=4)]
    assert reader.kept[0] == restored.found()[6:]
    assert reader.followed.refused() == {}


def test_a_position_of_another_datastore_is_refused():
    """Its digest names a cell that is not there."""
    reader = Reader(Log().grow(10), at=Position(0, 1, 4, digest=1234)).look()
    assert (reader.kept[0], reader.changes) == ([], [])
    assert reader.followed.refused().keys() == {0}


@pytest.mark.parametrize("at", [Position(0, 1, 99), Position(0, 7, 3)])
def test_a_position_past_the_head_or_of_an_unknown_generation_is_refused(at):
    """Nothing is given out, and the reason is told."""
    reader = Reader(Log().grow(10), at=at).look()
    assert reader.kept[0] == []
    assert ("past the head" in reader.followed.refused()[0]) or ("unknown here" in reader.followed.refused()[0])


def test_a_position_that_is_proven_costs_one_page_for_all_shards():
    """The topic is heard from before the positions, so nothing more is read."""
    log = Log(shards=3).grow(5, shard=0).grow(5, shard=1).grow(5, shard=2)
    followed = FollowedShards(3, 1)
    followed.begin(0, 7, [position_of(log.cells(n)[3]) for n in range(3)], to_end=False)
    steps = followed.catch_up(range(3))
    asked = steps.send(None)
    assert ([at.shard for at in asked.positions], asked.limit) == ([0, 1, 2], 1)
    batches = [steps.send(log.answer(asked)), *steps]
    assert [(batch.shard, batch.position.added_id) for batch in batches] == [(0, 5), (1, 5), (2, 5)]


def test_positions_have_the_digest_of_their_cell():
    """I16: also of a shard at its head whose stored position had none."""
    log = Log().grow(3)
    reader = Reader(log).take(*log.cells())
    assert reader.positions[-1] == structs.replace(position_of(log.cells()[-1]), offset=3)
    reader = Reader(log, at=Position(0, 1, 3))
    assert reader.followed.positions()[0] == structs.replace(position_of(log.cells()[-1]), offset=0)


def test_a_partition_that_goes_to_another_process_is_left_at_once():
    """Also in the middle of a hole that is being filled."""
    log = Log().grow(3999)
    reader = Reader(log)
    steps = reader.followed.take([record(cell(3999))])
    assert isinstance(steps.send(None), ReadLog)
    reader.followed.end({0})
    with pytest.raises(StopIteration):
        steps.send({0: ProvenPage(log.cells()[:1000], Location(1, 3999))})
    assert reader.followed.positions() == {}


@st.composite
def histories(draw):
    """A shard's life: cells of several generations, some superseded; the topic that tells it; the log that is left."""
    topic, log, head = [], Log(), 0
    for generation in range(1, draw(st.integers(1, 4)) + 1):
        if generation > 1:
            head = draw(st.integers(0, head))
            log.supersede(head + 1)
            topic.append(Announcement(0, generation, head + 1))
        before, head = head, head + draw(st.integers(0, 6))
        topic += log.grow(head).cells()[before:]
    return topic, log


@given(histories(), st.data())
def test_whatever_the_topic_lacks_repeats_or_adds_the_log_is_what_a_user_has(history, data):
    """Dropped, repeated, foreign records, a cut beginning, pages of any size: all cells, once, in order."""
    topic, log = history
    fates = st.sampled_from(["kept", "kept", "kept", "dropped", "twice", "after foreign"])
    damaged = []
    for found in topic[data.draw(st.integers(0, len(topic))) :]:
        damaged += {"kept": [found], "dropped": [], "twice": [found] * 2, "after foreign": [b"", found]}[
            data.draw(fates)
        ]
    reader = Reader(log)
    while damaged:
        size = data.draw(st.integers(1, 5))
        reader.take(*damaged[:size])
        del damaged[:size]
    reader.look()
    assert reader.kept[0] == log.found()
