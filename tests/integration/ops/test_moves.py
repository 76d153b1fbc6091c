"""Shards move to another cluster while they are written to, and back (I3, I4, I13)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.errors import Corrupt, Invalid, Misconfigured, NotFound, StateConflict, TableMissing, Unavailable
from schemaless.location import GenerationStart, Location
from schemaless.ops import move_orders
from schemaless.ops.growth import GrowthOrder
from schemaless.ops.move_orders import (
    arrivals,
    cancel,
    complete,
    follow,
    move_shards,
    parse_shards,
    plan_move,
    reverse,
    source_of,
    throttle,
)
from schemaless.ops.moves import Mover, MoveStep, ShardMover
from schemaless.storage import append, entity_table, shard_copy, shard_head, shard_move_table
from schemaless.storage.appointment_table import OrderKind
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_move_table import MoveState
from tests.log_harness import replication_stopped
from tests.mover_harness import Putter, fill, new_cell, verify
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(300)]


def test_a_shard_moves_under_puts(topology, make_datastore):
    """All that was acknowledged is at its new home, in the same places."""
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    with SyncStorage(topology) as storage:
        fill(storage, datastore, 0, 3000)
        with Putter(topology, datastore, 0) as putter, Mover(storage, ["a", "b"]) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            one.copy(200)
            one.switch()
            assert one.move.state is MoveState.OPEN
            stored = len(putter.stored)
            until(lambda: len(putter.stored) > stored + 10)
        assert not putter.errors
        verify(storage, datastore, 0, "b", "a", putter.stored)


POINTS = [step for step in MoveStep if step not in (MoveStep.CUT, MoveStep.UNDONE)]


def moving(running, datastore, shard, step):
    """Moves a shard to b in a process of its own, which is killed at a step. Returns how it ended."""
    command = [sys.executable, "-m", "tests.moving_process", running.path, datastore.name, str(shard), "b", step]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_a_mover_is_killed_at_every_point(running, topology, make_datastore):
    """The same command, run again, ends the move. No acknowledged cell is lost, and none is in another place."""
    datastore = make_datastore(shards=len(POINTS), partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        for shard, step in enumerate(POINTS):
            fill(storage, datastore, shard, 1500)
            with Putter(topology, datastore, shard) as putter:
                killed = moving(running, datastore, shard, step)
                assert killed.returncode == -signal.SIGKILL, killed.stderr
                again = moving(running, datastore, shard, "")
                assert again.returncode == 0, f"{step}: {again.stderr}"
            assert not putter.errors
            head = verify(storage, datastore, shard, "b", "a", putter.stored)
            print(
                f"killed at {step}: {len(putter.stored)} puts, longest {putter.longest_s:.2f} s, head {head.added_id}"
            )
        (row,) = {(one.move.state, one.is_home) for one in arrivals(storage, datastore.name) if one.move.target == "b"}
        assert row == (MoveState.OPEN, True)


SWITCHES = 100 if "SCHEMALESS_FAULTS_LONG" in os.environ else 20


def test_pauses_of_many_switches_there_and_back(topology, make_datastore):
    """Prints what the pauses were. They are far below the 250 ms for which puts wait."""
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    passed = {}
    with SyncStorage(topology) as storage:
        fill(storage, datastore, 0, 1000)

        def told(step, move):
            passed.setdefault(step, []).append(time.monotonic())

        with Putter(topology, datastore, 0) as putter, Mover(storage, ["a", "b"], told) as mover:
            pauses, whole = [], []
            for number in range(SWITCHES):
                one = ShardMover(mover, datastore, 0, *(("a", "b") if number % 2 == 0 else ("b", "a")))
                began = time.monotonic()
                one.begin()
                one.copy()
                one.switch()
                whole.append(time.monotonic() - began)
                pauses.append(one.move.pause_us / 1000)
        assert not putter.errors
        verify(storage, datastore, 0, "a", "b", putter.stored)
    pauses.sort()
    print(
        f"pause of {SWITCHES} switches: median {pauses[len(pauses) // 2]:.1f} ms, p99 {pauses[-2]:.1f} ms,"
        f" longest {pauses[-1]:.1f} ms. Longest put {putter.longest_s * 1000:.0f} ms."
        f" A switch with its announcement: median {sorted(whole)[len(whole) // 2]:.2f} s"
    )
    steps = [MoveStep.CLOSING, MoveStep.CLOSED, MoveStep.OPENED, MoveStep.SHOWN, MoveStep.PUBLISHED]
    for before, step in pairwise(steps):
        took = sorted(b - a for a, b in zip(passed[before], passed[step], strict=True))
        print(f"to {step}: median {took[len(took) // 2] * 1000:.1f} ms, longest {took[-1] * 1000:.1f} ms")
    assert pauses[len(pauses) // 2] < 250  # a busy machine may be late with one


AT = "'2026-01-01 00:00:00.5'"


def home_rows(datastore, shard):
    """Inserts a row into each table that goes with a shard, and rows that don't."""
    name = f"'{datastore.name}'"
    counts = "'running', NULL, NULL, 0, 0, UTC_TIMESTAMP(6)"
    parked = f"{name}, 'trigger:bill', {shard}, 7, 1, x'{'00' * 16}', 'BASE', -5, 'bill', 'error', 1"
    tried = f"3, '[1, 2]', 'v1', {AT}"
    return [
        f"checkpoint VALUES ({name}, 'trigger:bill', {shard}, 1, 9, 77, 0, 9, 4, 3, 2, 0, 0, 6, {counts})",
        f"checkpoint VALUES ({name}, 'index:by_driver', {shard}, 1, 9, 77, 0, NULL, 0, 0, 0, 0, 0, 6, {counts})",
        f"parked VALUES ({parked}, 'ü \\n', {tried}, 0, 0, NULL, 'retry', {AT}, 18446744073709551615, 'why', 1)",
        "parked_history (datastore, consumer, shard, added_id, generation, row_key, column_name, ref_key,"
        " function_name, cause, holds_row, error, attempts, attempted_at, version, parked_at, job, order_reason,"
        f" ending, ended_at) VALUES ({parked}, 'gone', {tried}, 12, NULL, 'finished', {AT})",
        f"trigger_order VALUES ({name}, 'trigger:bill', {shard}, 1, 'a pause', 0, 0, 0, NULL, {AT})",
        f"trigger_order VALUES ({name}, 'trigger:bill', -1, 0, NULL, 0, 0, 0, NULL, {AT})",
        f"job VALUES (18446744073709551615, {name}, 'trigger:bill', 'retry', 1, 0, 'why', 'me', {AT})",
        f"index_problem VALUES ({name}, 'by_driver', 1, {shard}, x'{'01' * 16}', 1, 8, 2, '{{}}')",
        f"index_pass VALUES ({name}, 'by_driver', 1, {shard}, 'ä1', {AT}, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)",
        f"index_check VALUES (99, {shard}, {name}, 'by_driver', 1, '{{}}', {AT}, NULL, NULL, NULL, NULL)",
    ]


TABLES = (
    "checkpoint",
    "parked",
    "parked_history",
    "trigger_order",
    "job",
    "index_problem",
    "index_pass",
    "index_check",
)


def held(node, datastore):
    """The rows of a datastore in each table, without those numbers that a server gives."""

    def row(columns):
        return tuple(value for name, value in columns.items() if name not in ("number", "updated_at"))

    found = {}
    for table in TABLES:
        ((names,),) = node.run(
            query,
            "SELECT GROUP_CONCAT(column_name ORDER BY ordinal_position) FROM information_schema.columns"
            f" WHERE table_schema = 'schemaless' AND table_name = '{table}'",
        )
        rows = node.run(query, f"SELECT * FROM schemaless.{table} WHERE datastore = '{datastore.name}'")
        found[table] = sorted((row(dict(zip(names.split(","), one, strict=True))) for one in rows), key=repr)
    return found


def test_what_lies_beside_the_cells_comes_along(topology, make_datastore):
    """Checkpoints of programs with another version, parked cells, orders, jobs, and answers of POSTs. And back."""
    datastore = make_datastore(shards=2, partitions=2, placement=("a",))
    with SyncStorage(topology) as storage:
        a, b = storage.masters
        for rows in home_rows(datastore, 1):
            a.run(query, f"INSERT INTO schemaless.{rows}")
        cell = msgspec.structs.replace(new_cell(1), idempotency_key="again")
        a.run(entity_table.put_cells, datastore, [cell])
        before = held(a, datastore)
        told = []
        with Mover(storage, ["a", "b"], lambda step, move: told.append(step)) as mover:
            there = ShardMover(mover, datastore, 1, "a", "b")
            there.begin()
            there.switch()
            moved, left = held(b, datastore), held(a, datastore)
            index, program = before["checkpoint"]
            assert left["checkpoint"] == [index, (*program[:13], 7, "moved", *program[15:])]
            assert moved["checkpoint"] == [(*program[:13], 7, "running", *program[15:])]
            assert moved["trigger_order"] == before["trigger_order"]  # that of the whole program, too
            assert left["trigger_order"] == [one for one in before["trigger_order"] if one[2] == -1]
            assert moved["job"] == [(*before["job"][0][:4], 0, *before["job"][0][5:])]  # nothing was ordered there
            assert left["job"] == before["job"]
            for table in ("parked", "parked_history"):
                assert moved[table] == before[table], table
                assert not left[table], table
            for table in ("index_problem", "index_pass", "index_check"):  # they stay where their index was made
                assert left[table] == before[table], table
                assert not moved[table], table
            (answer,) = b.run(append.idempotency_keys, datastore.name, [cell.key])
            assert answer == "again"
            back = ShardMover(mover, datastore, 1, "b", "a")
            back.begin()
            back.switch()
        after = held(a, datastore)
        assert after["checkpoint"] == [index, (*program[:13], 8, "running", *program[15:])]
        assert {table: rows for table, rows in after.items() if table != "checkpoint"} == {
            table: rows for table, rows in before.items() if table != "checkpoint"
        }


def test_a_generation_at_the_source_cuts_the_copy_back(topology, make_datastore):
    """Cells behind its start are copied again, and the target has both generations."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        a, b = storage.masters
        fill(storage, datastore, 0, 1500)
        with Mover(storage, ["a", "b"]) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            one.copy()
            a.run(shard_head.open_generation, datastore, 0, GenerationStart(2, 1001))
            fill(storage, datastore, 0, 10)
            one.switch()
        head = verify(storage, datastore, 0, "b", "a", [])
        assert head.location == Location(2, 1510)
        starts = [GenerationStart(1, 1), GenerationStart(2, 1001)]
        assert b.run(shard_head.generations, datastore.name, 0) == starts
        assert one.move.digest == b.run(query, shard_copy.digest(datastore, 0, 0, 1510))[0][0]


def test_a_close_that_a_voter_does_not_show_is_taken_back(topology, admin, make_datastore):
    """The shard is open again after a quarter of a second, its workers too, and the move goes on later."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage, ExitStack() as stopped:
        a = storage.master("a")
        a.run(query, f"INSERT INTO schemaless.{home_rows(datastore, 0)[0]}")
        fill(storage, datastore, 0, 100)

        def told(step, move):
            if step is MoveStep.CLOSING and move.attempt == 0:
                stopped.enter_context(replication_stopped(admin.minions("a")[0]))

        with Putter(topology, datastore, 0) as putter, Mover(storage, ["a", "b"], told) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            with pytest.raises(Unavailable, match="doesn't show the close"):
                one.switch()
            ((moved_to, state, version),) = a.run(
                query,
                "SELECT moved_to, state, version FROM schemaless.shard_head JOIN schemaless.checkpoint"
                f" USING (datastore, shard) WHERE datastore = '{datastore.name}'",
            )
            assert (moved_to, state, version) == (None, "running", 8)
            assert "doesn't show the close" in one.move.told
            stored = len(putter.stored)
            until(lambda: len(putter.stored) > stored + 10)  # the voter still shows nothing
            stopped.close()
            one.switch()
        verify(storage, datastore, 0, "b", "a", putter.stored)


def quiet(step, move):
    """Tells nobody."""


def states(storage, datastore):
    return [(one.move.target, str(one.move.state), one.is_home) for one in arrivals(storage, datastore.name)]


def test_shards_are_moved_followed_reversed_moved_again_and_completed(topology, make_datastore):
    """Cells written at the new home come back, and after completion nothing lies at the former one."""
    datastore = make_datastore(shards=3, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        for shard in (0, 2):
            fill(storage, datastore, shard, 20)
        wanted = parse_shards("0,2", datastore)
        move_shards(storage, datastore, plan_move(storage, datastore, wanted, "b"), "b", quiet)
        move_shards(storage, datastore, plan_move(storage, datastore, wanted, "b"), "b", quiet)  # as after a kill
        live = storage.live(datastore)
        assert [live.home(shard) for shard in range(3)] == ["b", "a", "b"]
        assert states(storage, datastore) == [("b", "open", True), ("a", "ready", False)] * 2
        fill(storage, live, 0, 1300)
        follow(storage, datastore, [0], quiet, lambda: arrivals(storage, datastore.name)[1].move.copied == 1320)
        fill(storage, live, 0, 5)
        reverse(storage, datastore, [0], quiet)
        assert live.home(0) == "a"
        assert verify(storage, datastore, 0, "a", "b", []).added_id == 1325
        complete(storage, datastore, [0, 2], quiet)
        assert states(storage, datastore) == [("a", "complete", True), ("b", "complete", True)]
        for shard, former in ((0, "b"), (2, "a")):
            with pytest.raises(TableMissing):
                storage.master(former).run(entity_table.read_after, datastore, shard, 0, 1)
        with pytest.raises(StateConflict, match="can't be reversed or completed"):
            reverse(storage, datastore, [0], quiet)
        move_shards(storage, datastore, plan_move(storage, datastore, [0], "b"), "b", quiet)
        assert verify(storage, datastore, 0, "b", "a", []).added_id == 1325


def test_what_can_not_be_moved_is_refused_with_a_sentence(topology, make_datastore, monkeypatch):
    """And nothing is changed."""
    datastore = make_datastore(shards=3, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        for text, error in (("3", NotFound), ("2-1", NotFound), ("x", Invalid), ("", Invalid), ("1,,2", Invalid)):
            with pytest.raises(error):
                parse_shards(text, datastore)
        with pytest.raises(NotFound, match="no storage cluster 'c'"):
            plan_move(storage, datastore, [0], "c")
        with pytest.raises(StateConflict, match=r"shard 0 of .* lives on a already"):
            plan_move(storage, datastore, [0], "a")
        with pytest.raises(StateConflict, match=r"shards 0 of .* don't move"):
            cancel(storage, datastore, [0], quiet)
        with pytest.raises(StateConflict, match="didn't move"):
            complete(storage, datastore, [0], quiet)
        with monkeypatch.context() as small:
            small.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
            with pytest.raises(Misconfigured, match="the disk of b1 has 0 MiB left"):
                plan_move(storage, datastore, [0], "b")
        with monkeypatch.context() as other:
            other.setattr(move_orders, "SAME_SETTINGS", ("server_id",))
            with pytest.raises(Misconfigured, match=r"server_id is .* on b, and .* on a"):
                plan_move(storage, datastore, [0], "b")
        assert not arrivals(storage, datastore.name)
        plan = plan_move(storage, datastore, [0], "b")
        with Mover(storage, ["b"]), pytest.raises(StateConflict, match="another process moves shards from or to b"):
            move_shards(storage, datastore, plan, "b", quiet)
        order = GrowthOrder(storage, OrderKind.ADD_NODE, "a", "a9", "somebody")
        with order, pytest.raises(StateConflict, match="somebody ordered `add-node a a9`"):
            move_shards(storage, datastore, plan, "b", quiet)
        assert not arrivals(storage, datastore.name)


def test_a_move_is_cancelled(topology, make_datastore):
    """What was copied is dropped, and the shard can move later."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        fill(storage, datastore, 0, 20)
        with Mover(storage, ["a", "b"]) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            one.copy()
        with pytest.raises(StateConflict, match="moves to b already"):
            source_of(datastore, 0, "c", arrivals(storage, datastore.name))
        cancel(storage, datastore, [0], quiet)
        assert not arrivals(storage, datastore.name)
        with pytest.raises(TableMissing):
            storage.master("b").run(entity_table.read_after, datastore, 0, 0, 1)
        move_shards(storage, datastore, plan_move(storage, datastore, [0], "b"), "b", quiet)
        assert verify(storage, datastore, 0, "b", "a", []).added_id == 20


def test_copying_waits_for_a_minion_until_the_limit_is_raised(topology, admin, make_datastore):
    """Whoever looks at the moves reads why it waits. The limit of a move that runs is changed."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage, SyncStorage(topology) as other:
        fill(storage, datastore, 0, 600)

        def told():
            ((one, _),) = arrivals(other, datastore.name)
            return one.told

        with Mover(storage, ["a", "b"]) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            with ThreadPoolExecutor(1) as pool, replication_stopped(admin.minions("b")[0]):
                one.begin(lag_max_ms=1)
                mover.lag_s(["a", "b"])
                copying = pool.submit(one.copy)
                until(lambda: "a minion of a or b is" in told())
                assert throttle(other, datastore, [0], {"lag_max_ms": 600_000}) == 1
                copying.result(LIMIT_S)
        assert one.move.copied == 600


def test_copying_waits_after_a_slow_commit_with_smaller_pages(topology, make_datastore):
    """A limit that no commit keeps makes each page wait, and shrinks it."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    pages = []
    with SyncStorage(topology) as storage:
        fill(storage, datastore, 0, 2300)
        with Mover(
            storage, ["a", "b"], lambda step, move: step is MoveStep.PAGE and pages.append(move.copied)
        ) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin(commit_max_ms=0)
            one.copy()
    assert pages == [1000, 2000, 2250, 2300]


CELLS = 40_000


def test_how_fast_cells_are_copied(topology, make_datastore):
    """Prints the rate. The bar is 8,000 cells/s, on a machine with nothing else to do."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        fill(storage, datastore, 0, CELLS, size=300)
        with Mover(storage, ["a", "b"]) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            began = time.monotonic()
            one.copy()
            print(f"{CELLS / (time.monotonic() - began):.0f} cells/s")
        assert one.move.copied == CELLS


def test_a_late_process_opens_nothing(topology, make_datastore):
    """Another one took its attempt back, and closed the shard again: the late one names the former attempt."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    with SyncStorage(topology) as storage:
        a, b = storage.masters
        fill(storage, datastore, 0, 20)

        def told(step, move):
            if step is MoveStep.CLOSED:
                assert b.run(shard_move_table.take_back, move, "too slow")
                again = b.run(shard_move_table.of_shard, datastore.name, 0)
                b.run(lambda: shard_move_table.change(again, state=MoveState.CLOSING))

        with Mover(storage, ["a", "b"], told) as mover:
            late = ShardMover(mover, datastore, 0, "a", "b")
            late.begin()
            with pytest.raises(StateConflict, match="was changed by another process"):
                late.switch()
        assert b.run(shard_move_table.home_head, datastore.name, 0) is None
        assert a.run(shard_move_table.home_head, datastore.name, 0).moved_to is None
        fill(storage, datastore, 0, 5)
        move_shards(storage, datastore, plan_move(storage, datastore, [0], "b"), "b", quiet)
        assert verify(storage, datastore, 0, "b", "a", []).added_id == 25


def test_cells_that_differ_at_the_target_stop_a_move(topology, make_datastore, monkeypatch):
    """What is stored is compared, not what was sent: here a body is changed on its way."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    inserting = shard_copy.inserting

    def other(*page):
        return [*inserting(*page), f"UPDATE {datastore.database(0)}.entity SET body = 'x' WHERE added_id = 7"]

    with SyncStorage(topology) as storage, Mover(storage, ["a", "b"]) as mover:
        fill(storage, datastore, 0, 20)
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        with monkeypatch.context() as changed:
            changed.setattr(shard_copy, "inserting", other)
            with pytest.raises(Corrupt, match="cells 1 to 20 are others on a than on b"):
                one.copy()
        one.switch()
        verify(storage, datastore, 0, "b", "a", [])


def test_commands_move_shards_and_show_them(running, make_datastore, monkeypatch):
    """As an operator runs them. Each that changes something prints what came of it."""
    datastore = make_datastore(shards=4, partitions=1, placement=("a",))
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", "127.0.0.1:1")

    def topology_command(*arguments):
        result = CliRunner().invoke(app, ["topology", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    def document(*arguments):
        return json.JSONDecoder().raw_decode(topology_command(*arguments, "--json"))[0]  # logs follow it here

    with SyncStorage(running.topology) as storage:
        for shard in (0, 1):
            fill(storage, datastore, shard, 20)
    dry = topology_command("move-shard", datastore.name, "0-1", "b", "--dry-run")
    assert "would move from a to b: nothing was changed" in dry
    assert document("moves", datastore.name) == {"moves": []}
    assert "live on b now" in document("move-shard", datastore.name, "0-1", "b", "--lag-ms", "900")["told"]
    moves = document("moves", datastore.name)["moves"]
    assert [(one["to"], one["state"], one["copied"], one["lag_max_ms"]) for one in moves] == [
        ("b", "open", 20, 900),
        ("a", "ready, follows back", 20, 900),
    ] * 2
    assert 0 < moves[0]["pause_ms"] < 250
    assert "2 moves" in topology_command("move-throttle", datastore.name, "0", "--commit-ms", "50")
    assert "live where they came from" in topology_command("reverse", datastore.name, "1")
    assert "are dropped" in topology_command("complete", datastore.name, "0-1")
    assert "complete" in topology_command("moves", datastore.name)
    refused = CliRunner().invoke(app, ["topology", "move-cancel", datastore.name, "0"])
    assert isinstance(refused.exception, StateConflict)


def test_a_switch_is_told_once_every_voter_of_the_target_has_it(topology, admin, make_datastore):
    """Whoever is promoted there would have the shard. Until then no process learns of the new home."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    passed = {}
    with SyncStorage(topology) as storage, ThreadPoolExecutor(1) as pool, ExitStack() as stopped:
        b = storage.master("b")
        fill(storage, datastore, 0, 20)

        def told(step, move):
            passed[step] = time.monotonic()
            if step is MoveStep.CLOSING:
                stopped.enter_context(replication_stopped(admin.minions("b")[0]))

        with Mover(storage, ["a", "b"], told) as mover:
            one = ShardMover(mover, datastore, 0, "a", "b")
            one.begin()
            switching = pool.submit(one.switch)
            until(lambda: b.run(shard_move_table.of_shard, datastore.name, 0).state is MoveState.OPEN)
            until(lambda: time.monotonic() > passed[MoveStep.CLOSING] + 0.5)
            started = time.monotonic()
            stopped.close()
            switching.result(LIMIT_S)
        assert passed[MoveStep.OPENED] < started < passed[MoveStep.SHOWN] < passed[MoveStep.PUBLISHED]
        verify(storage, datastore, 0, "b", "a", [])


def test_a_switch_is_not_interrupted(topology, make_datastore):
    """Ctrl-C in the middle counts when the switch is done: the shard isn't left closed."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    passed = []

    def told(step, move):
        passed.append(step)
        if step is MoveStep.CLOSED:
            os.kill(os.getpid(), signal.SIGINT)

    with SyncStorage(topology) as storage, Mover(storage, ["a", "b"], told) as mover:
        one = ShardMover(mover, datastore, 0, "a", "b")
        one.begin()
        with pytest.raises(KeyboardInterrupt):
            one.switch()
        assert passed[-1] is MoveStep.SETTLED
        verify(storage, datastore, 0, "b", "a", [])
