"""Bodies compared with stored ones: what is asked of the server, how often, and what is decoded (I1, I14)."""

from hashlib import sha256

import pytest

from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import DuplicateKey
from schemaless.storage import append, entity_table
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import PAUSE, Result
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 4, 2, ("a",))


def cell(body, ref_key=1):
    return ShardCell(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(ref_key)), encode_body(body), 3)


def compare(cells):
    return entity_table.same_as_stored(cells, {}, lambda cell, what: f"SELECT {what} FROM somewhere")


class Server:
    """Has one body under every key. `read` counts the statements that brought bodies, and `pauses` the pauses."""

    def __init__(self, body):
        self.body = encode_body(body)
        self.read = self.statements = self.pauses = 0

    def run(self, operation):
        try:
            script = next(operation)
            while True:
                script = operation.send(self._answer(script))
        except StopIteration as stop:
            return stop.value

    def _answer(self, script):
        if script is PAUSE:
            self.pauses += 1
            return []
        return [Result([self._row(statement)]) for statement in script.split(";")]

    def _row(self, statement):
        self.statements += 1
        if statement.startswith("SELECT LENGTH(body)"):
            return len(self.body), sha256(self.body).digest()
        if statement.startswith("SELECT body"):
            self.read += 1
            return (self.body,)
        return 1, 42, 99, None


def test_a_thousand_repeats_ask_once():
    """One look at the length, at most one body read, and one decoding, however often a key repeats."""
    server = Server({"a": [[]] * 40_000})
    same = server.run(compare([cell({})] * 999 + [cell({"a": [[]] * 40_000})]))
    assert same == [False] * 999 + [True]
    assert (server.statements, server.read) == (2, 1)


def test_bodies_that_cannot_be_the_same_stay_on_the_server():
    """A body that is too long for any order of the same members is never moved."""
    server = Server({"a": "".join(map(chr, range(500, 9000)))})
    assert server.run(compare([cell({}, n) for n in range(100)])) == [False] * 100
    assert server.read == 0


def test_large_comparisons_pause():
    """Between bodies that are decoded, others have their turn."""
    server = Server({"a": "x" * 300_000, "b": 1})
    other_order = [cell({"b": 1, "a": "x" * 300_000}, n) for n in range(5)]
    assert server.run(compare(other_order)) == [True] * 5
    assert server.pauses == 5


@pytest.mark.parametrize("exists", [False, True])
def test_a_repeat_in_a_batch_is_compared_with_its_own_first_item(monkeypatch, exists):
    """A key that comes twice counts in order, and its repeats ask the server nothing."""
    server = Server({"a": 1})

    def insert_new(datastore, cells, latest):
        if exists:
            raise DuplicateKey("exists")
        return [append._placed(Head(3, 1, 41, 99), 1) for _ in cells]
        yield

    monkeypatch.setattr(append, "insert_new", insert_new)
    bodies = [{"a": 1}, {"a": 1}, {"a": 1.0}, {}, {"a": 1}]
    places = server.run(entity_table.put_cells(TRIPS, [cell(body) for body in bodies]))
    first = PutStatus.ALREADY_STORED if exists else PutStatus.STORED
    same, other = PutStatus.ALREADY_STORED, PutStatus.CONFLICT
    assert [place.status for place in places] == [first, same, other, other, same]
    assert {place.added_id for place in places} == {42}
    assert server.read <= 1
    assert exists or server.statements == 0
