"""Rows that a query found wrong are repaired, also beside one that can't be compared. What is dropped is counted."""

import pytest

from api.index import passes
from api.index.passes import ROWS_AT_ONCE, QueuedRepairs
from schemaless.cell import RowKey
from schemaless.errors import Corrupt, StorageUnavailable
from schemaless.index.definition import parse_definition
from schemaless.index.inspection import InspectedSpan, Repaired
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 1, ())
DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
    }
)


def rows(*numbers):
    return [RowKey(number.to_bytes(16, "big")) for number in numbers]


class Inspector:
    """Compares rows, and finds each of them wrong. Some can't be compared."""

    def __init__(self, *arguments):
        self.datastore = self.placed = DATASTORE
        self.definition = DEFINITION
        self.poisoned, self.unreadable, self.away = set(), set(), 0
        self.compared, self.sizes = [], []

    async def of_rows(self, nodes, row_keys):
        self.sizes.append(len(row_keys))
        if self.away:
            self.away -= 1
            raise StorageUnavailable("a server is away")
        if self.poisoned.intersection(row_keys):
            raise Corrupt("a body can't be read")
        self.compared += row_keys
        unreadable = {row_key: "a body can't be read" for row_key in row_keys if row_key in self.unreadable}
        return InspectedSpan(len(row_keys), {}, {"a": list(row_keys)}, (), unreadable, row_keys[-1])

    async def repair(self, faults):
        return Repaired(len(faults))


@pytest.fixture
def inspector(monkeypatch):
    made = Inspector()
    monkeypatch.setattr(passes, "IndexInspector", lambda *arguments: made)
    return made


async def finish(queue):
    while len(queue):
        await queue.step()


async def test_one_row_that_cannot_be_compared_costs_no_other_its_repair(inspector):
    """The hundred are tried again by tens, and the ten of that row one by one. Only it is dropped, and counted."""
    queue = QueuedRepairs(storage=None)
    queue.add(DATASTORE, DEFINITION, rows(*range(100)))
    inspector.poisoned = set(rows(41))
    await finish(queue)
    assert sorted(inspector.compared) == rows(*(n for n in range(100) if n != 41))
    assert dict(queue.counts) == {("compared",): 99, ("dropped",): 1}
    assert len(inspector.sizes) == 1 + 10 + 10


async def test_a_row_that_cant_be_read_is_dropped_at_once(inspector):
    """Its cell stays as it is, so trying again would be no use. The others are compared."""
    queue = QueuedRepairs(storage=None)
    queue.add(DATASTORE, DEFINITION, rows(*range(100)))
    inspector.unreadable = set(rows(41))
    await finish(queue)
    assert dict(queue.counts) == {("compared",): 99, ("dropped",): 1}
    assert len(inspector.sizes) == 1


async def test_rows_outlive_a_short_outage(inspector):
    """A server that is away for a moment drops nothing. One that stays away is given up after some attempts."""
    queue = QueuedRepairs(storage=None)
    queue.add(DATASTORE, DEFINITION, rows(*range(30)))
    inspector.away = 1
    await finish(queue)
    assert sorted(inspector.compared) == rows(*range(30))
    queue.add(DATASTORE, DEFINITION, rows(*range(30)))
    inspector.away, inspector.sizes = 10**6, []
    await finish(queue)
    assert queue.counts["dropped",] == 30
    assert inspector.sizes == [30] + [10] * 3 + [1] * 30


async def test_new_rows_wait_for_none_that_failed(inspector):
    """What failed goes behind what came meanwhile. A row that waits is queued once."""
    queue = QueuedRepairs(storage=None)
    queue.add(DATASTORE, DEFINITION, rows(1))
    inspector.poisoned = set(rows(1))
    await queue.step()
    queue.add(DATASTORE, DEFINITION, rows(1, 2))
    assert len(queue) == 2
    await finish(queue)
    assert inspector.compared == rows(2)
    assert inspector.sizes == [1] * (len(ROWS_AT_ONCE) + 1)


async def test_the_queue_is_bounded_and_counts_what_it_does_not_take(inspector, monkeypatch):
    """I14: a table that is damaged as a whole doesn't fill the memory. The index cleaner repairs the rest."""
    monkeypatch.setattr(passes, "ROWS_MAX", 50)
    queue = QueuedRepairs(storage=None)
    queue.add(DATASTORE, DEFINITION, rows(*range(60)))
    assert (len(queue), queue.counts["dropped",]) == (50, 10)
    await finish(queue)
    assert queue.counts["compared",] == 50
