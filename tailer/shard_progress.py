"""ShardProgress: the state of one shard of a tailed partition, and the proof of its next cells (I7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from schemaless.cell import StoredCell
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart, Location


class TailState(Enum):
    """A shard is in exactly one state, and waits in the queue of that state (`tailer/shard_queue.py`)."""

    CAUGHT_UP = "caught up"  # everything up to its head is published
    BEHIND = "behind"  # has cells, or a generation, to publish
    DOUBTFUL = "doubtful"  # its head is below what was published: the master has to be asked
    WORKING = "working"  # in the present pass
    BACKING_OFF = "backing off"  # asked again after a pause: a hole, a minion that lags, an unreachable master
    REFUSED = "refused"  # the topic is ahead of MySQL: not tailed until a new generation begins
    PROGRESS_LOST = "progress lost"  # not tailed until a seek makes us open the log anew


PREDECESSORS = {
    TailState.CAUGHT_UP: {TailState.BEHIND, TailState.DOUBTFUL, TailState.WORKING, TailState.BACKING_OFF},
    TailState.BEHIND: {
        TailState.CAUGHT_UP,
        TailState.DOUBTFUL,
        TailState.WORKING,
        TailState.BACKING_OFF,
        TailState.REFUSED,
    },
    TailState.DOUBTFUL: {TailState.CAUGHT_UP, TailState.BEHIND, TailState.WORKING, TailState.BACKING_OFF},
    TailState.WORKING: {TailState.BEHIND, TailState.DOUBTFUL},
    TailState.BACKING_OFF: {TailState.WORKING},
    # From BEHIND and BACKING_OFF where a node showed a new generation, and then one that lags shows the old one.
    TailState.REFUSED: {TailState.WORKING, TailState.BEHIND, TailState.BACKING_OFF},
    TailState.PROGRESS_LOST: set(),
}
"""The states from which each state may be entered."""


class MasterAnswer(Enum):
    """The master's answer to the question whether it holds what was published."""

    NOT_ASKED = "not asked"
    HELD = "held"
    LOST = "lost"


@dataclass(slots=True)
class ShardProgress:
    """What was published of a shard, and what MySQL has."""

    shard: int
    published: Location
    head: Location
    """As last seen, on any node."""
    following: GenerationStart | None = None
    """The generation that has to be announced next, once it is known (I13)."""
    answer: MasterAnswer = MasterAnswer.NOT_ASKED
    state: TailState = TailState.CAUGHT_UP

    def due(self) -> TailState:
        """Returns the state in which a shard waits that nobody works at."""
        if self.answer is MasterAnswer.LOST and self.head.generation <= self.published.generation:
            return TailState.REFUSED  # what is written in the places of the lost cells is another history
        if self.head > self.published:
            return TailState.BEHIND
        if self.head < self.published and self.answer is MasterAnswer.NOT_ASKED:
            return TailState.DOUBTFUL
        return TailState.CAUGHT_UP

    def enter(self, state: TailState) -> None:
        """Changes the state. Raises AssertionError for a transition that isn't legal."""
        if self.state not in PREDECESSORS[state]:
            raise AssertionError(f"shard {self.shard} can't become {state.value}: it is {self.state.value}")
        self.state = state

    def published_up_to(self, location: Location) -> None:
        """Notes what a transaction has published."""
        if location.generation > self.published.generation:
            self.following = None
            self.answer = MasterAnswer.NOT_ASKED
        elif self.answer is MasterAnswer.HELD:  # it was asked about less
            self.answer = MasterAnswer.NOT_ASKED
        self.published = location
        self.head = max(self.head, location)

    @property
    def waiting(self) -> int:
        """The number of cells that can be published before a generation has to be announced."""
        end = self.head.added_id
        if self.following is not None:
            end = min(end, self.following.starts_at - 1)
        return max(0, end - self.published.added_id)

    def proven(self, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        """Returns the cells of the published generation, proven dense. Those of a later one have to wait.

        Raises Corrupt when a cell is missing, or belongs to a generation that ended before.
        """
        cells = [cell for cell in cells if cell.generation <= self.published.generation]
        for expected, cell in enumerate(cells, start=self.published.added_id + 1):
            if cell.added_id != expected:
                raise Corrupt(f"shard {self.shard}: cell {expected} is missing, the next one is {cell.added_id}")
            if cell.generation != self.published.generation:
                raise Corrupt(
                    f"shard {self.shard}: cell {cell.added_id} is of generation {cell.generation},"
                    f" but {self.published} was published before"
                )
        return cells
