"""audit: compares MySQL, topic, checkpoints and indexes, and knows only what is promised, not how it is kept.

The heads of all shards are fixed first; everything is compared up to them. Memory is bounded: a partition is read
once, its shards beside it page by page.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from schemaless.audit.consumer_audit import audit_consumers
from schemaless.audit.index_audit import IndexAudit
from schemaless.audit.partition_audit import PartitionAudit, read_partition
from schemaless.audit.patience import STALL_S, Patience
from schemaless.audit.report import FINDINGS_MAX, AuditReport, FindingKind, Findings, IndexReport, ShardReport
from schemaless.audit.shard_comparison import ShardComparison
from schemaless.audit.stored_cells import StoredCells
from schemaless.bus.reader import PartitionReader
from schemaless.location import GenerationStart
from schemaless.storage import buffer_table, conflict_table, index_definition_table, shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Topology

Starts = Mapping[int, Sequence[GenerationStart]]
"""By shard, where its generations begin."""


def audit(
    topology: Topology,
    bootstrap: str,
    datastore: Datastore,
    *,
    stall_s: float = STALL_S,
    findings_max: int | None = FINDINGS_MAX,
) -> AuditReport:
    """Waits for tailers and consumers as long as they get on, at most `stall_s` without progress. Names `findings_max`
    findings, or all.

    Raises StorageUnavailable or BusUnavailable when a server is away: nothing can be said then.
    """
    begun_at = time.monotonic()
    findings = Findings(findings_max)
    with SyncStorage(topology) as storage, PartitionReader(bootstrap) as reader:
        shards, starts = _fix_heads(storage, datastore)
        foreign, seeks = _audit_topic(storage, reader, datastore, shards, starts, findings, Patience(stall_s))
        _audit_ends(storage, datastore, shards, findings)
        heads = {shard: report.head for shard, report in shards.items()}
        consumers = audit_consumers(storage, datastore, heads, findings, Patience(stall_s))
        indexes = _audit_indexes(storage, datastore, heads, findings)
        return AuditReport(
            datastore=datastore.name,
            shards=list(shards.values()),
            indexes=indexes,
            consumers=consumers,
            findings=findings,
            buffered=_count_buffered(storage, datastore),
            conflicts=_count_conflicts(storage, datastore),
            foreign_records=foreign,
            seeks=seeks,
            seconds=time.monotonic() - begun_at,
        )


def _fix_heads(storage: SyncStorage, datastore: Datastore) -> tuple[dict[int, ShardReport], Starts]:
    reports, starts = {}, {}
    for shard in range(datastore.shards):
        master = storage.master(datastore.home(shard))
        head, starts[shard] = master.run(shard_head.history, datastore.name, shard)
        reports[shard] = ShardReport(shard, head.generation, head.added_id)
    return reports, starts


def _audit_topic(
    storage: SyncStorage,
    reader: PartitionReader,
    datastore: Datastore,
    reports: Mapping[int, ShardReport],
    starts: Starts,
    findings: Findings,
    patience: Patience,
) -> tuple[int, int]:
    """Partition by partition. Returns how many records are not ours, and how many are an operator's seeks."""
    foreign = seeks = 0
    for partition in range(datastore.partitions):
        cut = reader.committed_span(datastore.topic, partition).low > 0
        shards = datastore.shards_of_partition(partition)
        comparisons = {}
        for shard in shards:
            master = storage.master(datastore.home(shard))
            stored = StoredCells(master, datastore, reports[shard], starts[shard], findings, shards_beside=len(shards))
            comparisons[shard] = ShardComparison(reports[shard], iter(stored), findings, cut=cut)
        one = PartitionAudit(datastore, partition, comparisons, starts, findings, cut=cut)
        read_partition(reader, datastore, partition, one, patience)
        foreign += one.foreign
        seeks += one.seeks
    return foreign, seeks


def _audit_ends(
    storage: SyncStorage, datastore: Datastore, reports: Mapping[int, ShardReport], findings: Findings
) -> None:
    """No cell and no record lies beyond a head that is read after them: not what a lost or restored head leaves."""
    for shard, report in reports.items():
        stored, head = storage.master(datastore.home(shard)).run(shard_log.ends, datastore, shard)
        if stored > head:
            findings.add(FindingKind.MYSQL_WRONG, shard, f"there are cells up to {stored}, beyond the head {head}")
        if report.topic_end > head:
            detail = f"there are records up to {report.topic_end}, beyond the head {head}"
            findings.add(FindingKind.TOPIC_EXTRA, shard, detail, count=report.topic_end - head)


def _audit_indexes(
    storage: SyncStorage, datastore: Datastore, heads: Mapping[int, int], findings: Findings
) -> list[IndexReport]:
    """Those whose tables are made."""
    master = storage.master(datastore.home(0))
    defined = master.run(index_definition_table.all_of, datastore.name)
    return [
        IndexAudit(storage, datastore, index.definition, heads, findings).run()
        for index in defined.values()
        if index.build_until is not None
    ]


def _count_buffered(storage: SyncStorage, datastore: Datastore) -> int:
    depths = [storage.master(cluster).run(buffer_table.depths) for cluster in storage.topology.clusters]
    return sum(count for found in depths for (name, _), count in found.items() if name == datastore.name)


def _count_conflicts(storage: SyncStorage, datastore: Datastore) -> int:
    return sum(
        storage.master(cluster).run(conflict_table.count, datastore.name) for cluster in storage.topology.clusters
    )
