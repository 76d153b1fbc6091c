"""TriggerKit: what a test may do to a program, and what it sees of it."""

import asyncio
import subprocess
import sys
import uuid

import pytest

from schemaless import Park, RetryPolicy, Stop, trigger
from schemaless.errors import Misconfigured, Unavailable
from schemaless.storage.checkpoint_table import CellCounts

ROWS = [uuid.UUID(int=n) for n in range(8)]
ONCE = RetryPolicy(attempts=1)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def function(request):
    """Makes a marked function of a plain one."""

    def made(body, **options):
        def call(cell, context):
            body(cell, context)

        async def acall(cell, context):
            body(cell, context)

        return trigger(column="BASE", name="f", **options)(acall if request.param else call)

    return made


def nothing(cell, context):
    pass


def refs(kit):
    return [call.ref_key for call in kit.calls]


def test_cells_are_delivered_in_order_and_a_failed_call_comes_again_later(trigger_kit, function):
    kit = trigger_kit([function(nothing, retry=RetryPolicy(attempts=2, delay=5, jitter=0))])
    kit.put(ROWS[0], "BASE", {"n": 1})
    kit.fail_next(ValueError("broken"))
    kit.deliver()
    assert [(cell.cause, cell.attempts) for cell in kit.waiting()] == [("waiting", 1)]
    kit.put(ROWS[0], "BASE", {"n": 2})
    kit.advance(4)
    assert refs(kit) == [1]
    kit.advance(2)
    assert [(call.ref_key, call.attempt, str(call.error)) for call in kit.calls] == [
        (1, 1, "broken"), (1, 2, "None"), (2, 1, "None"),
    ]  # fmt: skip
    assert (kit.waiting(), kit.counts.called) == ([], 2)


def test_a_parked_cell_holds_its_row_until_it_is_called_again_or_discarded(trigger_kit, function):
    kit = trigger_kit([function(nothing, retry=ONCE)])
    for row in ROWS[:3]:
        kit.put(row, "BASE", {})
        kit.put(row, "BASE", {})
    kit.fail_next(ValueError("no address"), times=2)
    kit.deliver()
    first, second = kit.parked()
    assert ({first.row_key, second.row_key}, first.holds_row, first.cause) == (set(ROWS[:2]), True, "error")
    assert kit.counts == CellCounts(called=2, parked=2, waiting=2)
    kit.retry([first])
    kit.discard([second])
    kit.deliver()
    assert kit.parked() == []
    assert kit.counts == CellCounts(called=5, skipped=1)


def test_verdicts_are_those_of_a_worker(trigger_kit, function):
    verdicts = {1: Park("no card"), 2: Stop("the key is wrong")}

    def call(cell, context):
        raise verdicts[cell.ref_key]

    kit = trigger_kit([function(call)])
    kit.put(ROWS[0], "BASE", {})
    kit.put(ROWS[1], "BASE", {}, 2)
    kit.deliver()
    assert [(cell.cause, cell.error) for cell in kit.parked()] == [("verdict", "no card")]
    assert "the key is wrong" in kit.stopped[0]


def test_everything_comes_again_with_redeliver(trigger_kit, function):
    """In the same order. Parked cells come, too."""
    kit = trigger_kit([function(nothing, retry=ONCE)])
    for n in (1, 2, 3):
        kit.put(ROWS[n], "BASE", {})
    kit.fail_next(ValueError())
    kit.redeliver()
    assert [call.row_key for call in kit.calls] == ROWS[1:4] * 2
    assert (kit.parked(), kit.counts) == ([], CellCounts(called=3))


def test_rows_are_reordered_and_each_rows_cells_are_not(trigger_kit, function):
    """By a seed, so that a failure can be repeated."""

    def order(seed):
        kit = trigger_kit([function(nothing)])
        for row in ROWS:
            kit.put(row, "BASE", {})
        kit.put(ROWS[0], "BASE", {})
        kit.deliver_shuffled(seed)
        return [(call.row_key, call.ref_key) for call in kit.calls]

    orders = [order(seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    for found in orders:
        assert sorted(found) == [(ROWS[0], 1), (ROWS[0], 2), *((row, 1) for row in ROWS[1:])]
        assert found.index((ROWS[0], 1)) < found.index((ROWS[0], 2))


def test_a_held_row_waits_and_others_go_on(trigger_kit, function):
    kit = trigger_kit([function(nothing)])
    kit.hold(ROWS[0])
    kit.put(ROWS[0], "BASE", {})
    kit.put(ROWS[1], "BASE", {})
    kit.advance(5)
    assert [call.row_key for call in kit.calls] == [ROWS[1]]
    kit.release(ROWS[0])
    kit.advance(1)
    assert [call.row_key for call in kit.calls] == [ROWS[1], ROWS[0]]


def test_a_worker_is_killed_between_effect_and_checkpoint(trigger_kit, function):
    """The next one calls the cell again, with attempt 1."""
    kit = trigger_kit([function(lambda cell, context: None)])
    kit.put(ROWS[0], "BASE", {})
    kit.deliver()
    reached = [point for point in kit.points if point != "before the checkpoint"]
    assert reached[-3:] == ["before f", "after f", "after the checkpoint"]
    again = trigger_kit([function(nothing)])
    again.put(ROWS[0], "BASE", {})
    again.kill_at(kit.points.index("after f"))
    again.deliver()
    assert (again.kills, again.counts) == (1, CellCounts())
    again.deliver()
    assert [(call.ref_key, call.attempt) for call in again.calls] == [(1, 1), (1, 1)]
    assert (again.kills, again.counts) == (1, CellCounts(called=1))


def test_a_kill_in_a_function_ends_it_there(trigger_kit, function):
    """It passes `except Exception`, and nothing that the function does afterwards has an effect."""
    done = []

    def call(cell, context):
        try:
            if not done:
                done.append("killed")
                kit.kill()
        except Exception:
            done.append("caught")
        done.append("finished")

    kit = trigger_kit([function(call)])
    kit.put(ROWS[0], "BASE", {})
    kit.deliver()
    assert done == ["killed"]
    kit.deliver()
    assert done == ["killed", "finished"]
    kit.kill()
    kit.deliver()
    assert (kit.kills, done) == (2, ["killed", "finished"])


def test_a_cell_that_kills_its_worker_is_parked_with_that_cause(trigger_kit, function):
    kit = trigger_kit([function(lambda cell, context: kit.kill())], kills_max=2)
    kit.put(ROWS[0], "BASE", {})
    for _ in range(5):
        kit.deliver()
    assert [cell.cause for cell in kit.parked()] == ["killed"]


def test_an_outage_trips_the_breaker_and_parks_nothing(trigger_kit, function):
    kit = trigger_kit([function(nothing, retry=RetryPolicy(attempts=3, delay=0.5))])
    for n in range(30):
        kit.put(uuid.UUID(int=n), "BASE", {})
    kit.fail_next(ConnectionError("down"), times=20)
    kit.deliver()
    assert "ConnectionError" in kit.tripped
    kit.advance(60)
    assert (kit.tripped, kit.parked(), kit.counts) == (None, [], CellCounts(called=30))


def test_what_a_function_writes_is_delivered_too(trigger_kit, function):
    """Through the client of its context. `filtered` cells are those that no function wants."""

    def copies(cell, context):
        context.client.put(cell.row_key, "COPY", dict(cell.body))

    async def acopies(cell, context):
        await context.async_client.put(cell.row_key, "COPY", dict(cell.body))

    @trigger(column="COPY")
    def notes(cell):
        seen.append(cell.body)

    for body in (copies, acopies):
        seen = []
        kit = trigger_kit([trigger(column="BASE")(body), notes])
        kit.put(ROWS[0], "BASE", {"n": 7})
        kit.put(ROWS[0], "OTHER", {})
        kit.advance(6)
        assert (seen, kit.counts) == ([{"n": 7}], CellCounts(called=2, filtered=1))


def test_while_the_store_is_away_nothing_is_lost(trigger_kit, function):
    kit = trigger_kit([function(nothing)])
    kit.put(ROWS[0], "BASE", {})
    kit.store_is_away = True
    kit.advance(5)
    with pytest.raises(Unavailable):
        kit.put(ROWS[0], "BASE", {})
    assert kit.calls == []
    kit.store_is_away = False
    kit.advance(5)
    assert refs(kit) == [1]


def test_several_shards_have_a_log_each(trigger_kit, function):
    kit = trigger_kit([function(nothing)], shards=4)
    for row in ROWS:
        kit.put(row, "BASE", {})
    kit.deliver()
    kit.redeliver()
    assert sorted(call.row_key for call in kit.calls) == sorted(ROWS * 2)


def test_a_cell_grows_old_by_the_clock_of_the_kit(trigger_kit, function):
    """max_age, delays and retries follow the kit's clock."""
    kit = trigger_kit([function(nothing, max_age=3600, retry=RetryPolicy(attempts=100, delay=600, max_delay=600))])
    kit.put(ROWS[0], "BASE", {})
    kit.fail_next(ValueError(), times=100)
    began = kit.now
    kit.advance(7200)
    assert kit.now >= began + 7200
    assert [cell.cause for cell in kit.parked()] == ["error"]


def test_it_works_within_an_event_loop(trigger_kit, function):
    """An async test may use it as any other one."""
    kit = trigger_kit([function(nothing)])

    async def test():
        kit.put(ROWS[0], "BASE", {})
        kit.deliver()

    asyncio.run(test())
    assert refs(kit) == [1]


def test_a_program_without_a_function_is_refused(trigger_kit):
    with pytest.raises(Misconfigured, match="marked"):
        trigger_kit([nothing])
    with pytest.raises(Misconfigured, match="imported"):
        trigger_kit("examples.no_such_program")


def test_nothing_of_the_kit_is_loaded_where_it_isnt_used():
    """Neither by the package nor by a worker. The plugin loads the kit with its first use."""
    code = "import sys, schemaless, schemaless.consume.trigger_worker, schemaless.cli\n"
    code += "assert not [name for name in sys.modules if name.startswith(('schemaless.testing', 'pytest'))]\n"
    code += "import schemaless.pytest_plugin\n"
    code += "assert 'schemaless.testing' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_is_erased(trigger_kit):
    """What had failed for its cells ends, and a function for erasures is told which cells they were."""
    erasures = []

    @trigger(column="BASE", retry=RetryPolicy(attempts=1))
    def fails(cell):
        raise ValueError(cell.secret)

    @trigger(erased=True, column="BASE")
    def erased(cell):
        erasures.append(cell.cells)

    kit = trigger_kit([fails, erased])
    kit.put(ROWS[0], "BASE", {"secret": "s"})
    kit.put(ROWS[0], "NOTE", {"secret": "s"})
    kit.deliver()
    assert [parked.error.count("ValueError: s") for parked in kit.parked()] == [1]
    kit.erase(ROWS[0])
    kit.advance(2)
    assert (kit.parked(), erasures) == ([], [{"BASE": [1], "NOTE": [1]}])
