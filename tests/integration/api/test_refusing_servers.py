"""HTTP while a server answers with errors: what a missing table, right or resource of one node costs (I5, I15)."""

import uuid
from contextlib import contextmanager
from functools import partial

import pytest

from schemaless.storage.schema import FORMAT_VERSION
from tests.integration.api.api_harness import Caller, api_process, assert_problem, row_in
from tests.integration.storage.test_server_settings import nodes_of
from tests.log_harness import LOCAL_WRITE, REPLICATED_WRITE
from tests.waiting import until

pytestmark = [pytest.mark.storage, pytest.mark.faults]

SERVED = {"schemaless-served-by", "schemaless-cluster", "schemaless-lag"}


@contextmanager
def renamed(node, table):
    """The node lacks the table, and its replicas don't."""

    def rename(before, after):
        yield f"{LOCAL_WRITE}; RENAME TABLE {before} TO {after}; {REPLICATED_WRITE}"

    node.run(rename, table, f"{table}_gone")
    try:
        yield
    finally:
        node.run(rename, f"{table}_gone", table)


def copies_of(answer):
    return answer.status_code, answer.json().get("copies")


def test_a_secondary_without_its_buffer_costs_a_copy_and_never_the_put(api, make_datastore, admin, eventually):
    """I5: the healthy home takes every put, and the refusing master stays the home of its own rows."""
    at_a, at_b = api.at(make_datastore(placement=("a",))), api.at(make_datastore(placement=("b",)))
    eventually(lambda: at_a.put(uuid.uuid4(), 1, {"v": 0}), 201)
    with renamed(admin.master("b"), "schemaless.buffer"):
        assert {copies_of(at_a.put(uuid.uuid4(), 1, {"v": n})) for n in range(10)} == {(201, 1)}
        assert {copies_of(at_b.put(uuid.uuid4(), 1, {"v": n})) for n in range(10)} == {(201, 2)}
        items = [
            {"row_key": str(uuid.uuid4()), "column_name": "BASE", "ref_key": 1, "body": {"v": n}} for n in range(50)
        ]
        results = at_a.post("/batch/put", json={"cells": items}).json()["results"]
        assert {(result["status"], result["copies"]) for result in results} == {("stored", 1)}
        assert 'schemaless_api_server_refusals_total{code="1146",node="b1"}' in api.client.get("/metrics").text

    def two_copies():
        answer = at_a.put(uuid.uuid4(), 1, {"v": 0})
        answer.status_code = 201 if answer.json().get("copies") == 2 else 202
        return answer

    eventually(two_copies, 201)


def test_a_home_without_one_entity_table_buffers_that_shard_alone(api, make_datastore, admin, eventually):
    """I5: the cell is durable on the secondary, so the answer is 202 and no error; other shards are stored."""
    datastore = make_datastore(placement=("a",))
    call = api.at(datastore)
    row = row_in(datastore, 0)
    with renamed(admin.master("a"), f"{datastore.database(0)}.entity"):
        assert copies_of(call.put(row, 1, {"v": 1})) == (202, 1)
        assert copies_of(call.put(row_in(datastore, 1), 1, {"v": 1})) == (201, 2)
        items = [
            {"row_key": str(row_in(datastore, n % 2)), "column_name": "BASE", "ref_key": 2, "body": {}}
            for n in range(30)
        ]
        results = call.post("/batch/put", json={"cells": items}).json()["results"]
        assert [result["status"] for result in results] == ["buffered", "stored"] * 15
        assert_problem(call.post(f"/cells/{row}/BASE", json={"v": 1}), 503)
        assert_problem(call.get(f"/cells/{row}/BASE/9", params={"read_from": "master"}), 503)
        answer = call.get(f"/cells/{row}/BASE/9")
        assert (answer.status_code, answer.headers["schemaless-served-by"]) == (404, "minion")
    assert call.put(row, 1, {"v": 1}).status_code in {200, 201}


@pytest.mark.parametrize("node", ["a2", "a1"])
def test_one_node_without_its_catalogue_is_nobody_elses_outage(api, shared_datastore, admin, node):
    """A process is ready while one server shows the catalogue, and an unknown name stays a 404."""
    call = api.at(shared_datastore)
    with renamed(admin.nodes[node], "schemaless.format"):
        assert api.client.get("/readyz").status_code == 200
        assert_problem(api.client.get(f"/v1/nope_{uuid.uuid4().hex[:8]}/shards"), 404)
        assert call.put(uuid.uuid4(), 1, {"v": 1}).status_code == 201


@contextmanager
def of_another_release(nodes):
    """The nodes have databases of another format, and their replicas don't. Gives what ends it."""

    def become(version):
        yield f"{LOCAL_WRITE}; UPDATE schemaless.format SET version = {version}; {REPLICATED_WRITE}"

    def become_all(version):
        for node in nodes:
            node.run(become, version)

    become_all(FORMAT_VERSION - 1)
    try:
        yield partial(become_all, FORMAT_VERSION)
    finally:
        become_all(FORMAT_VERSION)


@pytest.fixture
def on_a(api, make_datastore):
    """Calls of a datastore on cluster a, whose servers the shared process has asked again when the test is over."""
    yield (call := api.at(make_datastore(placement=("a",))))
    until(lambda: call.put(row := uuid.uuid4(), 1, {}).status_code == 201 and until(lambda: seen_by_a2(call, row)))


def seen_by_a2(call, row):
    answer = call.get(f"/cells/{row}/BASE/1", params={"read_from": "minion"})
    return answer.status_code == 200 and answer.headers["schemaless-served-by"] == "minion"


@pytest.mark.parametrize(("node", "others", "status"), [("a1", "minion", 202), ("a2", "master", 201)])
def test_a_server_of_another_release_is_left_out_and_named(running, admin, on_a, node, others, status):
    """By a process that starts, too: the others serve all the same."""
    row = uuid.uuid4()
    until(lambda: on_a.put(row, 1, {"v": 1}).status_code in (200, 201) and seen_by_a2(on_a, row))

    def faults():
        return {one["name"]: one["setting_faults"] for one in nodes_of(call.get("/status").json())}[node]

    with of_another_release([admin.nodes[node]]) as end, api_process(running.path) as started:
        call = Caller(started.client, on_a.prefix)
        assert started.client.get("/readyz").status_code == 200
        assert call.put(uuid.uuid4(), 1, {"v": 1}).status_code == status
        answer = call.get(f"/cells/{row}/BASE/1")
        assert (answer.status_code, answer.headers["schemaless-served-by"]) == (200, others)
        assert until(faults) == [f"format is {FORMAT_VERSION - 1}, and must be {FORMAT_VERSION}"]
        end()
        until(lambda: not faults() and call.put(uuid.uuid4(), 1, {"v": 1}).status_code == 201)


def test_where_all_servers_are_of_another_release_nothing_is_ready(running, admin, on_a):
    """A process that runs hears of it by the next look. A put may be sent again: it is no error of the program."""
    look = {"schemaless.storage.server_settings.PERIOD_S": 1.0}
    with api_process(running.path, look) as started, of_another_release(admin.nodes.values()):
        call = Caller(started.client, on_a.prefix)
        until(lambda: call.put(uuid.uuid4(), 1, {}).status_code == 503)
        for answer in (started.client.get("/readyz"), call.put(uuid.uuid4(), 1, {})):
            assert assert_problem(answer, 503)["retryable"]


@pytest.mark.parametrize("read_from", ["master", "minion"])
def test_a_404_and_a_409_name_the_node_that_said_so(call, read_from):
    """A caller can tell "never written" from "a minion that lags doesn't show it yet"."""
    row = uuid.uuid4()
    cells = f"/cells/{row}"
    for path, query, status in (
        (f"{cells}/BASE/1", {}, 404),
        (f"{cells}/BASE", {}, 404),
        (cells, {}, 404),
        ("/shards/0/cells", {"after": 99999999}, 409),
    ):
        answer = call.get(path, params={"read_from": read_from, **query})
        assert_problem(answer, status)
        assert answer.headers.keys() >= SERVED
        assert answer.headers["schemaless-served-by"] == read_from
