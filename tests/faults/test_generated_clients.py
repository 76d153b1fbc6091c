"""Clients that two generators make of /openapi.json put and get against a real API process.

`make faults` runs it, because the generators and what they need come from npm and PyPI (deploy/install-generators).
tests/unit/api/http/test_openapi.py checks the document itself in every run.
"""

import json
import os
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.integration.api.api_harness import ApiProcess, api_process

pytestmark = pytest.mark.faults

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
ROOT = Path(__file__).parents[2]
GENERATOR_TIMEOUT_S = 120

IN_PYTHON = """
import sys
from uuid import UUID
from generated import AuthenticatedClient
from generated.api.cells import get_cell, put_cell
from generated.api.shards import get_shard_cells
from generated.models import CellView, LogPageView, ProblemView, PutCellBody, PutView

url, datastore, row_key = sys.argv[1:]
with AuthenticatedClient(base_url=url, token="none") as client:
    where = {"datastore": datastore, "row_key": UUID(row_key), "column": "BASE", "client": client}
    missing = get_cell.sync(ref_key=1, **where)
    assert isinstance(missing, ProblemView) and missing.status == 404, missing
    put = put_cell.sync(ref_key=1, body=PutCellBody.from_dict({"fare": 12.5}), **where)
    assert isinstance(put, PutView) and put.status == "stored" and put.copies == 2, put
    cell = get_cell.sync(ref_key=1, **where)
    assert isinstance(cell, CellView) and cell.body.to_dict() == {"fare": 12.5}, cell
    page = get_shard_cells.sync(datastore=datastore, shard=put.shard, client=client)
    assert isinstance(page, LogPageView) and page.cells[-1].added_id == put.added_id, page
"""

IN_TYPESCRIPT = """
import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

const [url, datastore, row_key] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url });
const path = { datastore, row_key, column: "BASE", ref_key: 2 };
const at = "/v1/{datastore}/cells/{row_key}/{column}/{ref_key}";

function check(holds: boolean, what: unknown): asserts holds {
  if (!holds) throw new Error(JSON.stringify(what));
}

const missing = await client.GET(at, { params: { path } });
const problem: components["schemas"]["ProblemView"] | undefined = missing.error;
check(problem?.status === 404, problem);
const put = await client.PUT(at, { params: { path }, body: { fare: 12.5 } });
check(put.data?.status === "stored" && put.data.copies === 2, put.error);
const got = await client.GET(at, { params: { path } });
check(got.data?.body?.["fare"] === 12.5, got.error);
const log = await client.GET("/v1/{datastore}/shards/{shard}/cells", {
  params: { path: { datastore, shard: put.data.shard } },
});
check(log.data !== undefined && log.data.cells.at(-1)?.added_id === put.data.added_id, log.error);
"""


@pytest.fixture(scope="module")
def datastore(make_datastore):
    return make_datastore()


@pytest.fixture(scope="module")
def api(running, datastore):
    with api_process(running.path) as process:
        yield process


@pytest.fixture(scope="module")
def generators():
    subprocess.run([ROOT / "deploy/install-generators"], check=True, timeout=300)
    return Path(os.environ.get("SCHEMALESS_CACHE", Path.home() / ".cache/schemaless")) / "generators"


def run(*command: object, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GENERATOR_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout.lower(), done.stdout


def document(api: ApiProcess, folder: Path) -> Path:
    path = folder / "openapi.json"
    path.write_text(json.dumps(api.client.get("/openapi.json").json()))
    return path


if LONG:

    def test_a_generated_python_client_puts_and_gets(api, generators, datastore, tmp_path):
        """It gets typed values: a cell, a put's outcome, a page, and a problem."""
        bin_folder = generators / "venv/bin"
        made_of = document(api, tmp_path)
        path = f"{bin_folder}:{os.environ['PATH']}"
        command = ["generate", "--path", made_of, "--meta", "none", "--output-path", tmp_path / "generated"]
        run(bin_folder / "openapi-python-client", *command, cwd=tmp_path, PATH=path)
        (tmp_path / "program.py").write_text(IN_PYTHON)
        told = [str(api.client.base_url), datastore.name, uuid.uuid4()]
        run(bin_folder / "python", "program.py", *told, cwd=tmp_path)

    def test_a_generated_typescript_client_puts_and_gets(api, generators, datastore, tmp_path):
        """The compiler accepts the program in its strict mode, so the types are those of the answers."""
        made_of = document(api, tmp_path)
        (tmp_path / "node_modules").symlink_to(generators / "node_modules")
        (tmp_path / "package.json").write_text('{"type": "module"}')
        (tmp_path / "program.ts").write_text(IN_TYPESCRIPT)
        (tmp_path / "globals.d.ts").write_text("declare const process: { argv: string[] };")
        tools = generators / "node_modules/.bin"
        run(tools / "openapi-typescript", made_of, "-o", "schema.d.ts", cwd=tmp_path)
        how = ["--strict", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
        run(tools / "tsc", *how, "--lib", "es2022,dom", "--skipLibCheck", "globals.d.ts", "program.ts", cwd=tmp_path)
        told = [str(api.client.base_url).rstrip("/"), datastore.name, uuid.uuid4()]
        run("node", "program.js", *told, cwd=tmp_path)
