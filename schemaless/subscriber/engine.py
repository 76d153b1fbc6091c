"""FollowedShards: what a subscriber knows of its shards. Keeps I9: a cell is given out right after the one before it.

Pure. Records of the topic go in, batches come out, and where the topic proves to lack something a `ReadLog` comes out,
to be answered with a page of the shard's log. The driver is schemaless/subscriber/subscriber.py.

What the topic brings lower than a shard's place is a duplicate. Higher: the log is read up to there first. A head
that the topic never brought: the same. A cell that not even the log knows is not given out, and nothing of its shard
until the next look at the heads, which are then read from the log: so a forged record costs time, never a cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Generator, Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import StoredCell, is_dense
from schemaless.errors import Corrupt, LocationGone
from schemaless.location import Location
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.subscriber.density import CellPlace, judge
from schemaless.subscriber.position import Batch, GenerationChange, Position

PAGE_CELLS_MAX = 1000
_FOREIGN_KEPT_MAX = 100


class ReadLog(msgspec.Struct, frozen=True):
    """At most `limit` cells of a shard's log after a location are needed."""

    shard: int
    after: Location
    limit: int


class HistoryPage(msgspec.Struct, frozen=True):
    """Cells of a shard's log; none: it ends here."""

    cells: Sequence[StoredCell]


LogAnswer = HistoryPage | LocationGone
Steps = Generator[Batch | ReadLog, LogAnswer | None, None]
"""A ReadLog is answered; a Batch is given out, and answered with None."""


class SubscriberCounts(msgspec.Struct):
    """Since the start, in cells or records. `from_log`: of those given out, what came from the log of the shard."""

    given: int = 0
    from_log: int = 0
    holes: int = 0
    duplicates: int = 0
    superseded: int = 0
    foreign: int = 0
    unproven: int = 0
    """Cells in the topic that the log doesn't know."""


class _FollowedShard:
    """`at`: up to where cells were taken; `run`: those of them that were not given out yet, after `given`.

    `head`: as the last look had it. `closed`: topic and log contradict each other, wait for the next look.
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
    """`partitions`: of the topic. `offsets`: by partition, below it everything was given out."""

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
        """A partition is followed from now on: the topic from `offset`, its shards after their locations."""
        self._offsets[partition] = offset
        self._shards.update({number: _FollowedShard(partition, at, heads[number]) for number, at in locations.items()})

    def end(self, partitions: Container[int]) -> None:
        """Others follow these from now on: what was taken and not given out is theirs."""
        self._shards = {n: shard for n, shard in self._shards.items() if shard.partition not in partitions}

    def positions(self) -> dict[int, Position]:
        """Of every shard that is followed, as far as batches were given out."""
        return {number: self._position(number, shard, shard.given) for number, shard in self._shards.items()}

    def take(self, records: Sequence[Record]) -> Steps:
        """What the topic brought, in the order of each partition."""
        for record in records:
            found = self._ours(record)
            if isinstance(found, StoredCell):
                yield from self._take_cell(found)
            elif isinstance(found, Announcement):
                yield from self._take_start(found)
        yield from self._give_out({record.partition: record.offset + 1 for record in records})

    def look(self, heads: Mapping[int, Location], at_end: Container[int]) -> Steps:
        """Of partitions that are read to their end: what a head told at the last look, and the topic never brought."""
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
        """Cells up to an added_id from the shard's log. Asks at least once: whether the shard's place still stands."""
        while (shard := self._shards.get(number)) is not None:
            yield from self._flush(number, shard)
            limit = max(1, min(PAGE_CELLS_MAX, until - shard.at.added_id))
            answer = yield ReadLog(number, shard.at, limit)
            if self._shards.get(number) is not shard:
                return
            if isinstance(answer, LocationGone):
                if not self._superseded(shard, answer):
                    return
                until = max(until, answer.head)
                place = self._place_after(shard, answer)
                yield self._change(number, shard, place, answer.generation, answer.resume_at + 1)
                continue
            cells = answer.cells if answer is not None else ()
            yield from self._take_page(number, shard, cells)
            if not cells or shard.at.added_id >= until:
                return

    def _ours(self, record: Record) -> StoredCell | Announcement | None:
        """None: not ours, not followed, or an operator's seek, which only explains duplicates and holes."""
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

    def _superseded(self, shard: _FollowedShard, gone: LocationGone) -> bool:
        """Else the node that answered is behind, or was restored: what was given out is never taken back for that."""
        return gone.generation > shard.at.generation and gone.resume_at < shard.at.added_id

    def _place_after(self, shard: _FollowedShard, gone: LocationGone) -> Location:
        """Where nothing follows yet the new generation does. Else the cells that follow tell their generation."""
        nothing_follows = gone.resume_at == gone.head
        return Location(gone.generation if nothing_follows else shard.at.generation, gone.resume_at)

    def _take_page(self, number: int, shard: _FollowedShard, cells: Sequence[StoredCell]) -> Steps:
        if not cells:
            return
        if not is_dense(shard.at, cells):
            raise Corrupt(f"the log of shard {number} is not dense after {shard.at}")
        shard.take(cells)
        self.counts.from_log += len(cells)
        yield from self._flush(number, shard)

    def _give_out(self, ends: Mapping[int, int]) -> Steps:
        """The runs that the topic has begun. The last one of each partition carries its new offset."""
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
