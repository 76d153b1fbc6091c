"""I17: tokens on real servers: a cluster is away, a token is revoked, streams are open, and the command line."""

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from schemaless.ops.datastores import create_shards
from schemaless.stack.local import running_topology
from schemaless.storage import token_table
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.integration.api.api_harness import ROOT, api_process, assert_problem
from tests.integration.api.login import AUDIENCE, running_issuer
from tests.waiting import until

SOON_S = 120.0
"""How long a test waits at most for what processes learn by reading tokens every second."""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Two clusters of this module's own, because access never goes off again."""
    with running_topology(
        tmp_path_factory.mktemp("access"), minions=0, flavour=FLAVOUR, options=SMALL_REDO_LOGS
    ) as running:
        with SyncStorage(running.topology) as storage:
            for name in ("trips", "other"):
                create_shards(storage, Datastore(name, 2, 2, ("a", "b")), administrators=running.administrators)
        yield running


@pytest.fixture
def command(own, tmp_path):
    """Runs `schemaless …`, and returns its output as JSON, or its failure's text."""

    def run(*arguments, fails=False, plain=False, **environment):
        env = {
            "SCHEMALESS_TOPOLOGY": str(own.path),
            "SCHEMALESS_KAFKA": "127.0.0.1:9",
            "SCHEMALESS_HOME": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-m", "schemaless", *arguments, *(() if fails or plain else ("--json",))],
            cwd=ROOT,
            env=os.environ | env | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout if plain else json.loads(done.stdout)

    return run


@pytest.fixture
def no_tokens(own):
    """Access is off, which no command can do."""
    with SyncStorage(own.topology) as storage:
        for master in storage.masters:
            master.run(lambda: (yield "DELETE FROM schemaless.token"))


@pytest.fixture
def admin(command, no_tokens):
    """The secret of the first token."""
    return command("token", "create", "root", "--datastore", "*", "--scope", "admin")["token"]


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def asked(api, secret=None, method="GET", path="/v1/trips/shards", **options):
    headers = {**(bearer(secret) if secret else {}), **options.pop("headers", {})}
    return api.client.request(method, path, headers=headers, **options)


def eventually_status(api, status, secret=None, **options):
    def answer():
        response = asked(api, secret, **options)
        return response if response.status_code == status else None

    return until(answer, lambda: asked(api, secret, **options).text)


def test_the_first_token_closes_a_running_process(own, command, no_tokens):
    """Loopback is served without a token until there is one. Then nobody is, but for health."""
    with api_process(own.path) as api:
        assert asked(api).status_code == 200
        secret = command("token", "create", "first", "--datastore", "trips", "--scope", "read")["token"]
        refused = eventually_status(api, 401)
        assert_problem(refused, 401)
        assert refused.headers["www-authenticate"].startswith("Bearer")
        assert asked(api, secret).status_code == 200
        for path in ("/healthz", "/readyz"):
            assert asked(api, path=path).status_code == 200
        for path in ("/metrics", "/docs", "/openapi.json", "/nowhere"):
            assert asked(api, path=path).status_code == 401
        assert asked(api, secret, path="/metrics").status_code == 200
        put = {"method": "PUT", "path": f"/v1/trips/cells/{uuid.uuid4()}/BASE/1", "json": {"v": 1}}
        assert_problem(asked(api, secret, **put), 403)
        assert asked(api, secret, path="/v1/other/shards").status_code == 403
        assert asked(api, path=f"/v1/trips/shards?token={secret}&access_token={secret}").status_code == 401
        assert asked(api, method="HEAD").status_code == 401


def test_tokens_over_http(own, command, admin):
    """An administrator makes, lists and revokes them. A narrower one can't make what reaches further. The list of
    actions says which token was made, and how far it reaches.
    """
    with api_process(own.path) as api, api_process(own.path) as second:
        new = {"name": "narrow", "scope": "admin", "expires": "1h"}
        made = asked(api, admin, "POST", "/v1/trips/tokens", json=new)
        assert made.status_code == 201
        narrow = made.json()["token"]
        for lifetime in ("1m", "3650d"):  # a token ends with its issuer at the latest
            outlives = asked(
                api, narrow, "POST", "/v1/trips/tokens", json={**new, "name": lifetime, "expires": lifetime}
            )
            assert (outlives.json()["expires_at"] == made.json()["expires_at"]) is (lifetime != "1m")
        assert asked(api, narrow).status_code == asked(second, narrow).status_code == 200
        for wider in ({"datastores": ["*"]}, {"datastores": ["other"]}):
            answer = asked(api, narrow, "POST", "/v1/trips/tokens", json={"name": "w", "scope": "read", **wider})
            assert_problem(answer, 403)
        assert asked(api, narrow, "DELETE", "/v1/trips/tokens/root").status_code == 404
        assert asked(api, admin, "POST", "/v1/trips/tokens", json=new).status_code == 409
        listed = asked(api, admin, path="/v1/trips/tokens").json()["tokens"]
        assert {(one["name"], one["scope"], one["state"]) for one in listed} >= {("narrow", "admin", "active")}
        assert narrow not in json.dumps(listed)
        assert asked(api, admin, "DELETE", "/v1/trips/tokens/narrow").json() == {"name": "narrow", "unreached": []}
        assert asked(api, narrow).status_code == 401
        eventually_status(second, 401, narrow)
    made = "POST /v1/trips/tokens name=narrow scope=admin expires=1h datastores=trips"
    outcomes = [one["outcome"] for one in command("actions")["actions"] if one["what"] == made]
    assert sorted(outcomes) == ["201", "409"]


def test_a_name_has_one_token_however_many_ask_at_once(own, command, admin):
    """Of ten that are issued together one is. A name that is rotated by several at once has one new token."""
    new = {"name": "raced", "scope": "read", "expires": "1h"}

    def rotates(_):
        try:
            return bool(command("token", "rotate", "raced"))
        except AssertionError:
            return False  # another one came first

    with api_process(own.path) as one, api_process(own.path) as two:
        with ThreadPoolExecutor(10) as pool:
            asked_at_once = [
                pool.submit(asked, api, admin, "POST", "/v1/trips/tokens", json=new) for api in (one, two) * 5
            ]
            made = [each.result().status_code for each in asked_at_once]
        assert sorted(made) == [201, *[409] * 9]
        with ThreadPoolExecutor(4) as pool:
            assert any(pool.map(rotates, range(4)))
        listed = asked(one, admin, "GET", "/v1/trips/tokens").json()["tokens"]
    assert [token["state"] for token in listed if token["name"] == "raced"].count("active") == 1


def test_a_stream_and_a_long_poll_end_with_their_token(own, command, admin):
    """Who holds an open stream at its revocation gets no more of it. Those of other tokens go on."""
    reader = command("token", "create", "reader", "--datastore", "trips", "--scope", "read")["token"]

    def follow(secret):
        headers = {**bearer(secret), "accept": "text/event-stream"}
        url = f"http://127.0.0.1:{api.port}/v1/trips/shards/0/cells?follow=true&after=end"
        with httpx.stream("GET", url, headers=headers, timeout=SOON_S) as response:
            assert response.status_code == 200
            for _ in response.iter_bytes():
                pass

    def poll(secret):
        path = "/v1/trips/shards/1/cells?wait=30&after=end"
        return asked(api, secret, path=path, timeout=SOON_S).json()["cells"]

    def followers():
        lines = asked(api, admin, path="/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("schemaless_api_followers "))

    def wait_for(count):
        until(lambda: followers() == count, followers)

    with ThreadPoolExecutor(5) as pool, api_process(own.path) as api:
        lifetime = ("--scope", "read", "--expires", "15s")
        short = command("token", "create", "short", "--datastore", "trips", *lifetime)["token"]
        expired = pool.submit(follow, short)
        revoked, kept = pool.submit(follow, reader), pool.submit(follow, admin)
        wait_for(3)
        kept_poll = pool.submit(poll, admin)
        wait_for(4)
        polled = pool.submit(poll, reader)
        wait_for(5)
        command("token", "revoke", "reader")
        revoked.result(SOON_S)
        assert polled.result(SOON_S) == []
        assert not kept_poll.done(), "the wait of both was over"
        expired.result(SOON_S)
        assert not kept.done()


def test_an_order_to_a_controller_needs_every_datastore(own, command, admin):
    """A master serves all of them. An administrator of all gets further: here nobody appointed a master."""
    of_one = command("token", "create", "one", "--datastore", "trips", "--scope", "admin")["token"]
    payload = {"order": "switch", "cluster": "a"}
    with api_process(own.path) as api:
        for secret, status in ((of_one, 403), (admin, 503)):
            assert_problem(asked(api, secret, "POST", "/v1/trips/topology/orders", json=payload), status)


def test_a_revocation_reaches_a_cluster_that_was_away(own, command, admin):
    """Its row still says valid when it comes back, and that brings nothing back."""
    secret = command("token", "create", "late", "--datastore", "trips", "--scope", "read")["token"]
    away = own.servers["b1"]
    with api_process(own.path) as api:
        assert asked(api, secret).status_code == 200
        away.terminate()
        try:
            assert asked(api, admin, path="/v1/trips/topology").status_code == 200
            made = command("token", "create", "meanwhile", "--datastore", "trips", "--scope", "read")
            assert made["unreached"] == ["b"]
            assert eventually_status(api, 200, made["token"], path="/v1/trips/topology")
            assert command("token", "revoke", "late")["unreached"] == ["b"]
            eventually_status(api, 401, secret)
        finally:
            away.start()
        with SyncStorage(own.topology) as storage:

            def written(cluster):
                return set(storage.master(cluster).run(token_table.all_rows).values())

            until(lambda: any(token.name == "late" and token.revoked_at for token in written("b")))
            until(lambda: written("b") == written("a"), lambda: (written("b"), written("a")))
            assert len(written("b")) == 3
        assert asked(api, secret).status_code == 401
        own.servers["a1"].terminate()
        try:  # a process that can only ask the cluster that was away
            with api_process(own.path) as fresh:
                assert asked(fresh, secret, path="/v1/trips/topology").status_code == 401
                assert asked(fresh, made["token"], path="/v1/trips/topology").status_code == 200
        finally:
            own.servers["a1"].start()


def test_the_first_token_needs_every_cluster(own, command, no_tokens):
    """So each of them knows that access is on, whichever can be asked later."""
    own.servers["b1"].terminate()
    try:
        said = command("token", "create", "first", "--datastore", "*", "--scope", "admin", fails=True)
        assert "the first token needs every cluster" in said
        assert "b" in said
    finally:
        own.servers["b1"].start()
    assert command("token", "list")["tokens"] == []


def test_the_way_back_and_the_list_of_actions(own, command, admin):
    """The last administrator's token is revoked: the server's own command makes another one. All of it is listed."""
    with api_process(own.path) as api:
        assert asked(api, admin, "DELETE", "/v1/trips/tokens/root").status_code == 200
        assert asked(api, admin).status_code == 401
        again = command("token", "create", "again", "--datastore", "*", "--scope", "admin")["token"]
        assert asked(api, again).status_code == 200
        rotated = command("token", "rotate", "again", "--overlap", "1m")["token"]
        assert asked(api, rotated).status_code == asked(api, again).status_code == 200
        last = command("token", "rotate", "again")["token"]
        eventually_status(api, 401, rotated)
        assert asked(api, last).status_code == 200
    actions = command("actions")["actions"]
    done = {(action["who"], action["what"]) for action in actions}
    assert ("root", "DELETE /v1/trips/tokens/root") in done
    assert any(what == "token create name=again datastore=* scope=admin expires=90d" for _, what in done)
    assert all(action["at"] and action["peer"] for action in actions)


def test_commands_that_change_something_are_recorded_with_their_outcome(own, command):
    """Who is the user of the machine. A dry run changes nothing, and a failure is as worth knowing as a success."""
    commands = {
        "datastore create name=third shards=2 partitions=3": ("Misconfigured", "third --shards 2 --partitions 3"),
        "tailer pause datastore=nope": ("NotFound", "nope"),
        "tailer pause datastore=trips": ("done", "trips"),
        "triggers remove program=census datastore=trips": ("NotFound", "census --datastore trips --yes"),
        "tailer seek": ("", "trips 0 --shard 9 --dry-run"),
    }

    def run(what):
        outcome, rest = commands[what]
        command(*what.split()[:2], *rest.split(), fails=outcome != "done", plain=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, commands))
    found = {one["what"]: one["outcome"] for one in command("actions")["actions"] if one["who"] == getpass.getuser()}
    for what, (outcome, _) in commands.items():
        assert found.get(what, "").partition(":")[0] == outcome
    assert not any("dry_run" in what or what.startswith("tailer seek") for what in found)


def test_a_port_beyond_loopback_needs_a_token(own, no_tokens, command):
    """The process ends with a sentence that says what to do."""
    settings = {
        "SCHEMALESS_TOPOLOGY": str(own.path),
        "SCHEMALESS_KAFKA": "127.0.0.1:9",
        "SCHEMALESS_API_HOST": "0.0.0.0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "api"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "schemaless token create" in done.stdout + done.stderr
    command("token", "create", "one", "--datastore", "trips", "--scope", "read")
    with api_process(own.path, host="0.0.0.0") as api:
        assert asked(api).status_code == 401


def test_a_foreign_host_or_origin(own, admin):
    """A web page writes nothing, and reads nothing by a name of its own."""
    with api_process(own.path) as api:
        put = {"method": "PUT", "path": f"/v1/trips/cells/{uuid.uuid4()}/BASE/1", "json": {"v": 1}}
        foreign = asked(api, admin, headers={"origin": "http://evil.example"}, **put)
        assert_problem(foreign, 403)
        assert asked(api, admin, headers={"host": "rebind.evil.example"}).status_code == 421
        own_page = {"origin": f"http://127.0.0.1:{api.port}"}
        untyped = {"method": "PUT", "path": put["path"], "content": b'{"v": 1}'}
        assert asked(api, admin, headers=own_page, **untyped).status_code == 415
        assert asked(api, admin, headers=own_page, **put).status_code == 201
        docs = asked(api, admin, path="/docs")
        assert docs.headers["x-content-type-options"] == "nosniff"


def test_the_documented_commands(own, command, no_tokens):
    """What docs/security.md shows runs in its order."""
    page = (ROOT / "docs/security.md").read_text()
    shown = re.findall(r"^    schemaless ((?:token|actions).*)$", page, re.MULTILINE)
    assert len(shown) == 6
    for line in shown:
        command(*shlex.split(line))


def test_an_honest_token_keeps_its_share_while_another_floods(own, command, admin):
    """From the same address: a flood of valid requests gets 429s, and not all places of the process."""
    flood, honest = (command("token", "create", name, "-d", "trips", "--scope", "read")["token"] for name in "fh")
    with api_process(own.path, requests_max=4) as api, ThreadPoolExecutor(12) as pool:
        ended = threading.Event()

        def flooding():
            with httpx.Client(base_url=api.client.base_url, headers=bearer(flood)) as client:
                statuses = []
                while not ended.is_set():
                    statuses.append(client.get("/v1/trips/shards").status_code)
            return statuses

        flooded = [pool.submit(flooding) for _ in range(12)]
        answers = []
        for _ in range(20):
            answers.append(asked(api, honest).status_code)
            time.sleep(0.03)
        ended.set()
        statuses = [status for one in flooded for status in one.result()]
    assert answers == [200] * 20
    assert set(statuses) == {200, 429}


def test_jwts_of_an_issuer_are_tokens(own, admin):
    """Beside ours. A process that has its keys keeps serving while the issuer is away."""
    with (
        running_issuer() as issuer,
        api_process(own.path, oidc_issuer=issuer.url, oidc_audience=AUDIENCE) as api,
    ):
        reader, writer = map(issuer.signed, ("openid schemaless:trips:read", "schemaless:trips:write"))
        assert asked(api, reader).status_code == asked(api, admin).status_code == 200
        issuer.pages.clear()
        put = {"method": "PUT", "path": f"/v1/trips/cells/{uuid.uuid4()}/BASE/1", "json": {"v": 1}}
        assert asked(api, writer, **put).status_code == 201
        assert_problem(asked(api, reader, **put), 403)
        assert asked(api, reader, path="/v1/other/shards").status_code == 403
        assert_problem(asked(api, reader[:-3] + "AAA"), 401)
        assert asked(api).status_code == 401
