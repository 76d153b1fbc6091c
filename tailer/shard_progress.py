"""ShardProgress: the state of one shard of a tailed partition."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from schemaless.location import Location
from schemaless.position import Position


class TailState(Enum):
    """A shard is in exactly one state, and waits in the queue of that state (`tailer/shard_queue.py`)."""

    CAUGHT_UP = "caught up"  # everything up to its head is published
    BEHIND = "behind"  # has cells, or a generation, to publish
    DOUBTFUL = "doubtful"  # the master has to be asked whether it holds what was published
    WORKING = "working"  # in the present pass
    BACKING_OFF = "backing off"  # asked again after a pause: a hole, a minion that lags, an unreachable master
    REFUSED = "refused"  # MySQL has another history than the topic: the master is asked again after a pause
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
    TailState.DOUBTFUL: {
        TailState.CAUGHT_UP,
        TailState.BEHIND,
        TailState.WORKING,
        TailState.BACKING_OFF,
        TailState.REFUSED,
    },
    TailState.WORKING: {TailState.BEHIND, TailState.DOUBTFUL},
    TailState.BACKING_OFF: {TailState.WORKING},
    TailState.REFUSED: {TailState.WORKING},
    TailState.PROGRESS_LOST: set(),
}
"""The states from which each state may be entered."""


@dataclass(slots=True)
class ShardProgress:
    """What was published of a shard, and what MySQL has."""

    shard: int
    published: Position
    head: Location
    """As last seen, on any node."""
    held: bool = False
    """The master was asked since the last transaction, and holds what was published."""
    state: TailState = TailState.CAUGHT_UP

    def due(self) -> TailState:
        """Returns the state in which a shard waits that nobody works at."""
        if self.head > self.published.location:
            return TailState.BEHIND
        if self.head < self.published.location and not self.held:
            return TailState.DOUBTFUL
        return TailState.CAUGHT_UP

    def enter(self, state: TailState) -> None:
        """Changes the state. Raises AssertionError for a transition that isn't legal."""
        if self.state not in PREDECESSORS[state]:
            raise AssertionError(f"shard {self.shard} can't become {state.value}: it is {self.state.value}")
        self.state = state

    def published_up_to(self, position: Position) -> None:
        """Notes what a transaction has published."""
        self.held = False  # the master was asked about less
        self.published = position
        self.head = max(self.head, position.location)

    @property
    def waiting(self) -> int:
        """The number of cells that wait to be published, as far as the head tells."""
        return max(0, self.head.added_id - self.published.added_id)
