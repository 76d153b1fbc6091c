"""verify and repair over HTTP: jobs that indexers carry out shard by shard, on real servers and a real API."""

import asyncio
import json
import uuid

import pytest
from typer.testing import CliRunner

from indexer.index_cleaner import OrderedChecks
from indexer.service import remove_from
from schemaless import AsyncClient, Client, Invalid, NotFound, NotReady
from schemaless.__main__ import app
from schemaless.cell import row_key_text
from schemaless.index.comparison import FIRST_ROW, NOTHING_CHECKED
from schemaless.sharding import shard_of
from schemaless.storage import index_check_table
from schemaless.storage.index_definition_table import IndexStage, defined
from tests.integration.api.api_harness import assert_problem
from tests.integration.indexer.test_indexer import SHARDS, definition
from tests.integration.indexer.test_inspection import Indexed, define, filled

pytestmark = pytest.mark.storage

PATH = "/indexes/by_owner"


class Ordered:
    """A damaged index: a ghost in shard 1, and an entry of `row` that is missing. Orders go to the API."""

    def __init__(self, rows, api, async_storage):
        self.rows, self.call = rows, api.at(rows.datastore)
        self.client = Client([f"http://127.0.0.1:{api.port}"], datastore=rows.datastore.name)
        self.async_client = AsyncClient([f"http://127.0.0.1:{api.port}"], datastore=rows.datastore.name)
        self.index = self.client.index("by_owner")
        self.wanted = rows.wanted(rows.index)
        (shard, self.row, _), *_ = sorted(self.wanted)
        rows.sql(shard, f"DELETE FROM {{table}} WHERE row_key = x'{self.row.hex()}'")
        self.ghost = uuid.uuid4().bytes
        rows.sql(1, f"INSERT INTO {{table}} VALUES (x'{self.ghost.hex()}', 0, 1, 1, 1, 'z', NULL, NULL)")
        self.source = shard_of(self.row, SHARDS)
        self.owned = range(SHARDS)
        self.checks = OrderedChecks(async_storage, rows.datastore, lambda: self.owned)
        self.checks.watch([rows.index])

    async def carried_out(self, job):
        """The job after the indexers have done what they can."""
        while await self.checks.step():
            pass
        return await asyncio.to_thread(self.index.job, job)


@pytest.fixture
async def ordered(storage, async_storage, make_datastore, api):
    datastore = make_datastore(shards=SHARDS, partitions=2)
    rows, _ = await filled(lambda index: Indexed(storage, async_storage, datastore, index), definition())
    define(rows)
    made = Ordered(rows, api, async_storage)
    yield made
    made.client.close()
    await made.async_client.close()


def counts(job):
    return tuple(job[kind] for kind in ("missing", "stale", "ghost", "repaired"))


async def test_verify_names_and_repair_repairs(ordered):
    """Progress by shard; nothing is written by verify; a repair makes it clean; the name of who ordered is there."""
    answer = ordered.call("POST", f"{PATH}/verify", json={"minions": False})
    assert answer.status_code == 202
    told = answer.json()
    assert told["matched"] == SHARDS
    assert "python -m indexer" in told["waits_for"]
    job = ordered.index.job(told["job"])
    assert (job["state"], job["pending"], job["done"]) == ("running", SHARDS, 0)
    ordered.owned = [0, 1]
    job = await ordered.carried_out(told["job"])
    assert (job["state"], job["pending"], job["done"]) == ("running", SHARDS - 2, 2)
    ordered.owned = range(SHARDS)
    job = await ordered.carried_out(told["job"])
    assert (job["state"], job["kind"], job["index"], job["version"]) == ("done", "verify", "by_owner", 1)
    assert (*counts(job), job["clean"], job["masters"]["rows"]) == (1, 0, 1, 0, False, 80)
    named = {(fault["kind"], fault["row_key"]) for fault in job["faults"]}
    assert named == {("missing", row_key_text(ordered.row)), ("ghost", row_key_text(ordered.ghost))}
    assert ordered.rows.found(ordered.rows.index) != ordered.wanted

    job = await ordered.carried_out(ordered.index.repair(minions=False)["job"])
    assert (job["kind"], *counts(job), job["clean"]) == ("repair", 1, 0, 1, 2, True)
    assert ordered.rows.found(ordered.rows.index) == ordered.wanted
    job = await ordered.carried_out((await ordered.async_client.index("by_owner").verify())["job"])
    assert (*counts(job), job["clean"], job["who"]) == (0, 0, 0, 0, True, "anybody on loopback")
    assert job == await ordered.async_client.index("by_owner").job(job["job"])


async def test_a_check_is_of_rows_of_shards_or_of_a_range(ordered):
    """What is outside of it isn't found, and what is in it is counted once."""

    async def found(**options):
        job = await ordered.carried_out(ordered.index.verify(minions=False, **options)["job"])
        assert sum(counts(job)) == len(job["faults"])
        row_keys = [fault["row_key"] for fault in job["faults"]]
        assert len(row_keys) == len(set(row_keys))
        return set(row_keys)

    row, ghost = row_key_text(ordered.row), row_key_text(ordered.ghost)
    assert await found(row_keys=[row]) == {row}
    assert await found(row_keys=[uuid.UUID(ghost), row]) == {row, ghost}
    assert await found(shards=[ordered.source]) - {ghost} == {row}
    assert await found(from_=row, to=row) == {row}
    assert await found(from_=ghost, to=ghost, rows_per_s=0) == {ghost}


async def test_a_value_that_is_no_text_is_shown(ordered):
    """No cell makes it, and JSON can't have it. The job is done, and the indexer lives."""
    ordered.rows.sql(1, f"UPDATE {{table}} SET owner = x'61ff' WHERE row_key = x'{ordered.ghost.hex()}'")
    ghost = row_key_text(ordered.ghost)
    job = await ordered.carried_out(ordered.index.verify(minions=False, row_keys=[ghost])["job"])
    assert (job["state"], counts(job)) == ("done", (0, 0, 1, 0))
    assert job["faults"][0]["found"]["owner"] == r"a\udcff"


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"shards": []}, "shards"),
        ({"shards": [SHARDS]}, "shards"),
        ({"shards": [-1]}, "shards"),
        ({"row_keys": []}, "row_keys"),
        ({"row_keys": ["x"]}, "row_keys"),
        ({"row_keys": [str(uuid.UUID(int=n)) for n in range(101)]}, "row_keys"),
        ({"row_keys": [str(uuid.UUID(int=1))], "shards": [1]}, "row_keys"),
        ({"from": "x"}, "from"),
        ({"from": str(uuid.UUID(int=2)), "to": str(uuid.UUID(int=1))}, "from"),
        ({"rows_per_s": -1}, "rows_per_s"),
        ({"shards": "all"}, None),
        ({"elsewhere": 1}, None),
    ],
)
async def test_a_wrong_order_is_refused(ordered, wanted, field):
    """With the field that is wrong, and no job is made."""
    for order in ("verify", "repair"):
        assert_problem(ordered.call("POST", f"{PATH}/{order}", json=wanted), 422, field)
    assert not await ordered.checks.step()


async def test_only_a_complete_version_is_checked(ordered):
    """An unknown index, an unknown version, and one that is being built. Too many pending checks are refused."""
    with pytest.raises(NotFound):
        ordered.client.index("nothing").verify()
    with pytest.raises(NotFound, match="no version 7"):
        ordered.index.repair(7)
    with pytest.raises(Invalid):
        ordered.index.job("7")
    with pytest.raises(NotFound, match="no job"):
        ordered.index.job("0" * 16)
    for _ in range(16):
        ordered.index.verify(1, shards=[0])
    with pytest.raises(NotReady, match="16 checks"):
        ordered.index.verify()


async def test_an_index_that_cannot_be_read_is_waited_for(ordered, async_storage):
    """The job says why; another index's goes on; a drop ends the job, and leaves no part behind."""
    ordered.checks.watch([])
    job = await ordered.carried_out(ordered.index.verify()["job"])
    assert (job["state"], job["pending"]) == ("running", SHARDS)
    assert not await ordered.checks.step()  # it is put off
    dropped = defined(ordered.rows.index, IndexStage.DELETING)
    for cluster in ordered.rows.datastore.clusters:
        await remove_from(async_storage, ordered.rows.datastore, dropped, cluster)
    job = await asyncio.to_thread(ordered.index.job, job["job"])
    assert (job["state"], job["pending"], job["waits_for"]) == ("dropped", 0, None)


async def test_a_part_is_noted_once(ordered, async_storage):
    """Of two processes that carried it out, the first one counts. A request is what was ordered."""
    job = int(ordered.index.verify(shards=[0], minions=False)["job"], 16)
    master = async_storage.master(ordered.rows.datastore.home(0))
    part = await master.run(index_check_table.due, ordered.rows.datastore.name, [0], [])
    assert (part.job, part.shard, part.request.first, part.request.minions) == (job, 0, FIRST_ROW, False)
    first = await ordered.carried_out(f"{job:016x}")
    await master.run(index_check_table.done, part, NOTHING_CHECKED, [])
    assert (await ordered.carried_out(f"{job:016x}")) == first


async def test_the_command_orders_a_job_and_shows_it(ordered, api, async_storage, running, monkeypatch):
    """Exit status 1 while something isn't repaired."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", "127.0.0.1:9")
    monkeypatch.setenv("SCHEMALESS_HOSTS", f"http://127.0.0.1:{api.port}")

    def run(*arguments):
        command = ["index", *arguments, "--datastore", ordered.rows.datastore.name]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        return done.exit_code, done.stdout

    status, told = await asyncio.to_thread(run, "verify", "by_owner", "--background", "--no-minions", "--json")
    assert (status, json.loads(told)["matched"]) == (0, SHARDS)
    job = json.loads(told)["job"]
    await ordered.carried_out(job)
    status, told = await asyncio.to_thread(run, "job", job)
    assert status == 1
    assert f"verify done: {SHARDS} of {SHARDS} shards" in told
    assert "missing: shard" in told
    arguments = ("repair", "by_owner", "--background", "--version", "1", "--no-minions", "--rows-per-s", "0")
    status, told = await asyncio.to_thread(run, *arguments)
    assert status == 0, told
    assert f": {SHARDS} shards\n" in told, told
    job = told.split()[1].strip(":")
    datastore = ordered.rows.datastore
    part = await async_storage.master(datastore.home(0)).run(index_check_table.due, datastore.name, [0], [])
    assert (part.job, part.request.rows_per_s) == (
        int(job, 16),
        0,
    )  # no bound, and not the 5,000 of an order without it
    await ordered.carried_out(job)
    status, told = await asyncio.to_thread(run, "job", job, "--json")
    assert (status, json.loads(told)["repaired"]) == (0, 2)
