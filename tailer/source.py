"""One cluster's log: read from its master, or from a minion while the master can't be reached.

A minion shows a prefix of what its master holds (I3), so changing over can delay cells, never skip or reorder them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from schemaless.errors import StorageUnavailable
from schemaless.storage.async_driver import AsyncNode, AsyncStorage
from schemaless.storage.operation import Start

T = TypeVar("T")
log = structlog.get_logger()

AWAY_S = 2.0
"""How long a node that failed is left alone before it is asked again."""


class ClusterSource:
    """Asks the first node that is not known to be away, the master first. `timeout_s` is for small questions."""

    def __init__(
        self,
        storage: AsyncStorage,
        cluster: str,
        *,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self._nodes = [storage.master(cluster), *storage.minions(cluster)]
        self._away_until: dict[str, float] = {}
        self._timeout_s = timeout_s
        self._clock = clock

    async def run(self, start: Start[T], *, timeout_s: float | None = None) -> T:
        """Raises StorageUnavailable when no node of the cluster answers."""
        now = self._clock()
        for node in self._nodes:
            if self._away_until.get(node.node.name, 0.0) > now:
                continue
            try:
                value = await node.run(start, timeout_s=timeout_s or self._timeout_s)
            except StorageUnavailable as error:
                self._mark_away(node, error)
            else:
                self._mark_back(node)
                return value
        raise StorageUnavailable(f"no node of cluster {self.cluster} answers")

    def _mark_away(self, node: AsyncNode, error: StorageUnavailable) -> None:
        if node.node.name not in self._away_until:
            log.warning("reading from the next node of the cluster", away=node.node.name, error=str(error))
        self._away_until[node.node.name] = self._clock() + AWAY_S

    def _mark_back(self, node: AsyncNode) -> None:
        if self._away_until.pop(node.node.name, None) is not None:
            log.info("a node answers again", node=node.node.name)
