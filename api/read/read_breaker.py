"""ReadBreaker: the circuit breaker of reads, for all MySQL servers.

One failed read opens it for a server, so a dead or hung server costs one time-out. The sampler in replica_lag.py asks
every server once a second and closes it. It differs from the write breaker (api/write/queue.py), which has no sampler
and lets single puts through as probes: a read is never a probe. A server that answered the sampler after the read began
is only slow. Leaving it would send callers that read their own writes to a minion that may not have them yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from schemaless.storage.asyncmy_driver import AsyncNode


class ReadBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._unreachable: set[str] = set()
        self._answered_at: dict[str, float] = {}

    def sampled(self, node: str, answered: bool) -> None:
        """Records whether a node answered the sampler."""
        if answered:
            self._answered_at[node] = self.clock()
            self._unreachable.discard(node)
        else:
            self._unreachable.add(node)

    def read_failed(self, node: AsyncNode, began: float) -> None:
        """Records that a read got no answer. It began at `began`, by this breaker's clock."""
        if self._answered_at.get(node.node.name, began) <= began:
            self._unreachable.add(node.node.name)

    def answers(self, node: AsyncNode) -> bool:
        return node.node.name not in self._unreachable

    def answering(self, nodes: Iterable[AsyncNode]) -> list[AsyncNode]:
        return [node for node in nodes if self.answers(node)]
