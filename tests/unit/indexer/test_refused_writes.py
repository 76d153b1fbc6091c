"""An index fails when the same shard is refused again and again, and not for an outage or another index's fault."""

import pytest

from indexer.walker import FAILED_AFTER_S, FAILED_AFTER_TIMES, RefusedWrites
from schemaless.consume.ports import Advance
from schemaless.errors import NodeRefuses, RefusedForGood, StorageUnavailable, TableMissing
from schemaless.position import Position


class Store:
    """Checkpoints whose next moves have these outcomes."""

    consumer = "index:x"

    def __init__(self):
        self.error = None

    async def move(self, advances, effects):
        if self.error is not None:
            raise self.error
        return frozenset()


class Harness:
    def __init__(self):
        self.now = 0.0
        self.store = Store()
        self.writes = RefusedWrites(self.store, clock=lambda: self.now)

    async def move(self, shard, error=None, after_s=FAILED_AFTER_S):
        self.now += after_s
        self.store.error = error
        advances = {shard: Advance(Position(shard, 1, 1))}
        if error is None:
            return await self.writes.move(advances, {})
        with pytest.raises(type(error)):
            await self.writes.move(advances, {})


async def test_a_shard_that_is_refused_again_and_again_fails_the_index():
    """Not before it was refused for a while, and so often. The reason names the shard and the server's words."""
    harness = Harness()
    for _ in range(FAILED_AFTER_TIMES - 1):
        await harness.move(3, TableMissing("a: there is no index_x"))
        await harness.move(1)  # other shards go on
        assert harness.writes.reason is None
    await harness.move(3, TableMissing("a: there is no index_x"))
    assert "shard 3" in harness.writes.reason
    assert "there is no index_x" in harness.writes.reason


async def test_a_success_in_between_shows_that_another_index_was_at_fault():
    """Writes of several indexes share a transaction, and so an error."""
    harness = Harness()
    for _ in range(10):
        await harness.move(3, RefusedForGood("too long"))
        await harness.move(3)
    assert harness.writes.reason is None


@pytest.mark.parametrize("error", [StorageUnavailable("away"), NodeRefuses("too many connections")])
async def test_an_outage_never_fails_an_index(error):
    """It waits, however long it takes."""
    harness = Harness()
    for _ in range(100):
        await harness.move(3, error)
    assert harness.writes.reason is None


async def test_refusals_within_a_moment_are_not_enough():
    """A server that is being repaired gets some seconds."""
    harness = Harness()
    for _ in range(100):
        await harness.move(3, RefusedForGood("no right"), after_s=FAILED_AFTER_S / 200)
    assert harness.writes.reason is None
