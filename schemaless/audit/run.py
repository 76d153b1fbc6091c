"""audit: compares MySQL, topic, checkpoints and indexes. It knows only what is promised, and not how it is kept.

It fixes the heads of all shards first, and compares everything up to them. Memory is bounded, whatever the number of
cells: a partition is read once, with one page of each of its shards beside it, and the consumers come one by one.
docs/audit.md has the bounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from schemaless.audit.consumer_audit import ConsumerAudit
from schemaless.audit.history import audit_positions, finished_until
from schemaless.audit.index_audit import IndexAudit
from schemaless.audit.partition_audit import PartitionAudit, read_partition
from schemaless.audit.progress_audit import ProgressRecords
from schemaless.audit.report import (
    FINDINGS_MAX,
    STALL_S,
    AuditReport,
    ConsumerReport,
    FindingKind,
    Findings,
    IndexReport,
    Patience,
    ShardReport,
)
from schemaless.audit.shard_audit import Published, ShardComparison, StoredCells
from schemaless.bus.reader import PartitionReader
from schemaless.errors import BusUnavailable, StorageUnavailable
from schemaless.index.versions import merge
from schemaless.location import GenerationStart
from schemaless.names import INDEX_PREFIX
from schemaless.quantity import quantity
from schemaless.storage import (
    buffer_table,
    conflict_table,
    consumer_summary,
    entity_table,
    index_definition_table,
    refusal_table,
    shard_head,
    shard_log,
    tailer_order_table,
)
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage, IndexState
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.topology import Datastore, Topology

AUDITED = (IndexState.BUILDING, IndexState.ACTIVE)
"""An index that is paused, has failed or is being deleted is behind, and nothing promises otherwise."""


_NEEDS_ALL = "an audit needs every master and Kafka: run it again when that server is back. Nothing was judged"


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
    try:
        with SyncStorage(topology) as storage, PartitionReader(bootstrap) as reader:
            progress = ProgressRecords(bootstrap, reader, datastore)
            return _DatastoreAudit(storage, reader, progress, datastore, Findings(findings_max)).run(stall_s)
    except (StorageUnavailable, BusUnavailable) as error:
        if type(error) not in (StorageUnavailable, BusUnavailable):
            raise  # a right or a table is missing, and its own hint says what to do
        raise type(error)(f"{datastore.name} was not audited: {error}", hint=_NEEDS_ALL) from error


class _DatastoreAudit:
    """One audit of one datastore, from the heads that it fixes to its report."""

    def __init__(
        self,
        storage: SyncStorage,
        reader: PartitionReader,
        progress: ProgressRecords,
        datastore: Datastore,
        findings: Findings,
    ) -> None:
        self._begun_at = time.monotonic()
        self._storage = storage
        self._reader = reader
        self._progress = progress
        self._datastore = datastore
        self._findings = findings
        self._ahead: list[int] = []
        self._foreign = self._seeks = 0
        self._is_paused = False
        self._reports: dict[int, ShardReport] = {}
        self._starts: dict[int, Sequence[GenerationStart]] = {}

    def run(self, stall_s: float) -> AuditReport:
        storage, name = self._storage, self._datastore.name
        self._is_paused = self._ask_whether_paused()
        self._fix_heads()
        patience = Patience(stall_s)
        for partition in range(self._datastore.partitions):
            self._audit_partition(partition, patience)
        self._audit_ends()
        defined = self._defined_indexes()
        consumers, indexes = self._audit_consumers(Patience(stall_s), defined), self._audit_indexes(defined)
        masters = [storage.master(cluster) for cluster in storage.topology.clusters]
        waiting = [
            waiting
            for master in masters
            for (datastore, _), waiting in master.run(buffer_table.waiting).items()
            if datastore == name
        ]
        refused = [
            (home, refused)
            for master in masters
            for (datastore, home), refused in master.run(refusal_table.refused).items()
            if datastore == name
        ]
        return AuditReport(
            datastore=name,
            is_paused=self._is_paused,
            shards=list(self._reports.values()),
            indexes=indexes,
            not_compared=[f"{index.name} is {index.state}" for index in defined if index.state not in AUDITED],
            consumers=consumers,
            findings=self._findings,
            buffered=sum(one.rows for one in waiting),
            oldest_buffered_s=max((one.oldest_s for one in waiting), default=0.0),
            refused=refused,
            ahead=self._ahead,
            conflicts=sum(master.run(conflict_table.count, name) for master in masters),
            foreign_records=self._foreign,
            seeks=self._seeks,
            seconds=time.monotonic() - self._begun_at,
        )

    def _ask_whether_paused(self) -> bool:
        """Returns whether an operator has stopped tailing. The latest order of any master counts."""
        masters = [self._storage.master(cluster) for cluster in self._storage.topology.clusters]
        orders = [master.run(tailer_order_table.all_of).get(self._datastore.name) for master in masters]
        given = [order for order in orders if order is not None]
        return bool(given) and max(given, key=lambda order: order.changed_at).paused

    def _fix_heads(self) -> None:
        for shard in range(self._datastore.shards):
            head, self._starts[shard] = self._home(shard).run(shard_head.history, self._datastore.name, shard)
            self._reports[shard] = ShardReport(shard, head.generation, head.added_id)
            self._ahead += [found.shard for found in shard_head.ahead([head], time.time())]

    def _audit_partition(self, partition: int, patience: Patience) -> None:
        datastore, starts, findings = self._datastore, self._starts, self._findings
        cut = self._reader.committed_span(datastore.topic, partition).low > 0
        published = self._published(partition)  # read after the cut was seen, so it counts all that was cut off
        shards = datastore.shards_of_partition(partition)
        comparisons = {}
        for shard in shards:
            report = self._reports[shard]
            stored = StoredCells(
                self._home(shard), datastore, report, starts[shard], findings, shards_beside=len(shards)
            )
            promise = Published(published.get(shard)) if cut else None
            paused_at = published.get(shard, 0) if self._is_paused else None
            comparisons[shard] = ShardComparison(report, iter(stored), findings, promise, paused_at)
        one = PartitionAudit(datastore, partition, comparisons, starts, findings, cut=cut)
        read_partition(self._reader, datastore, partition, one, patience)
        self._audit_lost_offsets(partition, sum(self._reports[shard].not_held for shard in shards))
        self._foreign += one.foreign
        self._seeks += one.seeks

    def _audit_lost_offsets(self, partition: int, not_held: int) -> None:
        """Reports cells that are said to have been in the topic, if more are than offsets are gone from it.

        Each cell had an offset of its own. So a progress record that somebody moved too far hides no cells.
        """
        gone = self._reader.committed_span(self._datastore.topic, partition).low
        if not_held > gone:
            detail = (
                f"progress counts {quantity(not_held, 'cell')} that {self._datastore.topic} [{partition}] doesn't hold,"
                f" and the topic has lost {quantity(gone, 'offset')}"
            )
            self._findings.add(FindingKind.TOPIC_MISSING, -1, detail, count=not_held - gone)

    def _published(self, partition: int) -> Mapping[int, int]:
        """Returns up to which added_id each shard was published, for shards whose progress record counts.

        A record that is on another history promises nothing (I16).
        """
        positions = self._progress.read(partition, self._findings)
        wrong = audit_positions(
            self._storage, self._datastore, "progress", positions.values(), self._starts, self._findings
        )
        return {
            shard: finished_until(position.location, self._starts[shard])
            for shard, position in positions.items()
            if shard not in wrong
        }

    def _audit_ends(self) -> None:
        """Reports cells and records beyond a head that is read after them: a lost or restored head leaves such.

        The unique key of a shard's table keeps a cell from being there twice. Without the key nothing does.
        """
        for shard, report in self._reports.items():
            if not self._home(shard).run(entity_table.has_unique_key, self._datastore, shard):
                detail = "the unique key is gone, so a cell may be there twice"
                self._findings.add(FindingKind.MYSQL_WRONG, shard, detail)
            stored, head = self._home(shard).run(shard_log.ends, self._datastore, shard)
            if stored > head:
                detail = f"there are cells up to {stored}, beyond the head {head}"
                self._findings.add(FindingKind.MYSQL_WRONG, shard, detail)
            if report.topic_end > head:
                detail = f"there are records up to {report.topic_end}, beyond the head {head}"
                self._findings.add(FindingKind.TOPIC_EXTRA, shard, detail, count=report.topic_end - head)

    def _defined_indexes(self) -> Sequence[DefinedIndex]:
        masters = {cluster: self._storage.master(cluster) for cluster in self._datastore.clusters}
        rows = {
            name: master.run(index_definition_table.all_of, self._datastore.name) for name, master in masters.items()
        }
        return [index for index in merge(rows, {}).merged.values() if index.stage is not IndexStage.GONE]

    def _audit_consumers(self, patience: Patience, defined: Sequence[DefinedIndex]) -> list[ConsumerReport]:
        """Audits trigger programs, and indexes that run. What a dropped index may have left is nobody's checkpoint."""
        masters = [self._storage.master(cluster) for cluster in self._datastore.clusters]
        names = {name for master in masters for name in master.run(consumer_summary.names, self._datastore.name)}
        running = {index.definition.consumer for index in defined if index.state in AUDITED}
        for index in defined:
            if index.state is IndexState.FAILED:
                detail = f"{index.definition.consumer} has failed: {index.order.reason}"
                self._findings.add(FindingKind.CHECKPOINT_BEHIND, -1, detail)
        return [
            ConsumerAudit(self._storage, self._datastore, name, self._heads(), self._starts, self._findings).run(
                patience
            )
            for name in sorted(names)
            if name in running or not name.startswith(INDEX_PREFIX)
        ]

    def _audit_indexes(self, defined: Sequence[DefinedIndex]) -> list[IndexReport]:
        return [
            IndexAudit(self._storage, self._datastore, index.definition, self._heads(), self._findings).run()
            for index in defined
            if index.has_tables and index.state in AUDITED
        ]

    def _heads(self) -> dict[int, int]:
        """Returns by shard how far consumers can come: they follow the topic, which brings nothing of what waits for a
        resume.
        """
        return {shard: report.head - report.waiting for shard, report in self._reports.items()}

    def _home(self, shard: int) -> SyncNode:
        return self._storage.master(self._datastore.home(shard))
