"""Erasures in trigger programs (I19): what has no body is called for nobody, and no error tells of it any longer."""

import asyncio

import pytest

from schemaless import RetryPolicy, trigger
from schemaless.cell import erasure_id
from schemaless.codec import decode_body
from schemaless.consume.ports import Death
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.storage.parked_table import Ending
from tests.unit.schemaless.consume.parking_world import SHARD, Order, Process, Server, row_key

ONCE = RetryPolicy(attempts=1)


class ErasingServer(Server):
    def erase(self, row, *added_ids, column="BASE"):
        """Erases cells of a row. Returns the added_id of the entry that says so."""
        return self.table.erase(SHARD, row_key(row).bytes, {column: list(added_ids)}).added_id


class Program:
    """A function that tells of the body in its error. `poison` are the refs of cells for which it fails."""

    def __init__(self, *poison, **options):
        self.called, self.poison = [], set(poison)

        def call(cell):
            self.called.append(cell.ref_key)
            if cell.ref_key in self.poison:
                raise ValueError(f"secret {cell.n}")

        self.function = trigger(column="BASE", name="f", **options)(call)


@pytest.fixture(params=[1, 4], ids=["one lane", "lanes"])
def parallel(request):
    return request.param


@pytest.fixture
def server():
    return ErasingServer()


async def test_a_cell_without_a_body_and_the_entry_are_called_for_nobody(server, parallel):
    """They are finished as those of other columns are."""
    for row in (1, 1, 2):
        server.write(row)
    server.erase(1, 1)
    program = Program()
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(1)
    assert sorted(program.called) == [2, 3]
    assert server.counts == CellCounts(called=2, filtered=2)


@pytest.mark.parametrize("attempts", [1, 5], ids=["parked", "waiting"])
async def test_a_cell_that_is_set_aside_ends_when_its_body_is_erased(server, parallel, attempts):
    """Its row goes on. Its error is empty from the moment when the program passes the entry."""
    for _ in range(3):
        server.write(1)
    program = Program(1, retry=RetryPolicy(attempts=attempts, delay=60.0))
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(1)
    assert "secret 1" in server.parked[1].error
    entry = server.erase(1, 1)
    errors = []
    run_script = server.run_script

    def watch(script):
        run_script(script)
        if server.position.added_id == entry:
            errors.append([record.error for record in server.records()])

    server.run_script = watch
    await process.pass_by(3)
    assert errors
    assert not any(error for found in errors for error in found)
    assert program.called == [1, 2, 3]
    assert server.parked == {}
    assert server.counts == CellCounts(called=2, filtered=2)
    if attempts == 1:
        assert list(server.history) == [(1, Ending.ERASED)]


async def test_entries_among_other_cells_empty_errors_too(server, parallel):
    """All of them come in one page of the log."""
    for row in (1, 2):
        server.write(row)
    program = Program(1, 2, retry=ONCE)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(1)
    assert all("secret" in record.error for record in server.records())
    server.write(3)
    server.erase(1, 1)
    server.write(1)
    server.erase(2, 2)
    server.write(3)
    await process.pass_by(3)
    assert (server.parked, sorted(program.called)) == ({}, [1, 2, 3, 5, 7])
    assert sorted(server.history) == [(1, Ending.ERASED), (2, Ending.ERASED)]
    assert server.counts == CellCounts(called=3, filtered=4)


async def test_the_next_worker_ends_what_the_one_before_left(server, parallel):
    """It died right after the transaction that passed the entry."""
    for _ in range(2):
        server.write(1)
    program = Program(1, retry=ONCE)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(1)
    entry = server.erase(1, 1)
    orders, server.due = server.due, list  # it never learns that the record is to be called
    await process.pass_by(1)
    assert (server.position.added_id, server.causes()) == (entry, {1: "error"})
    assert (server.parked[1].error, server.parked[1].ordered) == ("", Order.RETRY)
    await process.kill()
    server.due = orders
    await Process(server, 2, [program.function], parallel=parallel).pass_by(3)
    assert (program.called, server.parked, list(server.history)) == ([1, 2], {}, [(1, Ending.ERASED)])


async def test_what_waits_behind_without_a_body_is_passed_over(server, parallel):
    """Behind a parked cell, before the program meets the entry."""
    for _ in range(4):
        server.write(1)
    program = Program(1, retry=ONCE)
    process = Process(server, 1, [program.function], parallel=parallel)
    await process.pass_by(1)
    assert server.counts == CellCounts(parked=1, waiting=3)
    server.erase(1, 2, 3)
    program.poison.clear()
    server.order(1, Order.RETRY)
    await process.pass_by(3)
    assert program.called == [1, 1, 4]
    assert server.counts == CellCounts(called=2, filtered=3)


async def test_a_call_that_ends_after_the_entry_leaves_no_error(server):
    """It had the body when it began, and outlasts its pass."""
    server.write(1)
    ends, called = asyncio.Event(), []

    @trigger(column="BASE", retry=ONCE)
    async def slow(cell):
        called.append(cell.n)
        await ends.wait()
        raise ValueError(f"secret {cell.n}")

    process = Process(server, 1, [slow], parallel=4)
    await process.pass_by(2)
    entry = server.erase(1, 1)
    await process.pass_by(2)
    assert (server.position.added_id, called) == (entry, [1])
    ends.set()
    await process.pass_by(3)
    assert (server.parked, server.counts) == ({}, CellCounts(filtered=2))


async def test_a_function_for_erasures_gets_the_entry(server, parallel):
    """Of its column, or of any. It comes in its place in the row, and fails and waits as every call."""
    seen = []

    @trigger(erased=True, column="BASE")
    def of_base(cell):
        seen.append(("base", cell.column_name, dict(cell.cells)))
        if len(seen) == 1:
            raise ValueError

    @trigger(erased=True)
    def of_all(cell, context):
        seen.append(("all", cell.erasure, dict(cell.cells)))

    server.write(1)
    server.write(1, "STATUS")
    entry = server.erase(1, 1)
    server.erase(1, 2, column="STATUS")
    process = Process(server, 1, [of_base, of_all], parallel=parallel)
    await process.pass_by(1)
    assert server.causes() == {entry: "waiting"}
    await process.pass_by(5)
    id = erasure_id(1)
    assert seen == [
        ("base", "$erase", {"BASE": [1]}),
        ("base", "$erase", {"BASE": [1]}),
        ("all", id, {"BASE": [1]}),
        ("all", id, {"STATUS": [2]}),
    ]
    assert server.counts == CellCounts(called=2, filtered=2)


async def test_a_function_for_erasures_is_called_behind_what_its_row_waits_for(server):
    """The parked cell ends first, then what waits behind it, then the entry."""
    order = []

    @trigger(column="BASE", retry=ONCE)
    def of_cells(cell):
        order.append(cell.ref_key)
        if cell.ref_key == 1:
            raise ValueError

    @trigger(erased=True)
    def of_erasures(cell):
        order.append("erased")

    server.write(1)
    server.write(1)
    process = Process(server, 1, [of_cells, of_erasures])
    await process.pass_by(1)
    server.erase(1, 1)
    server.write(1)
    await process.pass_by(3)
    assert order == [1, 2, "erased", 4]
    assert server.counts == CellCounts(called=3, filtered=1)


async def test_an_entry_that_kills_its_worker_is_parked_and_empties_errors_all_the_same(server):
    """The suspect is judged without a call."""

    @trigger(erased=True)
    def deadly(cell):
        raise AssertionError("not called")

    program = Program(1, retry=ONCE)
    server.write(1)
    process = Process(server, 1, [program.function, deadly])
    await process.pass_by(1)
    entry = server.erase(1, 1)
    cell = server.cells[-1]
    assert (cell.added_id, decode_body(cell.body)["cells"]) == (entry, {"BASE": [1]})
    outcome = process.handler.judge_suspect(cell, 10, Death.KILLED)
    assert f"erase {row_key(1).bytes.hex()} BASE:1" in outcome.script.split(";")
