"""The tailer's watch over heads: no head that moved stays unseen (I7)."""

import re

from schemaless.location import Location
from schemaless.storage.shard_head import BLOCK_SHARDS
from tailer.cluster_reader import ClusterHeads


class Node:
    """Answers what one server would, from its heads by shard."""

    def __init__(self, heads: dict[int, int]) -> None:
        self.heads = heads
        self.heads_told = 0
        self.questions = 0

    def rows(self, script: str) -> list[tuple]:
        self.questions += 1
        if "GROUP BY datastore" in script:
            return [("flights", sum(self.heads.values()), len(self.heads))]
        if "GROUP BY block" in script:
            return [(block, sum(found), len(found)) for block, found in self._blocks().items()]
        asked = [range(int(low), int(high) + 1) for low, high in re.findall(r"BETWEEN (\d+) AND (\d+)", script)]
        self.heads_told += sum(shard in part for part in asked for shard in self.heads)
        return [
            (shard, 1, added_id, 0) for shard, added_id in self.heads.items() if any(shard in part for part in asked)
        ]

    def _blocks(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for shard, added_id in self.heads.items():
            found.setdefault(shard // BLOCK_SHARDS, []).append(added_id)
        return found


class Source:
    """A cluster whose node may change between two questions."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)

    async def run(self, operation, *args):
        node = self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]
        operation = operation(*args)
        script = next(operation)
        try:
            operation.send([_Result(node.rows(script))])
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one question, one answer")


class _Result:
    def __init__(self, rows: list[tuple]) -> None:
        self.rows = rows


async def test_a_minion_that_lags_hides_no_head_for_good():
    """The master tells that heads moved and dies; a minion tells the heads, and shows the last ones only later."""
    seen: dict[int, Location] = {}
    master, lagging, caught_up = Node({0: 5, 1: 3}), Node({0: 4, 1: 3}), Node({0: 5, 1: 3})
    watch = ClusterHeads(Source(master, master, lagging, caught_up), lambda name, heads: seen.update(heads))
    await watch.step()
    assert seen[0] == Location(1, 4)
    assert await watch.step()
    assert seen[0] == Location(1, 5)
    assert not await watch.step()


async def test_only_blocks_with_news_are_read():
    """4096 shards, one head moves: of all the others only the block's neighbours are read again."""
    seen: dict[int, Location] = {}
    node = Node(dict.fromkeys(range(4096), 1))
    watch = ClusterHeads(Source(node), lambda name, heads: seen.update(heads))
    await watch.step()
    assert seen == dict.fromkeys(range(4096), Location(1, 1))
    seen.clear()
    node.heads[700], node.heads_told = 2, 0
    assert await watch.step()
    assert seen == {700: Location(1, 2)}
    assert node.heads_told == BLOCK_SHARDS
    assert not await watch.step()


async def test_a_head_that_goes_back_is_seen_too():
    """A lagging minion, or a restored master: what moved is told, in whichever direction."""
    seen: dict[int, Location] = {}
    node = Node({0: 5, 200: 3})
    watch = ClusterHeads(Source(node), lambda name, heads: seen.update(heads))
    await watch.step()
    node.heads[0] = 2
    assert await watch.step()
    assert seen == {0: Location(1, 2), 200: Location(1, 3)}


async def test_where_there_is_one_block_nobody_asks_which_it_was():
    """Two questions tell what moved, until new shards come: then the blocks are asked for again."""
    seen: dict[int, Location] = {}
    node = Node({0: 5, 1: 3})
    watch = ClusterHeads(Source(node), lambda name, heads: seen.update(heads))
    await watch.step()
    node.heads[1], node.questions = 4, 0
    assert await watch.step()
    assert (seen[1], node.questions) == (Location(1, 4), 2)
    node.heads[200] = 7
    assert await watch.step()
    assert seen[200] == Location(1, 7)
    assert not await watch.step()
