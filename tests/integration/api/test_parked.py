"""Parked cells and control over HTTP, with records as a worker writes them. No worker runs here (I12)."""

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from api.metrics import Metrics
from schemaless.__main__ import app
from schemaless.consume.trigger_worker import Orders
from schemaless.facts.consumers import sample_programs
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.pace import Sampled
from schemaless.storage import parked_table, trigger_order_table, worker_table
from schemaless.storage.operation import query
from schemaless.storage.parked_table import Cause, Order
from schemaless.storage.sql import sql
from schemaless.storage.worker_table import WorkerReport
from tests.integration.api.api_harness import assert_problem, row_in
from tests.integration.api.parked_harness import CONSUMER, PROGRAM, Stage

pytestmark = pytest.mark.storage


@pytest.fixture
def stage(storage, make_datastore, api):
    datastore = make_datastore(shards=2, partitions=1)
    return Stage(storage, datastore, api.at(datastore))


@pytest.fixture
def one_row(stage):
    """In shard 0: a parked cell, then three cells of its row, one of a column that the program doesn't have."""
    ids = [stage.put(0, 1), stage.put(0, 2), stage.put(0, 1, "OTHER"), stage.put(0, 1, "STATUS"), stage.put(0, 3)]
    stage.checkpoint(0, ids[3])
    stage.checkpoint(1, 0)
    stage.announce()
    stage.park(0, ids[0])
    return ids


def ids_of(answer):
    return [(each["id"], each["cause"]) for each in answer.json()["parked"]]


def test_a_parked_cell_is_listed_with_what_waits_behind_it(stage, one_row):
    """In the row's order, up to the checkpoint, of the program's columns. A page may end within a row."""
    answer = stage.parked()
    assert answer.status_code == 200, answer.text
    expected = [("0:1:1:bill", "error"), ("0:1:2:bill", "behind"), ("0:1:4:notify", "behind")]
    assert ids_of(answer) == expected
    assert answer.json()["count"] == 1
    first = answer.json()["parked"][0]
    assert (first["error"], first["attempts"], first["version"], first["body"]) == (
        "ValueError: no card", 5, "v1", {"n": 1},
    )  # fmt: skip
    seen, cursor = [], None
    while True:
        page = stage.parked(limit=1, **({"cursor": cursor} if cursor else {}))
        seen += ids_of(page)
        if (cursor := page.json()["cursor"]) is None:
            break
    assert seen == expected
    assert ids_of(stage.parked(cause="behind")) == expected[1:]
    assert ids_of(stage.parked(cause="error")) == expected[:1]


def test_a_body_that_cant_be_decoded_costs_no_page(stage, one_row):
    """Such a cell is listed with the reason: the parked one, and one that waits behind it."""
    database = stage.datastore.database(0)
    stage.sql(0, f"UPDATE {database}.entity SET body = 'no body' WHERE added_id IN (1, 2)")
    answer = stage.parked()
    assert answer.status_code == 200, answer.text
    first, second, third = answer.json()["parked"]
    assert (first["body"], second["body"], third["body"]) == (None, None, {"n": 1})
    assert first["unreadable"] == second["unreadable"]
    assert first["unreadable"].startswith("a stored body can't be decoded")
    assert "unreadable" not in third


def test_filters_choose_records_of_all_clusters(stage, one_row):
    other = row_in(stage.datastore, 1)
    added_id = stage.put(1, 1, row=other)
    stage.park(1, added_id, "old", Cause.KILLED, row=other, holds=False)
    assert ids_of(stage.parked(trigger="old")) == [("1:1:1:old", "killed")]
    assert ids_of(stage.parked(row_key=str(other))) == [("1:1:1:old", "killed")]
    assert stage.parked(column="STATUS").json() == {"parked": [], "cursor": None, "count": 0}
    assert stage.parked(since="2100-01-01T00:00:00Z").json()["count"] == 0
    assert stage.parked().json()["count"] == 2


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"cause": "bad luck"}, "cause"),
        ({"row_key": "7"}, "row_key"),
        ({"since": "yesterday"}, "since"),
        ({"cursor": "x"}, "cursor"),
        ({"limit": "0"}, "limit"),
    ],
)
def test_a_wrong_filter_is_named(stage, one_row, params, field):
    assert_problem(stage.parked(**params), 422, field)


def test_an_unknown_program_is_missing(stage):
    stage.call.put(stage.rows[0], 1, {})
    assert_problem(stage.parked(), 404)
    for path in ("parked/retry", "pause", "resume", "seek"):
        document = {"seek": {"to": "end"}, "parked/retry": {"filter": {}}}.get(path, {})
        assert_problem(stage.call.post(f"/triggers/{PROGRAM}/{path}", json=document), 404)
    assert_problem(stage.call("DELETE", f"/triggers/{PROGRAM}"), 404)


@pytest.mark.parametrize("name", ["é", "a b", "x" * 121], ids=["not ASCII", "a space", "too long"])
def test_a_name_that_no_program_can_have_is_unknown(stage, name):
    """It doesn't reach a server, which refuses to compare it, and would count as out of order."""
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("GET", "/parked")):
        assert "can be called" in assert_problem(stage.call(method, f"/triggers/{name}{path}"), 404)["detail"]
    assert_problem(stage.call.post(f"/triggers/{name}/seek", json={"to": "end"}), 404)


def test_a_dry_run_of_a_pause_or_a_resume_says_what_it_would_touch(stage, one_row):
    """Shards that are paused or have stopped are counted, and nothing is ordered."""
    path = f"/triggers/{PROGRAM}"
    would = stage.call.post(f"{path}/pause", json={"shards": [0], "dry_run": True}).json()["would"]
    assert would == {"becomes": "paused", "shards": 1, "workers": 0}
    assert stage.call.get(path).json()["paused_shards"] == []
    assert stage.call.post(f"{path}/pause", json={"shards": [0]}).status_code == 200
    stage.sql(
        1, f"UPDATE schemaless.checkpoint SET state = 'stopped' WHERE consumer = 'trigger:{PROGRAM}' AND shard = 1"
    )
    for shards, found in (([], (1, 1)), ([0], (0, 1))):
        resumed = stage.call.post(f"{path}/resume", json={"shards": shards, "dry_run": True}).json()
        assert (resumed["stopped"], resumed["paused"], resumed["was_paused"]) == (*found, False)
        assert resumed["would"]["shards"] == (1 if shards else stage.datastore.shards)
    shown = stage.call.get(path).json()
    assert ([one["shard"] for one in shown["paused_shards"]], [one["shard"] for one in shown["stopped"]]) == ([0], [1])
    assert_problem(stage.call.post(f"{path}/pause", json={"shards": [999], "dry_run": True}), 422)
    assert stage.call.post(f"{path}/pause", json={}).status_code == 200
    assert_problem(stage.call.post(f"{path}/resume", json={"shards": [0], "dry_run": True}), 422)


def test_a_retry_is_ordered_by_filter_and_spread_by_its_rate(stage, one_row):
    """A dry run orders nothing. All clusters together keep to the rate, and the job counts what is left to do."""
    for _ in range(3):
        row = row_in(stage.datastore, 1)
        stage.park(1, stage.put(1, 1, row=row), row=row)
    dry = stage.order("retry", filter={}, dry_run=True).json()
    assert (dry["matched"], dry["job"]) == (4, None)
    assert all(record.ordered is None for shard in (0, 1) for record in stage.records(shard))
    done = stage.order("retry", filter={}, rate=1).json()
    assert done["matched"] == 4
    assert "nobody runs it" in done["waits_for"]
    due = [record.due_at for record in stage.records(1)]
    assert [round((at - due[0]) / 1_000_000, 1) for at in due] == pytest.approx([0, 1.333, 2.667], abs=0.2)
    job = stage.call.get(f"/jobs/{done['job']}").json()
    assert (job["state"], job["matched"], job["pending"], job["done"]) == ("running", 4, 4, 0)
    stage.park(0, 1)  # it failed again
    stage.sql(1, parked_table.delete(stage.datastore.name, CONSUMER, 1, 1))  # it succeeded
    job = stage.call.get(f"/jobs/{done['job']}").json()
    assert (job["pending"], job["failed"], job["done"]) == (2, 1, 1)
    assert "nobody runs it" in job["waits_for"]
    again = stage.order("retry", filter={}).json()
    assert again["matched"] == 3
    assert stage.call.get(f"/jobs/{done['job']}").json()["replaced"] == 2
    assert_problem(stage.call.get("/jobs/0123456789abcdef"), 404)
    assert_problem(stage.call.get("/jobs/x"), 422, "job")


def test_an_id_stands_for_its_row_from_the_first_parked_cell_on(stage, one_row):
    """A cell behind another is retried with its row. It can't be discarded alone, and is sent to the row's first."""
    assert stage.order("retry", ids=["0:1:4:notify"]).json()["matched"] == 1
    assert stage.records(0)[0].ordered is Order.RETRY
    problem = assert_problem(stage.order("discard", ids=["0:1:2:bill"], reason="test"), 404)
    assert "waits behind 0:1:1:bill" in problem["detail"]
    assert stage.order("discard", ids=["0:1:1:bill", "0:1:5:bill"], reason="a test").json()["left_out"] == [
        {"name": "0:1:5:bill", "cells": 1, "why": "isn't parked, or no longer"}
    ]
    assert (stage.records(0)[0].ordered, stage.records(0)[0].order_reason) == (Order.DISCARD, "a test")


def test_a_discard_that_comes_while_a_retry_runs_is_carried_out_after_it(stage, one_row):
    """The owner's own failure ends a retry, and not the discard that was ordered meanwhile."""
    stage.order("retry", filter={})
    stage.park(0, 1)
    assert stage.records(0)[0].ordered is None
    stage.order("retry", filter={})
    stage.order("discard", filter={}, reason="never mind")
    stage.park(0, 1)
    record = stage.records(0)[0]
    assert (record.ordered, record.due_at is None) == (Order.DISCARD, False)


def test_a_function_that_is_gone_is_left_out_of_retries(stage, one_row):
    """It is listed, and may be discarded. Where nothing else matches, the retry says what to do."""
    stage.park(0, 1, "old_name")
    problem = assert_problem(stage.order("retry", filter={}), 422, "filter")
    assert "old_name" in problem["detail"]
    assert "@trigger(name=" in problem["detail"]
    assert "old_name" in assert_problem(stage.order("retry", ids=["0:1:1:old_name"]), 404)["detail"]
    assert stage.order("discard", filter={"trigger": "old_name"}, reason="renamed").json()["matched"] == 1


@pytest.mark.parametrize(
    ("action", "document", "field"),
    [
        ("retry", {}, "order"),
        ("retry", {"filter": {}, "ids": ["0:1:1:x"]}, "order"),
        ("retry", {"ids": ["nine"]}, "ids"),
        ("retry", {"ids": []}, "ids"),
        ("retry", {"ids": ["9:1:1:x"]}, "ids"),
        ("retry", {"filter": {}, "rate": 0}, "rate"),
        ("retry", {"filter": {"cause": "behind"}}, "filter.cause"),
        ("discard", {"filter": {}}, "reason"),
        ("discard", {"filter": {}, "reason": " "}, "reason"),
    ],
)
def test_a_wrong_order_is_named(stage, one_row, action, document, field):
    assert_problem(stage.order(action, **document), 422, field)


async def test_a_worker_sees_orders_of_its_shards(stage, one_row, async_storage):
    """Pauses of the program and of shards, seeks with their numbers, and due records unless their shard is paused."""
    orders = Orders(async_storage, stage.datastore, CONSUMER)
    stage.order("retry", filter={})
    seen = await orders.read([0, 1])
    assert ([r.added_id for r in seen.due], seen.program_paused, dict(seen.seeks)) == ([1], False, {})
    assert not (await orders.read([1])).due
    stage.call.post(f"/triggers/{PROGRAM}/pause", json={"shards": [0], "reason": "deploy"})
    seen = await orders.read([0, 1])
    assert (seen.is_paused(0), seen.is_paused(1), seen.due) == (True, False, [])
    stage.call.post(f"/triggers/{PROGRAM}/pause", json={})
    assert (await orders.read([0, 1])).is_paused(1)
    assert_problem(stage.call.post(f"/triggers/{PROGRAM}/resume", json={"shards": [0]}), 422, "shards")
    assert stage.call.post(f"/triggers/{PROGRAM}/resume", json={}).json()["paused"] == 1
    assert len((await orders.read([0, 1])).due) == 1
    stage.call.post(f"/triggers/{PROGRAM}/seek", json={"to": "0:1:2"})
    seek = (await orders.read([0, 1])).seeks[0]
    assert (seek.to.added_id, seek.to.digest is not None) == (2, True)
    stage.call.post(f"/triggers/{PROGRAM}/seek", json={"to": "beginning"})
    stage.sql(0, trigger_order_table.seek_done(stage.datastore.name, CONSUMER, 0, seek.number))
    later = (await orders.read([0, 1])).seeks[0]
    assert later.number > seek.number
    stage.sql(0, trigger_order_table.seek_done(stage.datastore.name, CONSUMER, 0, later.number))
    assert 0 not in (await orders.read([0, 1])).seeks


def test_a_seek_says_what_comes_again_and_what_is_passed_over(stage, one_row):
    """By shard. A dry run orders nothing, and a location that isn't there is refused."""
    path = f"/triggers/{PROGRAM}/seek"
    moment = stage.call.get(f"/cells/{stage.rows[0]}/BASE/2").json()["created_at"]

    def seek(**document):
        return stage.call.post(path, json={"dry_run": True, **document})

    assert seek(to="beginning", shards=[0]).json()["shards"] == [
        {"shard": 0, "from": "1:4", "to": "1:0", "again": 4, "passed": 0, "stopped": False}
    ]
    assert seek(to="end").json()["passed"] == 1
    assert seek(to=moment, shards=[0]).json()["shards"][0]["to"] == "1:1"
    assert stage.call.get(f"/triggers/{PROGRAM}").json()["seeks"] == []
    for wrong, field in (("0:1:99", "to"), ("0:7:1", "to"), ("soon", "to"), ("9:1:1", "shards")):
        assert_problem(seek(to=wrong), 422, field)
    assert_problem(seek(to="end", shards=[2]), 422, "shards")


def test_a_program_is_shown_with_counts_parked_cells_and_why_it_waits(stage, one_row):
    """Counts add up. A paused program says so, and a worker whose breaker is open makes it tripped."""
    view = stage.call.get("/triggers").json()["triggers"][0]
    assert (view["state"], view["parked"], view["lag"]) == ("running", 1, 1)
    assert view["counts"] == {"seen": 4, "called": 3, "filtered": 0, "skipped": 0, "parked": 1, "waiting": 0}
    assert 0 < view["lag_seconds"] < 60
    assert view["oldest_parked_at"].startswith("2023-11-14T")
    for cluster in stage.datastore.clusters:
        report = WorkerReport(host="here", pid=1, tripped="TimeoutError of 9 of 10 rows")
        stage.storage.master(cluster).run(worker_table.put, stage.datastore.name, CONSUMER, 7, report)
    view = stage.call.get(f"/triggers/{PROGRAM}").json()
    assert (view["state"], view["reason"], view["tripped_workers"]) == ("tripped", "TimeoutError of 9 of 10 rows", 1)
    assert "breaker" in stage.order("retry", filter={}).json()["waits_for"]
    stage.call.post(f"/triggers/{PROGRAM}/pause", json={"reason": "provider moves"})
    view = stage.call.get(f"/triggers/{PROGRAM}").json()
    assert (view["state"], view["reason"]) == ("paused", "provider moves")
    assert "provider moves" in stage.order("retry", filter={}).json()["waits_for"]
    assert_problem(stage.call("DELETE", f"/triggers/{PROGRAM}"), 409)


def test_removing_a_program_removes_all_that_belongs_to_it(stage, one_row):
    stage.order("retry", filter={})
    stage.call.post(f"/triggers/{PROGRAM}/seek", json={"to": "beginning"})
    assert stage.call("DELETE", f"/triggers/{PROGRAM}").json()["parked"] == 1
    assert stage.records(0) == []
    for table in ("job", "trigger_order", "trigger_program", "checkpoint"):
        left = f"SELECT 1 FROM schemaless.{table} WHERE datastore = '{stage.datastore.name}'"
        assert not stage.master(0).run(lambda left=left: query(left)), table
    assert_problem(stage.call.get(f"/triggers/{PROGRAM}"), 404)


def test_many_parked_cells_are_ordered_in_parts(stage, one_row):
    """More records than one statement takes: each is ordered once, in order."""
    for n in range(10, 310):
        row = row_in(stage.datastore, 1)
        stage.park(1, n, row=row)
    assert stage.order("retry", filter={}, rate=301).json()["matched"] == 301
    due = [record.due_at for record in stage.records(1)]
    assert due == sorted(due)


def test_doubts_are_a_list_of_their_own(stage, one_row, api):
    """Without what waits behind them. The error of each names the effect and how it is settled."""
    assert stage.parked(doubt="true").json()["count"] == 0
    text = "doubt: charge of bill was begun and has no result. Ask the provider for k1, put …"
    for error in (text, "no doubt: it is broken"):
        row = row_in(stage.datastore, 1)
        added_id = stage.put(1, 1, row=row)
        stage.park(1, added_id, cause=Cause.VERDICT, row=row)
        stage.sql(1, sql("UPDATE schemaless.parked SET error = %s WHERE shard = 1 AND added_id = %s", error, added_id))
        doubts = stage.parked(doubt="true").json()
        assert [(each["error"], each["cause"]) for each in doubts["parked"]] == [(text, "verdict")]
    assert stage.parked().json()["count"] == 3
    answer = stage.order("discard", filter={"doubt": True}, reason="a test", dry_run=True)
    assert answer.json()["matched"] == 1
    hosts = {"SCHEMALESS_HOSTS": f"http://127.0.0.1:{api.port}"}
    told = CliRunner().invoke(app, ["triggers", "doubts", PROGRAM, "--datastore", stage.datastore.name], env=hosts)
    assert (text in told.output, "1 doubts" in told.output) == (True, True)


async def test_metrics_have_the_sums_of_the_status(stage, one_row, async_storage):
    """What became of the cells, what is paused and tripped."""
    for cluster in stage.datastore.clusters:
        report = WorkerReport(host="h", pid=1, tripped="bill fails", failing_count=3, erred_count=2)
        stage.storage.master(cluster).run(worker_table.put, stage.datastore.name, CONSUMER, 7, report)
    stage.call.post(f"/triggers/{PROGRAM}/pause", json={})
    samples = Sampled(lambda: sample_programs(async_storage, Catalogue(async_storage)), 10, {})
    metrics = Metrics()
    metrics.watch_programs(samples)
    await samples.step()
    found = generate_latest(metrics.registry).decode().splitlines()
    status = stage.call.get(f"/triggers/{PROGRAM}").json()
    counts = status["counts"]
    assert (counts["called"], counts["parked"], status["tripped_workers"]) == (3, 1, 1)
    labels = f'datastore="{stage.datastore.name}",program="{PROGRAM}"'
    cells = [line for line in found if line.startswith("schemaless_api_trigger_cells{") and labels in line]
    assert sorted(cells) == sorted(
        f'schemaless_api_trigger_cells{{became="{became}",{labels}}} {float(count)}'
        for became, count in counts.items()
        if became != "seen"
    )
    assert sum(float(line.rpartition(" ")[2]) for line in cells) == counts["seen"]
    assert f"schemaless_api_trigger_tripped_workers{{{labels}}} 1.0" in found
    assert f"schemaless_api_trigger_failing_cells{{{labels}}} 2.0" in found
    assert f"schemaless_api_trigger_workers{{{labels}}} {float(status['worker_count'])}" in found
    assert f"schemaless_api_trigger_paused{{{labels}}} {float(status['state'] == 'paused')}" in found
