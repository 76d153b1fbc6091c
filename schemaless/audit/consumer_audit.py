"""Checkpoints of every consumer against the heads (I9, I10): each one must have finished all of every shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from schemaless.audit.report import ConsumerReport, FindingKind, Findings, Patience
from schemaless.storage import checkpoint_table
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore

Checkpoints = Mapping[tuple[str, str, int], Checkpoint]
"""Checkpoints by consumer, cluster and shard."""


def audit_consumers(
    storage: SyncStorage, datastore: Datastore, heads: Mapping[int, int], findings: Findings, patience: Patience
) -> list[ConsumerReport]:
    """Waits while consumers make progress, and reports each one. Stopped shards are not waited for."""
    found = _read(storage, datastore)
    while any(
        checkpoint is None or checkpoint.state is State.RUNNING for _, checkpoint in _behind(datastore, found, heads)
    ):
        if not patience.wait():
            break
        before, found = found, _read(storage, datastore)
        if _finished(datastore, found, heads) != _finished(datastore, before, heads):
            patience.renew()
    for (consumer, cluster, shard), checkpoint in _behind(datastore, found, heads):
        findings.add(FindingKind.CHECKPOINT_BEHIND, shard, f"{consumer} {_describe(cluster, checkpoint, heads[shard])}")
    finished = _finished(datastore, found, heads)
    return [ConsumerReport(name, sum(heads.values()), finished[name]) for name in sorted(_consumers(found))]


def _read(storage: SyncStorage, datastore: Datastore) -> Checkpoints:
    return {
        (checkpoint.consumer, cluster, checkpoint.shard): checkpoint
        for cluster in datastore.clusters
        for checkpoint in storage.master(cluster).run(checkpoint_table.all_of, datastore.name)
    }


def _behind(
    datastore: Datastore, found: Checkpoints, heads: Mapping[int, int]
) -> Iterator[tuple[tuple[str, str, int], Checkpoint | None]]:
    """Yields checkpoints that are before their head on any cluster, and those that are missing at the shard's home."""
    at_home = {(name, datastore.home(shard), shard) for name in _consumers(found) for shard in heads}
    for place in sorted(at_home | found.keys()):
        checkpoint = found.get(place)
        finished = 0 if checkpoint is None else checkpoint.location.added_id
        if finished < heads.get(place[2], 0):
            yield place, checkpoint


def _finished(datastore: Datastore, found: Checkpoints, heads: Mapping[int, int]) -> Counter[str]:
    """Counts finished cells by consumer. The slowest checkpoint of each shard counts."""
    slowest: dict[tuple[str, int], int] = {}
    for (name, _, shard), checkpoint in found.items():
        known = slowest.get((name, shard), heads.get(shard, 0))
        slowest[name, shard] = min(known, checkpoint.location.added_id)
    finished: Counter[str] = Counter()
    for (name, _), added_id in slowest.items():
        finished[name] += added_id
    return finished


def _consumers(found: Checkpoints) -> set[str]:
    return {name for name, _, _ in found}


def _describe(cluster: str, checkpoint: Checkpoint | None, head: int) -> str:
    if checkpoint is None:
        return f"has no checkpoint on {cluster}, the head is {head}"
    stopped = f", stopped: {checkpoint.reason}" if checkpoint.state is State.STOPPED else ""
    return f"has finished {checkpoint.location.added_id} of {head} on {cluster}{stopped}"
