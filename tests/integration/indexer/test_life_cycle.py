"""Indexes are dropped, made anew, paused, throttled and given up, behind a real indexer and with real servers (I11)."""

import asyncio
import time
import uuid
from dataclasses import replace

import pytest

from indexer import service
from indexer.maintainer import Maintainer
from indexer.service import note_gone, remove_from, remove_strays
from schemaless.bus.topics import ensure_topics
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.ports import Advance, Run
from schemaless.errors import Conflict, Invalid, NotFound, RefusedForGood, TableMissing
from schemaless.index.catalogue import (
    build_progress,
    create_index,
    drop_index,
    fail_index,
    find_index,
    pause_index,
    read_versions,
    resume_index,
    run_on_masters,
    throttle_index,
)
from schemaless.index.comparison import CheckRequest, FaultCounts
from schemaless.index.definition import parse_definition
from schemaless.location import Location
from schemaless.names import index_consumer, index_table_name
from schemaless.position import position_of
from schemaless.storage import (
    checkpoint_table,
    entity_table,
    index_check_table,
    index_definition_table,
    index_pass_table,
    index_table,
    index_write_table,
)
from schemaless.storage.index_definition_table import IndexLimits, IndexOrder, IndexStage, IndexState, RowWalk, defined
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.job_table import Job, JobKind
from schemaless.storage.operation import query
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.integration.indexer.test_indexer import Rows, definition, wait_active
from tests.log_harness import replication_stopped, run_sql, running_tailers
from tests.waiting import async_until

pytestmark = pytest.mark.storage

SHARDS = 4


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def indexer_log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "indexer.log"


@pytest.fixture(scope="module")
def processes(running, kafka, datastore, indexer_log):
    """A tailer and an indexer."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with (
        indexer_log.open("wb") as log,
        running_tailers(1, running.path, kafka, datastore),
        running_consumer(["indexer"], settings, stdout=log.fileno()) as indexer,
    ):
        yield indexer


@pytest.fixture
def rows(storage, datastore):
    return Rows(storage, datastore)


def fill(rows, count, owner="o"):
    rows.put(
        *[rows.cell(uuid.uuid4().bytes, "BASE", 1, {"owner": f"{owner}{n % 7}", "number": n}) for n in range(count)]
    )


def left_of(storage, datastore, name, number):
    """What any cluster still has of a version."""
    consumer, table = index_consumer(name, number), index_table_name(name, number)
    found = []
    for cluster in datastore.clusters:
        master = storage.master(cluster)
        found += master.run(checkpoint_table.of_consumer, datastore.name, consumer)
        tables = f"SELECT table_schema, table_name FROM information_schema.tables WHERE table_name = '{table}'"
        found += [row for row in master.run(query, tables) if row[0].startswith(datastore.name)]
        build = f"SELECT 1 FROM schemaless.index_build WHERE datastore = '{datastore.name}'"
        found += master.run(query, f"{build} AND name = '{name}' AND number = {number}")
    return found


async def wait_gone(async_storage, datastore, name, number):
    async def gone():
        merged = (await read_versions(async_storage, datastore)).merged
        return (name, number) not in merged or merged[name, number].stage is IndexStage.GONE

    await async_until(gone)


async def test_an_index_is_dropped_while_active_and_while_building_and_made_anew_at_once(
    processes, rows, async_storage, storage, datastore
):
    """Each version has a number of its own. Nothing of the earlier ones is left, and the last one is complete."""
    fill(rows, 100)
    await create_index(async_storage, datastore, definition())
    await wait_active(async_storage, datastore, "by_owner")
    changed = parse_definition({**definition().document(), "stored": []})
    for again in (definition(), changed):
        dropped = await drop_index(async_storage, datastore, "by_owner")
        assert dropped.state is IndexState.DELETING
        assert await create_index(async_storage, datastore, again)
        assert (await find_index(async_storage, datastore, "by_owner")).number == dropped.number + 1
    await wait_active(async_storage, datastore, "by_owner")
    last = (await find_index(async_storage, datastore, "by_owner")).definition
    assert last.number == 3
    for number in (1, 2):
        await wait_gone(async_storage, datastore, "by_owner", number)
    fill(rows, 20)
    wait_until_finished(storage, datastore, last.consumer)
    assert rows.found(last) == rows.wanted(last)
    for number in (1, 2):
        assert left_of(storage, datastore, "by_owner", number) == []
    await drop_index(async_storage, datastore, "by_owner")
    await wait_gone(async_storage, datastore, "by_owner", 3)
    with pytest.raises(NotFound):
        await find_index(async_storage, datastore, "by_owner")
    with pytest.raises(NotFound):
        await drop_index(async_storage, datastore, "by_owner")


async def test_a_drop_survives_a_kill(processes, rows, async_storage, storage, datastore):
    """The indexer is killed as soon as the drop is ordered. Its successor deletes what is left."""
    name = definition("killed")
    await create_index(async_storage, datastore, name)
    await drop_index(async_storage, datastore, "killed")
    processes.kill_and_restart()
    await wait_gone(async_storage, datastore, "killed", 1)
    assert left_of(storage, datastore, "killed", 1) == []


async def test_a_paused_index_stays_where_it_is_and_continues_from_there(
    processes, rows, async_storage, storage, datastore
):
    """Nothing of the log is lost to it. A throttle that is set meanwhile holds when it goes on."""
    await create_index(async_storage, datastore, definition("paused"))
    await wait_active(async_storage, datastore, "paused")
    index = definition("paused")
    await pause_index(async_storage, datastore, "paused")
    other = definition("beside")  # ordered after the pause, and active: so the pause was seen
    await create_index(async_storage, datastore, other)
    await wait_active(async_storage, datastore, "beside")
    before = rows.found(index)
    fill(rows, 120, owner="later")
    wait_until_finished(storage, datastore, "index:beside")
    assert rows.found(index) == before
    await throttle_index(async_storage, datastore, "paused", {"cells_per_s": 60})
    began = time.monotonic()
    assert (await resume_index(async_storage, datastore, "paused")).state is IndexState.ACTIVE
    wait_until_finished(storage, datastore, "index:paused")
    assert time.monotonic() - began >= 120 / 60 - 0.2
    assert rows.found(index) == rows.wanted(index)


async def test_what_bounds_a_build_is_changed_while_it_runs(
    processes, indexer_log, rows, async_storage, datastore, admin
):
    """It rests for a minion that stands still, because an order says so, and goes on because another one does."""
    fill(rows, 200)
    order = IndexOrder(limits=IndexLimits(cells_per_s=80, build_lag_cells_max=1), revision=1)
    with replication_stopped(admin.minions("a")[0]):
        index = defined(definition("rests"), order=order)
        await run_on_masters(async_storage.masters, index_definition_table.bring_to, datastore.name, index)
        await async_until(lambda: "a build rests: a minion lags" in indexer_log.read_text())
        assert (await find_index(async_storage, datastore, "rests")).state is IndexState.BUILDING
        await throttle_index(async_storage, datastore, "rests", {"cells_per_s": None, "build_lag_cells_max": 0})
        await wait_active(async_storage, datastore, "rests")
    assert rows.found(definition("rests")) == rows.wanted(definition("rests"))


async def test_a_build_is_paused_and_continues_and_is_dropped_in_every_state(
    processes, rows, async_storage, storage, datastore
):
    """It is slowed down and paused while it walks, and stays where it is. Paused and failed indexes go as others do."""
    fill(rows, 300)
    await create_index(async_storage, datastore, definition("slow"))
    await throttle_index(async_storage, datastore, "slow", {"cells_per_s": 40})

    async def done():
        return (await build_progress(async_storage, datastore, await find_index(async_storage, datastore, "slow"))).done

    await async_until(done)
    assert (await pause_index(async_storage, datastore, "slow")).state is IndexState.PAUSED
    await create_index(async_storage, datastore, definition("other"))
    await wait_active(async_storage, datastore, "other")  # ordered after the pause: so the pause was seen
    stands = await done()
    await create_index(async_storage, datastore, definition("another"))
    await wait_active(async_storage, datastore, "another")
    assert await done() == stands > 0
    await resume_index(async_storage, datastore, "slow")
    await throttle_index(async_storage, datastore, "slow", {"cells_per_s": None})
    await wait_active(async_storage, datastore, "slow")
    assert rows.found(definition("slow")) == rows.wanted(definition("slow"))
    await pause_index(async_storage, datastore, "slow")
    await fail_index(async_storage, datastore, await find_index(async_storage, datastore, "other"), "for a test")
    for name in ("slow", "other"):
        assert (await find_index(async_storage, datastore, name)).state in (IndexState.PAUSED, IndexState.FAILED)
        assert (await drop_index(async_storage, datastore, name)).state is IndexState.DELETING
        await wait_gone(async_storage, datastore, name, 1)
        assert left_of(storage, datastore, name, 1) == []
    await drop_index(async_storage, datastore, "another")


async def test_an_index_whose_table_is_lost_fails_alone(processes, rows, async_storage, storage, datastore):
    """It says why, the others go on, and it runs again when somebody has put it right."""
    await create_index(async_storage, datastore, definition("broken"))
    await wait_active(async_storage, datastore, "broken")
    index = definition("broken")
    for shard in range(SHARDS):
        run_sql(
            storage.master(datastore.home(shard)),
            f"RENAME TABLE {datastore.database(shard)}.index_broken TO {datastore.database(shard)}.away",
        )
    fill(rows, 20, owner="unlucky")

    async def failed():
        found = await find_index(async_storage, datastore, "broken")
        return found if found.state is IndexState.FAILED else None

    found = await async_until(failed)
    assert "index_broken" in found.order.reason
    wait_until_finished(storage, datastore, "index:beside")
    for shard in range(SHARDS):
        run_sql(
            storage.master(datastore.home(shard)),
            f"RENAME TABLE {datastore.database(shard)}.away TO {datastore.database(shard)}.index_broken",
        )
    await resume_index(async_storage, datastore, "broken")
    wait_until_finished(storage, datastore, "index:broken")
    assert rows.found(index) == rows.wanted(index)


async def test_a_frozen_process_with_an_old_definition_writes_into_no_later_version(
    make_datastore, async_storage, storage
):
    """D9: its tables and its checkpoints have names of their own. It loses, and the later version stays as it is."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    rows = Rows(storage, datastore)
    old, new = definition(), replace(definition(), number=2)
    for each in (old, new):
        for shard in range(SHARDS):
            storage.master(datastore.home(shard)).run(index_table.create, datastore, shard, each)
    fill(rows, 30)
    frozen = Checkpoints(CommitLanes(async_storage, datastore), old.consumer, CheckpointPlacement.EVERYWHERE)
    await frozen.read(range(SHARDS))
    maintainer = Maintainer(async_storage, datastore, old)
    shard, cells = next(
        (shard, cells)
        for shard in range(SHARDS)
        if (cells := storage.master(datastore.home(shard)).run(entity_table.read_after, datastore, shard, 0, 100))
    )
    effect = await maintainer.handle([Run(shard, Location(1, 0), cells)])
    for cluster in datastore.clusters:
        storage.master(cluster).run(checkpoint_table.delete_all, datastore.name, old.consumer)
    advance = {shard: Advance(position_of(cells[-1]))}
    assert await frozen.move(advance, effect.scripts) == {shard}
    assert rows.found(old) == {}
    for each in range(SHARDS):
        storage.master(datastore.home(each)).run(index_table.drop, datastore, [each], old.table)
    await frozen.read(range(SHARDS))
    with pytest.raises(TableMissing):
        await frozen.move(advance, effect.scripts)
    assert rows.found(new) == {}
    assert await remove_strays(async_storage, datastore) == [old.consumer]


async def test_rows_that_a_late_process_left_of_a_dropped_version_go(make_datastore, async_storage, storage):
    """Of each table that has rows of versions. Those of a version that is there stay."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    await create_index(async_storage, datastore, definition())
    node = storage.master(datastore.clusters[0])

    def write(table, version):
        if table is index_pass_table:
            node.run(table.note, version, 0, FaultCounts())
        elif table is index_check_table:
            job = Job(version.number, "index:x", JobKind.VERIFY, 1, None, "test")
            node.run(table.put, version, job, {0: CheckRequest()})
        elif table is index_write_table:
            run_sql(node, table.count(version, 0, 5))
        elif table is index_definition_table:
            node.run(table.begin_walk, version, 0, RowWalk(1, 0))
        else:
            values = f"'{version.datastore}', '{version.name}', {version.number}, 0, 1"
            run_sql(node, f"INSERT INTO schemaless.index_forgotten VALUES ({values})")

    tables = (index_pass_table, index_check_table, index_write_table, index_definition_table, None)
    for number, table in enumerate(tables, start=7):  # of a version each, so that no other table tells of it
        for each in (1, number):
            write(table, IndexVersion(datastore.name, definition().name, each))
    await remove_strays(async_storage, datastore)
    for table in ("index_pass", "index_check", "index_write", "index_walk", "index_forgotten"):
        select = f"SELECT name, number FROM schemaless.{table} WHERE datastore = '{datastore.name}'"
        assert list(node.run(query, select)) == [(definition().name, 1)]


@pytest.mark.parametrize("stage", [IndexStage.DEFINED, IndexStage.BUILDING])
async def test_a_drop_at_the_moment_when_tables_are_made_leaves_none(
    make_datastore, async_storage, storage, monkeypatch, stage
):
    """A process that is killed before it removes them leaves empty tables. No build is noted, and they go later."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    other = parse_definition({**definition().document(), "name": "other"})
    for each in (definition(), other):
        await create_index(async_storage, datastore, each)
    await service.build_step(async_storage, datastore, await find_index(async_storage, datastore, "other"))
    index = replace(await find_index(async_storage, datastore, "by_owner"), stage=stage)
    await run_on_masters(async_storage.masters, index_definition_table.bring_to, datastore.name, index)
    make_tables = service.make_tables

    async def dropped_meanwhile(*arguments):
        going = await drop_index(async_storage, datastore, "by_owner")
        for cluster in datastore.clusters:
            await remove_from(async_storage, datastore, going, cluster)
        await note_gone(async_storage, datastore, going)
        await make_tables(*arguments)

    monkeypatch.setattr(service, "make_tables", dropped_meanwhile)
    await service.build_step(async_storage, datastore, index)
    left = left_of(storage, datastore, "by_owner", 1)
    assert [name for _, name in left] == ["index_by_owner"] * SHARDS  # and no checkpoint or row of a build
    kept = left_of(storage, datastore, "other", 1)
    await remove_strays(async_storage, datastore)
    assert left_of(storage, datastore, "by_owner", 1) == []
    assert left_of(storage, datastore, "other", 1) == kept
    assert len(kept) > SHARDS


async def test_a_late_creation_brings_no_dropped_version_back(make_datastore, async_storage, storage):
    """A process that stood still between two masters finds the number used, also after a later version was made."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    late = defined(definition())
    await create_index(async_storage, datastore, definition())
    gone = replace(late, text="", stage=IndexStage.GONE)
    for cluster in datastore.clusters:
        storage.master(cluster).run(index_definition_table.bring_to, datastore.name, gone)
        storage.master(cluster).run(index_definition_table.bring_to, datastore.name, late)
        storage.master(cluster).run(index_definition_table.insert, datastore.name, late, 100)
    assert (await read_versions(async_storage, datastore)).indexes() == {}
    await create_index(async_storage, datastore, definition())
    await drop_index(async_storage, datastore, "by_owner")
    await create_index(async_storage, datastore, definition())
    for cluster in datastore.clusters:
        storage.master(cluster).run(index_definition_table.bring_to, datastore.name, late)
    merged = (await read_versions(async_storage, datastore)).merged
    assert {number: index.stage for (_, number), index in merged.items()} == {
        2: IndexStage.DELETING,
        3: IndexStage.DEFINED,
    }


async def test_of_several_creations_at_once_one_is_made(make_datastore, async_storage):
    """The first master decides. Who asked for another definition is told so, and nothing of it stays."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    fields = [{"name": f"field_{n}", "column": "BASE", "path": "number", "type": "int"} for n in range(3)]
    wanted = [parse_definition({**definition().document(), "stored": [field]}) for field in fields]
    answers = await asyncio.gather(
        *(create_index(async_storage, datastore, each) for each in wanted for _ in range(2)), return_exceptions=True
    )
    (index,) = (await read_versions(async_storage, datastore)).merged.values()
    assert index.number == 1
    for each, answer in zip([each for each in wanted for _ in range(2)], answers, strict=True):
        if each == index.definition:
            assert isinstance(answer, bool)
        else:
            assert isinstance(answer, Conflict)
            assert "exists with another definition" in str(answer)


async def test_orders_that_are_given_at_once_all_count(make_datastore, async_storage, storage):
    """Each is in effect when it is answered, and every master has them all."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    await create_index(async_storage, datastore, definition())
    for n in range(1, 6):
        given = {"cells_per_s": n, "build_lag_cells_max": n, "build_commit_max_s": n / 2, "build_busy_share": n / 10}
        answers = await asyncio.gather(
            *(throttle_index(async_storage, datastore, "by_owner", {limit: given[limit]}) for limit in given),
            (pause_index, resume_index)[n % 2](async_storage, datastore, "by_owner"),
        )
        for limit, answer in zip(given, answers, strict=False):
            assert getattr(answer.order.limits, limit) == given[limit]
        for cluster in datastore.clusters:
            (index,) = storage.master(cluster).run(index_definition_table.all_of, datastore.name)
            assert index.order.limits == IndexLimits(**given)
            assert index.state is (IndexState.PAUSED, IndexState.BUILDING)[n % 2]


async def test_the_number_of_indexes_is_bounded(make_datastore, async_storage):
    """Those that are being deleted count: they still have tables. Nothing is made, and the same index again is fine."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    for name in ("one", "two"):
        await create_index(async_storage, datastore, definition(name), 2)
    await drop_index(async_storage, datastore, "two")
    with pytest.raises(Invalid, match="may have"):
        await create_index(async_storage, datastore, definition("three"), 2)
    assert not await create_index(async_storage, datastore, definition("one"), 2)
    with pytest.raises(Conflict):
        await create_index(async_storage, datastore, replace(definition("one"), stored=()), 2)
    assert list((await read_versions(async_storage, datastore)).indexes()) == ["one", "two"]


async def test_a_table_that_a_server_refuses_is_refused_for_good(storage, datastore):
    """So the index fails instead of waiting. A definition that is accepted may still be too much for a server."""
    wide = replace(definition(), name="w" * 60)
    with pytest.raises(RefusedForGood):
        storage.master(datastore.home(0)).run(index_table.create, datastore, 0, wide)
