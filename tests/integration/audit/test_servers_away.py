"""An audit that can't be made says so once, with the server, and that nothing was judged."""

import dataclasses

import pytest

from schemaless.audit.run import audit
from schemaless.bus.topics import ensure_topics
from schemaless.errors import StorageUnavailable
from schemaless.stack.plan import free_ports
from schemaless.topology import StorageCluster


def test_a_master_that_is_away_is_named_once(running, make_datastore, kafka):
    datastore = make_datastore(shards=8, partitions=1)
    ensure_topics(kafka, datastore)
    (nobody,) = free_ports(1)
    clusters = dict(running.topology.clusters)
    master, *minions = clusters["a"].nodes
    gone = dataclasses.replace(master, port=nobody, socket=None)
    clusters["a"] = StorageCluster("a", (gone, *minions))
    with pytest.raises(StorageUnavailable, match=rf"^{datastore.name} was not audited: {gone.name}: ") as refused:
        audit(dataclasses.replace(running.topology, clusters=clusters), kafka, datastore, stall_s=0.1)
    assert str(refused.value).count(f"{gone.name}: ") == 1
    assert "Nothing was judged" in refused.value.hint
