"""The port of metrics: what every process shows, who may see it, and what is said when it can't be opened."""

import socket
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemaless.config import CleanerSettings
from schemaless.errors import Misconfigured
from schemaless.runtime.service_metrics import ServiceMetrics
from schemaless.stack.plan import free_ports
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import parse_topology

NO_SERVERS = {"version": 2, "clusters": {}}


def settings_at(port, **more):
    return CleanerSettings(topology="none", kafka="none", metrics_port=port, **more)


@asynccontextmanager
async def served(**settings):
    """Yields the address of the metrics of a service without servers."""
    (port,) = free_ports(1)
    metrics = ServiceMetrics("cleaner")
    async with AsyncStorage(parse_topology(NO_SERVERS)) as storage:
        metrics.watch_storage(storage)
        async with metrics.served(settings_at(port, **settings)), httpx.AsyncClient() as client:
            yield client, f"http://127.0.0.1:{port}/metrics"


async def test_every_process_shows_its_version_its_resources_and_its_loop():
    """In Prometheus' text format."""
    async with served() as (client, url):
        answer = await client.get(url)
    assert answer.headers["content-type"].startswith("text/plain")
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert found["schemaless_build_info"].samples[0].labels["service"] == "cleaner"
    assert {"process_cpu_seconds", "python_info", "schemaless_service_loop_late_seconds"} <= found.keys()


async def test_with_a_token_only_its_bearer_sees_them(tmp_path):
    """I17: also on loopback, when a token is configured."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("secret\n")
    async with served(metrics_token_file=file) as (client, url):
        given = [None, "Bearer other", "secret", "Bearer secret"]
        statuses = [
            (await client.get(url, headers={} if header is None else {"authorization": header})).status_code
            for header in given
        ]
        alive = await client.get(url.replace("metrics", "healthz"))
    assert statuses == [401, 401, 401, 200]
    assert (alive.status_code, alive.json()) == (200, {"status": "alive"})  # a supervisor has no token


async def test_a_header_that_is_no_text_is_a_wrong_token(tmp_path):
    """Bytes beyond UTF-8 get the same answer as any other token, and no traceback in the log."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("secret\n")
    async with served(metrics_token_file=file) as (client, url):
        answer = await client.get(url, headers={"authorization": b"Bearer \xff\xfe"})
    assert answer.status_code == 401


@pytest.mark.parametrize("text", [None, "", " \n"])
async def test_a_token_file_that_names_no_token_opens_nothing(tmp_path, text):
    """I17: also on loopback. Who named a file wants a token, and a path with a typo must not open the port."""
    file = tmp_path / "token"
    if text is not None:
        file.touch(mode=0o600)
        file.write_text(text)
    with pytest.raises(Misconfigured, match=f"{file} .*SCHEMALESS_METRICS_TOKEN_FILE"):
        async with served(metrics_token_file=file):
            pass


async def test_outside_loopback_a_token_is_required():
    """I17: a port that everybody can read is never opened."""
    with pytest.raises(Misconfigured, match="SCHEMALESS_METRICS_TOKEN_FILE"):
        async with ServiceMetrics("cleaner").served(settings_at(0, metrics_host="0.0.0.0")):
            pass


async def test_a_port_that_is_taken_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"SCHEMALESS_METRICS_PORT: 127.0.0.1:{port}"):
            async with ServiceMetrics("cleaner").served(settings_at(port)):
                pass


async def test_without_a_port_nothing_is_served():
    async with ServiceMetrics("cleaner").served(settings_at(None)):
        pass
