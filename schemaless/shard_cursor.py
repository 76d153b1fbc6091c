"""ShardCursor: what comes next in a shard, and whether it really is next (I9, I13, I16).

Who follows a log and its topic drives one cursor for each shard: delivery to indexes and triggers, and the subscribers'
kit. Who reads only the log takes the proof of a page from here: the tailer (`verify_page`) and the client's tail
(`verify_next`). A cursor does no I/O and has no clock. Its driver brings records of the topic, pages of the log, heads,
and the results of the handler, and acts by the cursor's state:

    LOCATING     read the stored position, and give it to `begin`
    BEHIND       read a page of the log after `at`
    LIVE         wait: the topic brings what comes next
    REFUSED      wait for the next look at the heads: the log contradicts what is known, `reason` says how
    UNCONFIRMED  wait until the group has confirmed that the shard is ours: another process moved its checkpoint
    STOPPED      wait for a person: the handler gave up, `reason` says why

The log is the authority. The topic is only taken from while it proves dense: the next cell is at `at` + 1, in the
present generation. Anything else makes the shard fall behind, and the log is read until it has met the topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from schemaless.cell import StoredCell
from schemaless.errors import Corrupt, LocationGone
from schemaless.location import Location
from schemaless.position import Position, position_of

_NOTHING_SEEN = Location(0, 0)


class CursorState(StrEnum):
    """What a shard waits for. A shard is in exactly one state."""

    LOCATING = "locating"
    BEHIND = "behind"
    LIVE = "live"
    REFUSED = "refused"
    UNCONFIRMED = "unconfirmed"
    STOPPED = "stopped"


PREDECESSORS = {
    CursorState.LOCATING: set(CursorState),
    CursorState.BEHIND: {CursorState.LOCATING, CursorState.LIVE, CursorState.REFUSED},
    CursorState.LIVE: {CursorState.LOCATING, CursorState.BEHIND},
    CursorState.REFUSED: {CursorState.BEHIND},
    CursorState.UNCONFIRMED: set(CursorState),
    CursorState.STOPPED: set(CursorState) - {CursorState.UNCONFIRMED},
}
"""The states from which each state may be entered, beside itself."""


class CellPlace(StrEnum):
    """A cell of the topic beside the location that its shard has reached."""

    NEXT = "next"
    REPEATED = "repeated"
    AHEAD = "ahead"  # cells between are missing
    SUPERSEDED = "superseded"  # of a generation that is over (I13)
    UNANNOUNCED = "unannounced"  # of a generation that the log has to confirm first


def judge(at: Location, cell: StoredCell) -> CellPlace:
    """Returns where a cell is for a shard that has reached `at`."""
    if cell.generation < at.generation:
        return CellPlace.SUPERSEDED if cell.added_id > at.added_id else CellPlace.REPEATED
    if cell.generation > at.generation:
        return CellPlace.UNANNOUNCED
    if cell.added_id <= at.added_id:
        return CellPlace.REPEATED
    return CellPlace.NEXT if cell.added_id == at.added_id + 1 else CellPlace.AHEAD


class ProvenPage(msgspec.Struct, frozen=True, gc=False):
    """The cells of a shard's log after a position that was verified by the log, in order, perhaps none.

    `head` is what the same node showed before it read the cells. So a page that ends at or above the head ends the log.
    `digest` is that of the last cell that was examined, for a page without cells. None means that it was not read.
    """

    cells: Sequence[StoredCell]
    head: Location
    digest: int | None = None


class PlacedCell(Protocol):
    """A stored cell, as far as its place goes."""

    @property
    def generation(self) -> int: ...

    @property
    def added_id(self) -> int: ...


def verify_next(at: Location, cells: Iterable[PlacedCell], *, are_all: bool = True) -> Location:
    """Returns the location of the last of these cells of a log after `at`. Raises Corrupt where one isn't the next.

    Without `are_all` cells between them are left out, for example those of other columns.
    """
    generation, added_id = at.generation, at.added_id
    for cell in cells:
        if cell.generation < generation or cell.added_id <= added_id or (are_all and cell.added_id != added_id + 1):
            follows = f"{cell.generation}:{cell.added_id} follows {generation}:{added_id}"
            if cell.generation < generation:
                why = "generations only grow"
            else:
                why = "cells come again" if cell.added_id <= added_id else "the cells between are missing"
            raise Corrupt(f"the log is not dense: {follows}, and {why}")
        generation, added_id = cell.generation, cell.added_id
    return Location(generation, added_id)


def verify_page(at: Position, page: ProvenPage) -> None:
    """Raises Corrupt where the cells of a page aren't the next ones after a position, or the head promises one."""
    verify_next(at.location, page.cells)
    if not page.cells and page.head.added_id > at.added_id:
        raise Corrupt(f"the head is {page.head}, but no cell follows {at.location}")


class CursorCounts(msgspec.Struct):
    """Counts since the start, of cells. `holes` is how often the topic was not dense."""

    from_topic: int = 0
    from_log: int = 0
    duplicates: int = 0
    superseded: int = 0
    holes: int = 0
    unproven: int = 0
    """Cells that the topic has, or a head promised, and the log doesn't have."""


class ShardCursor:
    """One shard of one follower. Cells are handed over up to `at`, and finished up to `done`.

    `counts` may be shared by the cursors of a follower.
    """

    __slots__ = ("_generation", "_last_head", "_seen", "_to_end", "at", "counts", "done", "reason", "state")

    def __init__(self, shard: int, counts: CursorCounts | None = None) -> None:
        self.counts = counts or CursorCounts()
        self.state = CursorState.LOCATING
        self.at = self.done = Position(shard, 0, 0)
        self.reason: str | None = None
        self._seen = _NOTHING_SEEN  # the log goes at least as far, by what the topic and the heads showed
        self._last_head = 0  # its added_id, at the last look
        self._generation = 0  # that superseded `at` last: a node that doesn't know it yet lags
        self._to_end = True  # the topic may have brought cells before we listened, so the log is read to its end

    @property
    def missing(self) -> int | None:
        """How many cells the log has to bring until it meets the topic. None means all of them, or not known."""
        if self._to_end or self._seen.generation > self.at.generation:
            return None
        return max(1, self._seen.added_id - self.at.added_id)

    def begin(self, position: Position, head: Location | None = None, *, to_end: bool = True) -> None:
        """Continues after a stored position.

        The log is read to its end where the caller hears the topic from now on, and read `head` after that. A shard at
        its head has nothing to read. Without `to_end` the caller hears the topic from before the position, and one page
        of the log proves that.
        """
        self.at = self.done = position
        self.reason = None
        self._to_end = to_end and head != position.location
        is_proven = head == position.location if to_end else position.added_id == 0
        is_live = is_proven and self._seen <= position.location
        self._enter(CursorState.LIVE if is_live else CursorState.BEHIND)

    def take(self, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        """Takes cells of the topic, in its order. Returns those to hand over."""
        if self.state is not CursorState.LIVE:
            self._expect(cells[-1].location)
            return ()
        at, n = self.at, self.at.added_id
        if not all(cell.generation == at.generation and cell.added_id == n + i for i, cell in enumerate(cells, 1)):
            cells = self._proven(cells)
        if cells:
            self.counts.from_topic += len(cells)
            self.at = position_of(cells[-1])
        return cells

    def announce(self, generation: int, starts_at: int) -> None:
        """Takes an announcement of the topic: a generation begins. The log then says what it superseded."""
        if generation > self.at.generation:
            self._expect(Location(generation, starts_at - 1))

    def look(self, head: Location) -> None:
        """Takes the shard's head. Call it now and then: it finds what the topic never brought.

        The head of the call before must be reached by now. A shard that was refused is read again.
        """
        promised = self._last_head
        overdue = self.at.added_id < promised or head.added_id < promised or head.generation > self.at.generation
        if self.state is CursorState.REFUSED:
            self._enter(CursorState.BEHIND)
        elif self.state is CursorState.LIVE and overdue:
            self._expect(Location(head.generation, min(promised, head.added_id)))
        self._last_head = head.added_id

    def page(self, page: ProvenPage) -> Sequence[StoredCell]:
        """Takes the page of the log after `at`. Returns the cells to hand over."""
        if self.state is not CursorState.BEHIND:
            return ()
        if page.head.generation < self._generation:
            self._refuse(f"the node that was read does not know generation {self._generation}: it lags")
            return ()
        at, cells = self.at, page.cells
        try:
            verify_page(at, page)
        except Corrupt as error:
            self._refuse(str(error))
            return ()
        if cells:
            self.counts.from_log += len(cells)
            self.at = position_of(cells[-1])
        elif at.digest is None and page.digest is not None:
            self.at = Position(at.shard, at.generation, at.added_id, digest=page.digest)
        if self.at.added_id >= page.head.added_id:
            self._end_of_log(page.head)
        elif not self._to_end and self.at.location >= self._seen:
            self._enter(CursorState.LIVE)
        return cells

    def gone(self, error: LocationGone) -> int | None:
        """Takes the log's refusal of `at`. Returns how many cells a new generation superseded, or None.

        With a number, the shard continues after an earlier position, which the caller should store. Otherwise the
        shard is refused: the log belongs to another history, or a node lags.
        """
        if error.generation <= self.at.generation or error.resume_at >= self.at.added_id:
            self._refuse(str(error))
            return None
        superseded = self.at.added_id - error.resume_at
        self.at = self.done = Position(self.at.shard, self.at.generation, error.resume_at)
        self._last_head = 0
        self._generation = error.generation
        self._to_end = True
        self._enter(CursorState.BEHIND)
        return superseded

    def finish(self, position: Position) -> None:
        """Notes that cells are finished up to a position, which is stored."""
        self.done = position

    def give_back(self) -> None:
        """Notes that cells were handed over and not finished. They come again, from the log."""
        self.rewind(self.done)

    def rewind(self, position: Position) -> None:
        """Notes that the cells after a position were handed over and are not wanted now. They come from the log."""
        if self.at != position:
            self._expect(self.at.location)
            self.at = position

    def stop(self, reason: str) -> None:
        """Notes that the handler gave up. A person has to let the shard run again."""
        self.give_back()
        self.reason = reason
        self._enter(CursorState.STOPPED)

    def lose(self) -> None:
        """Notes that another process moved the checkpoint."""
        self.give_back()
        self._enter(CursorState.UNCONFIRMED)

    def forget(self) -> None:
        """Makes the shard begin anew, with its stored position."""
        self.give_back()
        self.reason = None
        self._enter(CursorState.LOCATING)

    def _enter(self, state: CursorState) -> None:
        """Changes the state. Raises AssertionError for a transition that isn't legal."""
        if state is not self.state and self.state not in PREDECESSORS[state]:
            raise AssertionError(f"shard {self.at.shard} can't become {state.value}: it is {self.state.value}")
        self.state = state

    def _proven(self, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        """Returns the cells that are next, up to the first that isn't proven. The shard then falls behind."""
        found: list[StoredCell] = []
        at = self.at.location
        for cell in cells:
            place = judge(at, cell)
            if place is CellPlace.NEXT:
                found.append(cell)
                at = cell.location
            elif place is CellPlace.REPEATED:
                self.counts.duplicates += 1
            elif place is CellPlace.SUPERSEDED:
                self.counts.superseded += 1
            else:
                self.counts.holes += 1
                self._expect(cells[-1].location)
                break
        return found

    def _expect(self, location: Location) -> None:
        """Falls behind: the log has to be read at least this far."""
        self._seen = max(self._seen, location)
        if self.state is CursorState.LIVE:
            self._enter(CursorState.BEHIND)

    def _end_of_log(self, head: Location) -> None:
        """Takes from the topic from now on, unless that has shown cells which the log doesn't have."""
        at, self._to_end = self.at, False
        if head.generation > at.generation and head.added_id <= at.added_id:
            self.at = Position(at.shard, head.generation, at.added_id, digest=at.digest)
        seen, self._seen = self._seen, _NOTHING_SEEN
        if seen > self.at.location:
            self.counts.unproven += 1
            self._refuse(f"the topic has cells up to {seen}, but the log ends at {self.at.location}")
        else:
            self._enter(CursorState.LIVE)

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._enter(CursorState.REFUSED)
