"""Two programs never share checkpoints by accident: the name belongs to the first, until somebody takes it over."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from schemaless.consume.trigger_program import load_program
from schemaless.consume.trigger_worker import claim_name
from schemaless.errors import InUse, NameTaken, StorageUnavailable
from schemaless.ops.trigger_removal import plan_removal, remove_program
from schemaless.position import Position
from schemaless.storage import checkpoint_table, trigger_order_table, worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.worker_table import WorkerReport
from schemaless.topology import StorageCluster, Topology
from tests.consumer_harness import running_consumer

MARKED = "from schemaless import trigger\n@trigger(column='BASE')\ndef {}(row_key): ...\n"


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=2)


@pytest.fixture
def program(tmp_path):
    """Makes and loads FOLDER/main.py with one function of this name."""

    def make(folder, function, name=None):
        path = tmp_path / folder / "main.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(MARKED.format(function))
        return load_program(str(path), name)

    return make


def owners(storage, datastore, program):
    """By cluster, the origin that is stored."""
    return {
        cluster: storage.master(cluster).run(trigger_order_table.functions_of, datastore.name, program.consumer).origin
        for cluster in datastore.clusters
    }


async def test_a_name_belongs_to_the_first_program(storage, async_storage, datastore, program):
    """Another file of the same name is refused, with both origins and the way out. A name of its own is free."""
    ours, other = program("a", "bill"), program("b", "bill")
    for _ in range(2):
        await claim_name(async_storage, datastore, ours, take_over=False)
    with pytest.raises(NameTaken) as refused:
        await claim_name(async_storage, datastore, other, take_over=False)
    assert ours.origin in str(refused.value)
    assert other.origin in str(refused.value)
    assert "--take-over" in refused.value.hint
    assert set(owners(storage, datastore, ours).values()) == {ours.origin}
    await claim_name(async_storage, datastore, program("b", "bill", name="bills"), take_over=False)


async def test_of_two_that_begin_at_once_one_is_refused(storage, async_storage, datastore, program):
    """Whatever each of them saw before it wrote."""
    both = [program(folder, "bill") for folder in ("a", "b")]
    answers = await asyncio.gather(
        *(claim_name(async_storage, datastore, one, take_over=False) for one in both), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {type(None), NameTaken}
    winner = both[answers.index(None)]
    assert set(owners(storage, datastore, winner).values()) == {winner.origin}


async def test_a_program_without_a_known_function_is_another_one(async_storage, datastore, program):
    """Two containers may both have /app/main.py. A version that keeps one function is the same program."""
    await claim_name(async_storage, datastore, program("app", "bill"), take_over=False)
    with pytest.raises(NameTaken, match="bill on BASE"):
        await claim_name(async_storage, datastore, program("app", "census"), take_over=False)
    await claim_name(async_storage, datastore, program("app", "bill"), take_over=False)


async def test_a_new_name_is_claimed_while_all_clusters_answer(topology, async_storage, datastore, program):
    """Another program may own it on a cluster that doesn't. A name that is known to be its own doesn't wait."""
    ours, other = program("a", "bill"), program("b", "bill")
    master, *minions = topology.cluster("b").nodes
    away = replace(master, port=1, socket=None)
    clusters = {**topology.clusters, "b": StorageCluster("b", (away, *minions))}
    async with AsyncStorage(Topology(clusters)) as half:
        with pytest.raises(StorageUnavailable, match="main is free"):
            await claim_name(half, datastore, other, take_over=False)
        await claim_name(async_storage, datastore, ours, take_over=False)
        await claim_name(half, datastore, ours, take_over=False)


async def test_a_name_with_two_owners_is_not_taken_from_workers_that_run(storage, async_storage, datastore, program):
    """Each was claimed on one cluster while the other was away. Without workers the later one counts."""
    ours, other = program("a", "bill"), program("b", "notify")
    for cluster, owner in (("a", ours), ("b", other)):
        storage.master(cluster).run(trigger_order_table.claim, datastore.name, owner.consumer, owner.functions)
    report = WorkerReport(origin=ours.origin, host="h", pid=4711)
    storage.master("a").run(worker_table.put, datastore.name, ours.consumer, 7, report)
    with pytest.raises(InUse, match="h pid 4711"):
        await claim_name(async_storage, datastore, other, take_over=False)
    assert owners(storage, datastore, ours) == {"a": ours.origin, "b": other.origin}
    storage.master("a").run(worker_table.remove, datastore.name, ours.consumer, [7])
    await claim_name(async_storage, datastore, other, take_over=False)
    assert set(owners(storage, datastore, ours).values()) == {other.origin}


async def test_a_program_is_taken_over_once_no_worker_runs(storage, async_storage, datastore, program):
    """Then the one before is refused. What a cluster that was away still says doesn't count."""
    ours, other = program("a", "bill"), program("b", "notify")
    await claim_name(async_storage, datastore, ours, take_over=False)
    master = storage.master("a")
    master.run(worker_table.put, datastore.name, ours.consumer, 7, WorkerReport(origin=ours.origin, host="h", pid=4711))
    with pytest.raises(InUse, match="h pid 4711"):
        await claim_name(async_storage, datastore, other, take_over=True)
    master.run(worker_table.remove, datastore.name, ours.consumer, [7])
    await claim_name(async_storage, datastore, other, take_over=True)
    with pytest.raises(NameTaken):
        await claim_name(async_storage, datastore, ours, take_over=False)
    assert set(owners(storage, datastore, ours).values()) == {other.origin}


async def test_a_removed_program_leaves_its_name_free(storage, async_storage, datastore, program):
    """As if it had never run."""
    ours, other = program("a", "bill"), program("b", "bill")
    await claim_name(async_storage, datastore, ours, take_over=False)
    home = storage.master(datastore.home(0))
    home.run(checkpoint_table.make, datastore.name, ours.consumer, [Position(0, 1, 0)])
    remove_program(storage, datastore, plan_removal(storage, datastore, "main"))
    await claim_name(async_storage, datastore, other, take_over=False)


def test_the_process_of_another_program_ends_and_says_why(capfd, running, kafka, storage, datastore, program, tmp_path):
    """Bug 1 of the first trial: two main.py shared their cells, and each was called for a part."""
    ours = program("a", "bill")
    storage.master("a").run(trigger_order_table.claim, datastore.name, ours.consumer, ours.functions)
    other = program("b", "bill")
    settings = {"topology": running.path, "kafka": kafka}
    command = ["consumers", str(tmp_path / "b" / "main.py"), "--datastore", datastore.name]
    with running_consumer(command, settings) as process:
        assert process.process.wait(30) == 1
    said = "".join(capfd.readouterr())
    assert f"belongs to the program {ours.origin}" in said
    assert other.origin in said
    assert "--take-over" in said


async def test_a_worker_says_what_it_runs(async_storage, datastore, program):
    """And a datastore that doesn't exist is waited for with one line."""
    from schemaless.consume.start_at import StartAt
    from schemaless.consume.trigger_worker import _begin

    ours = program("a", "bill")
    with capture_logs() as lines:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.2):
                await _begin(async_storage, ours, "nosuch", StartAt.BEGINNING, take_over=False)
        await _begin(async_storage, ours, datastore.name, StartAt.BEGINNING, take_over=False)
    waits, begins = lines
    assert "nosuch" in waits["why"]
    assert begins["calls"] == "BASE: bill"
    assert begins["group"] == f"schemaless.{datastore.name}.trigger.main"
