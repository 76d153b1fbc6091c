"""The tailer's watch over heads: no head that moved stays unseen (I7)."""

from schemaless.location import Location
from tailer.head_watch import HeadWatch


class Node:
    """Answers what one server would, from its heads by shard."""

    def __init__(self, heads: dict[int, int]) -> None:
        self.heads = heads

    def rows(self, script: str) -> list[tuple]:
        if "SUM(head)" in script:
            return [("flights", sum(self.heads.values()), len(self.heads))]
        return [(shard, 1, added_id, 0) for shard, added_id in self.heads.items()]


class Source:
    """A cluster whose node may change between two questions."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)

    async def run(self, start):
        node = self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]
        operation = start()
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
    watch = HeadWatch(Source(master, lagging, caught_up), lambda name, heads: seen.update(heads))
    await watch.step()
    assert seen[0] == Location(1, 4)
    assert await watch.step()
    assert seen[0] == Location(1, 5)
    assert not await watch.step()
