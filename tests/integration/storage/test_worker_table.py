"""Rows of workers on real servers, and what checkpoints say of them."""

import pytest

from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.ports import Advance, Mark, Predecessor
from schemaless.consume.worker import Worker
from schemaless.position import Position
from schemaless.storage import checkpoint_table, worker_table
from schemaless.storage.operation import query

pytestmark = pytest.mark.storage

CONSUMER = "trigger:test"


def at(shard, added_id):
    return Position(shard, 1, added_id, digest=added_id * 7)


class Process:
    def __init__(self, storage, datastore):
        self.worker = Worker(storage, datastore, CONSUMER)
        self.checkpoints = Checkpoints(
            CommitLanes(storage, datastore, self.worker), CONSUMER, CheckpointPlacement.HOME
        )  # fmt: skip

    async def found(self, shard=0):
        found = (await self.checkpoints.read([shard]))[shard]
        return found.predecessor, found.kills

    async def begin_call(self, added_id, kills=0):
        return await self.checkpoints.move({0: Advance(at(0, added_id), mark=Mark(True, kills))}, {})


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=2, partitions=1)


@pytest.fixture
def process(async_storage, datastore):
    return lambda: Process(async_storage, datastore)


async def test_a_call_that_had_begun_when_its_process_died_is_counted_once(process):
    first, second, third = process(), process(), process()
    assert await first.found() == (Predecessor.LEFT, 0)
    assert not await first.begin_call(4)
    assert await first.found() == (Predecessor.OURSELVES, 0)
    assert await second.found() == await third.found() == (Predecessor.DIED, 1)
    assert not await second.begin_call(4, kills=1)
    assert await third.found() == (Predecessor.DIED, 2)
    assert not await second.checkpoints.move({0: Advance(at(0, 5), 1)}, {})
    assert await third.found() == (Predecessor.DIED, 0)


async def test_a_process_that_stops_or_gives_a_shard_away_is_blamed_for_nothing(process):
    first, second = process(), process()
    await first.found()
    await first.begin_call(4)
    await first.checkpoints.give_away([0])
    assert await second.found() == (Predecessor.LEFT, 0)
    assert await first.begin_call(4) == frozenset()  # giving away is no move
    await first.worker.leave()
    assert await second.found() == (Predecessor.LEFT, 0)


async def test_of_two_processes_that_claim_a_shard_at_once_one_has_it(process):
    """Their moves lead to the same location. So the number of the process tells them apart."""
    first, second = process(), process()
    await first.found()
    await second.found()
    claim = Advance(at(0, 0), mark=Mark(begun=False))
    assert await first.checkpoints.move({0: claim}, {}) == frozenset()
    assert await second.checkpoints.move({0: claim}, {}) == {0}


async def test_a_shard_that_is_resumed_has_all_its_attempts(process, storage, datastore):
    first = process()
    await first.found()
    await first.checkpoints.move({0: Advance(at(0, 4), stop_reason="killed", mark=Mark(False, 3))}, {})
    assert await first.found() == (Predecessor.OURSELVES, 3)
    storage.master(datastore.home(0)).run(checkpoint_table.resume, datastore.name, CONSUMER)
    assert await first.found() == (Predecessor.LEFT, 0)


async def test_rows_of_dead_processes_stay_while_a_checkpoint_names_them(process, storage, datastore):
    first, second = process(), process()
    await first.found()
    await second.found()
    await first.begin_call(4)
    node = storage.master(datastore.home(0))
    node.run(query, f"UPDATE schemaless.worker SET seen_at = '2020-01-01' WHERE datastore = '{datastore.name}'")
    node.run(worker_table.remove_forgotten, datastore.name, CONSUMER, 600.0)
    assert node.run(worker_table.numbers_of, datastore.name, CONSUMER) == {first.worker.number}
    (row,) = node.run(worker_table.of_datastore, datastore.name)
    assert row.age_s > 600
