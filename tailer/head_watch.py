"""Which heads moved: one small question to each server in a turn, whatever the number of shards.

Heads are read only when the answer changed, and never by time: an earlier time may be committed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.shard_head import Movement
from tailer.source import ClusterSource

Moved = Callable[[str, dict[int, Location]], None]
"""Called with a datastore and the heads that moved, by shard."""


class HeadWatch:
    """One cluster. `heads` holds what was last seen, by datastore and shard."""

    def __init__(self, source: ClusterSource, moved: Moved) -> None:
        self._source = source
        self._moved = moved
        self._seen: dict[str, Movement] = {}
        self.heads: dict[str, dict[int, Location]] = {}

    async def step(self) -> bool:
        """One turn; whether anything moved. Raises StorageUnavailable."""
        now = await self._source.run(shard_head.movements)
        changed = [name for name, movement in now.items() if self._seen.get(name) != movement]
        for name in changed:
            await self._read_heads(name)
        return bool(changed)

    async def _read_heads(self, name: str) -> None:
        found = await self._source.run(lambda: shard_head.heads(name))
        known = self.heads.setdefault(name, {})
        moved = dict(_moved(known, found))
        known.update(moved)
        # Of these heads, not of the question before: a minion that lags may have answered the second one.
        self._seen[name] = Movement(sum(head.added_id for head in found), sum(head.generation for head in found))
        self._moved(name, moved)


def _moved(known: dict[int, Location], found: Iterable[shard_head.Head]) -> Iterable[tuple[int, Location]]:
    for head in found:
        location = Location(head.generation, head.added_id)
        if known.get(head.shard) != location:
            yield head.shard, location
