"""How far an index is behind its cells, and what it is complete up to, for every answer at hardly any cost.

One sample a second serves all queries of an index. It reads the heads first, and the checkpoints of the index after
that. So everything up to those heads that the checkpoints have reached was in the index when the sample was taken, and
an answer that is read later from the same master has it too. A minion shows how far the index is there.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from api.read.reader import Reader, Served
from schemaless.cell import created_at_text
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.index.catalogue import find_versions
from schemaless.index.versions import NamedIndex
from schemaless.location import Location, kept_until
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.storage import checkpoint_table, shard_head, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import BuildProgress
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
        clusters = datastore.clusters
        moments = await all_or_first_error(
            self._on_master(home, shard_head.moment, datastore.name) for home in clusters
        )
        by_cluster = {cluster: moment.heads for cluster, moment in zip(clusters, moments, strict=True)}
        heads = datastore.of_home(by_cluster, lambda head: head.shard)
        starts = {cluster: moment.starts for cluster, moment in zip(clusters, moments, strict=True)}
        reached = await self._on_master(cluster, checkpoint_table.locations, datastore.name, consumer)
        at = self._clock()
        missing = {}
        for head in heads:
            location = reached.get(head.shard, Location(1, 0))
            finished = kept_until(location, starts[datastore.home(head.shard)].get(head.shard, ()))
            if finished < head.added_id:
                missing[head.shard] = (finished + 1, head.added_id - finished)
        oldest = await self._oldest(datastore, {shard: first for shard, (first, _) in missing.items()})
        now = min(moment.now for moment in moments)
        until = now if oldest is None else min(now, oldest)
        freshness = Freshness(sum(cells for _, cells in missing.values()), (now - until) / 1e6, until)
        heads_sum = sum(head.added_id for head in heads)
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


# What a process remembers of indexes: those that answer, so that queries needn't ask, and how fast builds are.

KEPT_S = 2.0
PATIENCE_S = 0.2
"""How long a query waits for a look-up if the index is known already."""

_PACE_S, _LOOK_PAUSE_S = 300.0, 10.0  # what an estimate looks back on, and in which steps


class IndexCatalogue:
    """Remembers indexes that answer for some seconds, with all versions. Others are looked up each time.

    So for KEPT_S after a switch a process may answer from the version before (A21).

    While a master hangs a look-up takes seconds. A query then waits for a moment only, and goes on with what is known.
    """

    def __init__(self, storage: AsyncStorage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._active: dict[tuple[str, str], tuple[float, NamedIndex]] = {}
        self._looking: dict[tuple[str, str], asyncio.Task[NamedIndex]] = {}

    async def find(self, datastore: Datastore, name: str) -> NamedIndex:
        """Returns the versions of an index. Raises NotFound or StorageUnavailable."""
        key = (datastore.name, name)
        looked_at, known = self._active.get(key, (0.0, None))
        if known is not None and self._clock() - looked_at < KEPT_S:
            return known
        looking = self._looking.get(key)
        if looking is None:
            looking = self._looking[key] = asyncio.create_task(find_versions(self._storage, datastore, name))
            looking.add_done_callback(lambda task: self._looked(key, task))
        await asyncio.wait([looking], timeout=None if known is None else PATIENCE_S)
        if not looking.done() or (known is not None and isinstance(looking.exception(), StorageUnavailable)):
            assert known is not None, "without a time-out it is done"
            return known
        return looking.result()

    def forget(self, datastore: Datastore, name: str) -> None:
        """Looks the index up the next time: it may have been dropped, or made anew."""
        self._active.pop((datastore.name, name), None)
        self._looking.pop((datastore.name, name), None)

    def _looked(self, key: tuple[str, str], task: asyncio.Task[NamedIndex]) -> None:
        if self._looking.get(key) is not task:
            return  # forgotten meanwhile: what it found may be older
        del self._looking[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StorageUnavailable) or task.cancelled():
            return
        self._active.pop(key, None)
        if error is None and task.result().answering.is_complete:
            self._active[key] = (self._clock(), task.result())


class BuildEta:
    """Estimates when an index that is building is ready, from its pace of the last minutes, as this process saw it.

    A build works a tenth of the time while cells come in, so an earlier pace says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def seconds(self, datastore: str, consumer: str, progress: BuildProgress) -> float | None:
        """Returns the seconds that are left for a version, by its consumer, or None as long as no pace is known."""
        now = self._clock()
        seen = self._seen.setdefault((datastore, consumer), deque())
        if seen and progress.done < seen[0][1]:  # a walk began anew
            seen.clear()
        if not seen or now - seen[-1][0] >= _LOOK_PAUSE_S:
            seen.append((now, progress.done))
        while len(seen) > 1 and seen[1][0] <= now - _PACE_S:
            seen.popleft()
        began, done = seen[0]
        built = progress.done - done
        if progress.total is None or built <= 0:
            return None
        return (now - began) / built * (progress.total - progress.done)

    def forget(self, datastore: str, consumer: str) -> None:
        """Drops what is known of a version, because it isn't being built."""
        self._seen.pop((datastore, consumer), None)
