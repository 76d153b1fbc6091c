"""The probe, with real processes all around: every stage of a cell's way is seen, each in its time."""

import re

import httpx

from schemaless.index.definition import load_definition
from schemaless.stack.plan import free_ports
from tests.consumer_harness import running_consumer
from tests.integration.api.api_harness import ROOT
from tests.waiting import async_until

_LINE = re.compile(r'schemaless_probe_seconds\{datastore="(\w+)",stage="(\w+)"\} (\S+)')
STAGES = ["acknowledged", "logged", "published", "indexed", "triggered"]


def measured(port: int) -> dict[str, float]:
    """By stage, as Prometheus would read it."""
    try:
        return {
            stage: float(value) for _, stage, value in _LINE.findall(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
        }
    except httpx.TransportError:
        return {}


async def test_every_stage_of_a_cell_is_measured(running, kafka, api, new_datastore, tailing):
    """Acknowledged, in the log, in the topic, in the index, at the trigger: none is seen before the one it rests on."""
    datastore = new_datastore(shards=4, partitions=2)
    definition = load_definition((ROOT / "deploy" / "probe-index.yaml").read_text())
    assert api.at(datastore)("PUT", f"/indexes/{definition.name}", json=definition.document()).is_success
    tailing(datastore)
    (port,) = free_ports(1)
    settings = {"topology": running.path, "kafka": kafka, "datastores": datastore.name}
    own = {"hosts": api.client.base_url, "period_s": 0.5, "stage_timeout_s": 3, "metrics_port": port}
    arguments = ["consumers.probe", "--datastore", datastore.name, "--trigger"]
    with (
        running_consumer(["indexer"], settings),
        running_consumer(arguments, settings | own),
    ):
        await async_until(lambda: len(measured(port)) == len(STAGES))  # all have joined their groups
        found = measured(port)
    assert sorted(found) == sorted(STAGES)
    assert 0 < found["acknowledged"] <= min(found.values())
    assert found["triggered"] < 3
