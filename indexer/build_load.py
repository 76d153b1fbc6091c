"""BuildLoad decides when a build has to rest, and how much it may do at once.

It rests while a minion lags behind what it wrote, and when its commits became slow. While cells come in, it takes small
pages, one at a time, and works a share of the time only: a large commit makes puts wait that come behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from schemaless.errors import SchemalessError
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import index_walk_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import NO_LIMITS, IndexLimits
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_COMMITS_MAX = 100
_COMMITS_MIN = 10  # one that was slow says nothing
_SLOW_REST_S = 2.0
_REST_MAX_S = 1.0  # then it looks whether its limits were changed
_BUSY_COLUMNS_MAX = 256  # of a page while cells come in
_BUSY_REST_MAX_S = 5.0  # the least pace: pages of a server that is slow don't come ever more rarely
_BUSY_CELLS_PER_S = 5.0
_COUNT_PAUSE_S = 0.5
_FIRST_COUNT_PAUSE_S = 0.1  # nobody knows before the second look whether cells come in


class BusyTurns:
    """The turns of all builds of a process while cells come in: one page at a time, and one rest for all of them.

    So ten builds work as little as one. `ended_at` is when the last page ended, on the builds' clock, and `worked_s`
    how long it took.
    """

    def __init__(self) -> None:
        self.one_page = asyncio.Lock()  # it serves builds in the order in which they ask
        self.ended_at = 0.0
        self.worked_s = 0.0


class BuildLoad:
    """The load of one build in this process. `clock` counts seconds, and `sleep` rests for some.

    A build rests while a minion is more than `lag_cells_max` cells behind, 0: it doesn't look. And it rests when one of
    a hundred of its commits takes longer than `commit_max_s`. While cells come in, all builds that share `turns` work
    `busy_share` of the time together. They work more only where a rest would be longer than five seconds. With 1 a
    build doesn't look whether cells come in. These are the settings of the process, which orders may go before.
    """

    def __init__(  # noqa: PLR0913  # most of them are named, and two have defaults
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        version: IndexVersion,
        *,
        lag_cells_max: int,
        commit_max_s: float,
        busy_share: float,
        turns: BusyTurns | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._version = version
        self._by_settings = lag_cells_max, commit_max_s, busy_share
        self.limit_to(NO_LIMITS)
        self._clock = clock
        self._sleep = sleep
        self._commits_s: deque[float] = deque(maxlen=_COMMITS_MAX)
        self._looked_at = clock()
        self._turns = turns or BusyTurns()
        self._cells: int | None = None
        self._counted_at = clock() - _COUNT_PAUSE_S
        self._is_busy: bool | None = None

    def limit_to(self, limits: IndexLimits) -> None:
        """Changes the limits from now on. Where they say nothing, the settings of the process count."""
        lag_cells_max, commit_max_s, busy_share = self._by_settings
        self._lag_cells_max = lag_cells_max if limits.build_lag_cells_max is None else limits.build_lag_cells_max
        self._commit_max_s = commit_max_s if limits.build_commit_max_s is None else limits.build_commit_max_s
        self._busy_share = busy_share if limits.build_busy_share is None else limits.build_busy_share

    def note(self, commit_s: float) -> None:
        """Takes note of how long a commit took."""
        self._commits_s.append(commit_s)

    @asynccontextmanager
    async def page(self, columns_max: int) -> AsyncIterator[int]:
        """Waits until a page may be walked. Gives how many columns of rows it may have. Raises StorageUnavailable."""
        await self.rest()
        if self._busy_share >= 1 or not await self._cells_come_in():
            yield columns_max
            return
        turns = self._turns
        async with turns.one_page:
            while (rest_s := turns.ended_at + self._rest_s(turns.worked_s) - self._clock()) > 0:
                await self._sleep(min(rest_s, _REST_MAX_S))
            began = self._clock()
            try:
                yield min(columns_max, _BUSY_COLUMNS_MAX)
            finally:  # a page that failed has cost the servers as much
                turns.ended_at = self._clock()
                turns.worked_s = turns.ended_at - began

    def _rest_s(self, worked_s: float) -> float:
        """Returns how long builds rest after a page that took so long, while cells come in."""
        return min(worked_s * (1 / self._busy_share - 1), _BUSY_REST_MAX_S)

    async def _cells_come_in(self) -> bool:
        """Returns whether the datastore's heads have moved lately, and True while that isn't known."""
        passed_s = self._clock() - self._counted_at
        if passed_s >= (_FIRST_COUNT_PAUSE_S if self._is_busy is None else _COUNT_PAUSE_S):
            self._counted_at = self._clock()
            answers = await all_or_first_error(
                self._storage.master(cluster).run(shard_head.movement, self._datastore.name)
                for cluster in self._datastore.clusters
            )
            cells, before = sum(found.heads_sum for found in answers), self._cells
            self._cells = cells
            if before is not None:
                is_busy = cells - before > _BUSY_CELLS_PER_S * passed_s
                if is_busy and not self._is_busy:
                    log.info("a build gives way to puts", index=self._version.name, busy_share=self._busy_share)
                self._is_busy = is_busy
        return self._is_busy is not False

    async def rest(self) -> None:
        """Returns when the build may go on. A minion that doesn't answer isn't waited for."""
        if len(self._commits_s) >= _COMMITS_MIN:
            slowest_s = sorted(self._commits_s)[-1 - len(self._commits_s) // 100]
            if slowest_s > self._commit_max_s:
                log.info("a build rests: its commits are slow", index=self._version.name, seconds=round(slowest_s, 3))
                self._commits_s.clear()
                await self._sleep(_SLOW_REST_S)
        if not self._lag_cells_max or self._clock() - self._looked_at < _LOOK_PAUSE_S:
            return
        while self._lag_cells_max and (lag := await self._lag_cells()) > self._lag_cells_max:
            log.info("a build rests: a minion lags", index=self._version.name, cells=lag)
            await self._sleep(_LOOK_PAUSE_S)
        self._looked_at = self._clock()

    async def _lag_cells(self) -> int:
        """Returns how many cells the minion that lags most is behind what the build has written on its master."""
        lag = 0
        for cluster in self._datastore.clusters:
            master = self._storage.master(cluster)
            minions = self._storage.minions(cluster)
            if minions:
                written = await master.run(index_walk_table.walked_sum, self._version, timeout_s=_LOOK_TIMEOUT_S)
            for minion in minions:
                try:
                    there = await minion.run(index_walk_table.walked_sum, self._version, timeout_s=_LOOK_TIMEOUT_S)
                except SchemalessError:
                    continue
                lag = max(lag, written - there)
        return lag
