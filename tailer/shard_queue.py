"""The shards of one partition: which are behind, in the order of their turns, which are put aside, which are refused.

A shard that can't go on never holds up the others: it is put aside for a while, or refused until somebody acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from schemaless.bus.progress import Progress
from schemaless.errors import Misconfigured
from schemaless.location import Location
from schemaless.topology import Datastore
from tailer.shard_progress import ShardTail

log = structlog.get_logger()

SHARDS_MAX = 64  # of one transaction


class ShardTails:
    """`news` is set whenever there may be something to do."""

    def __init__(self, datastore: Datastore, progress: Progress) -> None:
        self.news = asyncio.Event()
        self._datastore = datastore
        self._progress = progress
        self._tails: dict[int, ShardTail] = {}
        self._behind: dict[int, None] = {}  # in the order of their turns
        self._doubtful: dict[int, None] = {}
        self._aside: set[int] = set()

    def __getitem__(self, shard: int) -> ShardTail:
        return self._tails[shard]

    @property
    def idle(self) -> bool:
        return not (self._behind or self._doubtful)

    def heads_moved(self, heads: Mapping[int, Location]) -> None:
        for shard, head in heads.items():
            known = self._tails.get(shard)
            if known is not None:
                known.head = head
                self.queue(known)
            elif shard not in self._aside:
                self._begin(shard, head)

    def queue(self, shard_tail: ShardTail) -> None:
        """Where it belongs now, behind those that wait already."""
        shard = shard_tail.shard
        if shard in self._aside:
            return
        if shard_tail.behind:
            self._behind.setdefault(shard)
            self.news.set()
        elif shard_tail.doubtful:
            self._doubtful.setdefault(shard)
            self.news.set()

    def next_turn(self) -> list[ShardTail]:
        """Takes the shards that wait longest and share a cluster out of the queue."""
        return self._take(self._behind)

    def next_doubtful(self) -> list[ShardTail]:
        return self._take(self._doubtful)

    def put_aside(self, shard: int, retry_s: float) -> None:
        self._aside.add(shard)
        asyncio.get_running_loop().call_later(retry_s, self._take_back, shard)

    def is_aside(self, shard: int) -> bool:
        return shard in self._aside

    def refuse(self, shard_tail: ShardTail, head: Location) -> None:
        """Until a new generation begins, or a seek makes us open the log anew."""
        name, shard, published = self._datastore.name, shard_tail.shard, shard_tail.published
        shard_tail.refused_at = head
        log.error(
            "shard is not tailed: the topic is ahead of MySQL",
            datastore=name,
            shard=shard,
            published=str(published),
            head=str(head),
            why="the master lost cells that are in the topic: it was restored, or its datastore made anew",
            what_to_do="bring the cells back or open a new generation; or say with"
            f" `schemaless tailer seek {name} {head} --shard {shard}` that what is there now is published, too",
        )

    def _begin(self, shard: int, head: Location) -> None:
        try:
            published = self._progress.location(shard, head.added_id)
        except Misconfigured as error:
            self._aside.add(shard)  # until progress says more: whoever writes it makes us open the log anew
            log.error("shard is not tailed", datastore=self._datastore.name, shard=shard, error=str(error))
            return
        shard_tail = self._tails[shard] = ShardTail(shard, published, head)
        refused_at = self._progress.refused.get(shard)
        if refused_at is not None and head.generation <= published.generation:
            self.refuse(shard_tail, refused_at)
        self.queue(shard_tail)

    def _take(self, queue: dict[int, None]) -> list[ShardTail]:
        first = next(iter(queue), None)
        if first is None:
            return []
        home = self._datastore.home(first)
        taken = [shard for shard in queue if self._datastore.home(shard) == home][:SHARDS_MAX]
        for shard in taken:
            del queue[shard]
        return [self._tails[shard] for shard in taken]

    def _take_back(self, shard: int) -> None:
        self._aside.discard(shard)
        self.queue(self._tails[shard])
