"""What comes next in a shard: every cell of the present history, in order, whatever topic and log do (I9, I13)."""

from collections import deque

import pytest

from schemaless.errors import LocationGone
from schemaless.location import GenerationStart, Location, next_start
from schemaless.position import Position
from schemaless.shard_cursor import CursorState, ProvenPage, ShardCursor
from tests.shard_histories import Log, cell, log_of, position


def read(cursor, log, limit=10):
    """Reads the log until the cursor doesn't ask for it. Returns what was handed over and finished."""
    found = []
    for _ in range(20):
        if cursor.state is not CursorState.BEHIND:
            return found
        answer = log.read(cursor.at, limit)
        if isinstance(answer, LocationGone):
            cursor.gone(answer)
        else:
            found += cursor.page(answer)
            cursor.finish(cursor.at)
    raise AssertionError(f"no end: {cursor.state} {cursor.at}")


def live(log, at=None):
    cursor = ShardCursor(0)
    cursor.begin(at or position(0))
    read(cursor, log)
    assert cursor.state is CursorState.LIVE
    return cursor


def locations(cells):
    return [(found.generation, found.added_id) for found in cells]


def test_it_takes_the_next_cells_of_the_topic_and_no_others():
    cursor = live(log_of(3))
    assert locations(cursor.take([cell(2), cell(3), cell(4), cell(5)])) == [(1, 4), (1, 5)]
    assert cursor.counts.duplicates == 2
    assert not cursor.take([cell(7)])
    assert cursor.state is CursorState.BEHIND
    assert locations(read(cursor, log_of(8))) == [(1, 6), (1, 7), (1, 8)]
    assert cursor.state is CursorState.LIVE


def test_superseded_records_of_the_topic_are_never_next():
    log = log_of(8).promoted(5).grown().grown()
    cursor = live(log, position(3))
    assert cursor.at.location == Location(2, 6)
    assert not cursor.take([cell(n) for n in range(4, 9)])
    assert cursor.state is CursorState.LIVE
    assert locations(cursor.take([cell(n, 2) for n in range(5, 10)])) == [(2, 7), (2, 8), (2, 9)]


def test_of_two_generations_the_later_one_may_start_lower():
    log = log_of(10).promoted(9).grown().promoted(7).grown().grown()
    cursor = ShardCursor(0)
    cursor.begin(position(10))
    assert locations(read(cursor, log)) == [(3, 7), (3, 8)]


def test_another_history_under_the_same_numbers_is_refused_until_a_generation_is_opened():
    old = log_of(10)
    restored = old.restored(6)
    for _ in range(6):
        restored = restored.grown(ref_key=7)
    cursor = live(old)
    cursor.look(restored.head)
    cursor.look(restored.head)
    assert not read(cursor, restored)
    assert cursor.state is CursorState.REFUSED
    assert "another cell is at 1:10" in cursor.reason
    cursor.look(restored.head)
    assert not read(cursor, restored)
    opened = restored.generation_opened(7)
    cursor.look(opened.head)
    assert locations(read(cursor, opened)) == [(2, n) for n in range(7, 13)]
    assert cursor.state is CursorState.LIVE


def test_a_head_that_fell_is_found_at_once_and_not_when_new_cells_overtake_it():
    cursor = live(log_of(10))
    cursor.look(log_of(10).head)
    restored = log_of(10).restored(6)
    cursor.look(restored.head)
    assert not read(cursor, restored)
    assert cursor.state is CursorState.REFUSED


def test_a_generation_that_would_take_nothing_back_is_no_reason_to_go_on():
    """A master that forgot the generation of the position says so."""
    cursor = ShardCursor(0)
    cursor.begin(position(10, 2))
    assert cursor.gone(LocationGone("generation 2 is unknown here", head=15, resume_at=10, generation=3)) is None
    assert (cursor.state, cursor.at.added_id) == (CursorState.REFUSED, 10)


def test_a_head_that_the_topic_never_brought_is_read_from_the_log_at_the_second_look():
    cursor = live(log_of(3))
    cursor.look(Location(1, 5))
    assert cursor.state is CursorState.LIVE
    cursor.look(Location(1, 5))
    assert locations(read(cursor, log_of(5))) == [(1, 4), (1, 5)]


def test_cells_that_only_the_topic_has_wait_for_the_next_look():
    cursor = live(log_of(3))
    cursor.take([cell(9)])
    assert not read(cursor, log_of(3))
    assert cursor.state is CursorState.REFUSED
    assert not cursor.take([cell(4)])
    cursor.look(Location(1, 4))
    assert locations(read(cursor, log_of(4))) == [(1, 4)]
    assert cursor.state is CursorState.LIVE


@pytest.mark.parametrize("page", [[cell(5)], [cell(4), cell(6)], [cell(4, 2), cell(5, 1)]])
def test_a_log_that_is_not_dense_is_refused(page):
    cursor = ShardCursor(0)
    cursor.begin(position(3))
    assert not cursor.page(ProvenPage(page, Location(1, 9)))
    assert cursor.state is CursorState.REFUSED
    assert "not dense" in cursor.reason


def test_one_page_proves_a_position_whose_topic_is_heard_from_before():
    cursor = ShardCursor(0)
    cursor.begin(position(0), to_end=False)
    assert cursor.state is CursorState.LIVE, "before the first cell there is nothing to prove"
    cursor.begin(position(3), to_end=False)
    assert cursor.state is CursorState.BEHIND
    assert locations(read(cursor, log_of(9), limit=1)) == [(1, 4)]
    assert cursor.state is CursorState.LIVE
    assert locations(cursor.take([cell(4), cell(5)])) == [(1, 5)]


def test_a_position_without_a_digest_gets_that_of_the_log():
    cursor = ShardCursor(0)
    cursor.begin(Position(0, 1, 3))
    cursor.page(ProvenPage((), Location(1, 3), digest=77))
    assert cursor.at == Position(0, 1, 3, digest=77)
    assert cursor.state is CursorState.LIVE


def test_it_says_how_many_cells_the_log_has_to_bring():
    cursor = live(log_of(3))
    cursor.take([cell(6), cell(7)])
    assert cursor.missing == 4
    cursor.announce(2, 5)
    assert cursor.missing is None, "nobody knows where the generations before it end"


def test_a_node_that_does_not_know_the_generation_yet_brings_nothing_superseded_again():
    old = log_of(8)
    cursor = live(old)
    cursor.announce(2, 5)
    assert cursor.gone(old.promoted(5).read(cursor.at)) == 4
    assert not read(cursor, old)
    assert cursor.state is CursorState.REFUSED
    assert "it lags" in cursor.reason
    cursor.look(Location(2, 5))
    assert locations(read(cursor, old.promoted(5).grown())) == [(2, 5)]
    assert cursor.state is CursorState.LIVE


def test_after_a_new_generation_the_log_is_read_to_its_end():
    """The topic may have brought its cells before, when the shard was refused."""
    old = log_of(8)
    cursor = live(old)
    promoted = old.promoted(5).grown().grown()
    assert cursor.gone(promoted.read(cursor.at)) == 4
    assert locations(read(cursor, promoted, limit=1)) == [(2, 5), (2, 6)]
    assert cursor.state is CursorState.LIVE


def test_a_head_without_its_cell_is_refused():
    cursor = ShardCursor(0)
    cursor.begin(position(3))
    cursor.page(ProvenPage([], Location(1, 9)))
    assert cursor.state is CursorState.REFUSED
    assert "no cell follows 1:3" in cursor.reason


def test_what_was_not_finished_comes_again_from_the_log():
    cursor = live(log_of(3))
    cursor.take([cell(4), cell(5)])
    cursor.finish(position(4))
    cursor.give_back()
    assert cursor.state is CursorState.BEHIND
    assert cursor.at == position(4)
    assert locations(read(cursor, log_of(5))) == [(1, 5)]
    assert cursor.state is CursorState.LIVE


def test_whoever_lost_a_checkpoint_hands_over_nothing_until_it_begins_anew():
    cursor = live(log_of(3))
    cursor.lose()
    assert not cursor.take([cell(4)])
    cursor.look(Location(1, 5))
    cursor.look(Location(1, 5))
    assert cursor.state is CursorState.UNCONFIRMED
    assert not cursor.page(ProvenPage([cell(4)], Location(1, 4)))
    cursor.forget()
    assert cursor.state is CursorState.LOCATING
    cursor.begin(position(4))
    assert locations(read(cursor, log_of(5))) == [(1, 5)]


class World:
    """A log that loses continuity twice, the topic that a tailer makes of it, and one follower with restarts."""

    CHANGES = (
        Log.grown,  # (1,3)
        lambda log: log.promoted(3),
        Log.grown,  # (2,3)
        lambda log: log.promoted(2),
        Log.grown,  # (3,2)
    )

    def __init__(self):
        self.log = log_of(2)
        self.changed = 0
        self.topic = ()
        self.published = Location(1, 1)
        self.offset = 0
        self.cursor = ShardCursor(0)
        self.cursor.begin(position(1))
        self.finished = frozenset(self.log.cells[:1])

    def key(self):
        cursor = self.cursor
        return (
            self.changed, self.topic, self.published, self.offset, self.finished,
            cursor.state, cursor.at, cursor.done, cursor._seen, cursor._last_head, cursor._to_end, cursor._generation,
        )  # fmt: skip

    def copied(self):
        """Copies the world and its cursor. `copy.copy` would take most of the test's time."""
        other, cursor = World.__new__(World), ShardCursor.__new__(ShardCursor)
        other.__dict__.update(self.__dict__, cursor=cursor)
        for name in ShardCursor.__slots__:
            setattr(cursor, name, getattr(self.cursor, name))
        return other

    def change(self):
        if self.changed < len(self.CHANGES):
            self.log = self.CHANGES[self.changed](self.log)
            self.changed += 1

    def publish(self):
        """Does what the tailer does: cells of the published generation, then the next generation that is met."""
        at = self.published
        start = next_start(at, self.log.starts)
        if start is not None and at.added_id >= start.starts_at - 1:
            self.topic += (start,)
            self.published = Location(start.generation, start.starts_at - 1)
        elif at.added_id < len(self.log.cells):
            found = self.log.cells[at.added_id]
            self.topic += (found,)
            self.published = found.location

    def deliver(self, count=1):
        for record in self.topic[self.offset : self.offset + count]:
            if isinstance(record, GenerationStart):
                self.cursor.announce(record.generation, record.starts_at)
            else:
                self._handle(self.cursor.at, self.cursor.take([record]))
        self.offset = min(len(self.topic), self.offset + count)

    def skip(self):
        """The topic's next record is never brought."""
        self.offset = min(len(self.topic), self.offset + 1)

    def read(self, limit=1):
        if self.cursor.state is CursorState.BEHIND:
            answer = self.log.read(self.cursor.at, limit)
            if isinstance(answer, LocationGone):
                self.cursor.gone(answer)
            else:
                self._handle(self.cursor.at, self.cursor.page(answer))

    def fail(self):
        """Reads a page, and the handler fails."""
        if self.cursor.state is CursorState.BEHIND and isinstance(page := self.log.read(self.cursor.at, 1), ProvenPage):
            self.cursor.page(page)
            self.cursor.give_back()

    def look(self):
        self.cursor.look(self.log.head)

    def restart(self):
        self.offset = 0
        done = self.cursor.done
        self.cursor = ShardCursor(0)
        self.cursor.begin(done)

    def resume(self):
        """Begins anew, with the topic from its beginning: only the position is proven by the log."""
        self.restart()
        self.cursor.begin(self.cursor.at, to_end=False)

    def _handle(self, at, cells):
        for found in cells:
            assert found.added_id == at.added_id + 1
            assert found.generation >= at.generation
            at = found
            self.finished |= {found}
        self.cursor.finish(self.cursor.at)

    @property
    def topic_is_read(self):
        if self.offset < len(self.topic):
            return False
        after = self.copied()
        after.publish()
        return after.topic == self.topic

    def drained(self):
        """The heads are looked at until nothing more happens."""
        for _ in range(3):
            self.look()
            for _ in range(10):
                self.read(10)
        return self

    def check(self):
        """Whatever happened, the topic is read to its end at some time. The cursor must then find what it lacks."""
        if not self.topic_is_read:
            return
        end = self.copied().drained()
        assert end.cursor.state is CursorState.LIVE, end.key()
        assert end.cursor.at.location == end.log.head, end.key()
        assert end.finished >= frozenset(end.log.cells), end.key()


EVENTS = (
    World.change,
    World.publish,
    World.deliver,
    World.skip,
    World.read,
    World.look,
    World.fail,
    World.restart,
    World.resume,
)


def test_every_interleaving_of_topic_log_restarts_and_two_generations_ends_with_the_whole_log():
    start = World()
    known = {start.key()}
    waiting = deque([start])
    while waiting:
        world = waiting.popleft()
        world.check()
        for event in EVENTS:
            after = world.copied()
            event(after)
            if (key := after.key()) not in known:
                known.add(key)
                waiting.append(after)
    assert len(known) > 1000
