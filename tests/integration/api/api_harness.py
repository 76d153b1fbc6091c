"""An API process as a fixture's product: `python -m api` on a free port, asked through httpx."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from api.http.asgi import Router
from api.http.openapi import problem_statuses
from api.routes import ROUTES
from schemaless.config import ApiSettings
from schemaless.contract.cells import ProblemView
from schemaless.sharding import shard_of
from schemaless.stack.plan import free_ports
from schemaless.storage import shard_head
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.environment import environment_of
from tests.patched import patched
from tests.processes import stopping
from tests.seed import seeded
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PATIENT = {"write_timeout_s": 30.0, "read_timeout_s": 30.0}
PATIENT_CONSTANTS = {"api.write.queue.PATIENCE_S": 30.0, "schemaless.facts.servers.STATUS_TIMEOUT_S": 30.0}
"""Time-outs that a bad machine doesn't reach, for tests that are about something else."""
PROBLEM_MEMBERS = {"type", "title", "status", "detail", "retryable"}

_row_keys = seeded("row keys")


@dataclass(frozen=True)
class ApiProcess:
    client: httpx.Client
    process: subprocess.Popen[bytes]
    port: int

    def at(self, datastore: Datastore) -> "Caller":
        return Caller(self.client, f"/v1/{datastore.name}")


@dataclass(frozen=True)
class Caller:
    """Calls of one datastore: `caller.get("/shards")`."""

    client: httpx.Client
    prefix: str

    def __call__(self, method: str, path: str, **options) -> httpx.Response:
        return self.client.request(method, self.prefix + path, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self("GET", path, **options)

    def post(self, path: str, **options) -> httpx.Response:
        return self("POST", path, **options)

    def put(self, row_key: uuid.UUID | str, ref_key: int, body: object, column: str = "BASE") -> httpx.Response:
        return self("PUT", f"/cells/{row_key}/{column}/{ref_key}", json=body)


@contextmanager
def api_process(
    topology: Path, constants: Mapping[str, object] | None = None, **settings: object
) -> Iterator[ApiProcess]:
    """A patient process with these settings, in which `constants` of its modules have other values."""
    with production_api(topology, PATIENT_CONSTANTS | dict(constants or {}), **(PATIENT | settings)) as started:
        yield started


@contextmanager
def production_api(
    topology: Path, constants: Mapping[str, object] | None = None, *, output: int | None = None, **settings: object
) -> Iterator[ApiProcess]:
    """A process with the time-outs of production, for tests that are about them. It logs to the descriptor `output`."""
    (port,) = free_ports(1)
    named = {
        "topology": topology,
        "kafka": "127.0.0.1:9",
        "port": port,
        "log_level": "warning",
        "drain_s": 0,
        **settings,
    }
    env = os.environ | environment_of(ApiSettings, named)
    command = [sys.executable, *patched(["api"], constants or {})]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
    hooks = {"response": [conforms]}
    with stopping(process), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, event_hooks=hooks) as client:
        wait_ready(client, process)
        yield ApiProcess(client, process, port)


_ROUTER = Router(ROUTES)
_ROUTES = {route.name: route for route in ROUTES}


def conforms(answer: httpx.Response) -> None:
    """Raises AssertionError for an answer that the OpenAPI document doesn't have: its status, or its shape."""
    found = _ROUTER.find(answer.request.method, answer.request.url.path)
    media = answer.headers.get("content-type", "")
    if found is None or answer.request.method == "HEAD" or media.startswith("text/"):
        return
    route = _ROUTES[found[0].name]
    shape = route.answers.get(answer.status_code)
    if answer.status_code >= 400:
        assert answer.status_code in problem_statuses(route), f"{route.name}: {answer.status_code} is undocumented"
        shape = ProblemView
    else:
        assert answer.status_code in route.answers, f"{route.name}: {answer.status_code} is undocumented"
    if shape is not None and media in ("application/json", "application/problem+json"):
        try:
            msgspec.json.decode(answer.read(), type=shape)
        except msgspec.ValidationError as error:
            raise AssertionError(f"{route.name} answers another shape than it documents: {error}") from error


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "the API ended while it was starting"
        return client.get("/readyz").status_code == 200

    until(is_ready)


def assert_problem(answer: httpx.Response, status: int, field: str | None = None) -> dict:
    """The whole problem document of an answer that must be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem.keys() >= PROBLEM_MEMBERS
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    if field is not None:
        assert problem["field"] == field
    return problem


def cells_in(storage: SyncStorage, datastore: Datastore) -> int:
    """How many cells stand in the datastore, by its heads."""
    masters = [storage.master(cluster) for cluster in set(datastore.placement)]
    return sum(master.run(shard_head.movement, datastore.name).heads_sum for master in masters)


def row_in(datastore: Datastore, shard: int) -> uuid.UUID:
    """A new row key of a given shard."""
    while True:
        row_key = uuid.UUID(int=_row_keys.getrandbits(128))
        if shard_of(row_key.bytes, datastore.shards) == shard:
            return row_key
