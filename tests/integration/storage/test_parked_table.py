"""Parked cells on real servers: what a worker reads of them, and what its scripts leave."""

import msgspec
import pytest

from schemaless.consume.parked_rows import head_of
from schemaless.storage import parked_table
from schemaless.storage.operation import query
from schemaless.storage.parked_table import Cause, Ending
from tests.log_harness import run_sql
from tests.topic_harness import stored_cell

pytestmark = pytest.mark.storage

CONSUMER = "trigger:test"
ROW = bytes(16)


@pytest.fixture
def node(storage):
    return storage.master("a")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=8, partitions=1).name


def record(shard, added_id, cause=Cause.ERROR):
    cell = stored_cell(shard, added_id)
    return head_of(cell, "f", cause, "ValueError", 1_000_000 * added_id, "v1")


def put(node, datastore, *records):
    run_sql(node, ";".join(parked_table.put(datastore, CONSUMER, one) for one in records))


@pytest.mark.parametrize("page_rows", [1, 2, 3, 100])
def test_the_records_of_many_shards_take_one_statement_for_each_page(node, datastore, page_rows):
    """Not one for each shard: a worker takes over thousands of shards, and few have parked cells."""
    wanted = {(0, 1), (0, 2), (0, 9), (3, 4), (5, 1), (5, 7)}
    put(node, datastore, *(record(shard, added_id) for shard, added_id in {*wanted, (2, 1), (7, 1)}))
    statements = []

    def counted(operation):
        script = next(operation)
        while True:
            statements.append(script)
            try:
                script = operation.send((yield script))
            except StopIteration as done:
                return done.value

    read = parked_table.of_shards(datastore, CONSUMER, [5, 3, 1, 0], page_rows)
    found = node.run(lambda: counted(read))
    assert [(one.shard, one.added_id) for one in found] == sorted(wanted)
    assert len(statements) == len(wanted) // page_rows + 1


def test_the_history_is_bounded(node, datastore):
    """The oldest go, those beyond a number and those beyond an age. What another program has counts, too."""
    run_sql(node, "DELETE FROM schemaless.parked_history")
    records = [msgspec.structs.replace(record(0, n), row_key=ROW) for n in range(1, 8)]
    put(node, datastore, *records)
    for one in records:
        run_sql(node, parked_table.keep(datastore, CONSUMER, 0, one.added_id, Ending.FINISHED))
    old = f"UPDATE schemaless.parked_history SET ended_at = ended_at - INTERVAL 31 DAY WHERE datastore = '{datastore}'"
    run_sql(node, f"{old} AND added_id = 7")

    def kept():
        found = node.run(parked_table.ended_of_row, datastore, [CONSUMER], ROW, 100)
        return sorted(one.record.added_id for one in found[CONSUMER])

    node.run(parked_table.forget_old_history)
    assert kept() == [1, 2, 3, 4, 5, 6]
    node.run(parked_table.forget_old_history, parked_table.KEPT_DAYS, 2)
    assert kept() == [5, 6]


def test_a_history_within_its_bounds_is_not_read(node, datastore):
    """A look finds by key that nothing has to go, and else reads what it deletes: not all that stays."""
    run_sql(node, "DELETE FROM schemaless.parked_history")
    records = [msgspec.structs.replace(record(0, n), row_key=ROW) for n in range(1, 301)]
    put(node, datastore, *records)
    for one in records:
        run_sql(node, parked_table.keep(datastore, CONSUMER, 0, one.added_id, Ending.FINISHED))

    def reads():
        counters = yield from query("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(count) for _, count in counters)

    def rows_read(*bounds):
        first, second = (yield from reads()), (yield from reads())
        yield from parked_table.forget_old_history(*bounds)
        return (yield from reads()) - second - (second - first)

    days = parked_table.KEPT_DAYS
    assert node.run(rows_read, days, 300) <= 10
    assert node.run(rows_read, days, 295) <= 20
    (kept,) = node.run(query, "SELECT COUNT(*) FROM schemaless.parked_history")
    assert kept == (295,)


def test_a_mark_that_is_taken_away_leaves_the_order_and_the_error(node, datastore):
    """The process that set the mark died. The cell is called again."""
    put(node, datastore, record(0, 1))
    run_sql(node, parked_table.begin(datastore, CONSUMER, 0, 1))
    run_sql(node, "UPDATE schemaless.parked SET ordered = 'retry', due_at = UTC_TIMESTAMP(6)")
    run_sql(node, parked_table.unmark(datastore, CONSUMER, 0, 1, 2))
    rows = node.run(
        query, f"SELECT begun, kills, ordered, error FROM schemaless.parked WHERE datastore = '{datastore}'"
    )
    assert rows == ((0, 2, "retry", "ValueError"),)
