"""Schemathesis asks a real API process whatever its OpenAPI document allows, and much that it forbids.

`make test` gives it some seconds, `make faults` many minutes. The seed is printed, and SCHEMALESS_TEST_SEED sets it.
"""

import os
import subprocess
import sys
import uuid

import msgspec
import pytest

from schemaless.contract.indexes import Definition
from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.integration.api.api_harness import api_process
from tests.seed import SEED

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))
TIME_S, EXAMPLES, PHASES = (1200, 3_000, "examples,coverage,fuzzing,stateful") if LONG else (30, 2, "examples,fuzzing")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CONFIGURATION = """
[parameters]
"path.datastore" = "trips"
"path.name" = "by_driver"
"query.wait" = 0
"""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(TIME_S + 120)]


@pytest.fixture
def own(tmp_path):
    """Clusters of this test's own: it issues tokens, and access never goes off again."""
    with running_topology(tmp_path, minions=1, flavour=FLAVOUR, options=SMALL_REDO_LOGS) as running:
        with SyncStorage(running.topology) as storage:
            create_shards(storage, Datastore("trips", 2, 2, ("a", "b")), administrators=running.administrators)
        yield running


def test_the_api_answers_what_it_documents(own, tmp_path):
    """No 500, no status and no shape that the document hasn't, and a process that serves at the end."""
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    with api_process(own.path) as api:
        url = str(api.client.base_url)
        row_key, body = uuid.uuid4(), {"fare": 12.5}
        assert api.client.put(f"/v1/trips/cells/{row_key}/BASE/1", json=body).status_code == 201
        definition = msgspec.json.schema(Definition)["examples"][0]
        assert api.client.put("/v1/trips/indexes/by_driver", json=definition).status_code == 201
        issued = api.client.post("/v1/trips/tokens", json={"name": "attack", "scope": "admin"})
        secret = f"Bearer {issued.json()['token']}"
        options = (
            f"--config-file {tmp_path}/schemathesis.toml run {url}/openapi.json --url {url} --no-color --seed {SEED}"
            f" --checks {CHECKS} --phases {PHASES} --max-time {TIME_S} --max-examples {EXAMPLES} --no-shrink"
            " --request-timeout 40 --continue-on-failure --generation-database none"
            " --exclude-path-regex ^/ui --exclude-operation-id delete_token"  # streams, and its own token
        )
        attack = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *options.split(), "--header", f"Authorization: {secret}"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_S + 100,
            check=False,
        )
        print(attack.stdout)
        assert attack.returncode == 0, attack.stdout
        assert api.client.get("/readyz").status_code == 200
        assert api.process.poll() is None
        stored = api.client.get(f"/v1/trips/cells/{row_key}/BASE/1", headers={"Authorization": secret})
        assert stored.json()["body"] == body
