"""Who inserted a buffer row is known on a re-run, also where two puts insert the same cell (S1, I6)."""

from types import SimpleNamespace

import pytest

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.errors import Busy, DuplicateKey
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 8, 2, ("a",))
KEY = CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1))


@pytest.fixture(autouse=True)
def same_bodies(monkeypatch):
    def same(rows, *_):
        yield from ()
        return [True] * len(rows)

    monkeypatch.setattr(entity_table, "same_as_stored", same)


def run(claim, owner):
    """Runs a put with a claim where the row of an owner is there, or none. Returns its generator at the last script."""
    operation = buffer_table._insert_missing(TRIPS, [BufferRow(KEY, b"body", 0, "a", claim)])
    next(operation)
    found = SimpleNamespace(rows=[] if owner is None else [(owner,)])
    return operation, operation.send([SimpleNamespace(rows=[]), found])


def outcome(operation):
    with pytest.raises(StopIteration) as ended:
        operation.send([])
    return ended.value.value


def test_the_second_inserter_shares_the_row_when_it_runs_again():
    """Both saw no row. The second one meets the first one's, runs again, and never takes it for its own."""
    first, inserts = run(claim=1, owner=None)
    second, also_inserts = run(claim=2, owner=None)
    assert "INSERT" in inserts
    assert "INSERT" in also_inserts
    assert outcome(first) == [BufferOutcome.INSERTED]
    with pytest.raises(Busy):
        second.throw(DuplicateKey("buffer"))
    again, takes_over = run(claim=2, owner=1)
    assert "INSERT" not in takes_over
    assert "UPDATE" in takes_over
    assert outcome(again) == [BufferOutcome.SHARED]


def test_an_inserter_that_runs_again_still_owns_its_row():
    """Its first run was committed, and the answer was lost. A conflict at home then removes the row."""
    again, changes = run(claim=1, owner=1)
    assert outcome(again) == [BufferOutcome.INSERTED]
    assert "INSERT" not in changes
    assert "UPDATE" not in changes
