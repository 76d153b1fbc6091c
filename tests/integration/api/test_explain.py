"""The explanation of a row over HTTP, with records as workers write them. No worker and no indexer run here (A16)."""

import uuid
from functools import partial

import pytest

from schemaless.cell import CellKey
from schemaless.cli.cells import explanation_lines
from schemaless.client.client import Client
from schemaless.codec import encode_body
from schemaless.consume.parked_store import MySQLParkedStore
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entries_for, entry_shard
from schemaless.index.transition import IndexWrite
from schemaless.location import Location
from schemaless.position import Position
from schemaless.storage import buffer_table, checkpoint_table, index_definition_table, index_table, worker_table
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.index_definition_table import IndexOrder, IndexStage, RunState, defined
from schemaless.storage.parked_table import Ending, Order
from schemaless.storage.worker_table import WorkerReport
from tests.integration.api.api_harness import assert_problem, row_in
from tests.integration.api.parked_harness import CONSUMER, PROGRAM, Stage
from tests.log_harness import erased_at_home

pytestmark = pytest.mark.storage

CAUSE = "importer@1:1:1"


@pytest.fixture
def stage(storage, make_datastore, api):
    datastore = make_datastore(shards=2, partitions=1)
    return Stage(storage, datastore, api.at(datastore))


@pytest.fixture
def one_row(stage):
    """In shard 0: a parked cell, then three cells of its row, and one that the checkpoint has not reached."""
    ids = [stage.put(0, 1), stage.put(0, 2), stage.put(0, 1, "OTHER"), stage.put(0, 1, "STATUS"), stage.put(0, 3)]
    stage.checkpoint(0, ids[3])
    stage.announce()
    stage.park(0, ids[0])
    return ids


def explained(stage, **params):
    answer = stage.call.get("/explain", params=params or {"row_key": str(stage.rows[0])})
    assert answer.status_code == 200, answer.text
    return answer.json()


def kinds(document):
    return [event["kind"] for event in document["events"]]


def program_of(document):
    (program,) = document["programs"]
    return program


def states(document):
    return [(cell["location"], cell["state"]) for cell in program_of(document)["unfinished"]]


def test_a_row_is_told_with_what_its_program_has_not_finished(stage, one_row):
    """The parked cell, those behind it, and those that the checkpoint has not reached, each with its reason."""
    found = explained(stage)
    cells = [event for event in found["events"] if event["kind"] == "cell"]
    assert [event["location"] for event in cells] == [f"0:1:{n}" for n in one_row]
    assert sorted(kinds(found)) == ["buffered"] * 5 + ["cell"] * 5 + ["failed_call", "parked"]
    parked = next(event for event in found["events"] if event["kind"] == "parked")
    assert (parked["program"], parked["trigger"], parked["cause"], parked["attempts"]) == (PROGRAM, "bill", "error", 5)
    assert parked["error"] == "ValueError: no card"
    assert states(found) == [("0:1:1", "error"), ("0:1:2", "behind"), ("0:1:4", "behind"), ("0:1:5", "not_reached")]
    why = [cell["why"] for cell in program_of(found)["unfinished"]]
    assert "schemaless parked retry billing 0:1:1:bill" in why[0]
    assert "0:1:1" in why[1]
    assert "nobody runs the program; it is the next cell of its shard" in why[3]
    assert (found["waits"][0]["for"], found["waits"][0]["cell"]) == ("program billing", "0:1:1")
    assert found["unknown"] == {}


def test_finished_cells_are_those_that_the_checkpoint_has_passed(stage, one_row):
    """A16: a successful call leaves no record. The checkpoint says by when it was finished."""
    stage.sql(0, "DELETE FROM schemaless.parked")
    stage.sql(0, "UPDATE schemaless.checkpoint SET added_id = 5 WHERE consumer = 'trigger:billing' AND shard = 0")
    found = explained(stage)
    program = program_of(found)
    assert (program["finished"], program["unfinished"], found["waits"]) == (4, [], [])  # OTHER is no column of it
    assert (program["checkpoint"]["location"], program["checkpoint"]["pending"]) == ("0:1:5", 0)
    assert any("finished by the checkpoint 0:1:5 of" in line for line in explanation_lines(found))


def test_orders_and_pauses_are_told(stage, one_row):
    """Who ordered a retry, and what keeps it from being carried out."""
    assert stage.order("retry", ids=["0:1:1:bill"], reason="card mended").status_code == 200
    assert stage.call.post(f"/triggers/{PROGRAM}/pause", json={"reason": "a deploy"}).status_code == 200
    for cluster in stage.datastore.clusters:
        report = WorkerReport(tripped="TimeoutError of 10 rows")
        stage.storage.master(cluster).run(worker_table.put, stage.datastore.name, CONSUMER, 7, report)
    found = explained(stage)
    ordered = next(event for event in found["events"] if event["kind"] == "retry_ordered")
    assert (ordered["reason"], ordered["location"]) == ("card mended", "0:1:1")
    assert (program_of(found)["state"], program_of(found)["reason"]) == ("paused", "a deploy")
    why = found["waits"][0]["why"]
    assert why.startswith("a retry is ordered, due at ")
    assert "the program is paused: a deploy; the breaker is open: TimeoutError of 10 rows" in why
    assert stage.records(0)[0].ordered is Order.RETRY


def test_what_became_of_a_parked_cell_is_told(stage, one_row):
    """When its calls failed, when it was parked, who ordered the retry, and when it was finished."""
    assert stage.order("retry", ids=["0:1:1:bill"], reason="card mended").status_code == 200
    (record,) = stage.records(0)
    parked = MySQLParkedStore(stage.storage, stage.datastore, CONSUMER, row_reads_max=4)
    stage.sql(0, parked.delete(record, Ending.FINISHED))
    found = explained(stage)
    told = [event for event in found["events"] if event.get("program") == PROGRAM]
    assert [event["kind"] for event in told] == ["failed_call", "parked", "retry_ordered", "unparked"]
    assert (told[1]["error"], told[2]["reason"], told[3]["ending"]) == (
        "ValueError: no card",
        "card mended",
        "finished",
    )
    assert {event["location"] for event in told} == {"0:1:1"}
    assert any(
        "unparked         0:1:1  billing/bill, called again and fin" in line for line in explanation_lines(found)
    )
    assert states(found) == [("0:1:5", "not_reached")]


def test_a_location_shows_the_cells_around_it(stage, one_row):
    """Half before and half behind. What is left out on either side is told, and any cell of the row names it."""
    found = explained(stage, location="0:1:3", limit=3)
    cells = [event["location"] for event in found["events"] if event["kind"] == "cell"]
    assert (cells, found["earlier"], found["later"]) == (["0:1:2", "0:1:3", "0:1:4"], True, True)
    last = explained(stage, row_key=str(stage.rows[0]), limit=2)
    cells = [event["location"] for event in last["events"] if event["kind"] == "cell"]
    assert (cells, last["earlier"], last["later"]) == (["0:1:4", "0:1:5"], True, False)
    assert_problem(stage.call.get("/explain", params={"location": "0:1:6"}), 409)  # past the head
    assert_problem(stage.call.get("/explain", params={"location": "9:1:1"}), 404)


def test_any_node_may_answer(stage, one_row):
    """A minion shows the same, and says that it did."""
    wanted = explained(stage)
    answer = stage.call.get("/explain", params={"row_key": str(stage.rows[0]), "read_from": "minion"})
    assert answer.headers["schemaless-served-by"] == "minion"
    for _ in range(200):
        if answer.status_code == 200 and answer.json() == wanted:
            return
        answer = stage.call.get("/explain", params={"row_key": str(stage.rows[0]), "read_from": "minion"})
    pytest.fail(answer.text)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "row_key"),
        ({"row_key": str(uuid.uuid4()), "location": "0:1:1"}, "row_key"),
        ({"row_key": "x"}, "row_key"),
        ({"location": "1:1"}, "location"),
        ({"row_key": str(uuid.uuid4()), "limit": "0"}, "limit"),
        ({"row": "x"}, "row"),
    ],
)
def test_a_wrong_question_is_named(stage, params, field):
    """422 with the field."""
    assert_problem(stage.call.get("/explain", params=params), 422, field)


def test_a_row_without_cells_is_missing(stage):
    """404, once all clusters were asked."""
    assert_problem(stage.call.get("/explain", params={"row_key": str(uuid.uuid4())}), 404)


def test_a_cell_that_is_only_buffered_is_told(stage):
    """It waits for its home. One whose cell is at home waits for a confirmation only, and shows its cause."""
    row = row_in(stage.datastore, 0)
    (other,) = set(stage.datastore.clusters) - {stage.datastore.home(0)}
    key = CellKey(row.bytes, "BASE", 2)
    stage.call("PUT", f"/cells/{row}/BASE/1", json={}, headers={"schemaless-cause": CAUSE})
    copy = BufferRow(key, encode_body({}), 0, stage.datastore.home(0), 5)
    stage.storage.master(other).run(buffer_table.insert, stage.datastore, [copy])
    found = explained(stage, row_key=str(row))
    at_home = {event["ref_key"]: event["at_home"] for event in found["events"] if event["kind"] == "buffered"}
    assert at_home == {1: True, 2: False}
    assert [(wait["for"], wait["cell"]) for wait in found["waits"]] == [("its home", "BASE/2")]
    assert next(event for event in found["events"] if event["kind"] == "cell")["cause"] == CAUSE


DEFINITION = parse_definition(
    {
        "name": "by_n",
        "shard_field": "n",
        "fields": [{"name": "n", "column": "BASE", "path": "n", "type": "int"}],
        "where": [{"field": "n", "op": "gte", "value": 2}],
    }
)


class IndexOfARow:
    """An index as indexers leave it in MySQL, and one row with cells in BASE."""

    def __init__(self, stage):
        self.stage, self.datastore = stage, stage.datastore
        self.at(IndexStage.DEFINED)

    def at(self, stage, order=None):
        for cluster in self.datastore.clusters:
            index = defined(DEFINITION, stage, order or IndexOrder())
            self.stage.storage.master(cluster).run(index_definition_table.bring_to, self.datastore.name, index)

    def make(self):
        for shard in (0, 1):
            self.stage.master(shard).run(index_table.create, self.datastore, shard, DEFINITION)

    def reach(self, added_id):
        self.stage.sql(0, f"DELETE FROM schemaless.checkpoint WHERE consumer = '{DEFINITION.consumer}'")
        name, at = self.datastore.name, [Position(0, 1, added_id, digest=None)]
        self.stage.master(0).run(partial(checkpoint_table.make, counts=False), name, DEFINITION.consumer, at)

    def write(self, n, added_id):
        (entry,) = entries_for(DEFINITION, {"BASE": {"n": n}})
        shard = entry_shard(DEFINITION, entry, 2)
        write = IndexWrite(shard, self.stage.rows[0].bytes, Location(1, added_id), entry)
        self.stage.sql(shard, index_table.upserts(self.datastore, DEFINITION, [write]))
        return shard

    @property
    def shown(self):
        (index,) = explained(self.stage)["indexes"]
        return index


def test_an_index_is_told_with_its_entries_or_why_there_are_none(stage):
    """Being made, `where`, not reached, paused, an entry, and one that differs from the newest cells."""
    stage.put(0, 1)
    index = IndexOfARow(stage)
    assert index.shown["why"] == "the index is building, and has no entries"
    index.make()
    index.at(IndexStage.ACTIVE)
    index.reach(1)
    assert index.shown["why"] == "`where` doesn't hold"
    stage.put(0, 2)
    assert (index.shown["late"], index.shown["why"]) == ("0:1:2", "the index is active, and has not reached 0:1:2")
    index.at(IndexStage.ACTIVE, IndexOrder(RunState.PAUSED, revision=1))
    assert index.shown["why"] == "the index is paused, and has not reached 0:1:2"
    index.reach(2)
    assert "compare with `schemaless audit`" in index.shown["why"]
    shard = index.write(2, 2)
    assert index.shown["entries"] == [{"shard": shard, "element": 0, "fields": {"n": 2}}]
    assert index.shown["why"] is None


def test_a_row_that_is_erased_has_no_entry_and_says_by_what(stage):
    """Its cells name the erasure, and so does the entry in the log. Nobody is called for them (I19)."""
    stage.put(0, 2)
    stage.announce()
    stage.checkpoint(0, 0)
    index = IndexOfARow(stage)
    index.make()
    index.at(IndexStage.ACTIVE)
    row_key = stage.rows[0].bytes
    erasure = erased_at_home(stage.storage, stage.datastore, row_key)
    index.reach(2)
    assert (index.shown["entries"], index.shown["why"]) == ([], "the row has no cell in BASE")
    found = explained(stage)
    cell, entry = (event for event in found["events"] if event["kind"] in ("cell", "erasure"))
    assert (cell["erased"]["erasure"], entry["erasure"], entry["location"]) == (erasure.id, erasure.id, "0:1:2")
    assert program_of(found)["unfinished"] == []
    assert any(f"0:1:2  {erasure.id} erased 1 cell" in line for line in explanation_lines(found))


def test_the_client_and_the_command_ask_for_the_same(stage, one_row, api):
    """By row key and by location, as people read it: told in the order of time, and last what it waits for."""
    with Client([f"http://127.0.0.1:{api.port}"], datastore=stage.datastore.name) as client:
        found = client.explain(stage.rows[0])
        assert found == client.explain("0:1:1")
    lines = list(explanation_lines(found))
    assert lines[0] == f"row {stage.rows[0]}: shard 0 on cluster {stage.datastore.home(0)}"
    assert lines[-1].startswith("it waits for program billing at 0:1:1: it is parked")
    assert any("failed call      0:1:1  billing/bill, attempt 5" in line for line in lines)
