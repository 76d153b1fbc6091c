"""Which heads moved: one small question to each server in a turn, whatever the number of shards.

When the answer changed, the server is asked which blocks of shards it was, and only their heads are read. Never by
time: an earlier time may be committed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.shard_head import Movement
from tailer.cluster_reader import ClusterSource

Moved = Callable[[str, dict[int, Location]], None]
"""Called with a datastore and the heads that moved, by shard."""


@dataclass(slots=True)
class _Seen:
    """Of one datastore. `blocks` is what the heads read last add up to, block by block."""

    heads: dict[int, Location] = field(default_factory=dict)
    blocks: dict[int, Movement] = field(default_factory=dict)
    total: Movement | None = None


class ClusterHeads:
    """One cluster."""

    def __init__(self, source: ClusterSource, moved: Moved) -> None:
        self._source = source
        self._moved = moved
        self._seen: dict[str, _Seen] = {}

    def heads(self, name: str) -> Mapping[int, Location]:
        """What was last seen of a datastore, by shard."""
        seen = self._seen.get(name)
        return {} if seen is None else seen.heads

    async def step(self) -> bool:
        """One turn; whether anything moved. Raises StorageUnavailable."""
        now = await self._source.run(shard_head.movements)
        changed = [name for name, total in now.items() if name not in self._seen or self._seen[name].total != total]
        for name in changed:
            await self._look_closer(name, now[name], self._seen.setdefault(name, _Seen()))
        return bool(changed)

    async def _look_closer(self, name: str, total: Movement, seen: _Seen) -> None:
        shown = await self._blocks(name, total, seen)
        blocks = [block for block, movement in shown.items() if seen.blocks.get(block) != movement]
        found = await self._source.run(shard_head.heads_in_blocks, name, blocks) if blocks else []
        moved = {head.shard: location for head in found if seen.heads.get(head.shard) != (location := head.location)}
        seen.heads.update(moved)
        # What these heads add up to, not what was told before: a minion that lags may have answered now.
        seen.blocks = {block: seen.blocks.get(block, Movement(0, 0)) for block in shown} | _sums(found)
        seen.total = _total(seen.blocks.values())
        self._moved(name, moved)

    async def _blocks(self, name: str, total: Movement, seen: _Seen) -> Mapping[int, Movement]:
        """Where there is but one block it is the one that moved. New shards, or generations, change the other sum."""
        if len(seen.blocks) == 1 and seen.total and seen.total.generations_sum == total.generations_sum:
            return dict.fromkeys(seen.blocks, total)
        return await self._source.run(shard_head.block_movements, name)


def _sums(heads: Sequence[shard_head.Head]) -> dict[int, Movement]:
    by_block: dict[int, list[Movement]] = {}
    for head in heads:
        by_block.setdefault(shard_head.block_of(head.shard), []).append(Movement(head.added_id, head.generation))
    return {block: _total(movements) for block, movements in by_block.items()}


def _total(movements: Iterable[Movement]) -> Movement:
    parts = list(movements)
    return Movement(sum(part.heads_sum for part in parts), sum(part.generations_sum for part in parts))
