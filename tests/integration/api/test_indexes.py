"""Indexes over HTTP: made, shown while building, asked with ranges, cursors and one's own writes.

The indexer's own steps are run by hand, so that each test decides how far the index has come.
"""

import asyncio
import time
import uuid
from contextlib import suppress
from functools import partial

import msgspec
import pymysql
import pytest
from prometheus_client import generate_latest

from api.index.search import DAMAGED_MAX
from api.metrics import Metrics
from indexer.maintainer import Maintainer
from indexer.service import build_step, note_gone, remove_from
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.ports import Advance, Run
from schemaless.errors import SchemalessError
from schemaless.facts.indexes import PassSamples, sample_problems
from schemaless.index.catalogue import build_progress, drop_index, fail_index, find_index, read_versions
from schemaless.index.comparison import FaultCounts
from schemaless.index.definition import parse_definition
from schemaless.index.entry import IndexEntry, entry_shard
from schemaless.names import INDEXER, index_consumer, index_table_name
from schemaless.ops.tokens import list_actions
from schemaless.position import position_of
from schemaless.runtime.pace import Sampled
from schemaless.storage import entity_table, index_pass_table, index_table, worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import IndexStage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.node_core import connect_options
from schemaless.storage.worker_table import WaitingShard, WorkerReport
from tests.integration.api.api_harness import assert_problem, row_in
from tests.log_harness import run_sql
from tests.waiting import async_until

pytestmark = pytest.mark.storage

NAME = "driver_index"
DRIVERS = [str(uuid.UUID(int=n)) for n in (1, 2)]
DEFINITION = {
    "name": NAME,
    "shard_field": "driver",
    "fields": [
        {"name": "driver", "column": "BASE", "path": "driver", "type": "uuid"},
        {"name": "created", "column": "BASE", "path": "times.created", "type": "datetime"},
    ],
    "stored": [{"name": "fare", "column": "BASE", "path": "fare", "type": "float"}],
}


class ByHand:
    """The indexer, one pass at a time."""

    def __init__(self, topology, datastore):
        self.topology, self.datastore = topology, datastore

    async def index_all(self):
        """Every cell that is there; makes the tables first, and the index active when it is complete."""
        async with AsyncStorage(self.topology) as storage:
            for _ in range(3):
                index = await find_index(storage, self.datastore, NAME)
                if index.has_tables:
                    await self._pass(storage, index.definition)
                await build_step(storage, self.datastore, await find_index(storage, self.datastore, NAME))

    async def _pass(self, storage, definition):
        lanes = CommitLanes(storage, self.datastore)
        checkpoints = Checkpoints(lanes, definition.consumer, CheckpointPlacement.EVERYWHERE)
        standing = await checkpoints.read(range(self.datastore.shards))
        maintainer = Maintainer(storage, self.datastore, definition)
        for shard, stand in standing.items():
            after = stand.position.location
            read = partial(entity_table.read_after, self.datastore, shard, after.added_id, 1000)
            cells = await storage.master(self.datastore.home(shard)).run(read)
            if cells:
                effect = await maintainer.handle([Run(shard, after, cells)])
                await checkpoints.move({shard: Advance(position_of(cells[-1]))}, effect.scripts)


@pytest.fixture
def datastore(make_datastore):
    return make_datastore()


@pytest.fixture
def call(api, datastore):
    return api.at(datastore)


@pytest.fixture
def by_hand(topology, datastore):
    return ByHand(topology, datastore)


def trip(call, driver, day, fare=1.0, row=None, ref_key=1):
    body = {"driver": driver, "times": {"created": f"2026-01-{day:02}T00:00:00Z"}, "fare": fare}
    answer = call.put(row or uuid.uuid4(), ref_key, body)
    assert answer.status_code == 201
    return answer.json()


def days(answer):
    assert answer.status_code == 200, answer.text
    return [int(entry["fields"]["created"][8:10]) for entry in answer.json()["entries"]]


def ask(call, **query):
    return call.get(f"/indexes/{NAME}/entries", params={"driver": DRIVERS[0], **query})


def make(call):
    return call("PUT", f"/indexes/{NAME}", json=DEFINITION)


async def test_an_index_is_active_only_once_each_shard_has_its_checkpoint(call, by_hand, topology, datastore):
    """An empty datastore has nothing to build, but queries with `after` wait for the checkpoint of their shard."""
    make(call)
    async with AsyncStorage(topology) as storage:
        for _ in range(3):
            await build_step(storage, datastore, await find_index(storage, datastore, NAME))
        index = await find_index(storage, datastore, NAME)
        progress = await build_progress(storage, datastore, index)
        assert (index.stage, progress.done, progress.total) == (IndexStage.BUILDING, 0, 0)
    await by_hand.index_all()
    assert call.get(f"/indexes/{NAME}").json()["state"] == "active"


async def test_an_index_is_made_once_and_shown_while_it_builds(call, by_hand):
    """201, then 200 for the same definition, 409 for another; queries are a 409 with progress until it is active."""
    trip(call, DRIVERS[0], 1)
    first = make(call)
    assert (first.status_code, first.json()["state"]) == (201, "building")
    assert make(call).status_code == 200
    assert_problem(call("PUT", f"/indexes/{NAME}", json=DEFINITION | {"stored": []}), 409)
    problem = assert_problem(ask(call), 409)
    assert problem["retryable"]
    assert f"index wait {NAME}" in problem["hint"]
    assert problem["progress"].keys() == {"done", "total", "eta_s"}
    await by_hand.index_all()
    shown = call.get(f"/indexes/{NAME}").json()
    assert (shown["name"], shown["state"]) == (NAME, "active")
    assert [listed["name"] for listed in call.get("/indexes").json()["indexes"]] == [NAME]
    assert days(ask(call)) == [1]


async def test_equality_ranges_and_orders(call, by_hand):
    """Entries of the shard field's value for which all comparisons hold, in the order asked for, with all fields."""
    for day in (3, 1, 4, 2, 5):
        trip(call, DRIVERS[0], day, fare=float(day))
    trip(call, DRIVERS[1], 9)
    make(call)
    await by_hand.index_all()
    assert days(ask(call)) == [1, 2, 3, 4, 5]
    assert days(ask(call, desc="true")) == [5, 4, 3, 2, 1]
    bounds = {"created.gte": "2026-01-02T00:00:00Z", "created.lt": "2026-01-05T00:00:00Z"}
    assert days(ask(call, **bounds)) == [2, 3, 4]
    assert days(ask(call, **bounds, **{"fare.ne": "3"})) == [2, 4]
    assert days(ask(call, order="created", desc="true", limit="2")) == [5, 4]
    assert days(ask(call, **{"created": "2026-01-04T00:00:00Z"})) == [4]
    (entry,) = ask(call, fare="4", fields="fare").json()["entries"]
    assert entry["fields"] == {"fare": 4.0}
    assert ask(call).headers["schemaless-served-by"] == "master"


async def test_cursors_lead_through_all_entries_once(call, by_hand):
    """Also when entries come in before the cursor meanwhile."""
    for day in range(2, 9):
        trip(call, DRIVERS[0], day)
    make(call)
    await by_hand.index_all()
    seen, cursor = [], {}
    while True:
        answer = ask(call, limit="3", **cursor)
        seen += days(answer)
        if answer.json()["cursor"] is None:
            break
        cursor = {"cursor": answer.json()["cursor"]}
        trip(call, DRIVERS[0], 1)
        await by_hand.index_all()
    assert seen == list(range(2, 9))


async def test_included_cells_are_the_newest(call, by_hand):
    """The cells of the columns asked for, null where a row has none."""
    row = uuid.uuid4()
    trip(call, DRIVERS[0], 1, row=row)
    trip(call, DRIVERS[0], 2, row=row, ref_key=2)
    make(call)
    await by_hand.index_all()
    (entry,) = ask(call, include="BASE,STATUS").json()["entries"]
    assert entry["row_key"] == str(row)
    assert entry["cells"]["BASE"]["ref_key"] == 2
    assert entry["cells"]["STATUS"] is None


async def test_an_erased_cell_is_included_without_its_body(call, by_hand):
    """It costs no entry. Those that it made are dropped by `verify` at once, and are gone when the indexer went by."""
    first, second = uuid.uuid4(), uuid.uuid4()
    for day, row in enumerate((first, second), start=1):
        trip(call, DRIVERS[0], day, row=row)
        assert call.put(row, 1, {"done": True}, column="STATUS").status_code == 201
    make(call)
    for row, column in ((first, "STATUS"), (second, "BASE")):
        await by_hand.index_all()
        order = {"row_key": str(row), "column_name": column, "reason": "asked to"}
        assert call.post("/erase", json=order).status_code == 202
    shown = {entry["row_key"]: entry["cells"] for entry in ask(call, include="BASE,STATUS").json()["entries"]}
    bodies = {row: {column: "body" in cell for column, cell in cells.items()} for row, cells in shown.items()}
    assert bodies == {str(first): {"BASE": True, "STATUS": False}, str(second): {"BASE": False, "STATUS": True}}
    verified = ask(call, verify="true", include="STATUS").json()
    assert ([entry["row_key"] for entry in verified["entries"]], verified["dropped"]) == ([str(first)], 1)
    assert "unreadable" not in verified
    await by_hand.index_all()
    assert days(ask(call)) == [1]


async def test_several_drivers_are_one_list(call, by_hand):
    """A23: one order and one cursor over all of them, whichever clusters they live on."""
    for day in range(1, 9):
        trip(call, DRIVERS[day % 2], day)
    make(call)
    await by_hand.index_all()
    both = {"driver": DRIVERS, "order": "created"}
    assert days(ask(call, **both)) == list(range(1, 9))
    first = ask(call, **both, limit="5", desc="true")
    assert days(first) == [8, 7, 6, 5, 4]
    assert days(ask(call, **both, limit="5", desc="true", cursor=first.json()["cursor"])) == [3, 2, 1]
    assert_problem(ask(call, driver=DRIVERS), 422, "order")
    problem = assert_problem(ask(call, order="created", cursor=first.json()["cursor"]), 422, "cursor")
    assert "begin again" in problem["detail"]


async def test_verify_drops_what_the_newest_cells_don_t_make(call, by_hand):
    """FriendFeed's filter: stale entries and those whose row has another one now. The answer counts them."""
    stays, moves, changes = (uuid.uuid4() for _ in range(3))
    for day, row in enumerate((stays, moves, changes), start=1):
        trip(call, DRIVERS[0], day, row=row)
    make(call)
    await by_hand.index_all()
    trip(call, DRIVERS[1], 2, row=moves, ref_key=2)
    trip(call, DRIVERS[0], 3, fare=9.0, row=changes, ref_key=2)
    assert days(ask(call)) == [1, 2, 3]
    answer = ask(call, verify="true", include="BASE,STATUS")
    assert days(answer) == [1]
    assert answer.json()["dropped"] == 2
    (entry,) = answer.json()["entries"]
    assert (entry["cells"]["BASE"]["ref_key"], entry["cells"]["STATUS"]) == (1, None)
    await by_hand.index_all()
    answer = ask(call, verify="true")
    assert (days(answer), answer.json()["dropped"]) == ([1, 3], 0)


@pytest.mark.parametrize(
    "asked", [{"verify": "true"}, {"include": "BASE"}, {"verify": "true", "include": "BASE,STATUS"}]
)
async def test_a_cell_that_cant_be_decoded_costs_its_own_row_only(call, by_hand, storage, datastore, asked):
    """The answer names the cell, and has the rest of the page. Without the cell the entry is shown."""
    damaged, stale, *rows = (uuid.uuid4() for _ in range(4))
    for day, row in enumerate((damaged, stale, *rows), start=1):
        trip(call, DRIVERS[0], day, row=row)
    make(call)
    await by_hand.index_all()
    trip(call, DRIVERS[1], 9, row=stale, ref_key=2)
    for shard in range(datastore.shards):
        entity = f"{datastore.database(shard)}.entity"
        run_sql(
            storage.master(datastore.home(shard)),
            f"UPDATE {entity} SET body = 'no body' WHERE row_key = x'{damaged.hex}'",
        )
    answer = ask(call, **asked)
    assert days(answer) == ([3, 4] if "verify" in asked else [2, 3, 4])
    (told,) = answer.json()["unreadable"]
    assert told.pop("reason").startswith("a stored body can't be decoded")
    assert told == {"row_key": str(damaged), "column_name": "BASE", "ref_key": 1}
    assert answer.json().get("dropped") == (1 if "verify" in asked else None)
    whole = ask(call)
    assert (days(whole), "unreadable" in whole.json()) == ([1, 2, 3, 4], False)


@pytest.mark.parametrize("asked", [{}, {"verify": "true", "include": "BASE"}])
async def test_a_cell_that_cant_be_decoded_costs_its_own_row_only_also_before_the_index_has_it(
    call, by_hand, storage, datastore, asked
):
    """`after` evaluates what the index lacks. The damaged row is named and left out, with its entry that is older."""
    row = row_in(datastore, 1)
    trip(call, DRIVERS[0], 1, row=row)
    make(call)
    await by_hand.index_all()
    trip(call, DRIVERS[0], 2, row=row, ref_key=2)
    run_sql(
        storage.master(datastore.home(1)),
        f"UPDATE {datastore.database(1)}.entity SET body = 'no body' WHERE row_key = x'{row.hex}' AND ref_key = 2",
    )
    location = trip(call, DRIVERS[0], 3, row=row_in(datastore, 1))["location"]
    answer = ask(call, after=location, **asked)
    assert (days(answer), answer.json()["overlay"]) == ([3], {"cells": 2})
    (told,) = answer.json()["unreadable"]
    assert told.pop("reason").startswith("a stored body can't be decoded")
    assert told == {"row_key": str(row), "column_name": "BASE", "ref_key": 2}
    assert answer.json().get("dropped", 0) == 0


async def test_what_a_query_finds_wrong_is_repaired(call, by_hand, storage, datastore):
    """`verify` queues what it drops, and any query what it can't read. An index that is behind costs no write."""
    damaged, stale, behind = (uuid.uuid4() for _ in range(3))
    for day, row in enumerate((damaged, stale, behind), start=1):
        trip(call, DRIVERS[0], day, row=row)
    make(call)
    await by_hand.index_all()
    for row, change in ((damaged, "created = '0000-05-01'"), (stale, "fare = 9")):
        for shard in range(datastore.shards):
            table = f"{datastore.database(shard)}.index_{NAME}"
            run_sql(storage.master(datastore.home(shard)), f"UPDATE {table} SET {change} WHERE row_key = x'{row.hex}'")
    trip(call, DRIVERS[0], 4, row=behind, ref_key=2)
    answer = ask(call, verify="true").json()
    assert (answer["damaged"], answer["dropped"], answer["entries"]) == ([str(damaged)], 2, [])
    await async_until(lambda: days(ask(call, verify="true")) == [1, 2])
    answer = ask(call).json()
    assert ("damaged" not in answer, [entry["fields"]["fare"] for entry in answer["entries"]]) == (True, [1.0] * 3)
    await by_hand.index_all()
    assert days(ask(call, verify="true")) == [1, 2, 4]


async def test_a_page_that_meets_too_much_damage_is_repaired_all_the_same(call, by_hand, storage, datastore):
    """It is a 503 that says so, and asked again it answers soon."""
    body = {"driver": DRIVERS[0], "times": {"created": "2026-01-01T00:00:00Z"}, "fare": 1.0}
    cells = [
        {"row_key": str(uuid.UUID(int=n << 64)), "column_name": "BASE", "ref_key": 1, "body": body}
        for n in range(DAMAGED_MAX + 1)
    ]
    for some in (cells[:DAMAGED_MAX], cells[DAMAGED_MAX:]):
        assert {result["status"] for result in call.post("/batch/put", json={"cells": some}).json()["results"]} == {
            "stored"
        }
    make(call)
    await by_hand.index_all()
    shard = entry_shard(parse_definition(DEFINITION), IndexEntry((uuid.UUID(DRIVERS[0]).bytes,)), datastore.shards)
    table = f"{datastore.database(shard)}.index_{NAME}"
    run_sql(storage.master(datastore.home(shard)), f"UPDATE {table} SET created = '0000-05-01'")
    assert "being repaired" in assert_problem(ask(call, verify="true"), 503)["hint"]
    await async_until(lambda: ask(call).status_code == 200)


async def test_a_minion_that_differs_answers_no_query(call, by_hand, storage, datastore):
    """C17: it is left out once the cleaner has named it. Another minion answers, or nobody, and never it."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    shard = entry_shard(parse_definition(DEFINITION), IndexEntry((uuid.UUID(DRIVERS[0]).bytes,)), datastore.shards)
    home = datastore.home(shard)
    version = IndexVersion(datastore.name, NAME, 1)

    def note(minion, **counts):
        storage.master(home).run(index_pass_table.note, version, shard, FaultCounts(**counts), minion.node.name)

    first, *others = storage.minions(home)
    note(first, missing=1)
    await async_until(lambda: ask(call, read_from="minion").status_code == 200 or not others)
    for other in others:
        note(other, ghost=1)
    await async_until(lambda: ask(call, read_from="minion").status_code == 503)
    problem = assert_problem(ask(call, read_from="minion"), 503)
    assert "differ from their cells" in problem["detail"]
    assert "read_from=master" in problem["hint"]
    assert ask(call).headers["schemaless-served-by"] == "master"
    note(first)
    await async_until(lambda: ask(call, read_from="minion").status_code == 200)


async def test_every_answer_says_how_far_the_index_is(call, by_hand):
    """Behind by the cells that it lacks, complete up to the oldest of them. Explaining shows what was read."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    fresh = ask(call).json()["freshness"]
    assert (fresh["behind_cells"], fresh["behind_seconds"]) == (0, 0)
    first = trip(call, DRIVERS[0], 2)
    trip(call, DRIVERS[1], 3)
    await async_until(lambda: ask(call).json()["freshness"]["behind_cells"] == 2)
    late = ask(call).json()["freshness"]
    assert late["complete_until"] == first["created_at"]
    assert late["behind_seconds"] >= 0
    explained = ask(call, explain="true").json()["explain"]
    assert [part["served_by"] for part in explained] == ["master"]
    assert explained[0]["rows_read"] >= 1
    assert "index_driver_index" in explained[0]["sql"]


async def test_a_minion_says_how_far_its_own_entries_are(call, by_hand):
    """It is complete up to what its checkpoints show there, and not up to its master's."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()

    def level():
        answer = ask(call, read_from="minion")
        return answer if answer.status_code == 200 and answer.json()["freshness"]["behind_cells"] == 0 else None

    answer = await async_until(level)
    assert answer.headers["schemaless-served-by"] == "minion"
    assert answer.json()["freshness"]["complete_until"] is not None


async def test_a_put_is_in_the_answer_before_the_index_has_it(call, by_hand):
    """The indexer stands still: a new row is there at once, and one that moved or left is not at its old place."""
    moved, left = uuid.uuid4(), uuid.uuid4()
    for row, day in ((uuid.uuid4(), 1), (moved, 2), (left, 3)):
        trip(call, DRIVERS[0], day, row=row)
    make(call)
    await by_hand.index_all()
    new = trip(call, DRIVERS[0], 4)["location"]
    answer = ask(call, after=new, wait="0")
    assert days(answer) == [1, 2, 3, 4]
    assert answer.json()["overlay"] == {"cells": 1}
    assert "waited" not in answer.json()
    assert days(ask(call)) == [1, 2, 3]
    gone = trip(call, DRIVERS[1], 2, row=moved, ref_key=2)["location"]
    assert 2 not in days(ask(call, after=gone, wait="0"))
    assert days(ask(call, after=gone, wait="0", driver=DRIVERS[1])) == [2]
    gone = trip(call, None, 3, row=left, ref_key=2)["location"]
    assert 3 not in days(ask(call, after=gone, wait="0"))
    await by_hand.index_all()
    reached = ask(call, after=gone)
    assert days(reached) == [1, 4]
    assert "overlay" not in reached.json()


async def test_options_of_a_query_are_right_with_cells_that_the_index_lacks(call, by_hand):
    """Filters, fields, cells, verification, the plan, and pages of one entry, whose cursors carry the location."""
    rows = sorted(uuid.uuid4() for _ in range(4))
    for day, row in enumerate(rows, 1):
        trip(call, DRIVERS[0], day, fare=day, row=row)
    make(call)
    await by_hand.index_all()
    location = trip(call, DRIVERS[0], 9, fare=7.5, row=rows[1], ref_key=2)["location"]
    answer = ask(call, after=location, include="BASE", verify="true", fields="fare", explain="true").json()
    assert [entry["fields"] for entry in answer["entries"]] == [{"fare": fare} for fare in (1, 3, 4, 7.5)]
    assert answer["entries"][3]["cells"]["BASE"]["ref_key"] == 2
    assert answer["dropped"] == 0
    assert answer["freshness"]["behind_cells"] <= 1
    assert rows[1].hex in answer["explain"][0]["sql"]
    assert days(ask(call, after=location, **{"fare.gt": "3.5", "desc": "true"})) == [9, 4]
    seen, more = [], {"after": location}
    while True:
        page = ask(call, limit="1", desc="true", **more)
        seen += days(page)
        if page.json()["cursor"] is None:
            break
        more = {"cursor": page.json()["cursor"]}
    assert seen == [9, 4, 3, 1]


async def test_a_minion_answers_with_cells_that_the_index_lacks(call, by_hand):
    """The cells come from the shard's master, the rest from a minion."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    await async_until(lambda: (answer := ask(call, read_from="minion")).is_success and days(answer) == [1])
    answer = ask(call, after=trip(call, DRIVERS[0], 2)["location"], read_from="minion", include="BASE", verify="true")
    assert days(answer) == [1, 2]
    assert all(entry["cells"]["BASE"] for entry in answer.json()["entries"])
    assert answer.headers["schemaless-served-by"] == "minion"
    assert answer.json()["overlay"] == {"cells": 1}


async def test_too_many_cells_are_waited_for(call, by_hand):
    """Not reached in time: 503 with Retry-After, never a stale 200. Reached while it waits: the answer says so."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    row = uuid.uuid4()
    cells = [{"row_key": str(row), "column_name": "OTHER", "ref_key": n, "body": {}} for n in range(1000)]
    assert call.post("/batch/put", json={"cells": cells}).status_code == 200
    location = trip(call, DRIVERS[0], 2, row=row)["location"]
    began = time.monotonic()
    refused = ask(call, after=location, wait="0.3")
    assert assert_problem(refused, 503)["retryable"]
    assert "1000 are evaluated at most" in refused.json()["detail"]
    assert "retry-after" in refused.headers
    assert time.monotonic() - began > 0.2
    asking = asyncio.create_task(asyncio.to_thread(ask, call, after=location))
    await by_hand.index_all()
    answer = await asking
    assert days(answer) == [1, 2]
    assert answer.json()["waited"] > 0
    assert "overlay" not in answer.json()


async def test_an_index_that_is_dropped_ends_the_queries_that_wait_for_it(call, by_hand, async_storage, datastore):
    """They are told that it is gone, and don't wait until their time is over."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    row = uuid.uuid4()
    cells = [{"row_key": str(row), "column_name": "OTHER", "ref_key": n, "body": {}} for n in range(1000)]
    assert call.post("/batch/put", json={"cells": cells}).status_code == 200
    location = trip(call, DRIVERS[0], 2, row=row)["location"]
    asking = asyncio.create_task(asyncio.to_thread(ask, call, after=location, wait="30"))
    assert call("DELETE", f"/indexes/{NAME}").status_code == 202
    (dropped,) = (await read_versions(async_storage, datastore)).merged.values()
    for cluster in datastore.clusters:
        await remove_from(async_storage, datastore, dropped, cluster)
    answer = await asyncio.wait_for(asking, 20)
    assert answer.status_code in (404, 503), answer.text


async def test_a_superseded_location_is_never_included(call, by_hand, datastore, storage):
    """I13: not by an index that has reached the new generation, nor before that. The answer says from where on."""
    first, second = trip(call, DRIVERS[0], 1), trip(call, DRIVERS[0], 2)
    make(call)
    await by_hand.index_all()
    shard, _, added_id = map(int, first["location"].split(":"))
    home = storage.master(datastore.home(shard))
    where = f"datastore = '{datastore.name}' AND shard = {shard}"
    start = f"('{datastore.name}', {shard}, 2, {added_id}, UTC_TIMESTAMP(6))"
    run_sql(home, f"UPDATE schemaless.shard_head SET generation = 2 WHERE {where}")
    run_sql(home, f"INSERT INTO schemaless.shard_generation VALUES {start}")
    unreached = ask(call, after=f"{shard}:1:{added_id + 9}")
    assert assert_problem(unreached, 409)["resume_at"] == added_id - 1
    for cluster in datastore.clusters:
        run_sql(storage.master(cluster), f"UPDATE schemaless.checkpoint SET generation = 2 WHERE {where}")
    problem = assert_problem(ask(call, after=first["location"]), 409)
    assert (problem["resume_at"], problem["generation"]) == (added_id - 1, 2)
    assert days(ask(call, after=f"{shard}:1:{added_id - 1}")) == [1, 2]
    if second["shard"] != shard:
        assert days(ask(call, after=second["location"])) == [1, 2]


async def test_a_paused_index_answers_and_says_how_far_it_is_behind(call, by_hand, topology, datastore):
    """Its document has the lag. What it hasn't reached is refused at once. Pausing and resuming twice is harmless."""
    trip(call, DRIVERS[0], 1)
    make(call)
    paused = [call("POST", f"/indexes/{NAME}/pause").json() for _ in range(2)]
    assert [document["state"] for document in paused] == ["paused", "paused"]
    assert paused[0]["progress"]["total"] is None
    async with AsyncStorage(topology) as storage:
        await build_step(storage, datastore, await find_index(storage, datastore, NAME))
    half = call.get(f"/indexes/{NAME}").json()
    assert (half["state"], half["progress"]) == ("paused", {"done": 0, "total": 1, "eta_s": None})
    assert not {"lag", "waiting_shards", "cleaner"} & half.keys()  # it was never complete
    problem = assert_problem(ask(call), 409)
    assert "paused" in problem["detail"]
    assert f"index resume {NAME}" in problem["hint"]
    call("POST", f"/indexes/{NAME}/resume")
    await by_hand.index_all()
    call("POST", f"/indexes/{NAME}/pause")
    location = trip(call, DRIVERS[0], 2)["location"]
    shown = call.get(f"/indexes/{NAME}").json()
    assert (shown["state"], shown["lag"], shown["progress"]) == ("paused", 1, None)
    assert "resume" in shown["what_to_do"]
    assert days(ask(call)) == [1]
    assert "paused" in assert_problem(ask(call, after=location), 503)["detail"]
    assert call("POST", f"/indexes/{NAME}/resume").json()["state"] == "active"


async def test_a_dropped_index_answers_no_query_and_its_name_is_free(call, by_hand, datastore, storage):
    """Not even in a process that has just asked it. While it is deleted it is shown, and dropping again is harmless."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    assert days(ask(call)) == [1]
    for _ in range(2):
        dropped = call("DELETE", f"/indexes/{NAME}")
        assert (dropped.status_code, dropped.json()["state"]) == (202, "deleting")
    assert_problem(ask(call), 404)
    assert_problem(call("POST", f"/indexes/{NAME}/resume"), 409)
    again = make(call)
    assert (again.status_code, again.json()["number"], again.json()["state"]) == (201, 2, "building")
    assert_problem(ask(call), 409)
    await by_hand.index_all()
    assert days(ask(call)) == [1]
    for shard in range(datastore.shards):  # behind the back of the process, which knows the second version
        storage.master(datastore.home(shard)).run(index_table.drop, datastore, [shard], index_table_name(NAME, 2))
    async with AsyncStorage(by_hand.topology) as others:
        await drop_index(others, datastore, NAME)

    def refused():
        """A minion may have the table for a moment more, and answers then."""
        if (answer := ask(call)).status_code == 200:
            assert days(answer) == [1]
            return None
        return answer

    assert_problem(await async_until(refused), 404)


ORDERS = {
    ("POST", "/pause"): ({}, {"becomes": "paused"}),
    ("POST", "/resume"): ({}, {"becomes": "active"}),
    ("POST", "/throttle"): ({"cells_per_s": 500}, {"becomes": "active", "limits": {"cells_per_s": 500}}),
    ("POST", "/switch"): ({"version": 1}, {"becomes": "answers"}),
    ("DELETE", ""): ({}, {"becomes": "deleted"}),
}


async def test_a_dry_run_says_what_an_order_would_touch_and_orders_nothing(call, by_hand, async_storage, datastore):
    """What the order would refuse, it refuses too. The log of admin actions has none of it."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    before = call.get(f"/indexes/{NAME}").json()
    for (method, path), (payload, expected) in ORDERS.items():
        options = {"json": payload} if payload else {}
        answer = call(method, f"/indexes/{NAME}{path}?dry_run=true", **options)
        assert answer.status_code == 200, answer.text
        would = answer.json().pop("would")
        assert would.items() >= {**expected, "versions": [1], "shards": datastore.shards, "workers": 0}.items()
        assert ("entries" in would) == (method == "DELETE")
    for check in ("verify", "repair"):
        answer = call("POST", f"/indexes/{NAME}/{check}?dry_run=true")
        assert (answer.status_code, answer.json()["matched"]) == (200, datastore.shards)
        assert (answer.json()["job"], "no indexer runs" in answer.json()["waits_for"]) == (None, True)
    assert call.get(f"/indexes/{NAME}").json() == before
    assert not any(
        "/verify" in action.what and datastore.name in action.what for action in await list_actions(async_storage, 50)
    )
    assert (
        "no version 7" in assert_problem(call("POST", f"/indexes/{NAME}/pause?dry_run=true&version=7"), 404)["detail"]
    )
    answer = call("DELETE", f"/indexes/{NAME}?dry_run=true&version=1")
    assert "answers queries" in assert_problem(answer, 409)["detail"]
    await fail_index(async_storage, datastore, await find_index(async_storage, datastore, NAME), "a full disk")
    assert_problem(call("POST", f"/indexes/{NAME}/pause?dry_run=true"), 409)


async def test_a_drop_while_an_index_is_being_deleted_changes_nothing(call, by_hand, datastore):
    """It may be asked for again until nothing is left. Then it is a 404 that says so, and the name is free."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    for path in (f"/indexes/{NAME}", f"/indexes/{NAME}", f"/indexes/{NAME}?version=1", f"/indexes/{NAME}"):
        answer = call("DELETE", path)
        assert (answer.status_code, answer.json()["state"], answer.json()["number"]) == (202, "deleting", 1)
    assert_problem(call("POST", f"/indexes/{NAME}/resume"), 409)
    async with AsyncStorage(by_hand.topology) as opened:
        index = await find_index(opened, datastore, NAME)
        first, *others = datastore.clusters
        await remove_from(opened, datastore, index, first)
        assert call("DELETE", f"/indexes/{NAME}").status_code == 202  # one that is half deleted, too
        for cluster in (first, *others):
            await remove_from(opened, datastore, index, cluster)
        await note_gone(opened, datastore, index)
    assert "was dropped" in assert_problem(call("DELETE", f"/indexes/{NAME}"), 404)["detail"]
    assert (make(call).status_code, call.get(f"/indexes/{NAME}").json()["number"]) == (201, 2)
    await by_hand.index_all()
    assert days(ask(call)) == [1]


def test_an_index_that_nobody_builds_or_deletes_says_so(call, storage, datastore):
    """Without an indexer it would be building for ever. What is paused waits for a person first."""

    def hints():
        listed = call.get("/indexes").json()["indexes"]
        return {index["what_to_do"] for index in (*listed, call.get(f"/indexes/{NAME}").json())}

    assert "no indexer runs" in make(call).json()["what_to_do"]
    assert ["python -m indexer" in hint for hint in hints()] == [True]
    assert "resume" in call("POST", f"/indexes/{NAME}/pause").json()["what_to_do"]
    assert "no indexer runs" in call("DELETE", f"/indexes/{NAME}").json()["what_to_do"]
    for cluster in datastore.clusters:
        storage.master(cluster).run(worker_table.put, datastore.name, INDEXER, 1, WorkerReport())
    assert hints() == {None}


async def test_an_index_whose_removal_waits_for_a_lock_says_who_holds_it(call, by_hand, storage, datastore):
    """A reader that forgot its transaction stops DROP TABLE, which is tried again and again."""
    make(call)
    await by_hand.index_all()
    for cluster in datastore.clusters:
        storage.master(cluster).run(worker_table.put, datastore.name, INDEXER, 1, WorkerReport())
    cluster = datastore.home(0)
    async with AsyncStorage(by_hand.topology) as opened:
        index = await find_index(opened, datastore, NAME)
        reader = pymysql.connect(**connect_options(storage.master(cluster).node))
        with reader.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT COUNT(*) FROM {index_table.table(datastore, 0, index.definition)}")
        assert call("DELETE", f"/indexes/{NAME}").status_code == 202

        def shown():
            return call.get(f"/indexes/{NAME}").json()["what_to_do"] or ""

        async def remove():
            with suppress(SchemalessError):
                await remove_from(opened, datastore, index, cluster)

        removing = asyncio.create_task(remove())
        hints = []
        while not removing.done():
            hints.append(await asyncio.to_thread(shown))
        reader.close()
    assert any(f"on {cluster}, " in hint and "Connection" in hint for hint in hints), hints


async def test_an_index_names_the_shards_in_which_it_waits(call, by_hand, topology, datastore):
    """A lag alone doesn't say that a cell can't be decoded. Each index names its own shards."""
    trip(call, DRIVERS[0], 1)
    make(call)
    await by_hand.index_all()
    assert call.get(f"/indexes/{NAME}").json()["waiting_shards"] == []
    damaged = WaitingShard(
        index_consumer(NAME), 3, "cell of row 1, column BASE, ref_key 1: a stored body can't be decoded"
    )
    other = WaitingShard(index_consumer("other"), 4, "its table is gone")
    refused = WaitingShard(index_consumer(NAME), 5, "the log has another cell there")
    report = WorkerReport(
        version="1", transport="faust", host="h", pid=1, is_member=True, partitions=1, assigned=(0,), rate=0.0,
        failing_shards=(damaged, other), failing_shards_count=2, refused=(refused,), refused_count=1,
    )  # fmt: skip
    async with AsyncStorage(topology) as storage:
        for master in storage.masters:
            await master.run(worker_table.put, datastore.name, INDEXER, 7, report)
    shown = call.get(f"/indexes/{NAME}").json()
    wanted = [{"shard": each.shard, "reason": each.reason} for each in (damaged, refused)]
    assert (shown["waiting_shards"], shown["versions"][0]["waiting_shards"]) == (wanted, wanted)


async def test_a_failed_index_says_why_and_what_to_do(call, async_storage, datastore):
    """In its document, to a query before it was complete, and to who wants to pause it."""
    make(call)
    await fail_index(async_storage, datastore, await find_index(async_storage, datastore, NAME), "a table is lost")
    shown = call.get(f"/indexes/{NAME}").json()
    assert (shown["state"], shown["reason"]) == ("failed", "a table is lost")
    assert f"index resume {NAME}" in shown["what_to_do"]
    for refused in (ask(call), call("POST", f"/indexes/{NAME}/pause")):
        problem = assert_problem(refused, 409)
        assert "a table is lost" in problem["detail"]
        assert "resume" in problem["detail"] + problem["hint"]
    assert call("POST", f"/indexes/{NAME}/resume").json()["state"] == "building"


LIMITS = ("cells_per_s", "build_lag_cells_max", "build_commit_max_s", "build_busy_share")


@pytest.mark.parametrize("value", [-1, "many", True, 10**9 + 1, 2**70])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_throttle_that_is_no_limit_is_refused(call, limit, value):
    """422, or 400 for what is no 64-bit number. The index stays as it is."""
    make(call)
    answer = call("POST", f"/indexes/{NAME}/throttle", json={limit: value})
    assert answer.status_code in (400, 422)
    assert limit in answer.json()["detail"] or answer.status_code == 400
    assert call.get(f"/indexes/{NAME}").json()[limit] is None


@pytest.mark.parametrize(
    "document",
    [
        {}, {"cells_per_s": 1.5}, {"build_lag_cells_max": 0.5}, {"build_commit_max_s": 0}, {"build_busy_share": 0},
        {"build_busy_share": 1.1}, {"lag": 3}, [],
    ],
)  # fmt: skip
def test_a_throttle_that_says_nothing_or_too_much_is_refused(call, document):
    """No build can work none of the time or commit in no time: a pause is for that."""
    make(call)
    assert_problem(call("POST", f"/indexes/{NAME}/throttle", json=document), 422)
    infinite = msgspec.msgpack.encode({"build_commit_max_s": float("inf")})
    headers = {"content-type": "application/msgpack"}
    assert_problem(call("POST", f"/indexes/{NAME}/throttle", content=infinite, headers=headers), 422)


def test_a_throttle_is_shown_and_taken_away(call):
    """0 and null mean no bound for the rate. For a build null means the settings. What isn't given stays as it is."""
    make(call)
    shown = dict.fromkeys(LIMITS)
    for given, changed in (
        ({"cells_per_s": 7}, {"cells_per_s": 7}),
        ({"build_lag_cells_max": 0, "build_busy_share": 0.1}, {"build_lag_cells_max": 0, "build_busy_share": 0.1}),
        ({"cells_per_s": 0}, {"cells_per_s": None}),
        ({"build_commit_max_s": 0.3, "cells_per_s": 8}, {"build_commit_max_s": 0.3, "cells_per_s": 8}),
        (dict.fromkeys(LIMITS), dict.fromkeys(LIMITS)),
    ):
        shown |= changed
        answer = call("POST", f"/indexes/{NAME}/throttle", json=given)
        assert answer.status_code == 200
        assert {limit: answer.json()[limit] for limit in LIMITS} == shown
        assert {limit: call.get(f"/indexes/{NAME}").json()["versions"][0][limit] for limit in LIMITS} == shown


@pytest.mark.parametrize("order", ["pause", "resume", "throttle"])
def test_an_unknown_index_takes_no_order(call, order):
    """404, as for a drop."""
    document = {"cells_per_s": 1} if order == "throttle" else None
    assert_problem(call("POST", f"/indexes/nope/{order}", json=document), 404)
    assert_problem(call("DELETE", "/indexes/nope"), 404)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"driver": None}, "driver"),
        ({"driver": "nobody"}, "driver"),
        ({"colour": "red"}, "colour"),
        ({"created.like": "x"}, "created.like"),
        ({"order": "colour"}, "order"),
        ({"limit": "0"}, "limit"),
        ({"cursor": "abc"}, "cursor"),
        ({"after": "1:1"}, "after"),
        ({"after": "99:1:1"}, "after"),
        ({"wait": "31"}, "wait"),
        ({"include": "no column"}, "include"),
        ({"fare.prefix": "1"}, "fare.prefix"),
        ({"verify": "perhaps"}, "verify"),
        ({"explain": "perhaps"}, "explain"),
        ({"read_from": "nobody"}, "read_from"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(call, by_hand, query, field):
    """422 that names the parameter."""
    make(call)
    await by_hand.index_all()
    params = {name: value for name, value in {"driver": DRIVERS[0], **query}.items() if value is not None}
    assert_problem(call.get(f"/indexes/{NAME}/entries", params=params), 422, field)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (DEFINITION | {"name": "other"}, "definition.name"),
        (DEFINITION | {"shard_field": "fare"}, "shard_field"),
        ({**DEFINITION, "fields": []}, None),
        (DEFINITION | {"colour": "red"}, "definition.colour"),
        ([], "definition"),
    ],
)
def test_a_wrong_definition_is_refused(call, document, field):
    """422 that names the member, and nothing is made."""
    assert_problem(call("PUT", f"/indexes/{NAME}", json=document), 422, field)
    assert call.get("/indexes").json() == {"indexes": []}


def test_an_unknown_index_is_a_404(call):
    """Shown or asked."""
    assert_problem(call.get("/indexes/nope"), 404)
    assert_problem(call.get("/indexes/nope/entries", params={"driver": DRIVERS[0]}), 404)


async def test_problems_are_counted_exactly_and_listed_in_pages(call, by_hand, datastore):
    """More rows than one page lists, and nothing else: every page, the number everywhere, and a repair."""
    rows = [str(uuid.uuid4()) for _ in range(1200)]
    unfit = {"driver": "nobody", "times": {"created": 5}, "fare": 1}
    cells = [{"row_key": row, "column_name": "BASE", "ref_key": 1, "body": unfit} for row in rows]
    for start in (0, 600):
        assert call.post("/batch/put", json={"cells": cells[start : start + 600]}).status_code == 200
    make(call)
    await by_hand.index_all()

    def page(**query):
        return call.get(f"/indexes/{NAME}/problems", params=query)

    first = page(limit=1000).json()
    second = page(limit=1000, cursor=first["cursor"]).json()
    third = page(limit=1000, cursor=second["cursor"]).json()
    assert [len(found["problems"]) for found in (first, second, third)] == [1000, 1000, 400]
    assert third["cursor"] is None
    listed = {(item["row_key"], item["field"]) for found in (first, second, third) for item in found["problems"]}
    assert listed == {(row, field) for row in rows for field in ("driver", "created")}
    assert first["problems"][0] | {"row_key": ""} == {
        "row_key": "",
        "column_name": "BASE",
        "field": "driver",
        "reason": "is no uuid: it takes hyphenated text such as 5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11",
        "value": '"nobody"',
        "values": 1,
        "element": None,
    }
    odd = page(limit=3).json()
    assert [item["field"] for item in page(limit=3, cursor=odd["cursor"]).json()["problems"]] == [
        "created",
        "driver",
        "created",
    ]
    assert {found["count"] for found in (first, second, third, odd)} == {2400}
    assert call.get(f"/indexes/{NAME}").json()["problems"] == 2400
    async with AsyncStorage(by_hand.topology) as storage:
        samples, metrics = Sampled(lambda: sample_problems(storage), 5, {}), Metrics()
        metrics.watch_problems(samples)
        await samples.step()
        line = f'schemaless_api_index_problems{{datastore="{datastore.name}",index="{NAME}",number="1"}} 2400.0'
        assert line in generate_latest(metrics.registry).decode()
    trip(call, DRIVERS[0], 1, row=rows[0], ref_key=2)
    await by_hand.index_all()
    assert page().json()["count"] == 2398
    assert [index["problems"] for index in call.get("/indexes").json()["indexes"]] == [2398]


async def test_bad_input_of_problems(call, by_hand):
    assert_problem(call.get("/indexes/no_such/problems"), 404)
    make(call)
    await by_hand.index_all()
    for query, field in (
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "WzksMCwiIiwwXQ"}, "cursor"),
        ({"fields": "driver"}, "fields"),
    ):
        assert_problem(call.get(f"/indexes/{NAME}/problems", params=query), 422, field)
    empty = {"problems": [], "count": 0, "cursor": None}
    assert call.get(f"/indexes/{NAME}/problems").json() == empty


async def test_an_index_shows_what_its_cleaner_found(call, by_hand, storage, datastore):
    """Null until every range was compared; the totals are in the metrics, too, and all goes with the index."""
    make(call)
    await by_hand.index_all()
    version = IndexVersion(datastore.name, NAME, 1)

    def note(shard, node=index_pass_table.MASTERS, **counts):
        storage.master(datastore.home(shard)).run(index_pass_table.note, version, shard, FaultCounts(**counts), node)

    note(0, rows=5, missing=2, repaired=2)
    assert call.get(f"/indexes/{NAME}").json()["cleaner"]["compared_since"] is None
    for shard in range(datastore.shards):
        note(shard, rows=3, entries=4, ghost=1)
    found = call.get(f"/indexes/{NAME}").json()["cleaner"]
    assert found["compared_since"] is not None
    shards = datastore.shards
    assert (found["ranges"], found["rows"], found["entries"], found["missing"]) == (shards, 3 * shards, 4 * shards, 0)
    assert found["total"] == {"missing": 2, "stale": 0, "ghost": shards, "repaired": 2}
    async with AsyncStorage(by_hand.topology) as opened:
        minion, other, *_ = [each.node.name for cluster in datastore.clusters for each in opened.minions(cluster)]
        note(1, minion, rows=3, entries=2, stale=1)
        note(1, "no-more", ghost=1)
        samples, metrics = PassSamples(opened), Metrics()
        metrics.watch_passes(samples)
        await samples.step()
    named = f'datastore="{datastore.name}",index="{NAME}",'
    exposed = generate_latest(metrics.registry).decode()
    assert f'schemaless_api_index_faults_total{{{named}kind="missing",number="1"}} 2.0' in exposed
    assert f'schemaless_api_index_faults_total{{{named}kind="stale",number="1"}} 0.0' in exposed
    assert f'schemaless_api_index_minion_faults{{{named}kind="stale",node="{minion}",number="1"}} 1.0' in exposed
    assert "no-more" not in exposed
    minions = call.get(f"/indexes/{NAME}").json()["cleaner"]["minions"]
    assert (minions[minion]["ranges"], minions[minion]["stale"], minions[other]["ranges"]) == (1, 1, 0)
    assert "no-more" not in minions
