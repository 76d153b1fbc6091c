"""The engine of a subscriber: what it knows of its shards. A cell is given out right after the one before it (I9).

This is pure. Records of the topic go in and batches come out. Where the topic lacks something a `ReadLog` comes out,
which the driver answers with a page of the shard's log. The driver is schemaless/subscriber/subscriber.py.

A cell of the topic at or below a shard's place is a duplicate. For a higher one, and for a head that the topic never
brought, the log is read up to there first. A cell that not even the log has is not given out, and nothing of its shard
until the next look at the heads; the shard is then read from the log. So a forged record costs time, never a cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Generator, Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import StoredCell, is_dense
from schemaless.errors import Corrupt, LocationGone
from schemaless.location import Location
from schemaless.position import Position
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.shard_cursor import CellPlace, judge
from schemaless.subscriber.batch import Batch, GenerationChange

PAGE_CELLS_MAX = 1000
_FOREIGN_KEPT_MAX = 100


class ReadLog(msgspec.Struct, frozen=True):
    """Asks for at most `limit` cells of a shard's log after a location."""

    shard: int
    after: Location
    limit: int


class HistoryPage(msgspec.Struct, frozen=True):
    """Cells of a shard's log. Without cells the log ends here."""

    cells: Sequence[StoredCell]


LogAnswer = HistoryPage | LocationGone
Steps = Generator[Batch | ReadLog, LogAnswer | None, None]
"""Yields a ReadLog, which is sent its answer, or a Batch, which is given out and sent None."""


class SubscriberCounts(msgspec.Struct):
    """Counts of cells or records since the start. `from_log` counts those given out that came from the shard's log."""

    given: int = 0
    from_log: int = 0
    holes: int = 0
    duplicates: int = 0
    superseded: int = 0
    foreign: int = 0
    unproven: int = 0
    """Cells in the topic that the log doesn't have."""


class _FollowedShard:
    """Cells are taken up to `at`. Those after `given` are in `run`, because they were not given out yet.

    `head` is that of the last look. `closed`: topic and log contradict each other, and the next look decides.
    """

    __slots__ = ("at", "closed", "given", "head", "partition", "run")

    def __init__(self, partition: int, at: Location, head: Location) -> None:
        self.partition = partition
        self.at = self.given = at
        self.run: list[StoredCell] = []
        self.head = head
        self.closed = False

    def take(self, cells: Iterable[StoredCell]) -> None:
        self.run.extend(cells)
        last = self.run[-1]
        self.at = last.location


class FollowedShards:
    """Follows shards of `partitions` of the topic, of which there are this many."""

    def __init__(self, shards: int, partitions: int) -> None:
        self.counts = SubscriberCounts()
        self.foreign: deque[ForeignRecord] = deque(maxlen=_FOREIGN_KEPT_MAX)
        self._count = shards
        self._partitions = partitions
        self._shards: dict[int, _FollowedShard] = {}
        self._offsets: dict[int, int] = {}
        self._begun: dict[int, None] = {}  # shards with a run, in order

    def begin(
        self, partition: int, offset: int, locations: Mapping[int, Location], heads: Mapping[int, Location]
    ) -> None:
        """Follows a partition from now on: the topic from `offset`, its shards after their locations."""
        self._offsets[partition] = offset
        self._shards.update({number: _FollowedShard(partition, at, heads[number]) for number, at in locations.items()})

    def end(self, partitions: Container[int]) -> None:
        """Follows these partitions no more. Cells that were taken and not given out come again to another process."""
        self._shards = {n: shard for n, shard in self._shards.items() if shard.partition not in partitions}

    def positions(self) -> dict[int, Position]:
        """Returns the position of every followed shard, as far as batches were given out."""
        return {number: self._position(number, shard, shard.given) for number, shard in self._shards.items()}

    def take(self, records: Sequence[Record]) -> Steps:
        """Takes what the topic brought, in the order of each partition."""
        for record in records:
            found = self._ours(record)
            if isinstance(found, StoredCell):
                yield from self._take_cell(found)
            elif isinstance(found, Announcement):
                yield from self._take_start(found)
        yield from self._give_out({record.partition: record.offset + 1 for record in records})

    def look(self, heads: Mapping[int, Location], at_end: Container[int]) -> Steps:
        """Finds in partitions that are read to their end what the last look's head promised and the topic lacks."""
        for number, head in heads.items():
            shard = self._shards.get(number)
            if shard is None:
                continue
            overdue = shard.partition in at_end and shard.at < shard.head
            shard.head = head
            if overdue or shard.closed:
                shard.closed = False
                yield from self.catch_up(number, head.added_id)

    def catch_up(self, number: int, until: int) -> Steps:
        """Gives out cells up to an added_id from the shard's log. It asks at least once: that verifies the place."""
        while (shard := self._shards.get(number)) is not None:
            yield from self._flush(number, shard)
            limit = max(1, min(PAGE_CELLS_MAX, until - shard.at.added_id))
            answer = yield ReadLog(number, shard.at, limit)
            if self._shards.get(number) is not shard:
                return
            if isinstance(answer, LocationGone):
                if answer.generation <= shard.at.generation or answer.resume_at >= shard.at.added_id:
                    return  # the node lags, or was restored: what was given out is never taken back for that
                until = max(until, answer.head)
                # Cells that follow have a generation of their own. Where none follows yet, the new one does.
                nothing_follows = answer.resume_at == answer.head
                place = Location(answer.generation if nothing_follows else shard.at.generation, answer.resume_at)
                yield self._change(number, shard, place, answer.generation, answer.resume_at + 1)
                continue
            cells = answer.cells if answer is not None else ()
            if cells:
                if not is_dense(shard.at, cells):
                    raise Corrupt(f"the log of shard {number} is not dense after {shard.at}")
                shard.take(cells)
                self.counts.from_log += len(cells)
                yield from self._flush(number, shard)
            if not cells or shard.at.added_id >= until:
                return

    def _ours(self, record: Record) -> StoredCell | Announcement | None:
        """Returns a cell or an announcement of a followed shard. A seek only explains duplicates and holes."""
        found = decoded(record)
        if not isinstance(found, ForeignRecord) and (
            found.shard >= self._count or found.shard % self._partitions != record.partition
        ):
            found = misplaced(record, found.shard)
        if isinstance(found, ForeignRecord):
            self.counts.foreign += 1
            self.foreign.append(found)
            return None
        shard = self._shards.get(found.shard)
        return None if isinstance(found, Seek) or shard is None or shard.closed else found

    def _take_cell(self, cell: StoredCell) -> Steps:
        shard = self._shards[cell.shard]
        verdict = judge(shard.at, cell)
        if verdict in (CellPlace.AHEAD, CellPlace.UNANNOUNCED):
            self.counts.holes += 1
            # A cell of a generation that nobody announced is taken from the log itself, which knows generations.
            until = cell.added_id - (verdict is CellPlace.AHEAD)
            yield from self.catch_up(cell.shard, until)
            if self._shards.get(cell.shard) is not shard:
                return
            verdict = judge(shard.at, cell)
        if verdict is CellPlace.NEXT:
            self._begun[cell.shard] = None
            shard.take([cell])
        elif verdict is CellPlace.REPEATED:
            self.counts.duplicates += 1
        elif verdict is CellPlace.SUPERSEDED:
            self.counts.superseded += 1
        else:
            self.counts.unproven += 1
            shard.closed = True

    def _take_start(self, found: Announcement) -> Steps:
        shard = self._shards[found.shard]
        last = found.starts_at - 1
        if found.generation <= shard.at.generation:
            return
        if shard.at.added_id < last:
            self.counts.holes += 1
            yield from self.catch_up(found.shard, last)
        if self._shards.get(found.shard) is not shard or found.generation <= shard.at.generation:
            return
        if shard.at.added_id < last:
            self.counts.unproven += 1
            shard.closed = True
            return
        yield from self._flush(found.shard, shard)
        place = Location(found.generation, last)
        yield self._change(found.shard, shard, place, found.generation, found.starts_at)

    def _give_out(self, ends: Mapping[int, int]) -> Steps:
        """Gives out the runs that the topic has begun. The last one of each partition carries its new offset."""
        begun, self._begun = self._begun, {}
        runs = [(number, shard) for number in begun if (shard := self._shards.get(number)) is not None and shard.run]
        last = {shard.partition: number for number, shard in runs}
        for number, shard in runs:
            if last[shard.partition] == number:
                self._offsets[shard.partition] = ends[shard.partition]
            yield from self._flush(number, shard)
        self._offsets.update(ends)

    def _flush(self, number: int, shard: _FollowedShard) -> Steps:
        if shard.run:
            cells, shard.run = shard.run, []
            after, shard.given = shard.given, shard.at
            self.counts.given += len(cells)
            yield Batch(number, after, cells, self._position(number, shard, shard.at))

    def _change(self, number: int, shard: _FollowedShard, place: Location, generation: int, starts_at: int) -> Batch:
        superseded = max(0, shard.at.added_id - place.added_id)
        after, shard.at, shard.given = shard.given, place, place
        change = GenerationChange(generation, starts_at, superseded)
        return Batch(number, after, (), self._position(number, shard, place), change)

    def _position(self, number: int, shard: _FollowedShard, at: Location) -> Position:
        return Position(number, at.generation, at.added_id, self._offsets[shard.partition])
