"""NodeHealth: which MySQL servers answer. The breaker of the read path.

One failed read opens it, so a dead or hung server costs one time-out; the sampler of api/lag.py, which asks every
server once a second, closes it. No reader is ever sent to try.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemaless.storage.async_driver import AsyncNode


class NodeHealth:
    def __init__(self) -> None:
        self._away: set[str] = set()

    def mark(self, node: str, answered: bool) -> None:
        (self._away.discard if answered else self._away.add)(node)

    def answers(self, node: AsyncNode) -> bool:
        return node.node.name not in self._away

    def answering(self, nodes: Iterable[AsyncNode]) -> list[AsyncNode]:
        return [node for node in nodes if self.answers(node)]
