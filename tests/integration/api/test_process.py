"""The process, and what stands outside the contract's paths: health, metrics, documentation, the router's errors."""

import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, checkpoint_table, entity_table, refusal_table, worker_table
from schemaless.storage.buffer_table import BufferRow, Sizes
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.sql import sql
from schemaless.storage.worker_table import FailingCell, OldestCall, WaitingShard, WorkerReport
from tests.integration.api.api_harness import ROOT, api_process, assert_problem, cells_in, row_in
from tests.log_harness import run_sql
from tests.waiting import LIMIT_S, until


def test_health_and_readiness(api, shared_datastore):
    """Alive without asking anybody; ready once the catalogue was read."""
    assert api.client.get("/healthz").status_code == 200
    ready = api.client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")


def test_metrics_count_requests_and_cells(api, call):
    """In Prometheus' format: requests by route and status, cells by outcome and copies, nodes."""
    row = uuid.uuid4()
    call.put(row, 1, {"v": 1})
    call.put(row, 1, {"v": 1})
    call.get("/topology")
    text = api.client.get("/metrics").text
    for line in (
        'schemaless_api_requests_total{route="put_cell",status="201"}',
        'schemaless_api_requests_total{route="get_topology",status="200"}',
        'schemaless_api_cells_put_total{copies="2",status="stored"}',
        'schemaless_api_cells_put_total{copies="2",status="already_stored"}',
        'schemaless_api_request_seconds_bucket{le="0.001",route="put_cell"}',
        'schemaless_api_node_up{cluster="a",node="a1",role="master"} 1.0',
    ):
        assert line in text


@pytest.mark.parametrize("service", ["api", "cleaner", "tailer"])
def test_too_few_open_files_end_a_service_before_it_begins(running, kafka, service):
    """The sentence has the limit, the need, and how to raise it."""
    servers = {"SCHEMALESS_TOPOLOGY": str(running.path), "SCHEMALESS_KAFKA": kafka}
    argv = ["prlimit", "--nofile=64", sys.executable, "-m", service]
    ended = subprocess.run(argv, cwd=ROOT, env=os.environ | servers, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "this process may open 64 files and needs" in ended.stderr + ended.stdout
    assert "ulimit -n" in ended.stderr + ended.stdout


def test_every_call_is_documented(api):
    """OpenAPI names each path with its parameters, its payload and its answers."""
    document = api.client.get("/openapi.json").json()
    put = document["paths"]["/v1/{datastore}/cells/{row_key}/{column}/{ref_key}"]["put"]
    in_path = {parameter["name"] for parameter in put["parameters"] if parameter["in"] == "path"}
    assert in_path == {"datastore", "row_key", "column", "ref_key"}
    assert {"200", "201", "202", "409", "503"} <= put["responses"].keys()
    page = document["paths"]["/v1/{datastore}/shards/{shard}/cells"]["get"]
    named = {(parameter["name"], parameter["in"]) for parameter in page["parameters"]}
    query = {"after", "since", "limit", "columns", "follow", "wait", "read_from"}
    assert {*((name, "query") for name in query), ("Last-Event-ID", "header")} <= named
    assert page["responses"]["200"]["content"].keys() == {"application/json"}
    many = document["components"]["schemas"]["LocationsRequest"]
    assert many["properties"].keys() == {"locations", "limit", "columns", "wait"}


def test_the_entrance_points_the_way(api):
    """What it names is there."""
    shown = api.client.get("/").json()
    assert shown["calls"] == "/v1/{datastore}"
    for name in ("docs", "openapi", "healthz", "readyz", "metrics"):
        assert api.client.get(shown[name]).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1", "/v2/x/shards", "/v1/DS/nope", "/v1/DS/cells", "/v1/DS/shards/", "/v1/DS/cells//B/1"]
)
def test_an_unknown_path_is_a_404(api, shared_datastore, path):
    """With a problem document, as everything that fails."""
    assert_problem(api.client.get(path.replace("DS", shared_datastore.name)), 404)


OTHER_METHODS = [("DELETE", "/cells/R/B/1"), ("PATCH", "/cells/R/B"), ("PUT", "/shards"), ("GET", "/batch/put")]


@pytest.mark.parametrize(("method", "path"), OTHER_METHODS)
def test_another_method_is_a_405(call, method, path):
    """With a problem document that is no matter of trying again, and Allow."""
    answer = call(method, path)
    assert_problem(answer, 405)
    assert answer.headers["allow"]


def test_topology_shows_servers_but_no_accounts(call, topology):
    """Who is where, and nothing that opens a door."""
    answer = call.get("/topology")
    shown = answer.json()
    assert (shown["version"], shown["operation"]) == (0, None)
    a, b = shown["clusters"]["a"], shown["clusters"]["b"]
    assert (a["epoch"], a["state"], a["master"]["port"]) == (0, "healthy", topology.cluster("a").nodes[0].port)
    assert [voter["name"] for voter in b["voters"]] == ["b2"]
    assert [(node["name"], node["role"], node["lag_s"] >= 0) for node in b["nodes"]] == [
        ("b1", "master", True),
        ("b2", "minion", True),
    ]
    assert topology.cluster("a").nodes[0].password not in answer.text
    assert topology.cluster("a").nodes[0].user not in answer.text


def test_an_order_without_a_controller_is_a_503(call):
    """Nobody would carry it out. What can be seen to be wrong is said first."""
    problem = assert_problem(call.post("/topology/orders", json={"order": "switch", "cluster": "a"}), 503)
    assert "no controller has appointed a master of a" in problem["detail"]
    assert problem["hint"].startswith("start a controller")
    assert_problem(call.post("/topology/orders", json={"order": "switch", "cluster": "z"}), 404)


def test_status_adds_up_heads_and_buffers(api, make_datastore):
    """What was put is seen in the heads, its first copy in the buffers, until a cleaner has confirmed it."""
    datastore = make_datastore()
    caller = api.at(datastore)
    for _ in range(5):
        caller.put(uuid.uuid4(), 1, {"v": 1})
    status = caller.get("/status").json()
    assert (status["tailing"], status["tailing_reason"][:9]) == ("no_partitions", "no tailer")
    assert (status["heads_sum"], status["buffered"], status["conflicts"]) == (5, 5, 0)
    assert sum(cluster["heads_sum"] for cluster in status["clusters"].values()) == 5
    roles = {node["name"]: node["role"] for cluster in status["clusters"].values() for node in cluster["nodes"]}
    assert roles == {"a1": "master", "a2": "minion", "b1": "master", "b2": "minion"}
    assert all(node["reachable"] for cluster in status["clusters"].values() for node in cluster["nodes"])


def test_a_backlog_that_does_not_shrink_is_seen_with_what_its_home_says(api, make_datastore, storage, eventually):
    """D10, S12: in the status, in the details of readiness and in metrics. A fresh one is no news."""
    datastore = make_datastore(placement=("a",))
    caller = api.at(datastore)
    for _ in range(3):
        caller.put(uuid.uuid4(), 1, {"v": 1})
    backlog = caller.get("/status").json()["clusters"]["b"]["backlogs"]["a"]
    assert (backlog["rows"], backlog["stalled"], backlog["refused"]) == (3, False, None)
    here, mine = storage.master("b"), sql("WHERE datastore = %s", datastore.name.encode())
    here.run(query, f"UPDATE schemaless.buffer SET buffered_at = buffered_at - INTERVAL 90 SECOND {mine}")
    ((number,),) = here.run(query, f"SELECT MIN(buffer_id) FROM schemaless.buffer {mine}")
    page = functools.partial(buffer_table.page, "a", number - 1, number, Sizes(), rows_max=1, bytes_max=1)
    (first,) = here.run(page)
    here.run(refusal_table.note, {"a1: no table": [first]})
    here.run(query, "UPDATE schemaless.refusal SET refused_since = refused_since - INTERVAL 70 SECOND")
    status = caller.get("/status").json()
    backlog = status["clusters"]["b"]["backlogs"]["a"]
    assert (backlog["rows"], backlog["stalled"], status["refused"]) == (3, True, 1)
    assert 90 <= backlog["oldest_s"] < 600
    assert (backlog["refused"]["cells"], backlog["refused"]["reason"]) == (1, "a1: no table")

    def told():
        answer = api.client.get("/readyz")
        assert answer.json()["status"] == "ready"
        return [one for one in answer.json()["backlogs"] if one["datastore"] == datastore.name and one["refused"]]

    (detail,) = until(told)  # sampled every few seconds
    assert (detail["secondary"], detail["home"], detail["rows"], detail["refused"]) == ("b", "a", 3, 1)
    metrics = api.client.get("/metrics").text
    labels = f'datastore="{datastore.name}",'
    assert f'schemaless_api_buffer_rows{{{labels}home="a",secondary="b"}} 3.0' in metrics
    oldest = f'schemaless_api_buffer_oldest_seconds{{{labels}home="a",secondary="b"}} '
    (oldest_s,) = [float(line.removeprefix(oldest)) for line in metrics.splitlines() if line.startswith(oldest)]
    assert 90 <= oldest_s < 600
    assert f'schemaless_api_buffer_refused_cells{{{labels}error="a1: no table",' in metrics
    here.run(refusal_table.clear, [first.buffer_id])


def test_what_is_buffered_can_be_waited_for(api, make_datastore, storage):
    """Readable at home counts, and not whether a cleaner has confirmed it. What isn't there in time is a 503."""
    datastore = make_datastore(placement=("a",))
    caller = api.at(datastore)
    caller.put(uuid.uuid4(), 1, {"v": 1})
    assert caller("POST", "/buffer/sync").json()["waited_s"] < 30
    row = RowKey(uuid.uuid4().bytes)
    cell = CellKey(row, ColumnName("BASE"), RefKey(1))
    late = BufferRow(cell, encode_body({"v": 2}), shard_of(row, datastore.shards), "a", 7)
    storage.master("b").run(buffer_table.insert, datastore, [late])
    homes = caller.get("/buffer").json()["homes"]
    assert (list(homes), homes["a"]["rows"]) == (["a"], 2)
    assert homes["a"]["bytes"] > 0
    answer = caller("POST", "/buffer/sync", json={"wait": 0.3})
    assert_problem(answer, 503)
    assert "what b buffers isn't all readable on a yet" in answer.json()["detail"]
    storage.master("a").run(entity_table.put_cells, datastore, [late])
    assert caller("POST", "/buffer/sync", json={"wait": 30}).status_code == 200
    disputed = msgspec.structs.replace(late, key=CellKey(row, ColumnName("BASE"), RefKey(2)))
    other = msgspec.structs.replace(disputed, body=encode_body({"v": 3}))
    storage.master("a").run(entity_table.put_cells, datastore, [other])
    storage.master("b").run(buffer_table.insert, datastore, [disputed])
    assert_problem(caller("POST", "/buffer/sync", json={"wait": 0.3}), 503)  # a cleaner makes it a conflict first
    assert_problem(caller("POST", "/buffer/sync", json={"wait": 301}), 422, "wait")


def test_consumers_show_lag_and_what_stopped_them(api, make_datastore, storage: SyncStorage):
    """From their checkpoints: one shard of a program stopped with a reason, the other behind by its whole log."""
    datastore = make_datastore(shards=2, placement=("a",))
    caller = api.at(datastore)
    cells = [caller.put(uuid.uuid4(), 1, {"v": 1}).json() for _ in range(8)]
    in_shard_0 = sum(cell["shard"] == 0 for cell in cells)
    master, name, consumer = storage.master("a"), datastore.name, "trigger:billing"
    starts = [Position(shard, 1, 0) for shard in (0, 1)]
    master.run(checkpoint_table.make, name, consumer, starts)
    stop = checkpoint_table.Move(consumer, 0, starts[0], stop_reason="card processor is down")
    master.run(checkpoint_table.move, name, [stop])
    program = caller.get("/triggers/billing").json()
    assert (program["state"], program["lag"]) == ("stopped", 8)
    assert program["stopped"] == [{"shard": 0, "reason": "card processor is down"}]
    assert [(shard["lag"], shard["state"]) for shard in program["shards"]] == [
        (in_shard_0, "stopped"),
        (8 - in_shard_0, "running"),
    ]
    assert [listed["program"] for listed in caller.get("/triggers").json()["triggers"]] == ["billing"]
    assert_problem(caller.get("/triggers/other"), 404)
    (shown,) = caller.get("/status").json()["consumers"]
    assert (shown["consumer"], shown["kind"], shown["name"], shown["lag"]) == (consumer, "trigger", "billing", 8)
    assert shown["stopped"] == [{"shard": 0, "reason": "card processor is down"}]


def test_workers_show_what_waits_there(api, make_datastore, storage: SyncStorage):
    """Of a program by name, and all of them in the status. One that wasn't seen for long has ended."""
    datastore = make_datastore(shards=2, placement=("a",))
    caller, master, name, consumer = api.at(datastore), storage.master("a"), datastore.name, "trigger:billing"
    master.run(checkpoint_table.make, name, consumer, [Position(shard, 1, 0) for shard in (0, 1)])
    report = WorkerReport(
        transport="plain",
        unconfirmed=(WaitingShard(consumer, 1, "another process moved its checkpoint"),),
        unconfirmed_count=1,
        oldest_call=OldestCall("bill_rider", "a cell", 0, 90.0),
        failing=(FailingCell("bill_rider", "a cell", "0:1:7", 2, 5, 1_700_000_000, "ValueError: no card"),),
        failing_count=3,
    )
    master.run(worker_table.put, name, consumer, 7, report)
    master.run(worker_table.put, name, "indexer", 8, WorkerReport())
    master.run(worker_table.put, name, consumer, 9, report)
    run_sql(master, f"UPDATE schemaless.worker SET seen_at = '2020-01-01' WHERE datastore = '{name}' AND worker = 9")
    (listed,) = caller.get("/triggers").json()["triggers"]
    assert (listed["worker_count"], listed["unconfirmed_count"], listed["refused_count"]) == (1, 1, 0)
    assert 90 <= listed["oldest_call_s"] < 120
    assert listed["failing_count"] == 3
    program = caller.get("/triggers/billing").json()
    (worker,) = program["workers"]
    assert worker["unconfirmed"] == [
        {"consumer": consumer, "shard": 1, "reason": "another process moved its checkpoint"}
    ]
    (failing,) = worker["failing"]
    assert (failing["attempt"], failing["attempts"], failing["error"]) == (2, 5, "ValueError: no card")
    assert failing["again_at"] == "2023-11-14T22:13:20.000000Z"
    assert (worker["worker"], worker["transport"]) == ("0000000000000007", "plain")
    assert [shard["kills"] for shard in program["shards"]] == [0, 0]
    assert [each["consumer"] for each in caller.get("/status").json()["workers"]] == ["indexer", consumer]


def test_lag_counts_from_where_a_later_generation_superseded_a_checkpoint(api, make_datastore, storage: SyncStorage):
    """At 1:4, with generation 2 from 3 and the head at 3: one cell is not handled, in each view (I13)."""
    datastore = make_datastore(shards=1, partitions=1, placement=("a",))
    caller = api.at(datastore)
    for _ in range(3):
        caller.put(uuid.uuid4(), 1, {"v": 1})
    master, name = storage.master("a"), datastore.name
    where = f"datastore = '{name}' AND shard = 0"
    run_sql(
        master,
        f"UPDATE {datastore.database(0)}.entity SET generation = 2 WHERE added_id = 3;"
        f"UPDATE schemaless.shard_head SET generation = 2 WHERE {where};"
        f"INSERT INTO schemaless.shard_generation VALUES ('{name}', 0, 2, 3, UTC_TIMESTAMP(6))",
    )
    master.run(checkpoint_table.make, name, "trigger:billing", [Position(0, 1, 4)])
    master.run(checkpoint_table.make, name, "trigger:census", [Position(0, 2, 3)])
    listed = caller.get("/triggers").json()["triggers"]
    assert [(each["program"], each["lag"]) for each in listed] == [("billing", 1), ("census", 0)]
    assert [shard["lag"] for shard in caller.get("/triggers/billing").json()["shards"]] == [1]


def test_an_index_lags_by_the_copy_that_is_furthest_behind(api, make_datastore, storage: SyncStorage):
    """Its checkpoints are on both clusters, also those of shards that live on the other one."""
    datastore = make_datastore(shards=2, placement=("a", "b"))
    caller = api.at(datastore)
    for shard in (0, 0, 1):
        caller.put(row_in(datastore, shard), 1, {"v": 1})
    for cluster, behind in (("a", 0), ("b", 1)):
        reached = [Position(0, 1, 2 - behind), Position(1, 1, 1)]
        storage.master(cluster).run(checkpoint_table.make, datastore.name, "index:by_v", reached)
    status = caller.get("/status").json()
    assert [(each["name"], each["lag"]) for each in status["consumers"]] == [("by_v", 1)]
    assert status["consumers_unknown"] == {}


def test_an_api_whose_log_nobody_reads_serves_and_stops(running, shared_datastore):
    """Far more lines than its pipe takes, one for each admin action. Read later, they are all there."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with open(read, "rb") as log, api_process(running.path, output=write, log_level="info") as api:
        os.close(write)
        for _ in range(100):
            answer = api.client.post(f"/v1/{shared_datastore.name}/triggers/nobody/pause", json={})
            assert answer.status_code == 404
        api.client.post(f"/v1/{shared_datastore.name}/triggers/the_last/pause", json={})
        lines = []
        while not (lines and b"the_last" in lines[-1]):
            lines.append(log.readline())
        assert sum(b"triggers/nobody/pause" in line for line in lines) == 100
        for _ in range(100):
            api.client.post(f"/v1/{shared_datastore.name}/triggers/nobody/pause", json={})
        api.process.send_signal(signal.SIGTERM)
        assert api.process.wait(LIMIT_S) in (0, -signal.SIGTERM)


def test_a_stop_finishes_what_is_in_flight(running, make_datastore, storage):
    """SIGTERM under load: every put that the process took is answered in full, and the process ends in order."""
    datastore = make_datastore()
    outcomes = []

    def put_until_refused(port):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            while True:
                try:
                    answer = client.put(f"/v1/{datastore.name}/cells/{uuid.uuid4()}/BASE/1", json={"v": 1})
                except httpx.TransportError:  # no listener any more, or an idle connection that closed meanwhile
                    return
                outcomes.append(answer.status_code)

    with ThreadPoolExecutor(4) as pool, api_process(running.path) as api:
        putting = [pool.submit(put_until_refused, api.port) for _ in range(4)]
        until(lambda: outcomes.count(201) >= 50 or all(one.done() for one in putting))
        api.process.send_signal(signal.SIGTERM)
        for one in putting:
            one.result(LIMIT_S)
        assert api.process.wait(60) in (0, -signal.SIGTERM)
    assert set(outcomes) == {201}
    assert cells_in(storage, datastore) == len(outcomes), "whatever was written was answered"


def test_a_payload_that_arrives_takes_no_place_of_other_requests(running, make_datastore):
    """A request is in flight when its payload is whole: a slow one is answered in full, and nobody waits for it."""
    datastore = make_datastore()
    path = f"/v1/{datastore.name}/cells/{uuid.uuid4()}/BASE/1"
    with (
        api_process(running.path, requests_max=1) as api,
        socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT_S) as slow,
    ):
        slow.sendall(f"PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{".encode())
        for _ in range(20):
            assert api.client.get("/healthz").status_code == 200
        slow.sendall(b"}")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 201 ")


def unread(port):
    """How many bytes lie in the kernel between clients and the process that has a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [line for line in lines if f"{port:04X}" in (line[1][-4:], line[2][-4:])]
    return sum(int(count, 16) for line in ours for count in line[4].split(":"))


def test_large_payloads_are_bounded_together(running, make_datastore, eventually):
    """While one upload holds the bytes that a process may hold, another one is a 503; once it is over, all is free."""
    datastore = make_datastore()
    path = f"/v1/{datastore.name}/cells/{uuid.uuid4()}/BASE/"
    body = b'{"x":"' + b"a" * 600_000 + b'"}'
    with (
        api_process(running.path, {"api.http.budget.PAYLOAD_BYTES_MAX": 1_000_000}) as api,
        socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT_S) as slow,
    ):
        slow.sendall(
            f"PUT {path}1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:-1]
        )
        until(lambda: unread(api.port) == 0)  # of two uploads under way at once, either may be the one refused
        answer = eventually(lambda: api.client.put(path + "2", content=body), 503)
        assert assert_problem(answer, 503)["retryable"]
        slow.sendall(body[-1:])
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
        for _ in range(3):
            assert api.client.put(path + "2", content=body).status_code in (200, 201)


def test_a_payload_that_never_comes_is_given_up(running, make_datastore):
    """A connection that announces a body and sends none holds its call for a bounded time. It is no fault of the
    client's where the process stood meanwhile: that is a 503.
    """
    datastore = make_datastore()
    path = f"/v1/{datastore.name}/cells/{uuid.uuid4()}/BASE/1"

    def answer():
        with socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT_S) as silent:
            silent.sendall(f"PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n".encode())
            return silent.recv(1 << 16)[:13]

    with api_process(running.path, {"api.http.request.PAYLOAD_TIMEOUT_S": 0.2}) as api:
        given = until(lambda: [said] if (said := answer()) != b"HTTP/1.1 503 " else [])
    assert given == [b"HTTP/1.1 400 "]


def test_a_topology_that_is_missing_is_said_in_a_line(tmp_path):
    """The process ends with status 1 and tells which file it looked for."""
    missing = tmp_path / "topology.json"
    env = os.environ | {"SCHEMALESS_TOPOLOGY": str(missing), "SCHEMALESS_KAFKA": "127.0.0.1:9"}
    command = [sys.executable, "-m", "api"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert ended.returncode == 1
    assert str(missing) in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_stop_drains_first(running, make_datastore):
    """From SIGTERM on /readyz is 503 and all else is served. No request fails while a balancer learns it."""
    datastore = make_datastore()
    cells = f"/v1/{datastore.name}/cells"
    outcomes: list[tuple[str, int]] = []

    def put(kind, client):
        answer = client.put(f"{cells}/{uuid.uuid4()}/BASE/1", json={"v": 1})
        outcomes.append((kind, answer.status_code))
        return answer.headers.get("connection")

    with api_process(running.path, drain_s=6.0) as api, httpx.Client(base_url=api.client.base_url) as kept:
        put("kept", kept)
        api.process.send_signal(signal.SIGTERM)
        while api.client.get("/readyz").status_code == 200:
            put("kept", kept)
        ends_at = time.monotonic() + 1.0  # a part of the drain
        while time.monotonic() < ends_at:
            with httpx.Client(base_url=api.client.base_url) as new:
                assert put("new", new) == "close"
            assert put("kept", kept) == "close"
            assert api.client.get("/readyz").status_code == 503
        assert api.process.wait(60) in (0, -signal.SIGTERM)
    assert {status for _, status in outcomes} == {201}
    assert {kind for kind, _ in outcomes} == {"new", "kept"}
