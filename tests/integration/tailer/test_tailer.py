"""The tailer on real servers: every cell once and in order, shared partitions, absent servers, holes, generations."""

import asyncio
import os
import re
import uuid
from dataclasses import replace

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from structlog.testing import capture_logs

from schemaless.audit.run import audit
from schemaless.bus.topics import MESSAGE_BYTES_MAX, ensure_topics
from schemaless.names import Stall
from schemaless.ops.datastores import create_shards
from schemaless.storage import shard_head
from schemaless.topology import Datastore
from tailer import partition_tail
from tests.log_harness import new_cell, put, records, run_sql, wait_for_cells, wait_for_records, write_for
from tests.waiting import async_until


def assert_clean(topology, kafka, datastore, cells):
    report = audit(topology, kafka, datastore, stall_s=10)
    assert report.findings.named == []
    assert report.cells()["matched"] == cells


def open_generation(master, datastore, starts_at, shards=(0,)):
    """What a promotion does to shards: cells from `starts_at` on are gone, and generation 2 begins there."""
    numbers = ", ".join(map(str, shards))
    begun = ", ".join(f"('{datastore.name}', {shard}, 2, {starts_at}, UTC_TIMESTAMP(6))" for shard in shards)
    gone = "".join(f"DELETE FROM {datastore.database(shard)}.entity WHERE added_id >= {starts_at};" for shard in shards)
    run_sql(
        master,
        f"BEGIN; {gone}"
        f"UPDATE schemaless.shard_head SET generation = 2, head = {starts_at - 1}"
        f" WHERE datastore = '{datastore.name}' AND shard IN ({numbers});"
        f"INSERT INTO schemaless.shard_generation VALUES {begun};"
        "COMMIT",
    )


async def test_every_cell_is_published_once_and_in_order(
    running, kafka, new_datastore, async_storage, tailing, monkeypatch
):
    """Several writers at once, batches over several transactions, both clusters: the audit finds nothing."""
    datastore = new_datastore(shards=8, partitions=4)
    monkeypatch.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 7)
    tailing(datastore)
    cells = await write_for(async_storage, datastore, seconds=2)
    await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, cells)


async def test_a_new_datastore_is_tailed_without_a_restart(running, kafka, storage, new_datastore, tailing):
    """A tailer that already works finds it in the catalogue, makes its topics and publishes its first cell."""
    known = new_datastore(shards=2, partitions=1)
    datastore = Datastore(f"t{uuid.uuid4().hex[:8]}", 2, 1, ("a", "b"))
    tailing(known, datastores=(known.name, datastore.name))
    put(storage, known, [new_cell(known)])
    await asyncio.to_thread(wait_for_cells, kafka, known, 1)
    create_shards(storage, datastore, administrators=running.administrators)
    put(storage, datastore, [new_cell(datastore)])
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 1)


async def test_bodies_of_any_size_come_in_bounded_batches(running, kafka, new_datastore, storage, tailing, monkeypatch):
    """Bodies larger than a whole batch may be, beside small ones: all are published, in order."""
    datastore = new_datastore(shards=2, partitions=1)
    sizes = [10, 30_000, *[10] * 30, 700, 700, 700, 30_000, 30_000, *[300] * 20]
    cells = [new_cell(datastore, {"noise": os.urandom(size).hex()}, shard) for size in sizes for shard in (0, 1)]
    put(storage, datastore, cells)
    monkeypatch.setattr(partition_tail, "TRANSACTION_BYTES_MAX", 4000)
    monkeypatch.setattr(partition_tail, "TRANSACTION_CELLS_MAX", 20)
    tailing(datastore)
    await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, len(cells))


async def test_a_cell_that_fits_no_record_stops_its_shard_and_no_other(kafka, new_datastore, storage, tailing):
    """The API takes no such body by default. The shard waits, its reason names the cell, and others go on."""
    datastore = new_datastore(shards=2, partitions=1)
    huge = os.urandom(MESSAGE_BYTES_MAX // 2).hex()
    put(storage, datastore, [new_cell(datastore, shard=0), new_cell(datastore, shard=1)])
    put(storage, datastore, [new_cell(datastore, {"noise": huge + huge[::-1]}, shard=0)])
    with capture_logs() as told:
        tailing(datastore)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 2)
        await async_until(lambda: any("fits no record" in str(entry.get("error")) for entry in told))
        put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1)])
        cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 3)
    assert sorted((cell.shard, cell.added_id) for cell in cells) == [(0, 1), (1, 1), (1, 2)]


async def test_a_bound_that_was_lowered_stops_one_shard_until_it_is_raised(
    kafka, new_datastore, storage, tailing, monkeypatch
):
    """The shard's reason names cell, size and bound. Others of its partition go on, large batches too."""
    monkeypatch.setattr("tailer.partition_tail.CORRUPT_RETRY_S", 0.5)
    datastore = new_datastore(shards=2, partitions=1)
    service = tailing(datastore)
    put(storage, datastore, [new_cell(datastore, shard=0)])
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 1)
    set_bound(kafka, datastore, 20_000)
    put(storage, datastore, [new_cell(datastore, {"noise": os.urandom(20_000).hex()}, shard=0)])
    put(storage, datastore, [new_cell(datastore, {"noise": os.urandom(200).hex()}, shard=1) for _ in range(300)])
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 301)
    (tailer,) = service.datastores
    await async_until(lambda: Stall.BOUND in tailer.stalls)
    (held,) = tailer.report().failing_shards
    assert held.shard == 0
    assert re.search(r"bound: cell 1:2, .* stored bytes and fits no record of Kafka: at most 20000 do", held.reason)
    set_bound(kafka, datastore, MESSAGE_BYTES_MAX)
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 302)
    await async_until(lambda: not tailer.stalls)


async def test_a_topic_that_would_lose_cells_from_now_on_is_refused_while_all_runs(
    kafka, new_datastore, storage, tailing, monkeypatch
):
    """As it is to a tailer that starts: compaction takes older cells out of the topic. It goes on by itself."""
    monkeypatch.setattr("schemaless.bus.topics.SETTINGS_EVERY_S", 0.5)
    monkeypatch.setattr("tailer.datastore_tailer.MISCONFIGURED_RETRY_S", 0.5)
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore)])
    service = tailing(datastore)
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 1)
    set_topic(kafka, datastore, "cleanup.policy", "compact")
    (tailer,) = service.datastores
    await async_until(lambda: Stall.REFUSED in tailer.stalls)
    assert "cleanup.policy=compact: older versions would vanish" in tailer.stalls[Stall.REFUSED]
    put(storage, datastore, [new_cell(datastore)])
    set_topic(kafka, datastore, "cleanup.policy", "delete")
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 2)
    await async_until(lambda: not tailer.stalls)


def set_bound(kafka, datastore, size):
    set_topic(kafka, datastore, "max.message.bytes", str(size))


def set_topic(kafka, datastore, setting, value):
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource("topic", datastore.topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": kafka})  # kept: a request dies with its client
    (done,) = admin.incremental_alter_configs([changed]).values()
    done.result()


async def test_a_hole_stops_its_shard_and_no_other(kafka, new_datastore, storage, tailing, monkeypatch):
    """A missing cell is reported; what is before it and every other shard go on; repaired, the shard goes on, too."""
    monkeypatch.setattr("tailer.partition_tail.CORRUPT_RETRY_S", 0.3)
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in (0, 1) for _ in range(5)])
    entity = f"{datastore.database(0)}.entity"
    run_sql(storage.master("a"), f"CREATE TABLE {datastore.database(0)}.kept AS SELECT * FROM {entity}")
    run_sql(storage.master("a"), f"DELETE FROM {entity} WHERE added_id = 3")
    with capture_logs() as told:
        tailing(datastore)
        cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 5)
        assert {cell.shard for cell in cells} == {1}
        await async_until(lambda: sum("1:4 follows 1:2" in str(entry) for entry in told) >= 2)
        put(storage, datastore, [new_cell(datastore, shard=1)])  # published after the hole was seen again
        assert {cell.shard for cell in await asyncio.to_thread(wait_for_cells, kafka, datastore, 6)} == {1}
    run_sql(storage.master("a"), f"INSERT INTO {entity} SELECT * FROM {datastore.database(0)}.kept WHERE added_id = 3")
    cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 11)
    assert [cell.added_id for cell in cells if cell.shard == 0] == [1, 2, 3, 4, 5]


async def test_a_new_generation_is_announced_before_its_cells(running, kafka, new_datastore, storage, tailing):
    """A promotion lost the last two cells of a shard: the generation that follows is announced once, then its cells
    come; the audit lists the lost ones as superseded and finds nothing wrong (I13).
    """
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
    service = tailing(datastore)
    await asyncio.to_thread(wait_for_cells, kafka, datastore, 5)
    await asyncio.to_thread(open_generation, storage.master("a"), datastore, 4)
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(3)])
    found = await asyncio.to_thread(wait_for_records, kafka, datastore, 9)
    kinds = [record.kind for record in found]
    assert kinds == [b"cell"] * 5 + [b"generation"] + [b"cell"] * 3
    cells = await asyncio.to_thread(wait_for_cells, kafka, datastore, 9)
    assert [(cell.generation, cell.added_id) for cell in cells[5:]] == [(2, 4), (2, 5), (2, 6)]
    service.stop()
    tailing(datastore)  # progress knows of the announcement: it is not repeated
    put(storage, datastore, [new_cell(datastore, shard=0)])
    await asyncio.to_thread(wait_for_records, kafka, datastore, 10)
    report = await asyncio.to_thread(audit, running.topology, kafka, datastore, stall_s=10)
    assert (report.findings.named, report.cells()["superseded"], report.cells()["matched"]) == ([], 2, 7)


async def test_what_a_promotion_begins_is_announced_in_one_transaction(kafka, new_datastore, storage, tailing):
    """A generation of each shard of the cluster. No marker of a transaction is between their records."""
    datastore = new_datastore(shards=8, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=shard) for shard in range(8)])
    tailing(datastore)
    await asyncio.to_thread(wait_for_records, kafka, datastore, 8)
    shards = [shard for shard in range(8) if datastore.home(shard) == "a"]
    await asyncio.to_thread(open_generation, storage.master("a"), datastore, 2, shards)
    found = (await asyncio.to_thread(wait_for_records, kafka, datastore, 8 + len(shards)))[8:]
    assert [record.kind for record in found] == [b"generation"] * len(shards)
    assert [record.offset for record in found] == list(range(found[0].offset, found[0].offset + len(shards)))


async def test_a_minion_is_read_while_its_master_is_away(running, kafka, new_datastore, storage, tailing):
    """The master is killed: what its minion holds is published; what the master takes later follows."""
    datastore = new_datastore(shards=2, partitions=1)
    put(storage, datastore, [new_cell(datastore, shard=0) for _ in range(5)])
    minion = storage.minions("a")[0]
    await async_until(lambda: minion.run(shard_head.movement, datastore.name).heads_sum == 5)
    running.servers["a1"].kill()
    try:
        tailing(datastore)
        await asyncio.to_thread(wait_for_cells, kafka, datastore, 5)
    finally:
        running.servers["a1"].start()
    put(storage, datastore, [new_cell(datastore, shard=0)])
    await asyncio.to_thread(assert_clean, running.topology, kafka, datastore, 6)


async def test_a_topic_with_too_few_partitions_is_refused(kafka, make_datastore, storage, tailing):
    """Nothing is published, and both numbers are told."""
    datastore = make_datastore(shards=4, partitions=2)
    wrong = replace(datastore, partitions=1)
    ensure_topics(kafka, wrong)
    put(storage, datastore, [new_cell(datastore)])
    with capture_logs() as told:
        tailing(datastore)
        await async_until(lambda: any(entry["log_level"] == "error" for entry in told))
    assert "has 1 partitions" in str(told)
    assert "needs 2" in str(told)
    assert records(kafka, wrong) == []
