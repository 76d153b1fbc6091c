"""HTTP while the services' password is rotated: who refuses whom is named, and no process is started again (I15)."""

import uuid

import pytest

from tests.integration.api.api_harness import api_process
from tests.rotated_account import rotated_account
from tests.waiting import until

pytestmark = pytest.mark.storage


def test_a_rotated_password_costs_no_restart_and_is_named_until_the_file_has_it(running, make_datastore, tmp_path):
    """Both clusters refuse it, so nothing can be stored. What is said has no password."""
    datastore = make_datastore(placement=("a",))
    with rotated_account(running, tmp_path / "topology.json") as account, api_process(account.path) as api:
        at, said = api.at(datastore), []

        row = uuid.uuid4()

        def put():
            return at.put(uuid.uuid4(), 1, {"v": 1})

        def get():
            return at.get(f"/cells/{row}/BASE/1")

        def refused(ask, *names):
            def holds():
                answer = ask()
                named = [f"{name} refuses the account '{account.user}'" for name in names]
                return any(one in answer.text for one in named) and answer

            answer = until(holds, lambda: ask().text)
            said.append(answer.text)
            return answer

        assert at.put(row, 1, {"v": 1}).status_code == 201
        account.rotate("second")
        assert put().status_code == 201
        account.cut()
        assert refused(put, "a1").status_code == 503
        assert refused(get, "a1", "a2").status_code == 503
        assert refused(lambda: at.get("/triggers/none"), "a1", "a2", "b1", "b2").status_code == 503
        assert refused(lambda: api.client.get("/readyz"), "a1", "a2", "b1", "b2").status_code == 503
        (master,) = [
            node
            for node in refused(lambda: at.get("/status"), "a1").json()["clusters"]["a"]["nodes"]
            if node["name"] == "a1"
        ]
        assert (master["reachable"], master["stall"]) == (False, "refused")
        metrics = api.client.get("/metrics").text
        for name in ("schemaless_api_server_refusals_total", "schemaless_service_mysql_refusals_total"):
            assert f'{name}{{code="1045",node="a1"}}' in metrics
        assert not any(password in text for password in ("first", "second") for text in said)
        account.write("second")
        until(lambda: put().status_code == 201, lambda: put().text)
        until(lambda: get().status_code == 200, lambda: get().text)
