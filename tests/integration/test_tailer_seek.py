"""`schemaless tailer seek`: what an operator says is what the next owner of the log goes on from."""

import pytest
from typer.testing import CliRunner

from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.cli import app
from schemaless.errors import Invalid
from schemaless.location import BEGINNING, Location

pytestmark = pytest.mark.storage


@pytest.fixture
def seek(running, kafka, monkeypatch):
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)
    return lambda *arguments: CliRunner().invoke(app, ["tailer", "seek", *arguments])


@pytest.fixture
def locations(kafka):
    def read(datastore):
        logs = [
            PartitionLog(kafka, datastore, partition, transaction_timeout_s=20)
            for partition in range(datastore.partitions)
        ]
        found = {shard: location for log in logs for shard, location in log.open().locations.items()}
        for log in logs:
            log.close()
        return found

    return read


def test_one_shard_or_all_go_on_where_told(seek, locations, kafka, make_datastore):
    """A dry run writes nothing; a named shard moves alone; without a name all move."""
    datastore = make_datastore(shards=4, partitions=2)
    ensure_topics(kafka, datastore)
    assert seek(datastore.name, "2:7", "--shard", "3", "--dry-run").output == "partition 1: shards 3 go on after 2:7\n"
    assert locations(datastore) == dict.fromkeys(range(4), BEGINNING)
    assert seek(datastore.name, "2:7", "--shard", "3").exit_code == 0
    assert locations(datastore) == {0: BEGINNING, 1: BEGINNING, 2: BEGINNING, 3: Location(2, 7)}
    assert seek(datastore.name, "0").exit_code == 0
    assert locations(datastore) == dict.fromkeys(range(4), BEGINNING)


@pytest.mark.parametrize("arguments", [("0", "--shard", "4"), ("x",), ("1:x",)])
def test_a_wrong_place_is_refused(seek, make_datastore, arguments):
    """A shard out of range, a malformed location: nothing is written."""
    datastore = make_datastore(shards=4, partitions=2)
    assert isinstance(seek(datastore.name, *arguments).exception, Invalid)
