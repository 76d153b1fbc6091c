"""audit: compares MySQL, topic, checkpoints and indexes. It knows only what is promised, and not how it is kept.

It fixes the heads of all shards first, and compares everything up to them. Memory is bounded: a partition is read once,
and its shards beside it page by page.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from schemaless.audit.consumer_audit import audit_consumers
from schemaless.audit.index_audit import IndexAudit
from schemaless.audit.partition_audit import PartitionAudit, read_partition
from schemaless.audit.report import FINDINGS_MAX, STALL_S, AuditReport, FindingKind, Findings, Patience, ShardReport
from schemaless.audit.shard_audit import ShardComparison, StoredCells
from schemaless.bus.reader import PartitionReader
from schemaless.location import GenerationStart
from schemaless.storage import buffer_table, conflict_table, index_definition_table, shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Topology

Starts = Mapping[int, Sequence[GenerationStart]]
"""The starts of each shard's generations."""


def audit(
    topology: Topology,
    bootstrap: str,
    datastore: Datastore,
    *,
    stall_s: float = STALL_S,
    findings_max: int | None = FINDINGS_MAX,
) -> AuditReport:
    """Audits a datastore. Waits while tailers and consumers make progress, at most `stall_s` without any.

    The report names `findings_max` findings, or all. Raises StorageUnavailable or BusUnavailable when a server is
    unreachable, because nothing can be judged then.
    """
    begun_at = time.monotonic()
    findings = Findings(findings_max)
    with SyncStorage(topology) as storage, PartitionReader(bootstrap) as reader:
        shards, starts = _fix_heads(storage, datastore)
        foreign, seeks = _audit_topic(storage, reader, datastore, shards, starts, findings, Patience(stall_s))
        _audit_ends(storage, datastore, shards, findings)
        heads = {shard: report.head for shard, report in shards.items()}
        consumers = audit_consumers(storage, datastore, heads, findings, Patience(stall_s))
        defined = storage.master(datastore.home(0)).run(index_definition_table.all_of, datastore.name)
        indexes = [
            IndexAudit(storage, datastore, index.definition, heads, findings).run()
            for index in defined.values()
            if index.build_until is not None  # its tables exist
        ]
        masters = [storage.master(cluster) for cluster in topology.clusters]
        waiting = [
            count
            for master in masters
            for (name, _), count in master.run(buffer_table.depths).items()
            if name == datastore.name
        ]
        return AuditReport(
            datastore=datastore.name,
            shards=list(shards.values()),
            indexes=indexes,
            consumers=consumers,
            findings=findings,
            buffered=sum(waiting),
            conflicts=sum(master.run(conflict_table.count, datastore.name) for master in masters),
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
    """Audits all partitions. Returns how many records are not ours, and how many are an operator's seeks."""
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
    """Reports cells and records beyond a head that is read after them: a lost or restored head leaves such."""
    for shard, report in reports.items():
        stored, head = storage.master(datastore.home(shard)).run(shard_log.ends, datastore, shard)
        if stored > head:
            findings.add(FindingKind.MYSQL_WRONG, shard, f"there are cells up to {stored}, beyond the head {head}")
        if report.topic_end > head:
            detail = f"there are records up to {report.topic_end}, beyond the head {head}"
            findings.add(FindingKind.TOPIC_EXTRA, shard, detail, count=report.topic_end - head)
