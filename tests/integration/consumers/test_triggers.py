"""Trigger programs as processes: order, attempts, stopped shards, and where a program begins."""

import json
import re
import uuid

import httpx
import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.codec import encode_body
from schemaless.consume.start_at import StartAfter, StartAt, StartSince, start_positions
from schemaless.errors import Misconfigured
from schemaless.location import Location
from schemaless.position import position_of
from schemaless.stack.plan import free_ports
from schemaless.storage import checkpoint_table, parked_table, shard_log, trigger_order_table, worker_table
from schemaless.storage.checkpoint_table import State
from schemaless.storage.entity_table import CellKey, ShardCell
from schemaless.storage.operation import query
from schemaless.storage.parked_table import Cause, Ending
from schemaless.storage.shard_log import LogRange
from schemaless.storage.trigger_order_table import ProgramPause
from schemaless.storage.worker_table import FailingCell, WorkerReport
from tests.consumer_harness import heads, reached, running_consumer, wait_until_finished, write_program
from tests.log_harness import erased_at_home, new_cell, put, running_tailers
from tests.waiting import until

SHARDS = 4
PROGRAM = """
import asyncio, json, os, pathlib
from schemaless import Skip, Stop, trigger

HERE = pathlib.Path(__file__).parent
CALLS = os.open(HERE / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(what, cell, context):
    line = [what, str(cell.row_key), cell.ref_key, cell.body.get("n"), str(cell.location), context.attempt]
    os.write(CALLS, (json.dumps(line) + "\\n").encode())

@trigger(column="BASE")
def check(cell, context):
    note("check", cell, context)
    if cell.body.get("fails", 0) >= context.attempt:
        raise RuntimeError("the processor said no")
    if cell.body.get("poison") and not (HERE / "repaired").exists():
        raise ValueError("poison")
    if cell.body.get("stop"):
        if not (HERE / "repaired").exists():
            raise Stop("the customer's account is locked")
    if cell.body.get("skip"):
        raise Skip("nothing to do")

@trigger(column="BASE")
%s second(cell, context):
    note("second", cell, context)
"""


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module", autouse=True)
def tailer(running, kafka, datastore):
    with running_tailers(1, running.path, kafka, datastore) as (started,):
        yield started


@pytest.fixture
def settings(running, kafka):
    return {"topology": running.path, "kafka": kafka, "attempts_max": 3, "retry_delay_s": 0.05}


def run(program, datastore, settings, *more):
    return running_consumer(["consumers", program, "--datastore", datastore.name, *more], settings)


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def stands(storage, datastore, consumer, shard):
    master = storage.master(datastore.home(shard))
    (found,) = master.run(checkpoint_table.of_consumer, datastore.name, consumer, [shard])
    return found


def test_every_cell_is_called_in_order_but_those_of_rows_that_fail(tmp_path, storage, datastore, settings):
    """A failed call comes again with its number, and other rows go on. Each function has its own attempts."""
    program = write_program(tmp_path, "order", PROGRAM % "async def")
    cells = [new_cell(datastore, {"n": n, "fails": 2 if n % 40 == 7 else 0, "skip": n % 3}) for n in range(120)]
    put(storage, datastore, cells[:60])
    with run(program, datastore, settings) as process:
        put(storage, datastore, cells[60:])
        wait_until_finished(storage, datastore, "trigger:order")
        assert process.stop() == 0
    made = calls(tmp_path)
    for function in ("check", "second"):
        of_function = [call for call in made if call[0] == function]
        for shard in range(SHARDS):
            found = [(int(call[4].split(":")[2]), call[3]) for call in of_function if call[4].startswith(f"{shard}:")]
            assert {place for place, _ in found} == set(range(1, heads(storage, datastore)[shard] + 1))
            places = [place for place, n in found if n is None or n % 40 != 7]
            assert places == sorted(places)
    attempts = {call[3]: call[5] for call in made if call[0] == "check"}
    assert {n for n, attempt in attempts.items() if attempt == 3} == {7, 47, 87}
    assert len([call for call in made if call[0] == "second" and call[3] is not None]) >= 120


ERASING = (
    PROGRAM
    + """
@trigger(erased=True, column="BASE")
def erased(cell, context):
    note("erased", cell, context)
    assert cell.column_name == "$erase" and cell.cells == {"BASE": [1]}, cell
"""
)


def test_a_parked_cell_ends_when_it_is_erased(tmp_path, storage, datastore, settings):
    """Its error goes with its body, and its row goes on: what waits behind it, and then the function for erasures."""
    program = write_program(tmp_path, "erasing", ERASING % "def")
    first = new_cell(datastore, {"n": 1, "poison": True}, shard=1)
    row_key, consumer, master = first.key.row_key, "trigger:erasing", storage.master(datastore.home(1))
    behind = ShardCell(CellKey(row_key, "BASE", 2), encode_body({"n": 2}), 1)
    put(storage, datastore, [first, behind])

    def records():
        return master.run(parked_table.of_row, datastore.name, [consumer], row_key, 9, 9_000)[consumer]

    with run(program, datastore, settings) as process:
        until(lambda: [record for record in records() if record.cause is Cause.ERROR])
        assert "ValueError: poison" in records()[0].error
        # A process that died had reported its call. So had one of another program, which hasn't met the entry.
        failed = FailingCell("check", str(first.key), "1:1:1", 1, 3, 0, "ValueError: poison")
        for cluster, name in (
            (cluster, name) for cluster in datastore.clusters for name in (consumer, "trigger:other")
        ):
            report = WorkerReport(host="h", failing=(failed,))
            storage.master(cluster).run(worker_table.put, datastore.name, name, 7, report)
        erased_at_home(storage, datastore, row_key, "BASE", 1)
        until(lambda: not records() and "erased" in [call[0] for call in calls(tmp_path)])
        wait_until_finished(storage, datastore, consumer)
        assert process.stop() == 0
    for cluster in datastore.clusters:
        found = storage.master(cluster).run(worker_table.of_datastore, datastore.name)
        reports = {row.consumer: row.report for row in found if row.worker == 7}
        assert reports[consumer] == WorkerReport(host="h")
        assert reports["trigger:other"].failing == (failed,)
        for name in reports:
            storage.master(cluster).run(worker_table.remove, datastore.name, name, [7])
    (ended,) = master.run(parked_table.ended_of_row, datastore.name, [consumer], row_key, 9)[consumer]
    assert (ended.ending, ended.record.error) == (Ending.ERASED, "")
    made = [(call[0], call[2]) for call in calls(tmp_path) if call[1] == str(uuid.UUID(bytes=row_key))]
    assert [call for call in made if call != ("check", 1)] == [("check", 2), ("second", 2), ("erased", 1)]


def test_a_shard_stops_with_its_reason_and_others_go_on(tmp_path, storage, datastore, settings):
    """The others finish. Resumed, it goes on at that very cell."""
    name = "stops"
    program = write_program(tmp_path, name, PROGRAM % "def")
    consumer = f"trigger:{name}"
    with run(program, datastore, settings, "--from", "end") as process:
        until(lambda: len(reached(storage, datastore, consumer)) == SHARDS)
        start = heads(storage, datastore)
        put(storage, datastore, [new_cell(datastore, {"n": 1, "stop": True}, shard=1)])
        put(storage, datastore, [new_cell(datastore, {"n": 2}, shard=shard) for shard in range(SHARDS)])
        until(lambda: stands(storage, datastore, consumer, 1).state is State.STOPPED)
        others = {shard: head for shard, head in heads(storage, datastore).items() if shard != 1}
        until(lambda: others.items() <= reached(storage, datastore, consumer).items())
        stopped = stands(storage, datastore, consumer, 1)
        assert "the customer's account is locked" in stopped.reason
        assert stopped.location.added_id == start[1]
        (tmp_path / "repaired").touch()
        master = storage.master(datastore.home(1))
        assert master.run(checkpoint_table.resume, datastore.name, consumer) == 1
        wait_until_finished(storage, datastore, consumer)
        assert process.stop() == 0


def test_a_cell_is_parked_after_its_last_attempt_and_its_shard_goes_on(tmp_path, storage, datastore, settings):
    """What waits behind it in its row is counted. When a person orders it, the row is called again in order (I12)."""
    program = write_program(tmp_path, "parks", PROGRAM % "def")
    consumer, master = "trigger:parks", storage.master(datastore.home(1))
    poison = new_cell(datastore, {"n": "poison", "poison": True}, shard=1)
    behind = [
        ShardCell(CellKey(poison.key.row_key, "BASE", n), encode_body({"n": f"behind {n}"}), 1) for n in (2, 3)
    ]  # fmt: skip

    def records():
        return master.run(parked_table.of_shards, datastore.name, consumer, range(SHARDS))

    with run(program, datastore, settings, "--from", "end") as process:
        until(lambda: len(reached(storage, datastore, consumer)) == SHARDS)
        put(storage, datastore, [poison])
        put(storage, datastore, [behind[0], *[new_cell(datastore, {"n": 2}, shard=1) for _ in range(5)]])
        until(lambda: [record.cause for record in records()] == [Cause.ERROR])
        put(storage, datastore, [behind[1]])
        wait_until_finished(storage, datastore, consumer)
        counts = stands(storage, datastore, consumer, 1).counts
        assert (counts.called, counts.parked, counts.waiting, counts.seen) == (5, 1, 2, 8)
        (record,) = records()
        assert (record.function_name, record.attempts, record.holds_row) == ("check", 3, True)
        (tmp_path / "repaired").touch()
        marked = "UPDATE schemaless.parked SET ordered = 'retry', due_at = UTC_TIMESTAMP(6)"
        master.run(lambda: query(marked))
        until(lambda: not records())
        until(lambda: stands(storage, datastore, consumer, 1).counts.called == 8)
        assert process.stop() == 0
    of_row = [call[3] for call in calls(tmp_path) if call[0] == "check" and call[3] != 2]
    assert of_row == ["poison"] * 4 + ["behind 2", "behind 3"]


def test_a_program_that_begins_at_the_end_sees_only_what_comes(tmp_path, storage, datastore, settings):
    """--from end counts for shards without a checkpoint; after that its checkpoints count."""
    program = write_program(tmp_path, "late", PROGRAM % "def")
    put(storage, datastore, [new_cell(datastore, {"n": "before"}) for _ in range(8)])
    with run(program, datastore, settings, "--from", "end") as process:
        until(lambda: len(reached(storage, datastore, "trigger:late")) == SHARDS)
        put(storage, datastore, [new_cell(datastore, {"n": "after"}) for _ in range(8)])
        wait_until_finished(storage, datastore, "trigger:late")
        assert process.stop() == 0
    put(storage, datastore, [new_cell(datastore, {"n": "between"}) for _ in range(8)])
    with run(program, datastore, settings, "--from", "end"):
        wait_until_finished(storage, datastore, "trigger:late")
    noted = [call[3] for call in calls(tmp_path) if call[0] == "check"]
    assert (noted.count("before"), noted.count("after"), noted.count("between")) == (0, 8, 8)


def test_other_columns_move_the_checkpoint_without_a_call(tmp_path, storage, datastore, settings):
    """A cell of a column without a trigger is finished at once."""
    program = write_program(tmp_path, "columns", PROGRAM % "def")
    with run(program, datastore, settings, "--from", "end"):
        until(lambda: len(reached(storage, datastore, "trigger:columns")) == SHARDS)
        base = [new_cell(datastore, {"n": 1}) for _ in range(8)]
        other = [ShardCell(CellKey(cell.key.row_key, "OTHER", 1), encode_body({}), cell.shard) for cell in base]
        put(storage, datastore, [*base, *other])
        wait_until_finished(storage, datastore, "trigger:columns")
    assert len([call for call in calls(tmp_path) if call[0] == "check"]) == 8


def test_a_call_that_takes_long_is_reported_with_its_age(tmp_path, storage, datastore, settings):
    """By the worker, on every cluster. A clean stop takes the report away."""
    program = write_program(
        tmp_path,
        "slow",
        "import pathlib, time\n"
        "from schemaless import trigger\n"
        "HERE = pathlib.Path(__file__).parent\n"
        "@trigger(column='BASE')\n"
        "def waits(cell):\n"
        "    while not (HERE / 'go').exists(): time.sleep(0.05)\n",
    )

    def report(cluster):
        found = storage.master(cluster).run(worker_table.of_datastore, datastore.name)
        return next((row.report for row in found if row.consumer == "trigger:slow"), None)

    with run(program, datastore, {**settings, "transport": "plain"}, "--from", "end") as process:
        until(lambda: len(reached(storage, datastore, "trigger:slow")) == SHARDS)
        put(storage, datastore, [new_cell(datastore, {"n": 1}, shard=2)])
        for cluster in datastore.clusters:
            until(lambda cluster=cluster: report(cluster) is not None and report(cluster).oldest_call)
            found = report(cluster)
            assert (found.oldest_call.trigger, found.oldest_call.shard) == ("waits", 2)
            assert found.oldest_call.age_s >= 2.0
            assert (found.transport, found.is_member, found.pid) == ("plain", True, process.process.pid)
        (tmp_path / "go").touch()
        until(lambda: report("a").oldest_call is None)
        assert process.stop() == 0
    assert report("a") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = 1\n", "no function that is marked"), (None, "there is no trigger program")],
)
def test_a_program_that_can_not_run_says_so_in_one_line(tmp_path, capfd, datastore, settings, text, said):
    """Nothing is started for a module that is missing or marks nothing."""
    path = str(tmp_path / "missing.py") if text is None else write_program(tmp_path, "empty", text)
    with run(path, datastore, settings) as process:
        assert process.process.wait(60) == 1
    assert said in capfd.readouterr().err


def test_a_program_may_begin_at_a_time_or_after_a_location(storage, datastore):
    """Each checkpoint is that of the last cell left out, with its digest. A location that is gone is refused."""
    put(storage, datastore, [new_cell(datastore, {"n": n}, shard=1) for n in range(3)])
    master, at = storage.master(datastore.home(1)), heads(storage, datastore)
    ((earlier, last),) = master.run(shard_log.read, datastore, [LogRange(1, at[1] - 2, 2)], 1 << 20)

    def begin(start, shard=1):
        (found,) = master.run(start_positions, datastore, start, [shard])
        return found

    assert begin(StartAfter({1: earlier.location})) == position_of(earlier)
    assert (
        begin(StartAfter({1: last.location})) == begin(StartAt.END) == begin(StartSince(1 << 55)) == position_of(last)
    )
    assert begin(StartSince(last.created_at)).added_id < last.added_id  # cells of one transaction share their time
    assert begin(StartSince(0)) == begin(StartAt.BEGINNING) == begin(StartAfter({0: earlier.location}))
    for gone in (Location(1, at[1] + 1), Location(7, 1)):
        with pytest.raises(Misconfigured, match="--from 1:"):
            begin(StartAfter({1: gone}))


def test_pauses_and_seeks_that_people_order_are_carried_out(tmp_path, storage, datastore, settings):
    """A paused program calls nothing. One that was moved back calls its cells again, and its counts begin there."""
    program = write_program(tmp_path, "moved", PROGRAM % "def")
    consumer, name = "trigger:moved", datastore.name
    paused = ProgramPause(paused=True, reason="a deploy", changed_at=1)

    def order(pause):
        for cluster in datastore.clusters:
            storage.master(cluster).run(trigger_order_table.put_program, name, consumer, pause)

    def seek(to):
        storage.master(datastore.home(1)).run(trigger_order_table.seek, name, consumer, [to], 1)

    def is_known_to_wait():
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return re.search(r"^schemaless_consumer_lag_cells{.*} 1.0$", text, re.MULTILINE)

    (port,) = free_ports(1)
    with run(program, datastore, settings | {"metrics_port": port}, "--from", "end") as process:
        until(lambda: len(reached(storage, datastore, consumer)) == SHARDS)
        start = stands(storage, datastore, consumer, 1).position
        put(storage, datastore, [new_cell(datastore, {"n": "first"}, shard=1)])
        wait_until_finished(storage, datastore, consumer)
        order(paused)
        here = stands(storage, datastore, consumer, 1).position
        seek(here)  # ordered after the pause, and carried out: so the pause was seen
        until(lambda: stands(storage, datastore, consumer, 1).counted_from == here.added_id)
        put(storage, datastore, [new_cell(datastore, {"n": "second"}, shard=1)])
        until(is_known_to_wait)
        assert [call[3] for call in calls(tmp_path) if call[0] == "check"] == ["first"]
        order(ProgramPause(paused=False, reason=None, changed_at=2))
        wait_until_finished(storage, datastore, consumer)
        seek(start)
        until(lambda: [call[3] for call in calls(tmp_path) if call[0] == "check"] == ["first", "second"] * 2)
        until(lambda: stands(storage, datastore, consumer, 1).counts.called == 2)
        assert stands(storage, datastore, consumer, 1).counted_from == start.added_id
        assert process.stop() == 0
