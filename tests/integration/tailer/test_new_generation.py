"""A master that lost published cells: refused, whatever it has taken since, until a new generation is opened
(I7, I13, I16).
"""

import asyncio

import pytest
from confluent_kafka.admin import AdminClient
from msgspec.structs import replace
from structlog.testing import capture_logs
from typer.testing import CliRunner

from schemaless.__main__ import app
from schemaless.audit.run import audit
from schemaless.bus.partition_log import PartitionLog
from schemaless.codec import decode_cell
from schemaless.errors import BusUnavailable, Invalid, Misconfigured, StorageUnavailable
from schemaless.location import GenerationStart, Location
from schemaless.position import cell_digest
from schemaless.storage import shard_head, shard_log
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.shard_log import LogRange
from tests.log_harness import new_cell, put, restore, run_sql, wait_for_cells, wait_for_records
from tests.topic_harness import delete_before, publish
from tests.waiting import async_until, until

pytestmark = pytest.mark.storage

SHARD = 0


@pytest.fixture
def tailer(running, kafka, monkeypatch):
    """tailer("seek", name, …) -> the result of the command."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    return lambda *arguments: CliRunner().invoke(app, ["tailer", *arguments])


def write(storage, datastore, count, shard=SHARD):
    put(storage, datastore, [new_cell(datastore, shard=shard) for _ in range(count)])


def stored(storage, datastore):
    return storage.master("a").run(shard_log.read, datastore, [LogRange(SHARD, 0, 100)], 1 << 20)[0]


def publish_all(kafka, storage, datastore):
    """What a tailer does, without one."""
    publish(kafka, datastore, stored(storage, datastore))


@pytest.fixture
def restored(kafka, storage, new_datastore):
    """Ten cells were published. The master came back with six, and has taken seven more."""
    datastore = new_datastore(shards=1, partitions=1, placement=("a",))
    write(storage, datastore, 10)
    publish_all(kafka, storage, datastore)
    restore(storage.master("a"), datastore, SHARD, kept=6)
    write(storage, datastore, 7)
    return datastore


def refusal(result):
    assert result.exit_code != 0, result.output
    return result.exception


def test_a_new_generation_begins_behind_the_last_cell_that_both_have(tailer, storage, restored):
    """The dry run tells and changes nothing. Then cells change their generation and no other field. Once is enough."""
    name, before = restored.name, stored(storage, restored)
    expected = [
        "shard 0: generation 2 begins at 7",
        "  topic and MySQL agree up to 6",
        "  superseded in the topic: 1:7 to 1:10, 4 cells",
        "  published again with generation 2: 7 cells",
    ]
    assert tailer("new-generation", name, "--shard", "0", "--dry-run").output.splitlines() == expected
    assert stored(storage, restored) == before
    opened = tailer("new-generation", name, "--shard", "0")
    assert set(opened.output.splitlines()) >= {*expected, "opened: tailers announce it by themselves"}
    after = stored(storage, restored)
    assert [cell.generation for cell in after] == [1] * 6 + [2] * 7
    assert [replace(cell, generation=1) for cell in after] == before
    head, starts = storage.master("a").run(shard_head.history, name, SHARD)
    assert (head.location, starts) == (Location(2, 13), [GenerationStart(1, 1), GenerationStart(2, 7)])
    again = refusal(tailer("new-generation", name, "--shard", "0"))
    assert isinstance(again, Misconfigured)
    assert "has a new generation already, 2" in str(again)


SHOWN = {
    "a ballot that a server of another cluster promised": (
        "b1", "REPLACE INTO schemaless.promise VALUES (@@server_id, 40, 'x', UTC_TIMESTAMP(6))",
        "DELETE FROM schemaless.promise",
    ),
    "a generation of the shard on a former master": (
        "a2", "UPDATE schemaless.shard_head SET generation = 40 WHERE datastore = '{}'",
        "UPDATE schemaless.shard_head SET generation = 1 WHERE datastore = '{}'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_its_number_is_above_all_that_any_server_shows(name, tailer, running, restored):
    """A controller gives the same numbers to its changes, and no two histories may share one."""
    server, shows, forgets = SHOWN[name]
    nodes = (node for cluster in running.administrators.clusters.values() for node in cluster.nodes)
    with AdminSession(next(node for node in nodes if node.name == server)) as session:
        if server == "a2":  # what it replicates later would take away what it shows
            head = f"SELECT 1 FROM schemaless.shard_head WHERE datastore = '{restored.name}' AND head = 13"
            until(lambda: session.query(head))
        session.query(f"SET sql_log_bin = 0; {shows.format(restored.name)}")
        try:
            planned = tailer("new-generation", restored.name, "--shard", "0", "--dry-run")
        finally:
            session.query(forgets.format(restored.name))
    assert "shard 0: generation 41 begins at 7" in planned.output


def test_a_plan_that_is_outdated_changes_nothing(storage, restored):
    """Of two commands at once the second one is refused, unless it is the same again after a lost answer."""
    master = storage.master("a")
    for _ in range(2):
        master.run(shard_head.open_generation, restored, SHARD, GenerationStart(2, 7))
    after = stored(storage, restored)
    for outdated in (GenerationStart(2, 8), GenerationStart(3, 15)):
        with pytest.raises(
            Misconfigured, match=f"generation {outdated.generation} can't begin at {outdated.starts_at}"
        ):
            master.run(shard_head.open_generation, restored, SHARD, outdated)
    write(storage, restored, 1)  # the lock was given back
    assert stored(storage, restored)[:-1] == after
    _, starts = master.run(shard_head.history, restored.name, SHARD)
    assert starts == [GenerationStart(1, 1), GenerationStart(2, 7)]


async def test_a_running_tailer_announces_it_and_publishes_the_cells(
    tailer, running, kafka, storage, restored, tailing
):
    """It refused the shard by the digest alone, as nobody looked while the head was low. The audit ends clean."""
    with capture_logs() as told:
        tailing(restored)
        await async_until(lambda: any("another history" in entry["event"] for entry in told))
    (refused,) = [entry for entry in told if entry["log_level"] == "error"]
    assert refused["why"] == "another cell is at 1:10: this log has another history"
    assert len(await asyncio.to_thread(wait_for_records, kafka, restored, 10)) == 10
    await asyncio.to_thread(tailer, "new-generation", restored.name, "--shard", "0")
    write(storage, restored, 1)
    found = await asyncio.to_thread(wait_for_records, kafka, restored, 19)
    assert [record.kind for record in found] == [b"cell"] * 10 + [b"generation"] + [b"cell"] * 8
    report = await asyncio.to_thread(audit, running.topology, kafka, restored, stall_s=10)
    assert (report.findings.named, report.cells()["superseded"], report.cells()["matched"]) == ([], 4, 14)
    again = refusal(await asyncio.to_thread(tailer, "new-generation", restored.name, "--shard", "0"))
    assert "needs no new generation: topic and MySQL have the same cell at 2:14" in str(again)


def test_a_seek_is_no_way_out(tailer, restored):
    """It names the command. Afterwards a bare added_id means the present generation, and the old one is refused."""
    refused = refusal(tailer("seek", restored.name, "6", "--shard", "0"))
    assert isinstance(refused, Misconfigured)
    assert f"run `schemaless tailer new-generation {restored.name} --shard 0`" in str(refused)
    assert tailer("new-generation", restored.name, "--shard", "0").exit_code == 0
    preview = tailer("seek", restored.name, "2", "--shard", "0", "--repeat", "--dry-run").output
    assert preview == "shard 0: 1:10 → 1:2: 4 cells to come again, 0 never to come\n"  # 1:7 to 1:10 are over
    preview = tailer("seek", restored.name, "8", "--shard", "0", "--dry-run").output
    assert preview == "shard 0: 1:10 → 2:8: 0 cells to come again, 2 never to come\n"
    for wrong, why in (("1:8", "1:8 is superseded"), ("2:3", "the log has 1:3: generation 2 begins later")):
        refused = refusal(tailer("seek", restored.name, wrong, "--shard", "0"))
        assert isinstance(refused, Invalid)
        assert why in str(refused)


def test_a_seek_tells_which_generations_are_announced_again(tailer, kafka, storage, restored):
    """The preview follows the rule of the tail."""
    assert tailer("new-generation", restored.name, "--shard", "0").exit_code == 0
    announce_and_publish(kafka, storage, restored)
    preview = tailer("seek", restored.name, "2", "--shard", "0", "--repeat", "--dry-run").output
    assert preview == (
        "shard 0: 2:13 → 1:2: 11 cells to come again, 0 never to come, 1 generation to be announced again\n"
    )
    preview = tailer("seek", restored.name, "2:6", "--shard", "0", "--repeat", "--dry-run").output
    assert preview == "shard 0: 2:13 → 2:6: 7 cells to come again, 0 never to come\n"


def announce_and_publish(kafka, storage, datastore):
    cells = stored(storage, datastore)
    log = PartitionLog(kafka, datastore, 0)
    log.open()
    log.announce([(SHARD, GenerationStart(2, 7), cell_digest(cells[5]))])
    log.publish(cells[6:])
    log.close()


@pytest.mark.parametrize("grown", [0, 3])
def test_a_healthy_shard_is_refused(tailer, kafka, storage, new_datastore, grown):
    """Topic and MySQL agree, also where cells wait to be published."""
    datastore = new_datastore(shards=1, partitions=1, placement=("a",))
    write(storage, datastore, 3)
    publish_all(kafka, storage, datastore)
    put(storage, datastore, [new_cell(datastore, shard=SHARD) for _ in range(grown)])
    refused = refusal(tailer("new-generation", datastore.name, "--shard", "0"))
    assert isinstance(refused, Misconfigured)
    assert "needs no new generation: topic and MySQL have the same cell at 1:3" in str(refused)


def test_without_progress_or_a_place_it_is_refused(tailer, storage, make_datastore):
    """No topic, no progress record, no such shard, a start that isn't a number."""
    datastore = make_datastore(shards=2, partitions=1, placement=("a",))
    write(storage, datastore, 3)
    assert isinstance(refusal(tailer("new-generation", datastore.name, "--shard", "0")), BusUnavailable)
    assert isinstance(refusal(tailer("new-generation", datastore.name, "--shard", "2")), Invalid)
    assert tailer("new-generation", datastore.name).exit_code == 2
    assert tailer("new-generation", datastore.name, "--shard", "0", "--from", "x").exit_code == 2


def test_a_shard_that_nobody_opened_is_refused(tailer, storage, new_datastore):
    datastore = new_datastore(shards=2, partitions=1, placement=("a",))
    write(storage, datastore, 3)
    refused = refusal(tailer("new-generation", datastore.name, "--shard", "0"))
    assert "has no progress record: start a tailer" in str(refused)


def test_what_a_cut_topic_can_not_prove_the_operator_has_to_say(tailer, kafka, storage, restored):
    """Refused without --from, and with one that contradicts the topic. The dry run says that nothing proves it."""
    delete_before(kafka, restored, offset_behind(kafka, restored, Location(1, 8)))
    command = ("new-generation", restored.name, "--shard", "0")
    assert "no longer reaches back to a cell of shard 0" in str(refusal(tailer(*command)))
    assert "must be from 1 to 9" in str(refusal(tailer(*command, "--from", "10")))
    told = tailer(*command, "--from", "7", "--dry-run").output.splitlines()
    assert told == [
        "shard 0: generation 2 begins at 7",
        "  nothing proves that topic and MySQL agree up to 6: the topic no longer reaches back",
        "  superseded in the topic: 1:9 to 1:10, 2 cells",
        "  published again with generation 2: 7 cells",
    ]
    assert tailer(*command, "--from", "7").exit_code == 0
    assert [cell.generation for cell in stored(storage, restored)] == [1] * 6 + [2] * 7


def offset_behind(kafka, datastore, location):
    """The offset behind a cell of the topic."""
    for record in wait_for_records(kafka, datastore, 10):
        if decode_cell(record.value).location == location:
            return record.offset + 1
    raise AssertionError(location)


def test_a_start_that_the_topic_disproves_is_refused(tailer, restored):
    refused = refusal(tailer("new-generation", restored.name, "--shard", "0", "--from", "8"))
    assert isinstance(refused, Invalid)
    assert "topic and MySQL agree up to 6, so the generation begins at 7" in str(refused)


def test_a_restore_to_before_an_earlier_generation_is_superseded_too(tailer, kafka, storage, restored):
    """The master forgets generation 2, which the topic has: generation 3 begins lower, and hides it."""
    assert tailer("new-generation", restored.name, "--shard", "0").exit_code == 0
    announce_and_publish(kafka, storage, restored)
    master = storage.master("a")
    restore(master, restored, SHARD, kept=4)
    forget_generations(master, restored)
    write(storage, restored, 1)
    told = tailer("new-generation", restored.name, "--shard", "0").output.splitlines()
    assert told[:4] == [
        "shard 0: generation 3 begins at 5",
        "  topic and MySQL agree up to 4",
        "  superseded in the topic: 2:7 to 2:13, 7 cells",
        "  superseded in the topic: 1:5 to 1:6, 2 cells",
    ]
    _, starts = master.run(shard_head.history, restored.name, SHARD)
    assert starts == [GenerationStart(1, 1), GenerationStart(2, 5), GenerationStart(3, 5)]


def forget_generations(master, datastore):
    where = f"datastore = '{datastore.name}' AND shard = 0"
    run_sql(
        master,
        f"BEGIN;DELETE FROM schemaless.shard_generation WHERE {where} AND generation > 1;"
        f"UPDATE schemaless.shard_head SET generation = 1 WHERE {where};COMMIT",
    )


@pytest.mark.faults
def test_with_a_server_away_it_is_refused_with_the_reason(tailer, running, storage, restored, monkeypatch):
    """Neither Kafka nor the shard's master may be missing, for a dry run neither. Nothing is changed."""
    command = ("new-generation", restored.name, "--shard", "0")
    running.servers["a1"].kill()
    try:
        for arguments in (command, (*command, "--dry-run")):
            away = refusal(tailer(*arguments))
            assert isinstance(away, StorageUnavailable)
            assert "a1" in str(away)
        assert isinstance(refusal(tailer("seek", restored.name, "6", "--shard", "0")), StorageUnavailable)
    finally:
        running.servers["a1"].start()
    monkeypatch.setenv("SCHEMALESS_KAFKA", "127.0.0.1:1")
    for arguments in (command, (*command, "--dry-run")):
        away = refusal(tailer(*arguments))
        assert isinstance(away, BusUnavailable)
        assert "127.0.0.1:1" in str(away)
    assert [cell.generation for cell in stored(storage, restored)] == [1] * 13


async def test_the_progress_topic_is_deleted_under_a_running_tailer(kafka, storage, new_datastore, tailing):
    """It is made anew, and rebuilt with digests from the last records of the topic: the next cell follows, and a
    master that was restored meanwhile is found.
    """
    datastore = new_datastore(shards=2, partitions=1, placement=("a",))
    write(storage, datastore, 5)
    write(storage, datastore, 1, shard=1)
    with capture_logs() as told:
        tailing(datastore)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 6)
        admin = AdminClient({"bootstrap.servers": kafka})
        await asyncio.to_thread(admin.delete_topics([datastore.progress_topic])[datastore.progress_topic].result)
        restore(storage.master("a"), datastore, SHARD, kept=3)
        write(storage, datastore, 4)
        await async_until(lambda: any("another history" in entry["event"] for entry in told))
        write(storage, datastore, 1, shard=1)
        cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 7)
    assert [cell.added_id for cell in cells if cell.shard == SHARD] == [1, 2, 3, 4, 5]
    assert [cell.added_id for cell in cells if cell.shard == 1] == [1, 2]
