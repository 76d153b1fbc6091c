"""Checkpoints of every consumer against the heads (I9, I10): each one must have finished all of every shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from schemaless.audit.patience import Patience
from schemaless.audit.report import ConsumerReport, FindingKind, Findings
from schemaless.storage import checkpoint_table
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore

Standing = Mapping[tuple[str, str, int], Checkpoint]
"""By consumer, cluster and shard."""


def audit_consumers(
    storage: SyncStorage, datastore: Datastore, heads: Mapping[int, int], findings: Findings, patience: Patience
) -> list[ConsumerReport]:
    """Waits for consumers that get on; a shard that was stopped is not waited for."""
    standing = _standing(storage, datastore)
    while any(_is_running(checkpoint) for _, checkpoint in _behind(datastore, standing, heads)):
        if not patience.wait():
            break
        before, standing = standing, _standing(storage, datastore)
        if _finished(datastore, standing, heads) != _finished(datastore, before, heads):
            patience.renew()
    for (consumer, cluster, shard), checkpoint in _behind(datastore, standing, heads):
        findings.add(FindingKind.CHECKPOINT_BEHIND, shard, f"{consumer} {_told(cluster, checkpoint, heads[shard])}")
    finished = _finished(datastore, standing, heads)
    return [ConsumerReport(name, sum(heads.values()), finished[name]) for name in sorted(_consumers(standing))]


def _standing(storage: SyncStorage, datastore: Datastore) -> Standing:
    return {
        (checkpoint.consumer, cluster, checkpoint.shard): checkpoint
        for cluster in datastore.clusters
        for checkpoint in storage.master(cluster).run(checkpoint_table.all_of, datastore.name)
    }


def _behind(
    datastore: Datastore, standing: Standing, heads: Mapping[int, int]
) -> Iterator[tuple[tuple[str, str, int], Checkpoint | None]]:
    """Checkpoints before their head, wherever they stand; and those that are missing at the shard's home."""
    at_home = {(name, datastore.home(shard), shard) for name in _consumers(standing) for shard in heads}
    for place in sorted(at_home | standing.keys()):
        checkpoint = standing.get(place)
        if _added_id(checkpoint) < heads.get(place[2], 0):
            yield place, checkpoint


def _finished(datastore: Datastore, standing: Standing, heads: Mapping[int, int]) -> Counter[str]:
    """Cells by consumer, as the slowest checkpoint of each shard has it."""
    slowest: dict[tuple[str, int], int] = {}
    for (name, _, shard), checkpoint in standing.items():
        known = slowest.get((name, shard), heads.get(shard, 0))
        slowest[name, shard] = min(known, checkpoint.location.added_id)
    finished: Counter[str] = Counter()
    for (name, _), added_id in slowest.items():
        finished[name] += added_id
    return finished


def _consumers(standing: Standing) -> set[str]:
    return {name for name, _, _ in standing}


def _added_id(checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.location.added_id


def _is_running(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is None or checkpoint.state is State.RUNNING


def _told(cluster: str, checkpoint: Checkpoint | None, head: int) -> str:
    if checkpoint is None:
        return f"has no checkpoint on {cluster}, the head is {head}"
    stopped = f", stopped: {checkpoint.reason}" if checkpoint.state is State.STOPPED else ""
    return f"has finished {checkpoint.location.added_id} of {head} on {cluster}{stopped}"
