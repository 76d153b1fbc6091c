"""Trigger programs go on when a shard moves: every cell is called, and orders and parked cells come along (I9, I12)."""

import asyncio
import json
import time
from collections import Counter

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.codec import encode_body
from schemaless.errors import ShardsMoved
from schemaless.storage import checkpoint_table, shard_head, trigger_order_table
from schemaless.storage.entity_table import CellKey, ShardCell
from tests.consumer_harness import running_consumer, wait_until_finished, write_program
from tests.integration.api.api_harness import api_process
from tests.log_harness import new_cell, put, running_tailers
from tests.move_harness_f import Move, Writers, move_shard, moved_while_written
from tests.waiting import until

PROGRAM = """
import json, os, pathlib
from schemaless import trigger

HERE = pathlib.Path(__file__).parent
CALLS = os.open(HERE / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@trigger(column="BASE")
def check(cell, context):
    shard, _, added_id = map(int, str(cell.location).split(":"))
    os.write(CALLS, (json.dumps([shard, added_id, cell.body.get("n")]) + "\\n").encode())
    if cell.body.get("poison") and not (HERE / "repaired").exists():
        raise ValueError("poison")
"""


@pytest.fixture
def datastore(make_datastore, kafka, running):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    with running_tailers(1, running.path, kafka, made):
        yield made


@pytest.fixture
def started(running, kafka, datastore):
    settings = {"topology": running.path, "kafka": kafka, "attempts_max": 1, "retry_delay_s": 0.05}

    def start(program):
        return running_consumer(["consumers", program, "--datastore", datastore.name], settings)

    return start


def calls(folder):
    return [tuple(json.loads(line)) for line in (folder / "calls").read_text().splitlines()]


async def test_every_cell_is_called_in_order_while_shards_move(
    tmp_path, running, storage, async_storage, datastore, started
):
    """There and back, with two workers: none is skipped, and what one finished is seldom called again."""
    program = write_program(tmp_path, "moves", PROGRAM)
    with started(program) as first, started(program) as second:
        await asyncio.to_thread(until, (tmp_path / "calls").exists)
        async with Writers(async_storage, datastore, range(4)) as writers:
            await moved_while_written(Move(running, datastore, 0, "b"), writers, 100)
            await moved_while_written(Move(running, datastore, 1, "a"), writers, 100)
            await moved_while_written(Move(running, datastore, 0, "a"), writers, 100)
        await asyncio.to_thread(wait_until_finished, storage, datastore, "trigger:moves")
        assert [first.stop(), second.stop()] == [0, 0]
    made = [(shard, added_id) for shard, added_id, _ in calls(tmp_path)]
    firsts = list(dict.fromkeys(made))
    for shard in range(4):
        placed = [added_id for at, added_id in firsts if at == shard]
        assert placed == list(range(1, len(placed) + 1))
    assert len(firsts) == writers.put
    again = {place: count for place, count in Counter(made).items() if count > 1}
    assert len(again) <= len(firsts) // 100, again
    counted = [
        row.counts.called
        for cluster in ("a", "b")
        for row in storage.master(cluster).run(checkpoint_table.of_consumer, datastore.name, "trigger:moves")
    ]
    assert sum(counted) == writers.put


def test_parked_cells_and_orders_come_along(tmp_path, running, storage, datastore, started):
    """The list, its counts, the status, a pause, a retry and its job are right at the new home, and nothing is there
    twice.
    """
    program = write_program(tmp_path, "parks", PROGRAM)
    poison = [new_cell(datastore, {"n": f"poison {n}", "poison": True}, shard=0) for n in range(3)]
    behind = ShardCell(CellKey(poison[0].key.row_key, "BASE", 2), encode_body({"n": "behind"}), 0)
    with started(program), api_process(running.path) as api:
        caller = api.at(datastore)

        def parked():
            return caller.get("/triggers/parks/parked").json()

        put(storage, datastore, [*poison, behind])
        until(lambda: caller.get("/triggers/parks").status_code == 200 and parked()["count"] == 3)
        wait_until_finished(storage, datastore, "trigger:parks")
        assert caller.post("/triggers/parks/pause", json={"shards": [0]}).status_code == 200
        ordered = caller.post("/triggers/parks/parked/retry", json={"filter": {}}).json()
        job = caller.get(f"/jobs/{ordered['job']}").json()
        assert (job["matched"], job["pending"]) == (3, 3)
        before = parked()
        move_shard(running, datastore, 0, "b")
        until(lambda: parked() == before)
        until(lambda: caller.get(f"/jobs/{ordered['job']}").json() == job)
        until(lambda: [one["shard"] for one in caller.get("/triggers/parks").json()["paused_shards"]] == [0])
        shown = caller.get("/triggers/parks").json()
        assert (shown["state"], shown["parked"], shown["lag"]) == ("running", 3, 0), shown
        assert [one["shard"] for one in shown["paused_shards"]] == [0], shown
        (tmp_path / "repaired").touch()
        # A process that hasn't heard of the move yet answers 503, to be tried again.
        until(lambda: caller.post("/triggers/parks/resume", json={"shards": [0]}).status_code == 200)
        until(lambda: parked()["count"] == 0)
        done = until(lambda: (job := caller.get(f"/jobs/{ordered['job']}").json())["state"] == "done" and job)
        assert (done["matched"], done["done"], done["failed"]) == (3, 3, 0)
        move_shard(running, datastore, 0, "a")
        put(storage, datastore, [new_cell(datastore, {"n": "last"}, shard=0)])
        wait_until_finished(storage, datastore, "trigger:parks")
        shown = caller.get("/triggers/parks").json()
        assert (shown["parked"], shown["lag"]) == (0, 0)
        until(lambda: caller.post("/triggers/parks/seek", json={"to": ["0:1:4"]}).status_code in (200, 202))
        until(lambda: [n for _, _, n in calls(tmp_path)].count("last") == 2)
        time.sleep(2)  # a seek that stayed at the former home would come again and again
        assert [n for _, _, n in calls(tmp_path)].count("last") == 2


def test_nothing_is_ordered_or_begun_at_a_home_that_was_closed(running, storage, datastore):
    """What would stay behind is refused: an order for a parked cell, a pause, and a checkpoint that isn't there yet."""
    move = Move(running, datastore, 0, "b")
    move.announce()
    move.close()
    home, name, consumer = storage.master("a"), datastore.name, "trigger:late"
    for write in (
        lambda: trigger_order_table.pause_shards(name, consumer, [0], "why"),
        lambda: iter_of(checkpoint_table.making(name, consumer, [], counts=True)),
    ):
        with pytest.raises(ShardsMoved):
            home.run(lambda write=write: shard_head.at_home(name, [0], write()))
    move.open()
    move.publish()


def iter_of(script):
    yield script
