"""What a process reads for its clients has one budget: every call that may read much waits for room first (I14)."""

import asyncio
import uuid
from dataclasses import replace

import httpx
import pytest

from api.app import create_app
from api.http.budget import ReadBudget
from api.state import opened_state
from schemaless.codec import encode_body
from schemaless.config import ApiSettings
from schemaless.position import Position
from schemaless.storage import checkpoint_table, conflict_table
from tests.integration.api.api_harness import assert_problem, row_in
from tests.integration.api.test_conflicts import record
from tests.integration.api.test_indexes import DRIVERS, NAME, ByHand, make, trip

pytestmark = pytest.mark.storage


@pytest.fixture
async def datastore(api, make_datastore, storage, topology):
    """With an active index, a conflict and a trigger program."""
    datastore = make_datastore(shards=2, placement=("a",))
    call = api.at(datastore)
    assert make(call).status_code == 201
    trip(call, DRIVERS[0], 1, row=row_in(datastore, 0))
    await ByHand(topology, datastore).index_all()
    master = storage.master("a")
    record(master, datastore, uuid.uuid4(), 1, encode_body({}))
    master.run(checkpoint_table.make, datastore.name, "trigger:billing", [Position(shard, 1, 0) for shard in (0, 1)])
    return datastore


def reads_nothing(*arguments):
    raise AssertionError("bodies are read")


async def test_calls_that_may_read_much_wait_for_room_before_they_read(running, datastore, api, monkeypatch):
    """While others hold all of it, each is a 503 that names the reason. It reads as usual once there is room."""
    row = api.at(datastore).get("/shards/0/cells").json()["cells"][0]["row_key"]
    calls = [
        ("GET", f"/cells/{row}", None),
        ("GET", f"/cells/{row}/BASE/versions", None),
        ("POST", "/batch/get", {"keys": [{"row_key": row, "column_name": "BASE"}]}),
        ("GET", "/shards/0/cells", None),
        ("POST", "/shards/cells", {"locations": {"0": 0}}),
        ("GET", "/conflicts", None),
        ("GET", f"/indexes/{NAME}/entries?driver={DRIVERS[0]}", None),
        ("GET", f"/indexes/{NAME}/problems", None),
        ("GET", "/triggers/billing/parked", None),
        ("GET", f"/explain?row_key={row}", None),
    ]
    settings = ApiSettings(topology=running.path, kafka="127.0.0.1:9")
    app = create_app(settings)
    async with opened_state(settings, running.topology) as state:
        app.api_state = replace(state, read_budget=(budget := ReadBudget(1, wait_s=0.0)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://localhost/v1/{datastore.name}/") as client:
            await budget.take(1, "somebody else")
            with monkeypatch.context() as patched:
                patched.setattr(conflict_table, "get", reads_nothing)  # beside their keys, which are small
                for method, path, document in calls:
                    answer = await client.request(method, path[1:], json=document)
                    assert "too many large responses" in assert_problem(answer, 503)["detail"], path
            budget.give_back(1, "somebody else")
            for method, path, document in calls:
                assert (await client.request(method, path[1:], json=document)).status_code == 200, path
                assert budget.held_bytes == 0, path


async def test_a_stream_holds_events_until_the_reader_takes_them(running, make_datastore, api):
    """Events are larger than what was read of a cell that compresses well."""
    datastore = make_datastore(shards=1, partitions=1)
    api.at(datastore).put(row_in(datastore, 0), 1, {"text": "x" * 900_000})
    settings = ApiSettings(topology=running.path, kafka="127.0.0.1:9")
    app = create_app(settings)
    held, was_taken = [], asyncio.Event()

    async def receive():
        await was_taken.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if len(message.get("body", b"")) > 900_000:
            held.append(budget.held_bytes)
            was_taken.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": f"/v1/{datastore.name}/shards/0/cells",
        "raw_path": f"/v1/{datastore.name}/shards/0/cells".encode(),
        "query_string": b"follow=true",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/event-stream")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    async with opened_state(settings, running.topology) as state:
        app.api_state = replace(state, read_budget=(budget := ReadBudget(16 << 20, wait_s=0.0)))
        await app(scope, receive, send)
        assert len(held) == 1
        assert held[0] > 900_000
        assert budget.held_bytes == 0
