"""BuildLoad decides when a build has to rest: a minion lags behind what the build wrote, or its commits became slow."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from schemaless.errors import SchemalessError
from schemaless.storage import index_walk_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion

log = structlog.get_logger()

_LOOK_PAUSE_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_COMMITS_MAX = 100
_COMMITS_MIN = 10  # one that was slow says nothing
_SLOW_REST_S = 2.0


class BuildLoad:
    """The load of one build in this process. `clock` counts seconds, and `sleep` rests for some.

    A build rests while a minion is more than `lag_cells_max` cells behind, 0: it doesn't look. And it rests when one of
    a hundred of its commits takes longer than `commit_max_s`.
    """

    def __init__(
        self,
        storage: AsyncStorage,
        version: IndexVersion,
        *,
        lag_cells_max: int,
        commit_max_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._storage = storage
        self._version = version
        self._lag_cells_max = lag_cells_max
        self._commit_max_s = commit_max_s
        self._clock = clock
        self._sleep = sleep
        self._commits_s: deque[float] = deque(maxlen=_COMMITS_MAX)
        self._looked_at = clock()

    def note(self, commit_s: float) -> None:
        """Takes note of how long a commit took."""
        self._commits_s.append(commit_s)

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
        while (lag := await self._lag_cells()) > self._lag_cells_max:
            log.info("a build rests: a minion lags", index=self._version.name, cells=lag)
            await self._sleep(_LOOK_PAUSE_S)
        self._looked_at = self._clock()

    async def _lag_cells(self) -> int:
        """Returns how many cells the minion that lags most is behind what the build has written on its master."""
        lag = 0
        for master in self._storage.masters:
            cluster = master.node.cluster
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
