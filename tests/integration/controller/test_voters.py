"""A voter that is silent is left out, so that it holds up no promotion, and votes again once it is back."""

import asyncio
import sys
import time
from contextlib import ExitStack

import pytest

from api.write.put import PutOutcome
from cleaner.service import Cleaner
from controller.decide import SILENT_VOTER_S
from controller.service import FRESH_S
from schemaless.cell import PutStatus
from schemaless.runtime.events import Event
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.appointment_table import OrderKind, OrderState
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.sql import sql
from tests.failover_harness import TAIL_S, Puts, check, cleaning, drill, give_back, in_thread, leave_out, make_datastore
from tests.log_harness import REPLICATED_WRITE, run_sql
from tests.waiting import async_until, until

pytestmark = [pytest.mark.storage, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    with drill(tmp_path_factory.mktemp("voters")) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(drilled):
    """Every test leaves servers that run and follow. The hour between two promotions is not waited for."""
    drilled.order("a", OrderKind.ACKNOWLEDGE)
    yield
    drilled.whole()


@pytest.fixture
async def puts(drilled, chance):
    datastore = await asyncio.to_thread(make_datastore, drilled.running)
    async with AsyncStorage(drilled.running.topology) as storage:
        yield Puts(storage, datastore, chance)


def voters(drilled):
    return set(drilled.controller.known["a"].voters) if "a" in drilled.controller.known else set()


def are(drilled, *names):
    return lambda: voters(drilled) == set(names)


def why(drilled):
    """What the controller says of the cluster, '' while it has said nothing since its start."""
    states = drilled.controller.states
    return states["a"].why if "a" in states else ""


def heads(node):
    return tuple(node.run(query, "SELECT datastore, shard, head FROM schemaless.shard_head ORDER BY 1, 2"))


def promised(node):
    """The highest ballot that a server promised to obey."""
    return node.run(query, "SELECT MAX(epoch) FROM schemaless.promise")


async def waiting(puts, home, secondary):
    """How many cells of a home wait on a secondary."""
    select = sql(
        "SELECT COUNT(*) FROM schemaless.buffer WHERE datastore = %s AND home = %s",
        puts.datastore.name.encode(),
        home.encode(),
    )
    return (await puts.storage.master(secondary).run(query, select))[0][0]


async def until_none_wait(puts, home, secondary):
    async def none_wait():
        return not await waiting(puts, home, secondary)

    await async_until(none_wait)


async def test_a_silent_voter_holds_up_no_promotion(drilled, puts):
    """The second failure comes after the first one was noticed: the other minion is promoted by nobody's order."""
    old, (first, second) = drilled.master("a"), drilled.controller.known["a"].voters
    async with puts.running():
        await asyncio.sleep(0.5)
        drilled.running.servers[first].kill()
        killed_at = time.monotonic()
        await in_thread(drilled.until, are(drilled, second), "the silent one is left out")
        print(f"left out after {time.monotonic() - killed_at:.1f} s, longest gap {puts.longest_gap_s * 1000:.0f} ms")
        assert time.monotonic() - killed_at > SILENT_VOTER_S - FRESH_S
        assert drilled.controller.known["a"].generation == 0
        assert drilled.master("a") == old
        await asyncio.sleep(0.5)
        drilled.running.servers[old].kill()
        await in_thread(drilled.another_master, "a", old)
        assert drilled.master("a") == second
        await in_thread(drilled.running.servers[first].start)
        await in_thread(drilled.until, are(drilled, first), "the silent one is back")
    assert puts.failed == []
    assert await check(puts)


async def test_a_master_that_its_own_options_open_is_closed_and_compared(drilled, puts):
    """Else one that was restored would take puts for good, and nobody would know what it lacks. Where another one takes
    its place, because it was late, that one is restarted.
    """
    files = [server.option_file for name, server in drilled.running.descriptions.items() if name.startswith("a")]

    def is_closed_after_a_restart():
        name = drilled.master("a")
        drilled.running.servers[name].kill()
        drilled.running.servers[name].start()
        drilled.healthy()
        fenced = drilled.controller._last_step("a", ("fenced",))
        return fenced is not None and fenced.told.startswith(f"{name} was open at its start")

    with ExitStack() as changed:
        for file in files:
            changed.callback(file.write_text, file.read_text())
            file.write_text(f"{file.read_text()}\nread_only=OFF\n")
        async with puts.running(), cleaning(puts.storage):
            await in_thread(until, is_closed_after_a_restart)
    last = drilled.controller._last_step("a", ("fenced", "opened"))
    assert last.step == "opened"
    assert puts.failed == []
    assert await check(puts)


async def test_what_somebody_wrote_to_a_minion_holds_up_no_promotion(drilled, puts):
    """A routine ANALYZE TABLE is enough. The other minion has received more, and this one has what nobody confirmed."""
    old, (first, second) = drilled.master("a"), drilled.controller.known["a"].voters
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(0.5)
        with SyncStorage(drilled.running.administrators) as admin:

            def write_and_kill():
                with drilled.acting_alone():
                    run_sql(admin.nodes[first], f"STOP REPLICA; {REPLICATED_WRITE}; ANALYZE TABLE schemaless.promise")
                    time.sleep(TAIL_S)
                    drilled.running.servers[old].kill()

            await in_thread(write_and_kill)
            await in_thread(drilled.another_master, "a", old)
    assert drilled.master("a") == second
    assert puts.failed == []
    await in_thread(drilled.whole)
    assert await check(puts)


async def test_one_that_left_a_cell_out_is_not_promoted(drilled, puts):
    """It is where the other one is, by its position and its heads, and it would be chosen first."""
    old, (first, second) = drilled.master("a"), drilled.controller.known["a"].voters
    async with puts.running():
        await asyncio.sleep(1)
    with SyncStorage(drilled.running.administrators) as admin:
        await async_until(lambda: len({heads(admin.nodes[name]) for name in (old, first, second)}) == 1)
        leave_out(admin.nodes[first], puts.datastore)
        drilled.running.servers[old].kill()
        await in_thread(drilled.another_master, "a", old)
        assert drilled.master("a") == second
        give_back(admin.nodes[first], puts.datastore)
    assert await check(puts)


async def test_where_all_lack_cells_an_order_promotes_one_and_nothing_is_copied_over_the_old_master(drilled, puts):
    """Nobody does it without an order, and the waiting takes no epoch. What the old master has isn't lost with it."""
    old, (first, second) = drilled.master("a"), drilled.controller.known["a"].voters
    async with puts.running(), cleaning(puts.storage):
        await asyncio.sleep(1)
    with SyncStorage(drilled.running.administrators) as admin, ExitStack() as restored:
        await async_until(lambda: len({heads(admin.nodes[name]) for name in (old, first, second)}) == 1)
        await in_thread(drilled.end_controller)
        for name, shard in ((first, 0), (second, 2)):
            leave_out(admin.nodes[name], puts.datastore, shard)
            run_sql(admin.nodes[name], "STOP REPLICA IO_THREAD")
        restored.callback(give_back, admin.nodes[second], puts.datastore, 2)  # the first one is promoted
        run_sql(admin.nodes[old], f"{REPLICATED_WRITE}; CREATE TABLE {puts.datastore.database(0)}.tail (id INT)")
        drilled.running.servers[old].kill()
        drilled.remake_command = "false"
        drilled.start_controller()
        drilled.remake_command = None  # of the next one
        await async_until(lambda: "which goes on without these cells" in why(drilled))
        epoch = promised(admin.nodes[first])
        await asyncio.sleep(6)
        assert promised(admin.nodes[first]) == epoch
        drilled.order("a", OrderKind.PROMOTE)
        await in_thread(drilled.another_master, "a", old)
        assert (drilled.settled["a"][0], drilled.master("a")) == (OrderState.DONE, first)
        give_back(admin.nodes[first], puts.datastore)  # under its number, as a person does. It is a hole of the log
        await in_thread(drilled.running.servers[old].start)
        again = f"put again what {old} has of that, then `schemaless topology rejoin a {old}`"
        await async_until(lambda: again in why(drilled), lambda: drilled.controller.states)
    await in_thread(drilled.make_anew, old, second)
    await in_thread(drilled.until, are(drilled, old, second), "both follow")
    assert puts.failed == []
    assert await check(puts)


async def test_while_no_voter_answers_cells_are_stored_and_stay_in_the_buffers(drilled, puts):
    """Nobody confirms them: what the master alone has would be lost with it. They go once a minion is back."""
    minions = drilled.controller.known["a"].voters
    for name in minions:
        drilled.running.servers[name].kill()
    await asyncio.sleep(SILENT_VOTER_S + 2)
    assert drilled.controller.known["a"].voters == minions
    stop = asyncio.Event()
    cleaning = asyncio.create_task(Cleaner(puts.storage).run(stop))
    async with puts.running():
        await asyncio.sleep(2)
    outcomes = {outcome.status for _, outcome in puts.told if isinstance(outcome, PutOutcome)}
    assert puts.failed == []
    assert PutStatus.STORED in outcomes
    told = [(cell.key, outcome) for cell, outcome in puts.told if outcome.copies == 2]  # b may have stood still
    home_a = {key for key, outcome in told if outcome.placed and outcome.placed.shard % 2 == 0}

    await until_none_wait(puts, "b", "a")
    assert await waiting(puts, "a", "b") >= len(home_a) > 0
    await in_thread(drilled.running.servers[minions[0]].start)
    await in_thread(drilled.until, are(drilled, minions[0]), "the other one is left out")
    await until_none_wait(puts, "a", "b")
    stop.set()
    await cleaning
    assert await check(puts)


async def test_minions_that_were_all_away_replace_a_master_that_dies_meanwhile(drilled, puts):
    """They stayed voters, so one of them is promoted once all are heard, and nobody has to order it."""
    old, minions = drilled.master("a"), drilled.controller.known["a"].voters
    for name in minions:
        drilled.running.servers[name].kill()
    await asyncio.sleep(SILENT_VOTER_S + 1)
    async with puts.running():
        await asyncio.sleep(0.5)
        drilled.running.servers[old].kill()
        for name in minions:
            await in_thread(drilled.running.servers[name].start)
        await in_thread(drilled.another_master, "a", old)
    assert drilled.master("a") in minions
    assert puts.failed == []
    await in_thread(drilled.whole)
    assert await check(puts)


async def test_a_voter_that_only_the_controller_does_not_hear_is_left_out_too(drilled, puts):
    """It goes on to receive, and counts for nobody meanwhile. It votes again without a new start."""
    master, (silent, other) = drilled.master("a"), drilled.controller.known["a"].voters
    (node,) = (node for node in drilled.running.administrators.cluster("a").nodes if node.name == silent)
    with AdminSession(node) as session:
        account = session.query("SELECT CURRENT_USER() AS account")[0]["account"].split("@")
        quoted = "@".join(f"'{part}'" for part in account)
        session.query(f"SET sql_log_bin = 0; ALTER USER {quoted} ACCOUNT LOCK")
        others = session.query(
            "SELECT id FROM information_schema.processlist WHERE user = %s AND id != CONNECTION_ID()", account[0]
        )
        for one in others:
            session.query(f"KILL {next(iter(one.values()))}")
        async with puts.running():
            await in_thread(drilled.until, are(drilled, other), "the silent one is left out")
            await async_until(lambda: [minion.node.name for minion in puts.storage.minions("a")] == [other])
            assert session.replication().healthy
            session.query(f"ALTER USER {quoted} ACCOUNT UNLOCK")
            await in_thread(drilled.until, are(drilled, silent, other), "it votes again")
    assert drilled.master("a") == master
    assert puts.failed == []
    assert await check(puts)


REMAKE = """
import pathlib, sys, time

folder, *names = sys.argv[1:]
pathlib.Path(folder, "names").write_text(" ".join(names))
pathlib.Path(folder, "names").rename(pathlib.Path(folder, "wanted"))
while not pathlib.Path(folder, "done").exists():
    time.sleep(0.05)
"""


def rejoins(drilled, name):
    """Orders it again where the controller hasn't seen yet that it doesn't follow."""
    drilled.order("a", OrderKind.REJOIN, name)
    drilled.until(lambda: "a" in drilled.settled or drilled.orders["a"].step, "the order is begun or settled")
    return "a" not in drilled.settled


async def test_a_minion_whose_replication_failed_rejoins_by_order(drilled, puts, tmp_path):
    """Here the test makes it anew, as the command that the controller runs. Nobody sends it there before the order."""
    (tmp_path / "remake.py").write_text(REMAKE)
    drilled.end_controller()
    drilled.remake_command = f"{sys.executable} {tmp_path / 'remake.py'} {tmp_path}"
    drilled.start_controller()
    await in_thread(drilled.healthy)
    failed, other = drilled.controller.known["a"].voters
    row = "INSERT INTO schemaless.admin_action VALUES (4000000, UTC_TIMESTAMP(6), 'x', 'x', 'x', 'x')"
    nodes = {node.name: node for node in drilled.running.administrators.cluster("a").nodes}
    with AdminSession(nodes[failed]) as session:
        session.query(f"SET sql_log_bin = 0; {row}")
        with AdminSession(nodes[drilled.master("a")]) as writer:
            writer.query(row)
        await in_thread(drilled.until, lambda: not session.replication().applying, "its replication fails")
    async with puts.running():
        await in_thread(drilled.until, lambda: rejoins(drilled, failed), "the order is carried out")
        await in_thread(drilled.until, (tmp_path / "wanted").exists, "it is to be made anew")
        assert (tmp_path / "wanted").read_text().split() == [failed, other]
        await in_thread(drilled.make_anew, failed, other)
        (tmp_path / "done").touch()
        await in_thread(drilled.until, are(drilled, failed, other), "both vote")
    with AdminSession(nodes[failed]) as session:
        await in_thread(drilled.until, lambda: session.replication().healthy, "it follows")
    await in_thread(drilled.until, lambda: "a" in drilled.settled, "the order is settled")
    told = f"{failed} follows {drilled.master('a')} again"
    assert drilled.settled["a"] == (OrderState.DONE, told)
    assert puts.failed == []
    assert await check(puts)
    drilled.remake_command = None


async def test_a_controller_dies_while_it_leaves_a_voter_out(drilled, puts):
    """The heads have a new epoch, and nobody knows it. The next controller ends that, and no put fails."""
    first, second = drilled.controller.known["a"].voters
    async with puts.running():
        await asyncio.sleep(0.5)
        async with drilled.dying_at(Event.HEADS_OPENED):
            drilled.running.servers[first].kill()
        await in_thread(drilled.until, are(drilled, second), "the silent one is left out")
        await asyncio.sleep(0.5)
    assert puts.failed == []
    assert await check(puts)
