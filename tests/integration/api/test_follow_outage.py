"""Following a shard whose home master goes away: the stream goes on from a minion, or waits; it never skips."""

import pytest

from tests.integration.api.api_harness import production_api, row_in
from tests.integration.api.follow_harness import following
from tests.log_harness import run_sql
from tests.waiting import until

pytestmark = pytest.mark.faults

HEARTBEAT_S = 0.3


@pytest.fixture(scope="module")
def quick(running, api):
    with production_api(running.path, heartbeat_s=HEARTBEAT_S, read_timeout_s=1) as started:
        yield started


@pytest.fixture
def servers(running, admin):
    """Whatever a test did to a server, it runs again afterwards."""
    yield running.servers
    for server in running.servers.values():
        if server.alive():
            server.cont()
        else:
            server.start()
    run_sql(admin.nodes["a2"], "START REPLICA")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=1, partitions=1, placement=("a",))


def put(call, datastore, count):
    """Once the master takes them."""
    for _ in range(count):
        row = row_in(datastore, 0)
        until(lambda row=row: call.put(row, 1, {"v": 1}).status_code in (200, 201))


def wait_for_minion(call, head):
    def shows():
        answer = call.get("/shards", params={"read_from": "minion"})
        return answer.status_code == 200 and [shard["head"] for shard in answer.json()["shards"]] == [head]

    until(shows)


@pytest.mark.parametrize("harm", ["stop", "kill"])
def test_a_stream_goes_on_from_a_minion(quick, datastore, servers, harm):
    """Its master hung or dead, a reader still gets all of the history, and what comes once the master is back."""
    call = quick.at(datastore)
    put(call, datastore, 50)
    wait_for_minion(call, 50)
    with following(call, limit=5, timeout_s=15) as stream:
        assert stream.added_ids(10) == list(range(1, 11))
        getattr(servers["a1"], harm)()
        assert stream.added_ids(40) == list(range(11, 51))
        assert stream.next("heartbeat").location == "1:50"
        with following(call, after=45, timeout_s=15) as later:
            assert later.answer.headers["schemaless-served-by"] == "minion"
            assert later.added_ids(5) == list(range(46, 51))
            servers["a1"].cont() if harm == "stop" else servers["a1"].start()
            put(call, datastore, 3)
            assert stream.added_ids(3) == later.added_ids(3) == [51, 52, 53]


def test_a_stream_waits_for_a_minion_that_lags(quick, datastore, servers, admin):
    """A reader that is further on than the only node left hears heartbeats of where it stands, then the next cell."""
    call = quick.at(datastore)
    put(call, datastore, 5)
    wait_for_minion(call, 5)
    minion = admin.nodes["a2"]
    run_sql(minion, "STOP REPLICA SQL_THREAD")
    put(call, datastore, 5)
    with following(call, timeout_s=15) as stream:
        assert stream.added_ids(10) == list(range(1, 11))
        servers["a1"].kill()
        beats = [stream.next() for _ in range(4)]
        assert {(beat.kind, beat.location, beat.data["head"]) for beat in beats} == {("heartbeat", "1:10", 10)}
        run_sql(minion, "START REPLICA SQL_THREAD")
        wait_for_minion(call, 10)
        assert stream.next().location == "1:10"
        servers["a1"].start()
        put(call, datastore, 2)
        assert stream.added_ids(2) == [11, 12]


def test_a_long_poll_waits_through_an_outage(quick, datastore, servers):
    """While a shard's cluster is away altogether it ends with a 503 for that shard; once it is back, with its cells."""
    call = quick.at(datastore)
    put(call, datastore, 2)
    wait_for_minion(call, 2)  # else it may be asked first afterwards, and call the location past its head
    locations = {"locations": {"0": "1:2"}, "wait": 0.3}
    servers["a1"].stop()
    servers["a2"].stop()
    shown = call.post("/shards/cells", json=locations).json()["shards"]["0"]
    assert (shown["problem"]["status"], shown["problem"]["retryable"]) == (503, True)
    servers["a1"].cont()
    servers["a2"].cont()
    behind = {"locations": {"0": "1:1"}, "wait": 10}
    shown = call.post("/shards/cells", json=behind).json()["shards"]["0"]
    assert [cell["added_id"] for cell in shown["cells"]] == [2]
