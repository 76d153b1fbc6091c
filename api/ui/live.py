"""Live: the samples of the last fifteen minutes, and the pictures that open pages watch.

One picture serves all pages that show the same. It is asked for while one of them is open, and never otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from api.follow.followers import Follower
from api.read.reader import ReadBreaker
from schemaless.errors import TooManyRequests
from schemaless.facts.consumers import Programs, tripped
from schemaless.facts.servers import STATUS_TIMEOUT_S, Backlog
from schemaless.runtime.pace import Sampled
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import ask_masters
from schemaless.storage.replica_lag import ReplicaLag
from schemaless.storage.shard_head import Movement

PERIOD_S = 5.0
HISTORY_S = 900.0


class Sample(msgspec.Struct, frozen=True):
    """One datastore at one moment. `rate` is in cells a second, and None where a master didn't answer twice."""

    at: float
    rate: float | None
    servers: int
    replica_lag_s: float
    behind_s: float
    buffered: int
    failing: int


class SampleHistory(Sampled[Mapping[str, deque[Sample]]]):
    """The samples of each datastore, oldest first. All but the heads comes from samplers that run anyway."""

    def __init__(
        self,
        storage: AsyncStorage,
        lag: ReplicaLag,
        breaker: ReadBreaker,
        backlogs: Sampled[list[Backlog]],
        programs: Sampled[Programs],
    ) -> None:
        super().__init__(self._add, PERIOD_S, {})
        self._storage = storage
        self._lag = lag
        self._breaker = breaker
        self._backlogs = backlogs
        self._programs = programs
        self._shown: Mapping[str, Mapping[str, Movement]] = {}
        self._shown_at = 0.0

    def columns(self, datastore: str) -> dict[str, list[float | None]]:
        """Returns the samples of a datastore by what they measure."""
        samples = self.last.get(datastore, ())
        return {name: [getattr(one, name) for one in samples] for name in Sample.__struct_fields__}

    async def _add(self) -> Mapping[str, deque[Sample]]:
        asked_at, clusters = time.monotonic(), self._storage.topology.clusters
        answers = await ask_masters(self._storage, clusters, shard_head.movements, timeout_s=STATUS_TIMEOUT_S)
        before, passed_s = self._shown, asked_at - self._shown_at
        self._shown, self._shown_at = answers.found, asked_at
        is_known = not answers.failures and before.keys() == answers.found.keys()
        nodes = self._storage.nodes.values()
        servers = sum(map(self._breaker.answers, nodes))
        lag_s = max((self._lag.lag_s(node) for node in nodes if self._breaker.answers(node)), default=0.0)
        known = {name for shown in answers.found.values() for name in shown}
        if answers.failures:
            known |= self.last.keys()  # the master that is away may have them
        samples = {name: self.last.get(name, deque()) for name in known}
        now = time.time()
        for name, mine in samples.items():
            rate = _grown(name, before, answers.found) / passed_s if is_known else None
            programs = [one for (datastore, _), one in self._programs.last.items() if datastore == name]
            failing = sum(
                one.summary.parked + sum(row.report.erred_count for row in one.workers) + len(tripped(one.workers))
                for one in programs
            )
            behind_s = max((one.summary.lag_us / 1e6 for one in programs), default=0.0)
            backlogs = [one for one in self._backlogs.last if one.datastore == name]
            failing += sum(one.refused.cells for one in backlogs if one.refused)
            buffered = sum(one.waiting.rows for one in backlogs)
            mine.append(Sample(now, rate, servers, round(lag_s, 3), round(behind_s, 3), buffered, failing))
            while mine[0].at <= now - HISTORY_S:
                mine.popleft()
        return samples


def _grown(
    datastore: str, before: Mapping[str, Mapping[str, Movement]], now: Mapping[str, Mapping[str, Movement]]
) -> int:
    """Returns by how many cells the heads grew. A master that was restored may have lost some, which is no growth."""
    return sum(
        max(0, shown[datastore].heads_sum - before[cluster][datastore].heads_sum)
        for cluster, shown in now.items()
        if datastore in shown and datastore in before.get(cluster, {})
    )


# Open pages.

PICTURE_PERIOD_S = 2.0
ASKED_AT_ONCE = 4
"""Pictures that are asked for at the same time, of all open pages."""

PAGES_OF_A_CALLER_MAX = 64
"""Pages that one token may hold open, or all callers without one: each may watch another shard."""

Ask = Callable[[], Awaitable[bytes]]
"""Returns a picture as the event that pages are sent. It raises nothing that a page could be told."""


class Picture:
    """What some pages see. `event` is the newest one, empty before the first."""

    def __init__(self, ask: Ask, turn: asyncio.Semaphore) -> None:
        self.event = b""
        self.watchers: set[Follower] = set()
        self._ask = ask
        self._turn = turn

    async def run(self) -> None:
        try:
            while True:
                began = time.monotonic()
                async with self._turn:
                    self.event = await self._ask()
                for follower in self.watchers:
                    follower.wake()
                await asyncio.sleep(max(PICTURE_PERIOD_S, time.monotonic() - began))
        finally:
            for follower in self.watchers:
                follower.release()  # of a picture that failed: its pages ask anew


class OpenPages:
    def __init__(self) -> None:
        self._pictures: dict[Hashable, tuple[Picture, asyncio.Task[None]]] = {}
        self._turn = asyncio.Semaphore(ASKED_AT_ONCE)

    def __len__(self) -> int:
        return sum(len(picture.watchers) for picture, _ in self._pictures.values())

    @contextmanager
    def watching(self, what: Hashable, ask: Ask, follower: Follower) -> Iterator[Picture]:
        """Adds a page that watches. The first one has the picture asked for, and the last one ends that.

        Raises TooManyRequests.
        """
        caller = follower.token and follower.token.digest
        open_ones = [one for picture, _ in self._pictures.values() for one in picture.watchers]
        if sum((one.token and one.token.digest) == caller for one in open_ones) >= PAGES_OF_A_CALLER_MAX:
            who = "without a token" if follower.token is None else f"with the token {follower.token.name!r}"
            raise TooManyRequests(f"{PAGES_OF_A_CALLER_MAX} pages are open {who}, and more may not be: close some")
        if what not in self._pictures:
            picture = Picture(ask, self._turn)
            task = asyncio.create_task(picture.run())
            task.add_done_callback(lambda _: self._forget(what, picture))
            self._pictures[what] = picture, task
        picture, task = self._pictures[what]
        picture.watchers.add(follower)
        try:
            yield picture
        finally:
            picture.watchers.discard(follower)
            if not picture.watchers:
                task.cancel()
                self._forget(what, picture)

    def _forget(self, what: Hashable, picture: Picture) -> None:
        """Removes a picture that failed or that nobody watches. Another one may have its place already."""
        if what in self._pictures and self._pictures[what][0] is picture:
            del self._pictures[what]
