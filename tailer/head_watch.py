"""ClusterHeads: finds which heads of a cluster moved, with one small query in each poll, however many shards there are.

When its answer changed, a second query finds the blocks of shards that changed, and only their heads are read. The time
of a cell is never used: a cell with an earlier time may be committed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.shard_head import Movement
from tailer.cluster_reader import ClusterReader

Moved = Callable[[str, dict[int, Location]], None]
"""Called with a datastore and the heads that moved, by shard."""


@dataclass(slots=True)
class _Seen:
    """What was last read of one datastore. `blocks` has the sums of these heads, block by block."""

    heads: dict[int, Location] = field(default_factory=dict)
    blocks: dict[int, Movement] = field(default_factory=dict)
    total: Movement | None = None


class ClusterHeads:
    def __init__(self, reader: ClusterReader, moved: Moved) -> None:
        self._reader = reader
        self._moved = moved
        self._seen: dict[str, _Seen] = {}

    @property
    def cluster(self) -> str:
        return self._reader.cluster

    def heads(self, name: str) -> Mapping[int, Location]:
        """Returns the heads of a datastore as last seen, by shard."""
        seen = self._seen.get(name)
        return {} if seen is None else seen.heads

    async def step(self) -> bool:
        """Polls once. Returns whether anything moved. Raises StorageUnavailable."""
        now = await self._reader.run(shard_head.movements)
        changed = [name for name, total in now.items() if name not in self._seen or self._seen[name].total != total]
        for name in changed:
            await self._look_closer(name, now[name], self._seen.setdefault(name, _Seen()))
        return bool(changed)

    async def _look_closer(self, name: str, total: Movement, seen: _Seen) -> None:
        shown = await self._blocks(name, total, seen)
        blocks = [block for block, movement in shown.items() if seen.blocks.get(block) != movement]
        found = await self._reader.run(shard_head.heads_in_blocks, name, blocks) if blocks else []
        moved = {head.shard: location for head in found if seen.heads.get(head.shard) != (location := head.location)}
        seen.heads.update(moved)
        # The sums of these heads, not of the first query: a minion that lags may have answered the second one.
        seen.blocks = {block: seen.blocks.get(block, Movement(0, 0)) for block in shown} | _sums(found)
        seen.total = _total(seen.blocks.values())
        self._moved(name, moved)

    async def _blocks(self, name: str, total: Movement, seen: _Seen) -> Mapping[int, Movement]:
        """Returns the blocks and their sums. A single block is the one that moved, unless generations changed."""
        if len(seen.blocks) == 1 and seen.total and seen.total.generations_sum == total.generations_sum:
            return dict.fromkeys(seen.blocks, total)
        return await self._reader.run(shard_head.block_movements, name)


def _sums(heads: Sequence[shard_head.Head]) -> dict[int, Movement]:
    by_block: dict[int, list[Movement]] = {}
    for head in heads:
        by_block.setdefault(shard_head.block_of(head.shard), []).append(Movement(head.added_id, head.generation))
    return {block: _total(movements) for block, movements in by_block.items()}


def _total(movements: Iterable[Movement]) -> Movement:
    parts = list(movements)
    return Movement(sum(part.heads_sum for part in parts), sum(part.generations_sum for part in parts))
