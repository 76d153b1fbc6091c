"""ShardQueue: the shards of one partition, in the order of their passes, and how a pass is shared among them.

A shard that can't be published never holds up the others. It backs off for a while, or is refused until an operator
acts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import structlog

from schemaless.bus.partition_log import Progress, beginning
from schemaless.errors import Misconfigured
from schemaless.location import Location
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.topology import Datastore

# ShardProgress: the state of one shard of a tailed partition.


class TailState(Enum):
    """A shard is in exactly one state, and waits in the queue of that state."""

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
    stall: Stall | None = None
    """Why it isn't published, until it is."""
    why: str = ""
    """The same in a sentence."""
    is_read_alone: bool = False
    """A server refused to read it, until it is published."""
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
        self.stall, self.is_read_alone = None, False
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


log = structlog.get_logger()

SHARDS_MAX = 64  # of one pass
_WAITING = (TailState.BEHIND, TailState.DOUBTFUL)
_AT_WORK = (TailState.WORKING, TailState.BACKING_OFF, TailState.PROGRESS_LOST)  # a new head changes no state


def fair_shares(waiting: Mapping[int, int], cells_max: int) -> dict[int, int]:
    """Divides `cells_max` cells among shards, given the number of cells that wait in each. Returns the share of each.

    Small shards get all they have, and what they leave is divided evenly among the larger ones. So a huge shard never
    starves small ones, and none gets 0.
    """
    left = max(cells_max, len(waiting))
    given: dict[int, int] = {}
    for position, shard in enumerate(sorted(waiting, key=waiting.__getitem__)):
        given[shard] = min(waiting[shard], left // (len(waiting) - position))
        left -= given[shard]
    return {shard: given[shard] for shard in waiting}


class ShardQueue:
    """`news` is set whenever a shard begins to wait for a pass."""

    def __init__(self, datastore: Datastore, progress: Progress) -> None:
        self.news = asyncio.Event()
        self._datastore = datastore
        self._progress = progress
        self._shards: dict[int, ShardProgress] = {}
        self._queues: dict[TailState, dict[int, ShardProgress]] = {state: {} for state in TailState}

    def __getitem__(self, shard: int) -> ShardProgress:
        return self._shards[shard]

    @property
    def idle(self) -> bool:
        return not any(self._queues[state] for state in _WAITING)

    @property
    def behind(self) -> int:
        """The number of shards that wait for a pass."""
        return len(self._queues[TailState.BEHIND])

    @property
    def cells_waiting(self) -> int:
        """The number of cells in the shards that wait for a pass."""
        return sum(shard.waiting for shard in self._queues[TailState.BEHIND].values())

    def states(self) -> Mapping[TailState, int]:
        """Returns how many shards are in each state."""
        return {state: len(shards) for state, shards in self._queues.items()}

    def held(self) -> list[ShardProgress]:
        """Returns the shards that aren't published, and say why."""
        return [shard for shard in self._late() if shard.stall is not None]

    def lag_cells(self) -> int:
        """Returns how many cells wait to be published."""
        return sum(shard.waiting for shard in self._late())

    def waiting_since(self) -> float | None:
        """Returns since when the oldest unpublished cell waits, in seconds since the epoch. None if there is none."""
        return min((s.waiting_since for s in self._late() if s.waiting_since is not None), default=None)

    def _late(self) -> Iterator[ShardProgress]:
        for state, shards in self._queues.items():
            if state is not TailState.CAUGHT_UP:
                yield from shards.values()

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        """Takes note of the heads of shards of this partition."""
        now = time.time()
        for number, head in heads.items():
            shard = self._shards.get(number)
            if shard is None:
                self._begin(number, head, now)
                continue
            shard.saw_head(head, now)
            if shard.state is TailState.REFUSED and head.generation <= shard.published.generation:
                continue  # what was written in the places of lost cells is another history
            if shard.state not in _AT_WORK:
                self._move(shard, shard.due())

    @contextmanager
    def taken(self, state: TailState, shards_max: int = SHARDS_MAX) -> Iterator[list[ShardProgress]]:
        """Takes the shards that wait longest in a state and share a cluster. They are WORKING inside the context.

        Afterwards each of them waits behind the others, unless it backs off or was refused.
        """
        queue = self._queues[state]
        taken = list(queue.values())
        if taken and taken[0].is_read_alone:
            taken = taken[:1]
        elif taken:
            homes = {shard: self._datastore.home(shard) for shard in queue}
            together = (shard for shard in taken if homes[shard.shard] == homes[taken[0].shard])
            taken = [shard for shard in together if not shard.is_read_alone][: min(shards_max, SHARDS_MAX)]
        for shard in taken:
            self._move(shard, TailState.WORKING)
        try:
            yield taken
        finally:
            for shard in taken:
                if shard.state is TailState.WORKING:
                    self._move(shard, shard.due())

    def back_off(self, shard: ShardProgress, retry_s: float, stall: Stall | None = None, why: str = "") -> None:
        """Lets a shard wait for `retry_s` before it is asked again. Without a stall it only waits for a minion."""
        if stall is not None:
            shard.stall, shard.why = stall, why
        self._move(shard, TailState.BACKING_OFF)
        asyncio.get_running_loop().call_later(retry_s, lambda: self._move(shard, shard.due()))

    def refuse(self, shard: ShardProgress, why: str, retry_s: float) -> None:
        """Refuses a shard of which the master has another history than the topic. After `retry_s` it is asked again.

        A new generation ends the refusal at once.
        """
        shard.stall, shard.why = Stall.OTHER_HISTORY, why
        self._move(shard, TailState.REFUSED)
        asyncio.get_running_loop().call_later(retry_s, self._doubt_again, shard)
        log.error(
            "shard is not tailed: MySQL has another history than the topic",
            datastore=self._datastore.name,
            shard=shard.shard,
            stall=shard.stall,
            published=str(shard.published.location),
            why=why,
            what_to_do="the master lost cells that are in the topic: it was restored, or its datastore made anew. Bring"
            f" the cells back, or run `schemaless tailer new-generation {self._datastore.name} --shard {shard.shard}`",
        )

    def _doubt_again(self, shard: ShardProgress) -> None:
        if shard.state is TailState.REFUSED:
            self._move(shard, TailState.DOUBTFUL)

    def _begin(self, number: int, head: Location, now: float) -> None:
        try:
            published = self._progress.position(number, head.added_id)
        except Misconfigured as error:
            log.error("shard is not tailed", datastore=self._datastore.name, shard=number, error=str(error))
            shard = ShardProgress(
                number,
                beginning(number),
                head,
                state=TailState.PROGRESS_LOST,
                stall=Stall.PROGRESS_LOST,
                why=str(error),
            )
        else:
            shard = ShardProgress(number, published, head)
            shard.saw_head(head, now)
            shard.state = shard.due()
            if shard.state is TailState.CAUGHT_UP and published.added_id:  # a restored master may show the same number
                shard.state = TailState.BEHIND
        self._shards[number] = self._queues[shard.state][number] = shard
        if shard.state in _WAITING:
            self.news.set()

    def _move(self, shard: ShardProgress, state: TailState) -> None:
        if state is shard.state:  # it keeps its place in the queue
            return
        del self._queues[shard.state][shard.shard]
        shard.enter(state)
        self._queues[state][shard.shard] = shard
        if state in _WAITING:
            self.news.set()
