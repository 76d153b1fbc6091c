"""The examples of the source texts run: FriendFeed's store, and the driver and city indexes of trips."""

import asyncio
import os
import subprocess
import sys
import uuid

import pytest

from schemaless import AsyncClient, Client
from schemaless.bus.topics import ensure_topics
from schemaless.config import IndexerSettings
from schemaless.index.definition import load_definition
from tests.consumer_harness import running_consumer
from tests.environment import environment_of
from tests.integration.api.api_harness import ROOT
from tests.log_harness import running_tailers


@pytest.fixture(scope="module")
def datastore(make_datastore, kafka):
    made = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, made)
    return made


@pytest.fixture(scope="module")
def hosts(running, kafka, api, datastore):
    """The API, with a tailer and an indexer beside it."""
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    with running_tailers(1, running.path, kafka, datastore), running_consumer(["indexer"], settings):
        yield f"http://127.0.0.1:{api.port}"


def test_friendfeed_adds_an_index_while_it_runs(hosts, datastore):
    """An entity that changed its user is found with the new one only. Links from before their index are found."""
    line = [sys.executable, "-m", "examples.friendfeed", "--datastore", datastore.name]
    env = os.environ | environment_of(IndexerSettings, {"hosts": hosts})
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counts = [int(part.split()[-2]) for part in done.stdout.splitlines() if part.startswith("user")]
    assert counts == [11, 13, 12, 12, 12]
    assert "/e/7: We just launched" in done.stdout


def test_trips_are_found_by_driver_and_by_city(hosts, datastore):
    """Both indexes have fields of BASE and STATUS. A trip that isn't completed is in the city's list only."""
    driver, city = uuid.uuid4(), uuid.uuid4()
    with Client([hosts], datastore=datastore.name) as client:
        for name in ("driver_partner_index", "city_index"):
            definition = load_definition((ROOT / "examples" / f"{name}.yaml").read_text())
            client.index(name).define(definition.document())
        trips = [uuid.uuid4() for _ in range(4)]
        for day, trip in enumerate(trips, start=1):
            created = {"created": f"2026-01-0{day}T00:00:00Z"}
            base = {
                "driver_partner_uuid": str(driver),
                "city_uuid": str(city),
                "times": created,
                "fare": {"amount": day},
            }
            client.put_cell(trip, "BASE", 1, base)
        last = [client.put(trip, "STATUS", {"is_completed": day != 2}) for day, trip in enumerate(trips, start=1)]
        for name in ("driver_partner_index", "city_index"):
            assert client.index(name).wait(40)["state"] == "active"
        locations = [put.location for put in last]
        for location in locations:
            found = client.index("driver_partner_index").query(driver_partner_uuid=driver, after=location, wait=30)
            client.index("city_index").query(city_uuid=city, after=location, wait=30)
        assert [entry.row_key for entry in found] == [trips[0], trips[2], trips[3]]
        assert [entry.fare for entry in found] == [1.0, 3.0, 4.0]
        in_city = client.index("city_index").entries(city_uuid=city, desc=True, limit=2)
        found = [(entry.row_key, entry.is_completed) for entry in in_city]
    assert found == [(trips[3], True), (trips[2], True), (trips[1], False), (trips[0], True)]
    assert found == asyncio.run(_entries_of_city(hosts, datastore, city))


async def _entries_of_city(hosts, datastore, city):
    """The same pages by the other client."""
    async with AsyncClient([hosts], datastore=datastore.name) as client:
        in_city = client.index("city_index").entries(city_uuid=city, desc=True, limit=2)
        return [(entry.row_key, entry.is_completed) async for entry in in_city]
