"""An index is changed in place, behind a real indexer, a tailer and the API: queries are always answered (I11)."""

import asyncio
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from schemaless.bus.topics import ensure_topics
from schemaless.errors import Conflict, Invalid
from schemaless.index.catalogue import Change, create_index, find_versions, has_definition
from schemaless.index.definition import parse_definition
from schemaless.index.switch import CAUGHT_UP_WITHIN_S
from schemaless.storage import index_table
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.integration.api.api_harness import assert_problem
from tests.integration.indexer.test_indexer import Rows, definition
from tests.integration.indexer.test_life_cycle import fill, left_of, wait_gone
from tests.log_harness import run_sql, running_tailers
from tests.waiting import until

SHARDS = 4
LEVEL_WITHIN_S = CAUGHT_UP_WITHIN_S + 1
"""By how much a version that is switched to may be behind the one before, and room for a slow machine."""


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=SHARDS, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def processes(running, kafka, datastore):
    """A tailer and an indexer."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings) as indexer:
        yield indexer


@pytest.fixture
def rows(storage, datastore):
    return Rows(storage, datastore)


@pytest.fixture
def call(api, datastore):
    return api.at(datastore)


def changed(name, *stored):
    """The definition of an index with other stored fields, each a number of BASE."""
    fields = [{"name": field, "column": "BASE", "path": "number", "type": "int"} for field in stored]
    return {**definition(name).document(), "stored": fields}


def put(call, name, document, **query):
    return call("PUT", f"/indexes/{name}", json=document, params=query)


def versions(call, name):
    return {version["number"]: version for version in call.get(f"/indexes/{name}").json()["versions"]}


def make_active(call, name):
    assert put(call, name, definition(name).document()).status_code == 201
    until(lambda: call.get(f"/indexes/{name}").json()["state"] == "active", lambda: call.get(f"/indexes/{name}").text)


def ask(call, name, **query):
    return call.get(f"/indexes/{name}/entries", params={"owner": "o1", **query})


async def test_an_index_is_changed_while_puts_and_queries_go_on(
    processes, rows, call, async_storage, storage, datastore
):
    """Every query is answered, by the old version and then by the new one, and no entry that was there is missing."""
    fill(rows, 300)
    make_active(call, "by_owner")
    stop, asked_at, answers = threading.Event(), [], []

    def put_and_ask():
        while not stop.is_set():
            fill(rows, 7)
            asked_at.append(time.monotonic())
            answers.append(ask(call, "by_owner", limit="1000"))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(put_and_ask)
        try:
            asked = put(call, "by_owner", changed("by_owner", "twice"), change="true", keep="0s")
            assert asked.status_code == 201
            assert [version["role"] for version in asked.json()["versions"]] == ["answers", "change"]
            until(lambda: asking.done() or (answers and answers[-1].json()["version"] == 2))
        finally:
            stop.set()
        asking.result()
    assert {answer.status_code for answer in answers} == {200}
    numbers = [answer.json()["version"] for answer in answers]
    assert numbers == sorted(numbers)
    assert {numbers[0], numbers[-1]} == {1, 2}
    last = answers[-1].json()["entries"]
    assert all(entry["fields"]["twice"] == entry["fields"]["number"] for entry in last)
    first_seen = {}
    for at, answer in zip(asked_at, answers, strict=True):
        rows_now = {entry["row_key"] for entry in answer.json()["entries"]}
        settled = {row for row, seen_at in first_seen.items() if at - seen_at > LEVEL_WITHIN_S}
        assert settled <= rows_now, answer.json()["version"]
        for row in rows_now:
            first_seen.setdefault(row, at)
    await wait_gone(async_storage, datastore, "by_owner", 1)
    assert left_of(storage, datastore, "by_owner", 1) == []
    new = (await find_versions(async_storage, datastore, "by_owner")).answering.definition
    wait_until_finished(storage, datastore, new.consumer)
    assert rows.found(new) == rows.wanted(new)
    assert put(call, "by_owner", changed("by_owner", "twice"), change="true").status_code == 200


def test_a_change_waits_for_its_switch_and_goes_back(processes, rows, call, storage, datastore):
    """Cursors continue in the version that gave them (A22). What isn't switched to is kept, and goes when told."""
    fill(rows, 60)
    make_active(call, "held")
    assert_problem(put(call, "held", changed("held", "twice")), 409)
    assert_problem(put(call, "held", changed("held", "twice"), hold="true"), 422, "hold")
    assert put(call, "held", changed("held", "twice"), change="true", hold="true").status_code == 201
    assert_problem(put(call, "held", changed("held", "third"), change="true"), 409)
    until(lambda: versions(call, "held")[2]["state"] == "active")
    assert "index switch held" in versions(call, "held")[2]["what_to_do"]
    page = ask(call, "held", limit="2").json()
    assert page["version"] == 1
    switched = call.post("/indexes/held/switch", json={})
    assert (switched.status_code, switched.json()["number"]) == (200, 2)
    assert {number: version["role"] for number, version in versions(call, "held").items()} == {1: "kept", 2: "answers"}
    assert datetime.fromisoformat(versions(call, "held")[1]["kept_until"]) > datetime.now(UTC)
    rest = ask(call, "held", limit="1000", cursor=page["cursor"]).json()
    whole = ask(call, "held", limit="1000").json()
    assert (rest["version"], whole["version"]) == (1, 2)
    assert [entry["row_key"] for entry in page["entries"] + rest["entries"]] == [
        entry["row_key"] for entry in whole["entries"]
    ]
    of_new = ask(call, "held", limit="2").json()["cursor"]
    fill(rows, 14)  # both versions follow
    for consumer in ("index:held", "index:held:2"):
        wait_until_finished(storage, datastore, consumer)
    back = call.post("/indexes/held/switch", json={"back": True})
    assert (back.status_code, back.json()["number"]) == (200, 1)
    assert len(ask(call, "held", limit="1000").json()["entries"]) == len(whole["entries"]) + 2
    assert ask(call, "held", limit="2", cursor=of_new).json()["version"] == 2
    assert_problem(call("DELETE", "/indexes/held", params={"version": 1}), 409)
    assert call("DELETE", "/indexes/held", params={"version": 2}).status_code == 202
    until(lambda: versions(call, "held").keys() == {1})
    problem = assert_problem(ask(call, "held", limit="2", cursor=of_new), 422, "cursor")
    assert "begin again" in problem["detail"]
    assert_problem(call.post("/indexes/held/switch", json={"back": True}), 409)
    assert_problem(call.post("/indexes/held/switch", json={"version": 2}), 404)
    for wrong in ({"keep": "long"}, {"version": 1, "back": True}, {"colour": "red"}, {"version": "1"}):
        assert_problem(call.post("/indexes/held/switch", json=wrong), 422)


def test_what_a_kept_version_costs_is_shown(processes, rows, call):
    """Its writes are counted from the switch on, and those of the version that answers aren't."""
    fill(rows, 10)
    make_active(call, "costly")
    assert put(call, "costly", changed("costly", "twice"), change="true", keep="1h").status_code == 201
    until(lambda: call.get("/indexes/costly").json()["number"] == 2)
    before = versions(call, "costly")[1]["kept_writes"]

    def written():
        fill(rows, 7)
        return versions(call, "costly")[1]["kept_writes"] > before

    until(written)
    assert "kept_writes" not in versions(call, "costly")[2]


def test_a_change_that_fails_leaves_the_old_version_answering(processes, rows, call, storage, datastore):
    """What isn't as its cells say isn't switched to. The change says why, is given up, and another one follows."""
    fill(rows, 40)
    make_active(call, "typo")
    call("PUT", "/indexes/typo", json=changed("typo", "twice"), params={"change": "true"})
    call.post("/indexes/typo/throttle", json={"cells_per_s": 1})  # of the change: so it isn't built yet
    assert (versions(call, "typo")[1]["cells_per_s"], versions(call, "typo")[2]["cells_per_s"]) == (None, 1)
    until(lambda: versions(call, "typo")[2]["progress"]["total"])
    ghost = parse_definition(changed("typo", "twice"), 2)
    for shard in range(SHARDS):
        run_sql(
            storage.master(datastore.home(shard)),
            f"INSERT INTO {index_table.table(datastore, shard, ghost)}"
            " (row_key, element, source_generation, source_added_id, live, owner, number, twice)"
            f" VALUES (x'{uuid.uuid4().hex}', 0, 1, 1, 1, 'nobody', 1, 2)",
        )
    call.post("/indexes/typo/throttle", json={"cells_per_s": 0})
    until(lambda: versions(call, "typo")[2]["state"] == "failed")
    shown = call.get("/indexes/typo").json()
    assert (shown["number"], shown["state"]) == (1, "active")
    assert "differ" in versions(call, "typo")[2]["reason"]
    assert ask(call, "typo").json()["version"] == 1
    assert_problem(call.post("/indexes/typo/switch", json={}), 409)
    assert call("DELETE", "/indexes/typo", params={"version": 2}).status_code == 202
    until(lambda: versions(call, "typo").keys() == {1})
    assert put(call, "typo", changed("typo", "other"), change="true", keep="0s").status_code == 201
    until(lambda: call.get("/indexes/typo").json()["number"] == 3)
    assert "other" in ask(call, "typo").json()["entries"][0]["fields"]


async def test_of_two_changes_at_once_one_is_made(make_datastore, async_storage):
    """The first master decides. The other is told that the index is being changed, and nothing of it stays."""
    datastore = make_datastore(shards=4, partitions=2)
    await create_index(async_storage, datastore, definition("raced"))
    wanted = [parse_definition(changed("raced", f"field_{n}")) for n in range(6)]
    answers = await asyncio.gather(
        *(create_index(async_storage, datastore, each, change=Change(keep_s=60)) for each in wanted),
        return_exceptions=True,
    )
    told = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(told) == len(wanted) - 1
    assert all(isinstance(answer, Conflict) and "is being changed already" in str(answer) for answer in told)
    named = await find_versions(async_storage, datastore, "raced")
    made = wanted[answers.index(True)]
    assert [index.number for index in named.versions] == [1, 2]
    assert has_definition(named.versions[1], made)


async def test_the_bound_on_indexes_counts_versions(make_datastore, async_storage):
    """Each has tables in every shard, and follows the log."""
    datastore = make_datastore(shards=SHARDS, partitions=2)
    await create_index(async_storage, datastore, definition(), 1)
    with pytest.raises(Invalid, match="may have"):
        await create_index(async_storage, datastore, parse_definition(changed("by_owner", "n")), 1, Change(0))
