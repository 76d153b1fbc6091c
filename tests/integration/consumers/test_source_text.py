"""The trigger of the source texts runs as it stands there, against real servers."""

import hashlib
import uuid
from pathlib import Path

import pytest

import examples
from examples.card_processor import failures_of
from schemaless import Client
from schemaless.bus.topics import ensure_topics
from schemaless.ops.datastores import create_shards
from schemaless.stack.plan import free_ports
from schemaless.topology import Datastore
from tests.consumer_harness import running_consumer, wait_until_finished
from tests.integration.api.api_harness import api_process
from tests.log_harness import running_tailers
from tests.waiting import until

SOURCE_TEXT_SHA256 = "65f6cbd3425186b54b9d3bdb3ab71cf179daf0eda833b48143e6fc934c2c3517"


@pytest.fixture
def mezzanine(running, storage, kafka):
    """The datastore that the text names."""
    datastore = create_shards(storage, Datastore("mezzanine", 4, 2, ("a", "b")), administrators=running.administrators)
    ensure_topics(kafka, datastore)
    return datastore


def test_bill_rider_runs_to_the_letter(tmp_path, running, kafka, storage, mezzanine):
    """It bills trips whose charge fails at first, too, and the cell that it found missing names the column."""
    _, marker, text = Path(examples.__file__).with_name("bill_rider.py").read_text().partition("# fmt: off\n")
    assert marker
    assert hashlib.sha256(text.encode()).hexdigest() == SOURCE_TEXT_SHA256
    (port,) = free_ports(1)
    processor = ["examples.card_processor", "--port", str(port), "--charges", str(tmp_path)]
    trips = [uuid.UUID(int=n) for n in range(40)]
    with api_process(running.path) as api:
        hosts = f"http://127.0.0.1:{api.port}"
        settings = {"topology": running.path, "kafka": kafka, "hosts": hosts, "retry_delay_s": 0.1}
        with (
            Client([hosts], datastore=mezzanine.name) as client,
            running_tailers(1, running.path, kafka, mezzanine),
            running_consumer(processor, {}),
            running_consumer(
                ["consumers", "examples.bill_rider", "--datastore", mezzanine.name],
                settings,
                {"CARD_PROCESSOR": f"http://127.0.0.1:{port}"},
            ) as worker,
        ):
            assert all(client.put_cells([(trip, "BASE", 1, {"fare": 12.5}) for trip in trips]))
            until(lambda: all(client.get_cell_latest(trip, "STATUS").is_completed for trip in trips))
            wait_until_finished(storage, mezzanine, "trigger:bill_rider")
            billed = [client.get_cell_latest(trip, "STATUS") for trip in trips]
            assert worker.stop() == 0
    assert {(cell.ref_key, cell.result) for cell in billed} == {(1, "SUCCESS")}
    charged = [line.split("\t")[0] for path in tmp_path.glob("*.tsv") for line in path.read_text().splitlines()]
    assert sorted(charged) == sorted(map(str, trips))
    assert any(failures_of(str(trip)) for trip in trips)
