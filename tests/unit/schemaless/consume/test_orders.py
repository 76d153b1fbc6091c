"""Orders: which due records a look finds, when more are due than it returns."""

import types

import pytest

from schemaless.consume.trigger_worker import DUE_MAX, Orders, _ClusterOrders
from schemaless.errors import Overloaded, StorageUnavailable
from schemaless.storage.trigger_order_table import TriggerOrders
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 2, ("a", "b"))


class Masters:
    """Masters on which orders are due, those that are due longest first."""

    def __init__(self, due):
        self.due = due
        self.failure = None

    def master(self, cluster):
        async def run(look, shards, timeout_s):
            if self.failure is not None and cluster == "a":
                raise self.failure
            found = [one for one in self.due if one.shard in shards and DATASTORE.home(one.shard) == cluster]
            return _ClusterOrders(TriggerOrders(), found[:DUE_MAX])

        return types.SimpleNamespace(run=run)


async def test_orders_of_a_shard_that_stopped_hide_none_of_others():
    """A person may order a retry of a thousand records of a shard, and resume it tomorrow."""
    due = [types.SimpleNamespace(shard=0, added_id=n) for n in range(DUE_MAX)]
    due += [types.SimpleNamespace(shard=2, added_id=7), types.SimpleNamespace(shard=1, added_id=8)]
    orders = Orders(Masters(due), DATASTORE, "trigger:p")
    assert {record.shard for record in (await orders.read([0, 1, 2])).due} == {0, 1}
    seen = await orders.read([0, 1, 2], at_work=[1, 2])
    assert sorted((record.shard, record.added_id) for record in seen.due) == [(1, 8), (2, 7)]


@pytest.mark.parametrize("failure", [StorageUnavailable("away"), Overloaded("no connection was free")])
async def test_a_cluster_that_cant_be_asked_ends_no_worker(failure):
    """Its orders come with a later look. It may be our own calls that keep the connections busy."""
    masters = Masters([types.SimpleNamespace(shard=shard, added_id=7) for shard in range(4)])
    orders, shards = Orders(masters, DATASTORE, "trigger:p"), range(4)
    masters.failure = failure
    assert {DATASTORE.home(record.shard) for record in (await orders.read(shards)).due} == {"b"}
    masters.failure = None
    assert {record.shard for record in (await orders.read(shards)).due} == {*shards}
