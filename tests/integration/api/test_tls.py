"""The API serves HTTPS where settings say so, and the client and the commands verify it (I17)."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import pytest

from schemaless import AsyncClient, Client
from schemaless.client.transport import settings_of
from schemaless.config import ApiSettings
from schemaless.errors import Misconfigured, Unavailable
from schemaless.stack.plan import free_ports
from tests.certificates import make_certificates
from tests.environment import environment_of
from tests.integration.api.api_harness import ROOT
from tests.processes import stopping
from tests.waiting import until

ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def serve(running, make_datastore, certificates):
    """Starts an API process with the certificate that is there now. Returns its port."""
    make_datastore()

    def start():
        (port,) = free_ports(1)
        files = {"tls_certificate": certificates.certificate, "tls_key": certificates.key}
        named = {"topology": running.path, "kafka": "127.0.0.1:9", "port": port, "log_level": "warning", **files}
        env = os.environ | environment_of(ApiSettings, named)
        process = subprocess.Popen([sys.executable, "-m", "api"], cwd=ROOT, env=env)
        started.enter_context(stopping(process))

        def answers():
            assert process.poll() is None, "the process ended"
            return httpx.get(f"https://127.0.0.1:{port}/readyz", verify=False).status_code == 200 and port

        return until(answers)

    with ExitStack() as started:
        yield start


@pytest.fixture(scope="module")
def port(serve):
    return serve()


@pytest.fixture
def believing(monkeypatch, certificates):
    """The environment names the CA."""
    monkeypatch.setenv("SCHEMALESS_CA", certificates.tls.ca)


def refused(host):
    with pytest.raises(Unavailable) as caught, Client([host], datastore="mezzanine") as client:
        client.get_cell_latest(ROW, "BASE")
    return str(caught.value)


async def test_both_clients_verify_and_are_served(believing, port, make_datastore):
    """Cells go there and back."""
    datastore = make_datastore().name
    with Client([f"https://127.0.0.1:{port}"], datastore=datastore) as client:
        client.put_cell(ROW, "BASE", 1, {"v": 1})
    async with AsyncClient([f"https://127.0.0.1:{port}"], datastore=datastore) as client:
        assert (await client.get_cell(ROW, "BASE", 1)).body == {"v": 1}


def test_plain_http_gets_nothing(port):
    """No answer goes over an open line."""
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")


def test_a_wrong_ca_is_refused(monkeypatch, certificates, port):
    monkeypatch.setenv("SCHEMALESS_CA", certificates.other_tls.ca)
    assert "its certificate is refused" in refused(f"https://127.0.0.1:{port}")


def test_without_a_ca_of_ours_only_public_ones_count(monkeypatch, port):
    monkeypatch.delenv("SCHEMALESS_CA", raising=False)
    assert "its certificate is refused" in refused(f"https://127.0.0.1:{port}")


def test_a_wrong_host_name_is_refused(believing, port):
    assert "not valid for 'localhost'" in refused(f"https://localhost:{port}")


def test_an_expired_certificate_is_refused(believing, serve, certificates):
    certificates.issue(for_s=-60)
    try:
        assert "certificate has expired" in refused(f"https://127.0.0.1:{serve()}")
    finally:
        certificates.issue()


def test_a_replaced_certificate_is_taken_up_by_the_running_process(believing, serve, certificates):
    """An expired one is refused. The next one serves new connections, and its end is a metric."""
    certificates.issue(for_s=-60)
    try:
        port = serve()
        assert "certificate has expired" in refused(f"https://127.0.0.1:{port}")
    finally:
        certificates.issue(for_s=3 * 86_400)
    until(lambda: is_verified(port, certificates))
    text = httpx.get(f"https://127.0.0.1:{port}/metrics", verify=certificates.tls.context()).text
    (found,) = re.findall(r"^schemaless_api_certificate_expiration_timestamp_seconds (\S+)$", text, re.MULTILINE)
    assert 2 < (float(found) - time.time()) / 86_400 < 4


def is_verified(port, certificates):
    try:
        return httpx.get(f"https://127.0.0.1:{port}/healthz", verify=certificates.tls.context()).status_code == 200
    except httpx.ConnectError:
        return False


def test_a_ca_that_can_not_be_read_is_named(monkeypatch):
    monkeypatch.setenv("SCHEMALESS_CA", "/nowhere/ca.pem")
    with pytest.raises(Misconfigured, match=r"/nowhere/ca\.pem"):
        Client(["https://127.0.0.1:1"], datastore="mezzanine")


def test_a_command_takes_the_ca_from_its_profile(tmp_path, certificates, port, make_datastore):
    """Hosts and CA of the profile go together, before the environment's."""
    datastore = make_datastore().name
    profiles = tmp_path / "profiles.toml"
    profiles.touch(mode=0o600)
    profiles.write_text(f'[prod]\nhosts = ["https://127.0.0.1:{port}"]\nca = "{certificates.tls.ca}"\n')
    env = {"SCHEMALESS_PROFILES": str(profiles), "SCHEMALESS_CA": certificates.other_tls.ca}
    command = [sys.executable, "-m", "schemaless", "--profile", "prod", "put", ROW, "BASE", "1", '{"v": 1}']
    done = subprocess.run(
        [*command, "--datastore", datastore, "--json"],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "stored"


def test_a_missing_key_ends_the_process_with_a_sentence(running, certificates, tmp_path):
    """Not with a traceback, and not by serving without TLS."""
    named = {"topology": running.path, "kafka": "127.0.0.1:9", "port": 1, "tls_certificate": tmp_path / "none.pem"}
    env = os.environ | environment_of(ApiSettings, named)
    done = subprocess.run(
        [sys.executable, "-m", "api"], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "none.pem" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_default_is_the_environment_s(believing, certificates):
    assert str(settings_of(["https://x"]).ca) == certificates.tls.ca
