"""What the index cleaner found, and what was written to versions that are kept, over all clusters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from schemaless.cell import created_at_text
from schemaless.errors import SchemalessError
from schemaless.index.sweep import ranges_of
from schemaless.runtime.pace import sample_forever
from schemaless.storage import index_pass_table, index_write_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_pass_table import MASTERS, NO_PASS, IndexPass, PassKey
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

SAMPLE_PERIOD_S = 10.0

Passes = Mapping[PassKey, IndexPass]


async def read_passes(storage: AsyncStorage, datastore: Datastore, timeout_s: float) -> Passes | None:
    """Returns what is known of the indexes of a datastore, or None when a master is away."""
    answers = await answers_of_all(
        {
            cluster: storage.master(cluster).run(index_pass_table.of_datastore, datastore.name, timeout_s=timeout_s)
            for cluster in datastore.clusters
        },
        tolerated=SchemalessError,
    )
    return None if answers.failures else _together(answers.found.values())


async def kept_writes(
    storage: AsyncStorage, datastore: Datastore, timeout_s: float
) -> Mapping[IndexVersion, int] | None:
    """Returns how many entries were written to versions that are kept, or None when a master is away."""
    answers = await answers_of_all(
        {
            cluster: storage.master(cluster).run(index_write_table.of_datastore, datastore.name, timeout_s=timeout_s)
            for cluster in datastore.clusters
        },
        tolerated=SchemalessError,
    )
    if answers.failures:
        return None
    versions = {version for found in answers.found.values() for version in found}
    return {version: sum(found.get(version, 0) for found in answers.found.values()) for version in versions}


def cleaner_view(storage: AsyncStorage, datastore: Datastore, passes: Passes, version: IndexVersion) -> dict[str, Any]:
    """Shows what the comparisons of an index came to: those of its masters together, and of each minion."""
    minions = [minion.node.name for cluster in datastore.clusters for minion in storage.minions(cluster)]
    return {
        **_pass_view(datastore, passes.get((version, MASTERS))),
        "minions": {name: _pass_view(datastore, passes.get((version, name))) for name in minions},
    }


def _pass_view(datastore: Datastore, found: IndexPass | None) -> dict[str, Any]:
    """Shows the last comparison of each range in sums. `compared_since` is null until all were compared."""
    last = found or NO_PASS
    return {
        "ranges": last.ranges,
        "compared_since": created_at_text(last.compared_since) if last.ranges >= ranges_of(datastore) else None,
        **msgspec.structs.asdict(last.last),
        "total": {kind: getattr(last.total, kind) for kind in ("missing", "stale", "ghost", "repaired")},
    }


class PassSamples:
    """What the cleaner found in the indexes, as of the last sample. It is unknown until each master answered once.

    A master that is away counts as it was: a total that fell and rose again would look like new faults.
    """

    def __init__(self, storage: AsyncStorage, *, timeout_s: float) -> None:
        self.passes: Passes = {}
        self._differing: Mapping[IndexVersion, Collection[str]] = {}
        self._by_cluster: dict[str, Passes] = {}
        self._storage = storage
        self._timeout_s = timeout_s

    async def run(self) -> None:
        await sample_forever(self.step, SAMPLE_PERIOD_S)

    async def step(self) -> None:
        answers = await answers_of_all(
            {
                cluster: self._storage.master(cluster).run(index_pass_table.of_all, timeout_s=self._timeout_s)
                for cluster in self._storage.topology.clusters
            },
            tolerated=SchemalessError,
        )
        self._by_cluster |= answers.found
        if len(self._by_cluster) < len(self._storage.topology.clusters):
            return
        nodes = {node.name for cluster in self._storage.topology.clusters.values() for node in cluster.minions}
        found = _together(self._by_cluster.values())
        self.passes = {key: one for key, one in found.items() if key[1] in nodes or key[1] == MASTERS}
        differing: dict[IndexVersion, set[str]] = {}
        for (version, node), one in self.passes.items():
            if node != MASTERS and one.last.faults:
                differing.setdefault(version, set()).add(node)
        self._differing = differing

    def differing(self, version: IndexVersion) -> Collection[str]:
        """Returns the names of the minions whose entries of an index differed when they were last compared."""
        return self._differing.get(version, ())


def _together(answers: Iterable[Passes]) -> Passes:
    found: dict[PassKey, IndexPass] = {}
    for answer in answers:
        for key, one in answer.items():
            found[key] = index_pass_table.merged(found[key], one) if key in found else one
    return found
