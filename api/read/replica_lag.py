"""ReplicaLag: how far each minion is behind its master, sampled once a second so that no read pays for it.

A minion is as fresh as the latest moment at which its master showed no more than the minion shows now (sums of
heads, because a minion shows a prefix, I3). While the master is unreachable the lag
grows with the clock, which is the honest upper bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from schemaless.errors import NodeRefuses, Overloaded, SchemalessError
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.shard_head import CLOCK_AHEAD_MAX_S, ServerPosition
from schemaless.topology import Role

SAMPLE_PERIOD_S = 1.0
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
        self._masters: dict[str, deque[tuple[float, int]]] = {
            name: deque(maxlen=SAMPLES_MAX) for name in storage.topology.clusters
        }
        self._sampled_at: dict[str, float] = {}
        self._fresh: dict[str, float] = {}
        self._clocks_ahead_s: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def step(self) -> None:
        """Samples every node once, all clusters concurrently."""
        await asyncio.gather(*map(self._sample_cluster, self._storage.topology.clusters))

    def lag_s(self, node: AsyncNode) -> float:
        """Returns the lag at the latest sample, or by the clock when no sample is recent. A master has none."""
        if node.node.role is Role.MASTER:
            return 0.0
        now = self._clock()
        sampled = self._sampled_at.get(node.node.cluster, 0.0)
        until = sampled if now - sampled < 3 * SAMPLE_PERIOD_S else now
        return max(0.0, until - self._fresh.get(node.node.name, 0.0))

    def latest_created_at(self, cluster: str) -> int:
        """Returns the latest time that a cluster's master may give a cell, in microseconds since the epoch.

        A master is believed unless it is a minute ahead of this process and of all other masters (I4).
        """
        others = [ahead_s for name, ahead_s in self._clocks_ahead_s.items() if name != cluster]
        return int((self._clock() + max(0.0, *others, 0.0) + CLOCK_AHEAD_MAX_S) * 1e6)

    async def _sample_cluster(self, cluster: str) -> None:
        asked = self._clock()
        shown = await self._position(self._storage.master(cluster))
        self._clocks_ahead_s.pop(cluster, None)
        if shown is not None:
            if shown.clock:
                self._clocks_ahead_s[cluster] = shown.clock / 1e6 - asked
            self._masters[cluster].append((asked, shown.heads_sum))
            self._sampled_at[cluster] = asked
        await asyncio.gather(*(self._sample_minion(cluster, minion) for minion in self._storage.minions(cluster)))

    async def _sample_minion(self, cluster: str, minion: AsyncNode) -> None:
        position = await self._position(minion)
        if position is None:
            return
        known = self._fresh.get(minion.node.name, 0.0)
        seen = fresh_until(self._masters[cluster], position)
        self._fresh[minion.node.name] = max(known, seen)

    async def _position(self, node: AsyncNode) -> ServerPosition | None:
        try:
            position = await node.run(shard_head.position, timeout_s=self._timeout_s, traffic=Traffic.PROBE)
        except Overloaded:  # nobody knows: this process had too much to do
            return None
        except NodeRefuses:  # it answers: there is no datastore yet, so no tables
            position = None
        except SchemalessError:
            self._on_sample(node.node.name, False)
            return None
        self._on_sample(node.node.name, True)
        return position


def fresh_until(master: deque[tuple[float, int]], minion: ServerPosition) -> float:
    """Returns the latest sampled moment at which the master showed no more than the minion, or else the time of the
    minion's newest cell.
    """
    for moment, heads_sum in reversed(master):
        if heads_sum <= minion.heads_sum:
            return moment
    return minion.last_created_at / 1e6
