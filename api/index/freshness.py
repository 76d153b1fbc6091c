"""How far an index is behind its cells, and what it is complete up to, for every answer at hardly any cost.

One sample a second serves all queries of an index. It reads the heads first, and the checkpoints of the index after
that. So everything up to those heads that the checkpoints have reached was in the index when the sample was taken, and
an answer that is read later from the same master has it too. A minion shows how far the index is there.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.read.reader import Reader, Served
from schemaless.cell import created_at_text
from schemaless.errors import SchemalessError
from schemaless.location import Location, kept_until
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.storage import checkpoint_table, shard_head, shard_log
from schemaless.storage.shard_head import Moment
from schemaless.topology import Datastore, Role

AGE_MAX_S = 2.0
"""A query waits for a new sample if the last one is older. From half of that on the next one is taken beside it."""

KNOWN_S = 10.0  # A sample that is older isn't used.
WAIT_S = 0.25  # for the first sample
COST_SHARE_MAX = 0.05  # of the time between two samples
SAMPLES_MAX = 60
INDEXES_MAX = 1000  # times clusters. Versions of indexes come and go, and their numbers are never used again.
_SHARDS_AT_ONCE = 256


class Freshness(msgspec.Struct, frozen=True):
    """`cells` and `seconds` that an answer may lack. Every cell created before `complete_until` is in it.

    None is not known. Times are microseconds since the epoch.
    """

    cells: int | None = None
    seconds: float | None = None
    complete_until: int | None = None

    def document(self) -> dict[str, Any]:
        until = None if self.complete_until is None else created_at_text(self.complete_until)
        return {"behind_cells": self.cells, "behind_seconds": self.seconds, "complete_until": until}


UNKNOWN = Freshness()


class _Sample(msgspec.Struct, frozen=True):
    """`at` is by the monotonic clock. `added_ids_sum` is that of the checkpoints, as servers add them up."""

    at: float
    freshness: Freshness
    heads_sum: int
    added_ids_sum: int


class FreshnessSamples:
    """The samples of one index on one cluster."""

    def __init__(self, take: Callable[[], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._take = take
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._taking: asyncio.Task[None] | None = None
        self._rest_until = 0.0

    @property
    def is_old(self) -> bool:
        """Whether it is time for a new sample."""
        return self._age_s(self._clock()) >= AGE_MAX_S / 2

    def _age_s(self, now: float) -> float:
        return now - self._samples[-1].at if self._samples else AGE_MAX_S

    async def refresh(self) -> None:
        """Makes sure that there is a sample young enough, if one can be had soon."""
        now = self._clock()
        age_s = self._age_s(now)
        if age_s < AGE_MAX_S / 2:
            return
        if self._taking is None and now >= self._rest_until:
            self._taking = asyncio.create_task(self._sample())
        if self._taking is not None and age_s >= AGE_MAX_S:
            await asyncio.wait({self._taking}, timeout=WAIT_S)

    def of(self, served: Served, added_ids_sum: int | None, read_at: float) -> Freshness:
        """Returns what is known of an answer that was read after `refresh`, from `read_at` on.

        A sample that was taken during the reads says nothing of it.
        """
        now = self._clock()
        samples = [sample for sample in self._samples if sample.at <= read_at]
        if not samples or now - samples[-1].at > KNOWN_S:
            return UNKNOWN
        newest = samples[-1]
        if served.role is Role.MASTER:
            return newest.freshness
        if added_ids_sum is None:
            return UNKNOWN
        cells = max(0, newest.heads_sum - added_ids_sum)
        for sample in reversed(samples):
            if sample.added_ids_sum <= added_ids_sum:
                seconds = (sample.freshness.seconds or 0.0) + newest.at - sample.at
                known = sample.freshness.seconds is not None
                return Freshness(cells, (seconds if cells else 0.0) if known else None, sample.freshness.complete_until)
        return Freshness(cells)

    async def _sample(self) -> None:
        began = self._clock()
        try:
            sample = await self._take()
        except SchemalessError:
            self._samples.clear()  # nothing is known while a master can't be asked
        else:
            if self._samples and sample.added_ids_sum < self._samples[-1].added_ids_sum:
                self._samples.clear()  # a generation took the index back: sums say nothing across it
            self._samples.append(sample)
        finally:
            ended = self._clock()
            self._rest_until = ended + max(AGE_MAX_S / 4, (ended - began) / COST_SHARE_MAX)
            self._taking = None


class IndexFreshness:
    """The samples of all indexes that this process is asked for."""

    def __init__(self, reader: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._of: dict[tuple[str, str, str], FreshnessSamples] = {}

    async def refresh(self, datastore: Datastore, consumer: str, clusters: Iterable[str]) -> None:
        old = [each for cluster in clusters if (each := self._samples(datastore, consumer, cluster)).is_old]
        if old:
            await asyncio.gather(*(samples.refresh() for samples in old))

    def of(
        self,
        datastore: Datastore,
        consumer: str,
        answers: Mapping[str, tuple[Served, int | None]],
        read_at: float,
    ) -> Freshness:
        """Returns what is known of an answer with parts of several clusters, read from `read_at` on: the least."""
        parts = [self._samples(datastore, consumer, cluster).of(*part, read_at) for cluster, part in answers.items()]
        cells = [part.cells for part in parts if part.cells is not None]
        seconds = [part.seconds for part in parts if part.seconds is not None]
        until = [part.complete_until for part in parts if part.complete_until is not None]
        return Freshness(
            max(cells) if len(cells) == len(parts) else None,
            max(seconds) if len(seconds) == len(parts) else None,
            min(until) if len(until) == len(parts) else None,
        )

    def _samples(self, datastore: Datastore, consumer: str, cluster: str) -> FreshnessSamples:
        key = (datastore.name, consumer, cluster)
        samples = self._of.get(key)
        if samples is None:

            async def take() -> _Sample:
                return await self._sample(datastore, consumer, cluster)

            while len(self._of) >= INDEXES_MAX:
                del self._of[next(iter(self._of))]  # that of a version that was dropped, or it comes again
            samples = self._of[key] = FreshnessSamples(take, self._clock)
        return samples

    async def _sample(self, datastore: Datastore, consumer: str, cluster: str) -> _Sample:
        """Raises StorageUnavailable: a minion's heads may be old, so only masters are asked."""
        moments = await all_or_first_error(
            self._on_master(home, shard_head.moment, datastore.name) for home in datastore.clusters
        )
        reached = await self._on_master(cluster, checkpoint_table.locations, datastore.name, consumer)
        at = self._clock()
        missing = _missing(moments, reached)
        oldest = await self._oldest(datastore, {shard: first for shard, (first, _) in missing.items()})
        now = min(moment.now for moment in moments)
        until = now if oldest is None else min(now, oldest)
        freshness = Freshness(sum(cells for _, cells in missing.values()), (now - until) / 1e6, until)
        heads_sum = sum(head.added_id for moment in moments for head in moment.heads)
        return _Sample(at, freshness, heads_sum, sum(location.added_id for location in reached.values()))

    async def _oldest(self, datastore: Datastore, first_missing: Mapping[int, int]) -> int | None:
        """Returns when the oldest of these cells was created, None without any."""
        found: list[int] = []
        for cluster, shards in datastore.by_home(first_missing, lambda shard: shard).items():
            for part in chunks(shards, count_max=_SHARDS_AT_ONCE):
                places = {shard: first_missing[shard] for shard in part}
                oldest = await self._on_master(cluster, shard_log.oldest, datastore, places)
                found += [] if oldest is None else [oldest]
        return min(found, default=None)

    async def _on_master(self, cluster: str, operation: Callable[..., Any], *args: Any) -> Any:
        value, _ = await self._reader.read(cluster, operation, *args, read_from=Role.MASTER)
        return value


def _missing(moments: Sequence[Moment], reached: Mapping[int, Location]) -> dict[int, tuple[int, int]]:
    """Returns by shard the first added_id that the index lacks, and how many cells it lacks, where it lacks any."""
    missing = {}
    for moment in moments:
        for head in moment.heads:
            location = reached.get(head.shard, Location(1, 0))
            finished = kept_until(location, moment.starts.get(head.shard, ()))
            if finished < head.added_id:
                missing[head.shard] = (finished + 1, head.added_id - finished)
    return missing
