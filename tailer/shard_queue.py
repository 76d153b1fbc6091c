"""ShardQueue: the shards of one partition, in the order of their passes, and how a pass is shared among them.

A shard that can't be published never holds up the others. It backs off for a while, or is refused until an operator
acts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog

from schemaless.bus.published_progress import Progress, beginning
from schemaless.errors import Misconfigured
from schemaless.location import Location
from schemaless.topology import Datastore
from tailer.shard_progress import HoldCause, ShardProgress, TailState

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

    def causes(self) -> Counter[HoldCause]:
        """Returns how many shards aren't published for each cause."""
        return Counter(shard.cause for shard in self._late() if shard.cause is not None)

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
    def taken(self, state: TailState) -> Iterator[list[ShardProgress]]:
        """Takes the shards that wait longest in a state and share a cluster. They are WORKING inside the context.

        Afterwards each of them waits behind the others, unless it backs off or was refused.
        """
        queue = self._queues[state]
        homes = {shard: self._datastore.home(shard) for shard in queue}
        first = next(iter(homes.values()), "")
        taken = [queue[shard] for shard, home in homes.items() if home == first][:SHARDS_MAX]
        for shard in taken:
            self._move(shard, TailState.WORKING)
        try:
            yield taken
        finally:
            for shard in taken:
                if shard.state is TailState.WORKING:
                    self._move(shard, shard.due())

    def back_off(self, shard: ShardProgress, retry_s: float, cause: HoldCause | None = None) -> None:
        """Lets a shard wait for `retry_s` before it is asked again. Without a cause it only waits for a minion."""
        shard.cause = cause or shard.cause
        self._move(shard, TailState.BACKING_OFF)
        asyncio.get_running_loop().call_later(retry_s, lambda: self._move(shard, shard.due()))

    def refuse(self, shard: ShardProgress, why: str, retry_s: float) -> None:
        """Refuses a shard of which the master has another history than the topic. After `retry_s` it is asked again.

        A new generation ends the refusal at once.
        """
        shard.cause = HoldCause.OTHER_HISTORY
        self._move(shard, TailState.REFUSED)
        asyncio.get_running_loop().call_later(retry_s, self._doubt_again, shard)
        log.error(
            "shard is not tailed: MySQL has another history than the topic",
            datastore=self._datastore.name,
            shard=shard.shard,
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
                number, beginning(number), head, state=TailState.PROGRESS_LOST, cause=HoldCause.PROGRESS_LOST
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
