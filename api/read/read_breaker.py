"""NodeHealth: which MySQL servers answer. The breaker of the read path.

One failed read opens it, so a dead or hung server costs one time-out; the sampler of replica_lag.py, which asks every
server once a second, closes it. No reader is ever sent to try. A server that answered the sampler since the read
began is only slow: leaving it would send readers of their own writes to a minion that may not have them yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from schemaless.storage.asyncmy_driver import AsyncNode


class NodeHealth:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._away: set[str] = set()
        self._answered_at: dict[str, float] = {}

    def sampled(self, node: str, answered: bool) -> None:
        """What the sampler saw."""
        if answered:
            self._answered_at[node] = self.clock()
            self._away.discard(node)
        else:
            self._away.add(node)

    def read_failed(self, node: AsyncNode, began: float) -> None:
        """A read that began at `began`, by this object's clock, got no answer."""
        if self._answered_at.get(node.node.name, began) <= began:
            self._away.add(node.node.name)

    def answers(self, node: AsyncNode) -> bool:
        return node.node.name not in self._away

    def answering(self, nodes: Iterable[AsyncNode]) -> list[AsyncNode]:
        return [node for node in nodes if self.answers(node)]
