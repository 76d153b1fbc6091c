"""The engine of a subscriber: it feeds the cursors of its shards, and makes batches of the cells that they hand over.

This is pure. Records of the topic go in and batches come out. Where a cursor has to read the log a `ReadLog` comes out,
which the driver answers with pages. The driver is schemaless/subscriber/subscriber.py. What is next, superseded or
refused is decided in schemaless/shard_cursor.py.

A shard whose log contradicts its position is refused. None of its cells is given out until the log has a generation
that supersedes the position. So a forged record costs time, never a cell.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from schemaless.cell import StoredCell
from schemaless.errors import LocationGone
from schemaless.found_cell import FoundCell, found_cell
from schemaless.location import Location
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.runtime.batching import chunks
from schemaless.shard_cursor import CursorCounts, CursorState, ProvenPage, ShardCursor

PAGE_CELLS_MAX = 1000
SHARDS_AT_ONCE = 1000
_FOREIGN_KEPT_MAX = 100

_log = logging.getLogger("schemaless.subscriber")


class GenerationChange(msgspec.Struct, frozen=True):
    """A shard lost its continuity: `generation` begins at `starts_at` (I13).

    `superseded` counts the last cells that were given out before, which are not in the log any more. Those that were
    still buffered come again, elsewhere in the log.
    """

    generation: int
    starts_at: int
    superseded: int


class Batch(msgspec.Struct, frozen=True):
    """Consecutive cells of one shard and generation. The first is right after the location `after`.

    Store `position` together with the effect of the cells, in one transaction if you can. It replaces the position at
    `after`. A batch with a `change` has no cells. Store its position too: it may be a lower one.
    """

    shard: int
    after: Location
    cells: Sequence[FoundCell]
    position: Position
    change: GenerationChange | None = None


class ReadLog(msgspec.Struct, frozen=True):
    """Asks for a page of each shard's log after a position, with at most `limit` cells."""

    positions: Sequence[Position]
    limit: int


LogAnswers = Mapping[int, ProvenPage | LocationGone]
"""By shard. One of several shards may be missing, and is then asked for alone."""
Steps = Generator[Batch | ReadLog, LogAnswers | None, None]
"""Yields a ReadLog, which is sent its answers, or a Batch, which is given out and sent None."""


class SubscriberCounts(CursorCounts):
    """Counts of cells or records since the start. `from_topic` and `from_log` count those that were given out."""

    foreign: int = 0
    refused: int = 0
    """How often a shard was refused."""
    unproven_positions: int = 0
    """Stored positions without a digest, which were taken by their numbers."""

    @property
    def given(self) -> int:
        return self.from_topic + self.from_log


class _FollowedShard:
    """Batches were given out up to `given`. `refused` says why the log was refused, until it is followed again."""

    __slots__ = ("cursor", "given", "partition", "refused")

    def __init__(self, partition: int, position: Position, counts: CursorCounts) -> None:
        self.partition = partition
        self.given = position
        self.refused: str | None = None
        self.cursor = ShardCursor(position.shard, counts)


class FollowedShards:
    """Follows shards of `partitions` of the topic, of which there are this many."""

    def __init__(self, shards: int, partitions: int) -> None:
        self.counts = SubscriberCounts()
        self.foreign: deque[ForeignRecord] = deque(maxlen=_FOREIGN_KEPT_MAX)
        self._count = shards
        self._partitions = partitions
        self._shards: dict[int, _FollowedShard] = {}
        self._offsets: dict[int, int] = {}

    def begin(self, partition: int, offset: int, positions: Iterable[Position], *, to_end: bool) -> None:
        """Follows a partition from now on: the topic from `offset`, its shards after their positions.

        `to_end`: the logs are read to their ends first. `catch_up` has to follow in either case, because it proves the
        positions.
        """
        self._offsets[partition] = offset
        for stored in positions:
            digest = stored.digest if stored.added_id else BEGINNING_DIGEST
            position = Position(stored.shard, stored.generation, stored.added_id, digest=digest)
            shard = self._shards[stored.shard] = _FollowedShard(partition, position, self.counts)
            shard.cursor.begin(position, to_end=to_end)

    def end(self, partitions: Container[int]) -> None:
        """Follows these partitions no more. Cells that were taken and not given out come again to another process."""
        self._shards = {n: shard for n, shard in self._shards.items() if shard.partition not in partitions}

    def positions(self) -> dict[int, Position]:
        """Returns the position of every followed shard, as far as batches were given out."""
        return {number: self._with_offset(shard, shard.given) for number, shard in self._shards.items()}

    def refused(self) -> dict[int, str]:
        """Returns by shard why its log was refused."""
        return {number: shard.refused for number, shard in self._shards.items() if shard.refused is not None}

    def take(self, records: Sequence[Record]) -> Steps:
        """Takes what the topic brought, in the order of each partition."""
        runs: dict[int, list[StoredCell]] = {}
        for record in records:
            found = self._ours(record)
            if isinstance(found, StoredCell):
                runs.setdefault(found.shard, []).append(found)
            elif isinstance(found, Announcement) and (shard := self._shards.get(found.shard)) is not None:
                yield from self._take_run(shard, runs.pop(found.shard, ()))
                shard.cursor.announce(found.generation, found.starts_at)
                yield from self._read_on(shard)
        ends = {record.partition: record.offset + 1 for record in records}
        given = [(shard, cells) for number, cells in runs.items() if (shard := self._shards.get(number)) is not None]
        last = {shard.partition: shard for shard, _ in given}
        for shard, cells in given:
            if last[shard.partition] is shard:  # a program that stores its position has stored the others'
                self._offsets[shard.partition] = ends[shard.partition]
            yield from self._take_run(shard, cells)
        self._offsets.update(ends)

    def look(self, heads: Mapping[int, Location], at_end: Container[int]) -> Steps:
        """Finds in partitions that are read to their end what the last look's head promised and the topic lacks.

        Shards that were refused are read again.
        """
        for number, shard in self._shards.items():
            if number in heads and (shard.partition in at_end or shard.cursor.state is CursorState.REFUSED):
                shard.cursor.look(heads[number])
        yield from self.catch_up(self._shards)

    def catch_up(self, numbers: Iterable[int]) -> Steps:
        """Reads the logs of shards that are behind. They share requests for the first cell, which prove positions."""
        behind = [shard for n in numbers if (shard := self._shards.get(n)) is not None and _is_behind(shard)]
        for some in chunks(behind, count_max=SHARDS_AT_ONCE):
            if len(some) > 1:
                answers = (yield ReadLog([shard.cursor.at for shard in some], 1)) or {}
                for shard in some:
                    if shard.given.shard in answers and self._follows(shard):
                        yield from self._take_answer(shard, answers[shard.given.shard])
            for shard in some:
                yield from self._read_on(shard)

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
        return None if isinstance(found, Seek) else found

    def _follows(self, shard: _FollowedShard) -> bool:
        """Returns whether the shard is still followed: a partition may be lost at every step."""
        return self._shards.get(shard.given.shard) is shard

    def _take_run(self, shard: _FollowedShard, cells: Sequence[StoredCell]) -> Steps:
        if cells and self._follows(shard):
            yield from self._give_out(shard, shard.cursor.take(cells))
            yield from self._read_on(shard)

    def _read_on(self, shard: _FollowedShard) -> Steps:
        """Reads the log of one shard as long as its cursor asks for it."""
        cursor = shard.cursor
        while self._follows(shard) and _is_behind(shard):
            missing = cursor.missing
            limit = PAGE_CELLS_MAX if missing is None else min(PAGE_CELLS_MAX, missing)
            answers = yield ReadLog([cursor.at], limit)
            if not answers or not self._follows(shard):
                return
            yield from self._take_answer(shard, answers[shard.given.shard])

    def _take_answer(self, shard: _FollowedShard, answer: ProvenPage | LocationGone) -> Iterator[Batch]:
        cursor = shard.cursor
        cells: Sequence[StoredCell] = ()
        if isinstance(answer, LocationGone):
            cursor.gone(answer)
        else:
            cells = cursor.page(answer)
        if cursor.state is not CursorState.REFUSED:
            shard.refused = None
        elif shard.refused != cursor.reason:
            shard.refused = cursor.reason
            self.counts.refused += 1
            _log.warning("shard %d is refused after %s: %s", cursor.at.shard, cursor.at.location, cursor.reason)
        yield from self._give_out(shard, cells)
        if cursor.state is CursorState.LIVE and self._follows(shard):
            yield from self._change(shard, cursor.at.generation, cursor.at.added_id + 1)
            shard.given = cursor.at

    def _give_out(self, shard: _FollowedShard, cells: Sequence[StoredCell]) -> Iterator[Batch]:
        """Yields cells as batches of one generation each, and before a new generation its change."""
        number = shard.given.shard
        for generation, group in groupby(cells, key=attrgetter("generation")):
            if not self._follows(shard):
                return
            same = list(group)
            yield from self._change(shard, generation, same[0].added_id)
            after, last = shard.given.location, same[-1]
            shard.given = Position(number, generation, last.added_id, digest=cell_digest(last))
            yield Batch(number, after, [found_cell(cell) for cell in same], self._with_offset(shard, shard.given))

    def _change(self, shard: _FollowedShard, generation: int, starts_at: int) -> Iterator[Batch]:
        """Yields the change to the generation of the next cell, unless that just follows what was given out."""
        given, place = shard.given, Location(generation, starts_at - 1)
        if place == given.location:
            return
        digest = given.digest if place.added_id == given.added_id else BEGINNING_DIGEST if starts_at == 1 else None
        shard.given = Position(given.shard, generation, place.added_id, digest=digest)
        change = GenerationChange(generation, starts_at, given.added_id - place.added_id)
        yield Batch(given.shard, given.location, (), self._with_offset(shard, shard.given), change)

    def _with_offset(self, shard: _FollowedShard, at: Position) -> Position:
        return Position(at.shard, at.generation, at.added_id, self._offsets[shard.partition], at.digest)


def _is_behind(shard: _FollowedShard) -> bool:
    return shard.cursor.state is CursorState.BEHIND
