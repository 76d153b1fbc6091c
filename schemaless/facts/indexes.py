"""Indexes: what the index cleaner found, problems, and writes to versions that are kept, over all clusters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import add
from typing import TypeVar

from schemaless.facts.servers import STATUS_TIMEOUT_S
from schemaless.runtime.pace import Sampled
from schemaless.storage import index_pass_table, index_problem_table, index_write_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import all_masters, ask_masters
from schemaless.storage.index_pass_table import MASTERS, IndexPass, PassKey
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

K = TypeVar("K")
T = TypeVar("T")
Passes = Mapping[PassKey, IndexPass]
Counts = Mapping[IndexVersion, int]


async def read_passes(storage: AsyncStorage, datastore: Datastore) -> Passes | None:
    """Returns what is known of the indexes of a datastore, or None when a master is away."""
    return await _of_all(storage, datastore, index_pass_table.of_datastore, index_pass_table.merged)


async def kept_writes(storage: AsyncStorage, datastore: Datastore) -> Counts | None:
    """Returns how many entries were written to versions that are kept, or None when a master is away."""
    return await _of_all(storage, datastore, index_write_table.of_datastore, add)


async def counts_or_none(storage: AsyncStorage, datastore: Datastore) -> Counts | None:
    """Returns how many values don't fit, by version of an index, or None when a master is away."""
    return await _of_all(storage, datastore, index_problem_table.counts_of, add)


async def count_problems(storage: AsyncStorage, datastore: Datastore) -> Counts:
    """Returns what `counts_or_none` does. Raises StorageUnavailable when a master is away."""
    answers = await all_masters(storage, datastore.clusters, index_problem_table.counts_of, datastore.name)
    return _together(answers.values(), add)


async def sample_problems(storage: AsyncStorage) -> Counts:
    """Returns how many problems the indexes of all datastores have, as far as the masters that answer know."""
    clusters = storage.topology.clusters
    answers = await ask_masters(storage, clusters, index_problem_table.counts, timeout_s=STATUS_TIMEOUT_S)
    return _together(answers.found.values(), add)


class PassSamples(Sampled[Passes]):
    """What the cleaner found in the indexes, as of the last sample. It is unknown until each master answered once.

    A master that is away counts as it was: a total that fell and rose again would look like new faults.
    """

    def __init__(self, storage: AsyncStorage) -> None:
        super().__init__(self._read, 10.0, {})
        self._differing: dict[IndexVersion, set[str]] = {}
        self._by_cluster: dict[str, Passes] = {}
        self._storage = storage

    async def _read(self) -> Passes:
        clusters = self._storage.topology.clusters
        answers = await ask_masters(self._storage, clusters, index_pass_table.of_all, timeout_s=STATUS_TIMEOUT_S)
        self._by_cluster |= answers.found
        if len(self._by_cluster) < len(clusters):
            return {}
        nodes = {MASTERS, *(minion.node.name for cluster in clusters for minion in self._storage.minions(cluster))}
        found = _together(self._by_cluster.values(), index_pass_table.merged)
        self._differing = {}
        for (version, node), one in found.items():
            if node in nodes and node != MASTERS and one.last.faults:
                self._differing.setdefault(version, set()).add(node)
        return {key: one for key, one in found.items() if key[1] in nodes}

    def differing(self, version: IndexVersion) -> Collection[str]:
        """Returns the names of the minions whose entries of an index differed when they were last compared."""
        return self._differing.get(version, ())


async def _of_all(
    storage: AsyncStorage,
    datastore: Datastore,
    operation: Callable[[str], Operation[dict[K, T]]],
    merged: Callable[[T, T], T],
) -> dict[K, T] | None:
    answers = await ask_masters(storage, datastore.clusters, operation, datastore.name, timeout_s=STATUS_TIMEOUT_S)
    return None if answers.failures else _together(answers.found.values(), merged)


def _together(answers: Iterable[Mapping[K, T]], merged: Callable[[T, T], T]) -> dict[K, T]:
    found: dict[K, T] = {}
    for answer in answers:
        for key, one in answer.items():
            found[key] = merged(found[key], one) if key in found else one
    return found
