"""ShardProgress: the state of one shard of a tailed partition."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

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


class HoldCause(StrEnum):
    """Why a shard isn't published."""

    UNREACHABLE = "cluster_unreachable"
    CORRUPT = "not_dense"  # or whatever else the log shows that can't be
    TOO_LARGE = "cell_too_large"
    OTHER_HISTORY = "other_history"
    PROGRESS_LOST = "progress_lost"


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
    cause: HoldCause | None = None
    """Why it isn't published, until it is."""
    waiting_since: float | None = None
    """Since when its oldest unpublished cell has waited, in seconds since the epoch. It is the time at which the head
    moved, or that of the last cell published before it, which is the later one of what is known."""

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

    def saw_head(self, head: Location, now: float) -> None:
        """Takes note of the head, as some node shows it now."""
        self.head = head
        if not self.waiting:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def published_up_to(self, position: Position, created_at: int | None = None) -> None:
        """Notes what a transaction has published, and when its last cell was created, in microseconds."""
        self.held = False  # the master was asked about less
        self.cause = None
        self.published = position
        self.head = max(self.head, position.location)
        if not self.waiting:
            self.waiting_since = None
        elif created_at is not None:
            self.waiting_since = created_at / 1e6

    @property
    def waiting(self) -> int:
        """The number of cells that wait to be published, as far as the head tells."""
        return max(0, self.head.added_id - self.published.added_id)
