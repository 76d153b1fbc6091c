"""ReplicaLag: how far each minion is behind its master, sampled once a second so that no read pays for it.

A minion is as fresh as the latest moment at which its master showed no more than the minion shows now (sums of
heads, because a minion shows a prefix, I3). While the master is unreachable the lag
grows with the clock, which is the honest upper bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import structlog

from schemaless.errors import NodeRefuses, NotWhole, Overloaded, SchemalessError
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.server_settings import shows
from schemaless.storage.shard_head import CLOCK_AHEAD_MAX_S, ServerPosition
from schemaless.storage.shard_log import DensityWalk
from schemaless.topology import Role

log = structlog.get_logger()

SAMPLE_PERIOD_S = 1.0
WALK_PERIOD_S = 10.0
WALK_S = 0.25  # of each period
SUSPECTED_MAX = 8  # cells that the master is asked for, of one look
SAMPLES_MAX = 600  # of a master: a minion further behind than ten minutes is judged by its newest cell


class ReplicaLag:
    """Samples every node of a topology, and calls `on_sample` with its name and whether it answered."""

    def __init__(
        self,
        storage: AsyncStorage,
        *,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        on_sample: Callable[[str, bool], None] = lambda node, answered: None,
    ) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_sample = on_sample
        self._masters = defaultdict[str, deque[tuple[float, int]]](partial(deque, maxlen=SAMPLES_MAX))
        self._sampled_at: dict[str, float] = {}
        self._fresh: dict[str, float] = {}
        self._clocks_ahead_s: dict[str, float] = {}
        self._suspected: dict[str, list[NotWhole]] = {}
        self._walks = WeakKeyDictionary[AsyncNode, DensityWalk]()
        self._walked_at: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def step(self) -> None:
        """Samples every node once, all clusters concurrently."""
        await asyncio.gather(*map(self._sample_cluster, self._storage.topology.clusters))
        ahead_s = min(self._clocks_ahead_s.values(), default=0.0)
        if ahead_s > CLOCK_AHEAD_MAX_S:
            log.warning("the clock of this host is behind those of all MySQL servers", behind_s=round(ahead_s, 1))

    def lag_s(self, node: AsyncNode) -> float:
        """Returns the lag at the latest sample, or by the clock when no sample is recent. A master has none."""
        if node.role is Role.MASTER:
            return 0.0
        now = self._clock()
        sampled = self._sampled_at.get(node.node.cluster, 0.0)
        until = sampled if now - sampled < 3 * SAMPLE_PERIOD_S else now
        return max(0.0, until - self._fresh.get(node.node.name, 0.0))

    def latest_created_at(self, cluster: str) -> int:
        """Returns the latest time that a cluster's master may give a cell, in microseconds since the epoch.

        A master is believed unless it is a minute ahead of this process and of all other servers, minions too (I4). So
        a late clock of this host costs no healthy master, also where the other masters are away.
        """
        master = self._storage.master(cluster).node.name
        others = [ahead_s for name, ahead_s in self._clocks_ahead_s.items() if name != master]
        return int((self._clock() + max(0.0, *others, 0.0) + CLOCK_AHEAD_MAX_S) * 1e6)

    async def _sample_cluster(self, cluster: str) -> None:
        asked = self._clock()
        shown = await self._position(self._storage.master(cluster))
        if shown is not None:
            self._masters[cluster].append((asked, shown.heads_sum))
            self._sampled_at[cluster] = asked
        await asyncio.gather(*(self._sample_minion(cluster, minion) for minion in self._storage.others(cluster)))

    async def _sample_minion(self, cluster: str, minion: AsyncNode) -> None:
        position = await self._position(minion)
        if position is None:
            return
        await self._look_for_holes(cluster, minion)
        known = self._fresh.get(minion.node.name, 0.0)
        seen = fresh_until(self._masters[cluster], position)
        self._fresh[minion.node.name] = max(known, seen)

    def suspect(self, node: AsyncNode, error: NotWhole) -> None:
        """Has the next sample ask the master for a cell that a minion lacks."""
        if node.role is Role.MINION and error.database:
            self._suspected[node.node.name] = [error]

    async def _look_for_holes(self, cluster: str, minion: AsyncNode) -> None:
        """Looks every few seconds whether a minion has all cells up to its heads, for a small share of the time.

        One that lacks a cell which its master shows is not read (I3). What the master lacks too is no fault of the
        minion's, and costs its own shard.
        """
        name, now = minion.node.name, self._clock()
        suspected = {str(error): error for error in self._suspected.pop(name, [])}
        walk = self._walks.setdefault(minion, DensityWalk())
        if now - self._walked_at.get(name, 0.0) >= WALK_PERIOD_S:
            self._walked_at[name] = now
            until = time.monotonic() + WALK_S
            with suppress(SchemalessError):  # the next sample sees why
                for database, added_id in minion.settings.lacking:  # the master may be another one since
                    if not await self._shows(cluster, database, added_id):
                        minion.settings.pass_over(database, added_id)
                goes_on = True
                while goes_on:
                    holes, goes_on = await minion.run(walk.look, timeout_s=self._timeout_s, traffic=Traffic.PROBE)
                    suspected |= {str(error): error for error in holes}
                    goes_on &= time.monotonic() < until
        for error in list(suspected.values())[:SUSPECTED_MAX]:
            with suppress(SchemalessError):
                if await self._shows(cluster, error.database, error.added_id):
                    minion.settings.lacks(error)
                else:
                    walk.pass_over(error)

    async def _shows(self, cluster: str, database: str, added_id: int) -> bool:
        master = self._storage.master(cluster)
        return await master.run(shows, database, added_id, timeout_s=self._timeout_s, traffic=Traffic.PROBE)

    async def _position(self, node: AsyncNode) -> ServerPosition | None:
        asked = self._clock()
        try:
            position = await node.run(shard_head.position, timeout_s=self._timeout_s, traffic=Traffic.PROBE)
        except Overloaded:  # nobody knows: this process had too much to do
            return None
        except NodeRefuses:  # it answers: there is no datastore yet, so no tables
            position = None
        except SchemalessError:
            self._clocks_ahead_s.pop(node.node.name, None)
            self._walks.pop(node, None)  # it may come back with less
            self._on_sample(node.node.name, False)
            return None
        self._on_sample(node.node.name, True)
        if position is not None and position.clock:
            self._clocks_ahead_s[node.node.name] = position.clock / 1e6 - asked
        return position


def fresh_until(master: deque[tuple[float, int]], minion: ServerPosition) -> float:
    """Returns the latest sampled moment at which the master showed no more than the minion, or else the time of the
    minion's newest cell.
    """
    for moment, heads_sum in reversed(master):
        if heads_sum <= minion.heads_sum:
            return moment
    return minion.last_created_at / 1e6
