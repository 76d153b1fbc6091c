"""A tailer publishes a shard that moves, from its new home, as if nothing had happened (I7)."""

import asyncio

import pytest

from schemaless.ops.tailers import read_tailer_status
from schemaless.topology import Role
from tests.log_harness import new_cell, put, records, wait_for_cells
from tests.move_harness_f import Move, Writers, move_shard, moved_while_written, places
from tests.waiting import async_until


@pytest.mark.parametrize("read_from", [Role.MASTER, Role.MINION])
async def test_a_shard_that_moves_is_published_once_in_order_and_whole(
    read_from, running, kafka, new_datastore, async_storage, tailing
):
    """There and back, while cells are written: no announcement, no restart, nothing twice, nothing missing."""
    datastore = new_datastore(shards=4, partitions=2)
    tailing(datastore, read_from=read_from)
    async with Writers(async_storage, datastore, range(4)) as writers:
        await moved_while_written(Move(running, datastore, 0, "b"), writers)
        await moved_while_written(Move(running, datastore, 1, "a"), writers)
        await moved_while_written(Move(running, datastore, 0, "a"), writers)
    cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, writers.put)
    assert places(cells) == {shard: list(range(1, len(found) + 1)) for shard, found in places(cells).items()}
    assert len(cells) == writers.put
    assert {record.kind for record in records(kafka, datastore)} == {b"cell"}


async def test_a_tailer_that_starts_later_looks_at_the_present_home(
    running, kafka, storage, new_datastore, async_storage, tailing
):
    """The head that stays at the former home is lower: it hides nothing, and no cell is waited for."""
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1) for _ in range(5)])
    move_shard(running, datastore, 1, "a")
    put(storage, datastore, [new_cell(datastore, shard=1) for _ in range(60)])
    service = tailing(datastore)
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 70)
    (tailer,) = service.datastores
    await async_until(lambda: all(owned.shards and not owned.shards.lag_cells() for owned in tailer.partitions))
    status = await asyncio.to_thread(read_tailer_status, storage, kafka, storage.live(datastore))
    assert [(shard.head.added_id, shard.lag, shard.problem) for shard in status.shards] == [(5, 0, None), (65, 0, None)]


async def test_cells_that_came_before_it_knew_of_the_move_are_published(
    running, kafka, storage, new_datastore, async_storage, tailing
):
    """The head of the new home was seen before, and doesn't move again."""
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=1) for _ in range(5)])
    tailing(datastore)
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 5)
    move_shard(running, datastore, 1, "a")
    put(storage, datastore, [new_cell(datastore, shard=1) for _ in range(5)])
    cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 10)
    assert places(cells) == {1: list(range(1, 11))}
