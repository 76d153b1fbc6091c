"""ClusterReader: reads one cluster's log from one of its nodes, the master or a minion, as `tail_from` says.

A minion shows a prefix of what its master holds (I3), so changing over can delay cells, never skip or reorder them.
A node that failed is skipped, and a minion that lags comes last, until `check` finds them fit again. So no query waits
for such a node.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from schemaless.errors import NodeRefuses, Overloaded, SchemalessError, StorageUnavailable
from schemaless.location import Location
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import first_answer, nobody_answers, without_frames
from schemaless.storage.operation import Args, Operation
from schemaless.storage.shard_head import Movement
from schemaless.topology import Role

T = TypeVar("T")
log = structlog.get_logger()


class ClusterReader:
    """Asks the first node that is fit. `timeout_s` bounds small queries."""

    def __init__(
        self,
        storage: AsyncStorage,
        cluster: str,
        *,
        tail_from: Role = Role.MASTER,
        lag_max_s: float = 5.0,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self.master = storage.master(cluster)
        self._storage = storage
        self._turns = defaultdict[str, float](random.random)  # tailers of one topology share the minions
        self._tail_from = tail_from
        self._unreachable: dict[str, SchemalessError] = {}
        self._lagging: set[str] = set()
        self._tops: deque[tuple[float, int]] = deque()
        self._asked = defaultdict[str, set[asyncio.Timeout]](set)
        self._lag_max_s = lag_max_s
        self._timeout_s = timeout_s
        self._clock = clock

    async def run(self, operation: Callable[[*Args], Operation[T]], *args: *Args, timeout_s: float | None = None) -> T:
        """Runs an operation on the first node that answers it. Raises StorageUnavailable when none does.

        `timeout_s` is for a query that may take long. It ends early when another query finds the node unreachable.
        """

        async def ask(node: AsyncNode) -> T:
            if timeout_s is None:
                return await node.run(operation, *args, timeout_s=self._timeout_s)
            return await self._ask_at_length(node, timeout_s, operation, *args)

        skipped = self._unreachable.values()
        answer, _ = await first_answer(self._order(), ask, on_failure=self._skip, skipped=skipped)
        return answer

    async def ask_master(self, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Runs an operation on the master. Raises StorageUnavailable, at once if it is known to be unreachable."""
        if why := self._unreachable.get(self.master.node.name):
            raise nobody_answers([why])
        return await self.master.run(operation, *args, timeout_s=self._timeout_s)

    async def check(self) -> None:
        """Asks unreachable nodes whether they answer again and, where minions are read, measures how far each lags."""
        nodes = self._nodes
        present = {node.node.name for node in nodes}
        self._unreachable = {name: why for name, why in self._unreachable.items() if name in present}
        if self._unreachable or self._tail_from is Role.MINION:
            shown = dict(zip(nodes, await asyncio.gather(*map(self._heads_sum, nodes)), strict=True))
            self._judge_lag({node.node.name: total for node, total in shown.items() if total is not None})

    @property
    def _nodes(self) -> list[AsyncNode]:
        present = [self._storage.present_master(self.cluster), *self._storage.others(self.cluster)]
        return sorted(present, key=lambda node: self._turns[node.node.name])

    def _order(self) -> list[AsyncNode]:
        """Returns the nodes in the order in which they are asked. A minion that lags is better than none."""
        there = [node for node in self._nodes if node.node.name not in self._unreachable]
        return sorted(there, key=lambda node: (node.node.name in self._lagging, node.role is not self._tail_from))

    async def _ask_at_length(
        self, node: AsyncNode, timeout_s: float, operation: Callable[[*Args], Operation[T]], *args: *Args
    ) -> T:
        asked = self._asked[node.node.name]
        try:
            async with asyncio.timeout(None) as cut:
                asked.add(cut)
                try:
                    return await node.run(operation, *args, timeout_s=timeout_s)
                finally:
                    asked.discard(cut)
        except TimeoutError as error:
            name = node.node.name
            why = self._unreachable.get(name) or StorageUnavailable(f"{name}: another query found it unreachable")
            raise nobody_answers([why]) from error

    def _skip(self, node: AsyncNode, error: SchemalessError) -> None:
        """Skips a node from now on, and ends long queries to it: one may wait ten seconds for a server that hangs."""
        if isinstance(error, NodeRefuses | Overloaded):  # it answers, or nobody knows: other queries may succeed
            return
        name = node.node.name
        if name not in self._unreachable:
            log.warning("reading from the next node of the cluster", node=name, error=str(error))
        self._unreachable[name] = without_frames(error)
        waiting, self._asked[name] = self._asked[name], set()
        for cut in waiting:
            cut.reschedule(asyncio.get_running_loop().time())

    async def _heads_sum(self, node: AsyncNode) -> int | None:
        """Returns the sum of the heads that a node shows, or None if it doesn't answer."""
        name = node.node.name
        try:
            position = await node.run(shard_head.position, timeout_s=self._timeout_s)
        except NodeRefuses:  # its tables aren't made yet
            return 0
        except SchemalessError as error:
            self._skip(node, error)
            return None
        if self._unreachable.pop(name, None):
            log.info("a node answers again", node=name)
        return position.heads_sum

    def _judge_lag(self, sums: dict[str, int]) -> None:
        """Finds the nodes that lag: they show less than the furthest one showed `lag_max_s` ago."""
        now = self._clock()
        self._tops.append((now, max(sums.values(), default=0)))
        while len(self._tops) > 1 and self._tops[1][0] <= now - self._lag_max_s:
            self._tops.popleft()
        asked_at, due = self._tops[0]
        lagging = {name for name, total in sums.items() if asked_at <= now - self._lag_max_s and total < due}
        for name in lagging - self._lagging:
            log.warning("a node lags and is read last", node=name, behind_s_min=self._lag_max_s, cells=due - sums[name])
        self._lagging = lagging


# ClusterHeads: finds which heads of a cluster moved, with one small query in each poll, however many shards there are.
#
# When its answer changed, a second query finds the blocks of shards that changed, and only their heads are read. The
# time of a cell is never used: a cell with an earlier time may be committed later.

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
