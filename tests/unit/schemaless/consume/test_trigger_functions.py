"""@trigger marks, programs, and what the handler makes of each way in which a call can end."""

import asyncio
import re
import threading
import uuid
from datetime import UTC, datetime
from math import inf

import pytest
from structlog.testing import capture_logs

from schemaless import Retry, Skip, Stop, trigger
from schemaless.cell import StoredCell
from schemaless.codec import encode_body
from schemaless.config import ConsumerSettings
from schemaless.consume.ports import Outcome, Run
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram, load_program
from schemaless.errors import Forbidden, Invalid, Misconfigured
from schemaless.location import BEGINNING
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.testing.memory_program import MemoryEntityTable, MemoryParkedStore, MemoryProgram
from schemaless.topology import Datastore
from schemaless.triggers.decorator import Takes, triggers_of
from tests.unit.schemaless.consume.parking_world import Order, Process, Server, row_key

ROW = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


def run_of(count, shard=0, first=1, column="BASE"):
    cells = [
        StoredCell(ROW.bytes, column, n, shard, 1, n, 1_000_000, encode_body({"n": n}))
        for n in range(first, first + count)
    ]
    return Run(shard, BEGINNING, cells)


@pytest.fixture
def settings(tmp_path):
    return ConsumerSettings(
        topology=tmp_path, kafka="", attempts_max=3, retry_delay_s=0.1, retry_delay_max_s=0.15, attempt_timeout_s=30.0
    )


def handler_of(settings, *functions, **options):
    by_column = {}
    for found in triggers_of({str(n): function for n, function in enumerate(functions)}):
        by_column.setdefault(found.column, []).append(found)
    datastore = Datastore("mezzanine", 64, 8, ("a",))
    nothing_parked = MemoryParkedStore(MemoryProgram("trigger:program", datastore, MemoryEntityTable(datastore)))
    return TriggerHandler(TriggerProgram("program", by_column), datastore, settings, nothing_parked, **options)


async def outcome_of(handler, run):
    return (await handler.handle([run])).outcomes[0]


def record_of(handler, shard=0, added_id=1):
    """Returns the record of a cell that waits for its next attempt."""
    return handler._shards[shard].replays[added_id].record


def test_marking_leaves_the_function_as_it_is():
    """It can be called in a test, and carries more than one mark."""

    @trigger(column="BASE")
    @trigger(column="STATUS")
    def bill_rider(row_key):
        return row_key

    assert bill_rider(7) == 7
    assert [found.column for found in triggers_of({"a": bill_rider, "again": bill_rider})] == ["STATUS", "BASE"]


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda row_key: None, Takes.ROW_KEY),
        (lambda cell: None, Takes.CELL),
        (lambda trip, context: None, Takes.CELL_AND_CONTEXT),
    ],
)
def test_what_a_function_takes_is_told_by_its_parameters(function, takes):
    """`row_key` by its name; anything else alone is the cell; a second parameter is the context."""
    (found,) = triggers_of({"f": trigger(column="BASE", name="f")(function)})
    assert found.takes is takes


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        lambda cell, context, more: None,
        lambda row_key, cell: None,  # the first would be the cell, and the second the context
        lambda context, cell: None,
    ],
)
def test_a_function_that_takes_something_else_is_refused(function):
    """When it is marked, not when the first cell comes."""
    with pytest.raises(Misconfigured, match="must take row_key, or cell, or cell and context, in this order"):
        trigger(column="BASE", name="f")(function)
    with pytest.raises(Invalid):
        trigger(column="1")


async def test_a_plain_function_gets_a_uuid_and_others_the_cell(settings):
    """As the contract says."""
    got = []

    @trigger(column="BASE")
    def plain(row_key):
        got.append(row_key)

    @trigger(column="BASE")
    def whole(cell, context):
        got.append((cell.row_key, cell.column_name, cell.ref_key, cell.body, cell.created_at, str(cell.location)))
        got.append((context.program, context.datastore, context.attempt))

    assert (await outcome_of(handler_of(settings, plain, whole), run_of(1))).counts == CellCounts(called=1)
    assert got == [
        ROW,
        (ROW, "BASE", 1, {"n": 1}, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "0:1:1"),
        ("program", "mezzanine", 1),
    ]


@pytest.mark.parametrize(
    ("said", "counts", "due_in_s"),
    [
        (Skip("nothing"), CellCounts(called=4, skipped=1), inf),
        (Retry(7.5), CellCounts(called=2, waiting=3), 7.5),
        (RuntimeError("no"), CellCounts(called=2, waiting=3), 0.1),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_call_says_decides_what_becomes_of_its_row(settings, said, counts, due_in_s, is_async):
    """Later cells of the row wait behind one that failed."""
    called = []

    def say(cell):
        called.append(cell.ref_key)
        if cell.ref_key == 3:
            raise said

    async def say_later(cell):
        await asyncio.sleep(0)
        say(cell)

    handler = handler_of(settings, trigger(column="BASE")(say_later if is_async else say), clock=lambda: 1.0)
    outcome = await outcome_of(handler, run_of(5))
    assert (outcome.finished, outcome.counts, outcome.due_in_s) == (5, counts, pytest.approx(due_in_s))
    assert called == list(range(1, 6 if isinstance(said, Skip) else 4))


async def test_stop_stops_the_shard_with_its_reason(settings):
    """At the cell, with the finished ones kept."""

    def say(cell):
        if cell.ref_key == 2:
            raise Stop("locked")

    outcome = await outcome_of(handler_of(settings, trigger(column="BASE")(say)), run_of(3))
    assert (outcome.finished, outcome.counts) == (1, CellCounts(called=1))
    assert "locked" in outcome.stop_reason


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_whose_own_task_was_cancelled_has_failed(settings, is_async):
    """A CancelledError of the function's making is an attempt like any other, never a silent end of the shard."""

    def say(cell):
        raise asyncio.CancelledError

    async def say_later(cell):
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    handler = handler_of(settings, trigger(column="BASE")(say_later if is_async else say))
    assert (await outcome_of(handler, run_of(1))).counts == CellCounts(waiting=1)
    assert "cancelled" in record_of(handler).error


async def test_attempts_are_counted_for_each_cell_and_their_delay_grows():
    """Without a policy of its own, the settings' values count. A retry that a person orders has all attempts again."""
    attempts = []

    @trigger(column="BASE")
    def fail(cell, context):
        attempts.append((process.now, context.attempt))
        raise ValueError("no")

    server = Server()
    server.write(1)
    process = Process(server, 1, [fail], attempts_max=3, retry_delay_s=1.0, retry_delay_max_s=1.5)
    await process.pass_by(10)
    server.order(1, Order.RETRY)
    await process.pass_by(10)
    begun_at = attempts[0][0]
    assert [n for _, n in attempts] == [1, 2, 3, 1, 2, 3]
    assert [at - begun_at for at, _ in attempts[:3]] == pytest.approx([0.0, 1.0, 2.5], abs=0.3)
    assert "ValueError: no" in server.parked[1].error


async def test_a_function_that_is_done_is_not_called_again_for_the_next_one():
    """Of two functions of a column, only the one that failed comes again."""
    calls = []

    @trigger(column="BASE")
    def first(cell):
        calls.append("first")

    @trigger(column="BASE")
    def second(cell, context):
        calls.append(f"second {context.attempt}")
        if context.attempt < 3:
            raise ValueError

    server = Server()
    server.write(1)
    await Process(server, 1, [first, second]).pass_by(5)
    assert calls == ["first", "second 1", "second 2", "second 3"]


async def test_an_async_call_that_hangs_is_a_failed_attempt(settings):
    """It is cut off after attempt_timeout_s."""

    @trigger(column="BASE")
    async def hang(cell):
        await asyncio.Event().wait()

    hurried = settings.model_copy(update={"attempt_timeout_s": 0.001})
    handler = handler_of(hurried, hang)
    assert (await outcome_of(handler, run_of(1))).counts == CellCounts(waiting=1)
    assert "TimeoutError" in record_of(handler).error


async def test_a_long_run_is_recorded_in_parts(settings):
    """What is finished after a quarter of a second is reported, so that a kill repeats little."""
    now = [0.0]

    @trigger(column="BASE")
    def slow(cell):
        now[0] += 0.1

    handler = handler_of(settings, slow, clock=lambda: now[0])
    assert (await outcome_of(handler, run_of(50))).finished == 3


async def test_sync_calls_do_not_block_the_event_loop(settings):
    """They run in a thread of their own; cells without a trigger don't even hop there."""
    threads = []

    @trigger(column="BASE")
    def where(cell):
        threads.append(threading.current_thread())

    handler = handler_of(settings, where)
    assert (await outcome_of(handler, run_of(2))).counts == CellCounts(called=2)
    others = await outcome_of(handler, run_of(3, first=3, column="OTHER"))
    assert others == Outcome(3, idle=True, counts=CellCounts(filtered=3))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_program_is_named_after_its_module(tmp_path):
    """Dotted or a file, the last part."""
    path = tmp_path / "my_bills.py"
    path.write_text("from schemaless import trigger\n@trigger(column='BASE')\ndef f(row_key): ...\n")
    assert load_program(str(path)).consumer == "trigger:my_bills"
    assert load_program(str(path), name="bills").consumer == "trigger:bills"
    with pytest.raises(Misconfigured, match="letters, digits"):
        load_program(str(path), name="no name")
    assert load_program("examples.census").consumer == "trigger:census"
    assert load_program("examples.census").origin == load_program("examples/census.py").origin == "examples.census"
    assert load_program(str(path)).origin == str(path)
    for missing in ("no.such.module", str(tmp_path / "none.py"), "schemaless.errors"):
        with pytest.raises(Misconfigured):
            load_program(missing)


MARKED = "from schemaless import trigger\n@trigger(column='BASE')\ndef f(row_key): ...\n"


def test_a_program_has_the_version_that_it_gives_or_a_digest_of_its_source(tmp_path):
    """So a parked cell says which code failed."""
    path = tmp_path / "versioned.py"
    versions = []
    for text in (MARKED, MARKED, MARKED + "# changed\n", MARKED + "__version__ = '2.1'\n"):
        path.write_text(text)
        versions.append(load_program(str(path)).version)
    assert versions[0] == versions[1] != versions[2]
    assert re.fullmatch("[0-9a-f]{12}", versions[2])
    assert versions[3] == "2.1"
    for wrong in ("''", "(2, 1)", "'v' * 65", "'2 1'"):
        path.write_text(MARKED + f"__version__ = {wrong}\n")
        with pytest.raises(Misconfigured, match="__version__"):
            load_program(str(path))


def test_names_are_unique_within_a_program(tmp_path):
    """They stand for the function in ids and keys. One function on several columns keeps its name."""
    path = tmp_path / "named.py"
    path.write_text(MARKED + "@trigger(column='STATUS', name='f')\ndef g(row_key): ...\n")
    with pytest.raises(Misconfigured, match="two trigger functions have the name f"):
        load_program(str(path))
    path.write_text(MARKED.replace("\n@", "\n@trigger(column='BASE')\n@"))
    with pytest.raises(Misconfigured, match="the name f"):
        load_program(str(path))
    path.write_text(MARKED.replace("\n@", "\n@trigger(column='STATUS')\n@"))
    assert {column: [f.name for f in found] for column, found in load_program(str(path)).triggers.items()} == {
        "BASE": ["f"],
        "STATUS": ["f"],
    }


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_call_that_takes_long_is_logged_and_one_that_hangs_ends_the_process(settings, is_async):
    """With its function, its cell and its age. The other shards' calls go on meanwhile."""
    begun, release, now = threading.Event(), threading.Event(), [0.0]

    @trigger(column="BASE")
    def hangs(cell):
        begun.set()
        release.wait()

    @trigger(column="BASE")
    async def hangs_in_loop(cell):
        begun.set()
        await asyncio.to_thread(release.wait)

    handler = handler_of(settings, hangs_in_loop if is_async else hangs, clock=lambda: now[0])
    handling = asyncio.create_task(outcome_of(handler, run_of(1, shard=3)))
    await asyncio.to_thread(begun.wait)
    with capture_logs() as logs:
        for now[0] in (59.0, 61.0, 62.0, 121.0, 123.0, 600.0):
            assert handler.hung_call() is None
    assert [(line["shard"], line["age_s"]) for line in logs] == [(3, 61.0), (3, 123.0), (3, 600.0)]
    now[0] = 601.0
    hung = handler.hung_call()
    assert (hung.cell.shard, hung.before.finished, hung.last) == (3, 0, None)
    assert "hasn't returned for 601 s" in hung.text
    release.set()
    assert (await handling).finished == 1
    assert handler.hung_call() is None


async def test_an_error_whose_text_raises_is_a_failure_like_any_other(settings):
    class Nameless(Exception):
        def __str__(self):
            raise ValueError("no text")

    @trigger(column="BASE")
    def fails(cell):
        raise Nameless

    handler = handler_of(settings, fails)
    assert (await outcome_of(handler, run_of(1))).counts == CellCounts(waiting=1)
    assert "Nameless" in record_of(handler).error


async def test_a_cell_whose_function_asks_to_be_called_later_waits_and_does_not_fail():
    """Nobody is alerted for it: a program may poll with Retry for as long as it likes."""

    @trigger(column="BASE")
    def polls(cell):
        raise Retry(60)

    server = Server()
    server.write(1)
    process = Process(server, 1, [polls])
    await process.pass_by(0.5)
    count, erred, (shown,) = process.handler.failing()
    assert (count, erred, shown.trigger) == (1, 0, "polls")


async def test_a_cell_that_our_api_refuses_while_others_succeed_is_shown_as_failing():
    """It uses no attempt up, and nobody asked for it to wait."""

    @trigger(column="BASE")
    def reads(cell):
        if cell.ref_key == 1:
            raise Forbidden("not this datastore")

    server = Server()
    for row in (2, 1, 3):
        server.write(row)
    process = Process(server, 1, [reads])
    for row in range(4, 8):
        await process.pass_by(0.5)
        server.write(row)
    count, erred, _ = process.handler.failing()
    assert (count, erred) == (1, 1)


async def test_a_cell_that_fails_is_shown_with_its_attempt_and_traceback_while_it_fails():
    """The log has the traceback once. What is parked isn't shown as failing any more."""

    @trigger(column="BASE")
    def bills(cell):
        raise ValueError("no card")

    server = Server()
    server.write(1)
    process = Process(server, 1, [bills])
    with capture_logs() as lines:
        await process.pass_by(0.5)
        count, erred, (shown,) = process.handler.failing()
        assert (count, erred, shown.trigger, shown.cell) == (1, 1, "bills", f"{row_key(1)}/BASE/1")
        assert (shown.location, shown.attempt, shown.attempts) == ("0:1:1", 1, 3)
        assert 'raise ValueError("no card")' in shown.error
        await process.pass_by(1.0)
        assert [cell.attempt for cell in process.handler.failing()[2]] == [2]
        await process.pass_by(5.0)
        assert process.handler.failing() == (0, 0, [])
    failed = [line for line in lines if line["event"] == "a call failed"]
    assert [("exception" in line, line["log_level"]) for line in failed] == [(True, "warning"), (False, "warning")]


async def test_recent_calls_say_how_many_failed_and_why(settings):
    """The status of an answer has a different name in each library, and a class of the user's may raise for it."""
    now = [0.0]

    class Limited(Exception):
        status = 429

    class Broken(Exception):
        @property
        def code(self):
            raise ValueError

    @trigger(column="BASE")
    def works(cell):
        if error := {1: Limited, 2: Broken, 3: Skip("known")}.get(cell.ref_key):
            raise error

    handler = handler_of(settings, works, clock=lambda: now[0])
    assert handler.recent_calls() == (0, {})
    cells = [StoredCell(uuid.uuid4().bytes, "BASE", n, 0, 1, n, 1_000_000, encode_body({})) for n in range(1, 6)]
    await handler.handle([Run(0, BEGINNING, cells)])
    assert handler.recent_calls() == (5, {"Limited 429": 1, "Broken": 1})
    now[0] = 30.0
    assert handler.recent_calls() == (0, {})
