"""Orders: what people ordered for a trigger program, as a worker reads it once a second.

It is about the shards that the worker has: which of them are paused, where checkpoints are to go, and which records of
parked cells are to be called again or discarded. The worker carries that out. Nobody else writes there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import structlog

from schemaless.errors import StorageUnavailable
from schemaless.storage import parked_table, trigger_order_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.parked_table import ParkedCell
from schemaless.storage.trigger_order_table import SeekOrder, TriggerOrders, latest
from schemaless.topology import Datastore

log = structlog.get_logger()

DUE_MAX = 1000
"""How many due records a look returns for each cluster."""

_TIMEOUT_S = 1.0


class OrdersSeen(msgspec.Struct, frozen=True):
    """What is ordered. `program_paused`: nothing of the program is called. `seeks` and `paused` are by shard.

    `due` are records of shards that aren't paused, those that are due longest first.
    """

    program_paused: bool = False
    paused: frozenset[int] = frozenset()
    seeks: Mapping[int, SeekOrder] = {}
    due: Sequence[ParkedCell] = ()

    def is_paused(self, shard: int) -> bool:
        """Whether nothing of a shard is called. Before a seek that is so too, or cells that it passes would be."""
        return self.program_paused or shard in self.paused or shard in self.seeks


class _ClusterOrders(msgspec.Struct, frozen=True):
    orders: TriggerOrders
    due: Sequence[ParkedCell]


class Orders:
    """Reads the orders for one program from the masters of its datastore."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str) -> None:
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._known: dict[str, TriggerOrders] = {}

    async def read(self, shards: Collection[int], at_work: Collection[int] | None = None) -> OrdersSeen:
        """Returns what is ordered for these shards. A cluster that is away keeps its last known pauses and seeks.

        `at_work` are those that can carry out orders for records now, by default all. What is due in others, such as a
        shard that stopped, would fill each look, and orders of the shards at work would never be seen.
        """
        by_home: dict[str, list[int]] = {cluster: [] for cluster in self._datastore.clusters}
        for shard in shards if at_work is None else at_work:
            by_home[self._datastore.home(shard)].append(shard)
        answers = await answers_of_all(
            {
                cluster: self._storage.master(cluster).run(self._look, tuple(own), timeout_s=_TIMEOUT_S)
                for cluster, own in by_home.items()
            },
            tolerated=StorageUnavailable,
        )
        for cluster, error in answers.failures.items():
            log.warning("orders can't be read", consumer=self._consumer, cluster=cluster, why=str(error))
        self._known.update({cluster: found.orders for cluster, found in answers.found.items()})
        paused = latest(self._known.values()).paused
        ours = set(shards)
        return OrdersSeen(
            program_paused=paused,
            paused=frozenset(shard for one in self._known.values() for shard in one.paused),
            seeks={n: seek for one in self._known.values() for n, seek in one.seeks.items() if n in ours},
            due=() if paused else [record for found in answers.found.values() for record in found.due],
        )

    def _look(self, shards: Sequence[int]) -> Operation[_ClusterOrders]:
        name, consumer = self._datastore.name, self._consumer
        orders = yield from trigger_order_table.of_consumer(name, consumer)
        due = [] if orders.program.paused else (yield from parked_table.due(name, consumer, DUE_MAX, shards))
        return _ClusterOrders(orders, due)
