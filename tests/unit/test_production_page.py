"""docs/production.md: what it copies from the code and from deploy/ is what stands there."""

import json
import re
from pathlib import Path

from schemaless.bus.partition_log import PROGRESS_FORMAT
from schemaless.bus.topics import MESSAGE_BYTES_MAX
from schemaless.names import RECORD_VERSION
from schemaless.stack import plan
from schemaless.storage import schema
from schemaless.topology import TOPOLOGY_VERSION, load_topology

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "production.md").read_text()


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return text


def test_the_versions_of_formats_are_those_of_the_code():
    row = re.compile(r"^\| ([\w ]+) \| (\d+) \|", re.MULTILINE)
    shown, changelog = dict(row.findall(PAGE)), dict(row.findall((ROOT / "CHANGELOG.md").read_text()))
    assert shown.items() <= changelog.items()
    assert changelog["topology file"] == str(TOPOLOGY_VERSION)
    assert changelog["records of the cells topic"] == RECORD_VERSION.decode()
    assert shown == {
        "databases": str(schema.FORMAT_VERSION),
        "progress records": str(PROGRESS_FORMAT),
        "folder of the embedded stack": str(plan.FORMAT),
    }


def test_the_topology_of_the_page_is_one(tmp_path):
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(json.loads(block("json"))))
    file.chmod(0o600)
    clusters = load_topology(file).clusters
    assert {name: len(cluster.nodes) for name, cluster in clusters.items()} == {"a": 2, "b": 1}


def test_the_settings_of_kafka_are_those_that_compose_has_for_one_broker():
    """The copies differ. The largest message is that of the code."""
    compose = (ROOT / "deploy" / "docker" / "kafka" / "server.properties").read_text()
    ours = dict(line.split("=", 1) for line in compose.splitlines() if "=" in line and not line.startswith("#"))
    shown = dict(line.split("=", 1) for line in block("properties").splitlines())
    assert shown.keys() <= ours.keys()
    different = {name for name, value in shown.items() if ours[name] != value}
    assert all("replication.factor" in name or "isr" in name for name in different)
    assert shown["message.max.bytes"] == str(MESSAGE_BYTES_MAX)
