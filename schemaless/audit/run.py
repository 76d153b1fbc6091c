"""audit: compares MySQL, topic, checkpoints and indexes. It knows only what is promised, and not how it is kept.

It fixes the heads of all shards first, and compares everything up to them. Memory is bounded, whatever the number of
cells: a partition is read once, with one page of each of its shards beside it, and the consumers come one by one.
docs/audit.md has the bounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from schemaless.audit.consumer_audit import ConsumerAudit, audit_positions, finished_until
from schemaless.audit.partition_audit import PartitionAudit, Published, ShardComparison, StoredCells, read_partition
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
from schemaless.bus.ownership import require_ours
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import describe_topic
from schemaless.cell import ColumnName, RowKey, row_key_text
from schemaless.codec import Body, decode_body
from schemaless.errors import BusUnavailable, NotWhole, StorageUnavailable, TableMissing, TopicMissing
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry, entries_for, entry_shard
from schemaless.index.versions import merge
from schemaless.location import GenerationStart
from schemaless.names import INDEX_PREFIX
from schemaless.position import Position
from schemaless.quantity import quantity
from schemaless.runtime.batching import chunks
from schemaless.sharding import shard_of
from schemaless.storage import (
    buffer_table,
    conflict_table,
    consumer_summary,
    entity_table,
    index_definition_table,
    index_table,
    refusal_table,
    shard_head,
    shard_log,
    tailer_order_table,
)
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage, IndexState
from schemaless.storage.index_table import BEFORE_ALL, EntryKey, FoundEntry
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.server_settings import ServerIds, ServerSettings
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore, Role, Topology

AUDITED = (IndexState.BUILDING, IndexState.ACTIVE)
"""An index that is paused, has failed or is being deleted is behind, and nothing promises otherwise."""


COUNTED_AT_ONCE = 100_000
"""Cells of a minion: a statement takes some milliseconds, and a hole is looked for among so many ids."""
_NEEDS_ALL = "an audit needs every master and Kafka: run it again when that server is back. Nothing was judged"

HOME_LOOKS, HOME_LOOK_PAUSE_S = 8, 0.5  # a shard that moves is closed for less than all of them


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
            live = storage.live(datastore)
            progress = ProgressRecords(bootstrap, reader, live)
            return _DatastoreAudit(storage, reader, progress, live, Findings(findings_max)).run(stall_s)
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
        self._unread: list[str] = []
        self._foreign = self._seeks = 0
        self._is_paused = False
        self._reports: dict[int, ShardReport] = {}
        self._starts: dict[int, Sequence[GenerationStart]] = {}

    def run(self, stall_s: float) -> AuditReport:
        storage, name = self._storage, self._datastore.name
        self._is_paused = self._ask_whether_paused()
        self._audit_homes()
        self._fix_heads()
        patience = Patience(stall_s)
        for partition in range(self._audit_counts()):
            self._audit_partition(partition, patience)
        self._audit_ends()
        self._audit_minions()
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
            not_compared=[f"index {index.name} is {index.state}" for index in defined if index.state not in AUDITED]
            + self._unread,
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

    def _audit_homes(self) -> None:
        """Reports shards that aren't open at their home alone. While one moves, it is open nowhere for a moment."""
        for look in range(HOME_LOOKS):
            if look:
                time.sleep(HOME_LOOK_PAUSE_S)
            self._storage.look()
            open_at: dict[int, list[str]] = {shard: [] for shard in range(self._datastore.shards)}
            for cluster in sorted(self._storage.topology.clusters):
                for head in self._storage.master(cluster).run(shard_head.heads_at_home, self._datastore.name):
                    open_at[head.shard].append(cluster)
            wrong = {n: found for n, found in open_at.items() if found != [self._datastore.home(n)]}
            if not wrong:
                return
        for shard, found in wrong.items():
            where = " and ".join(found) or "no cluster"
            detail = f"it is open at {where}, and its home is {self._datastore.home(shard)}"
            self._findings.add(FindingKind.HOME_DIFFERS, shard, detail)

    def _fix_heads(self) -> None:
        for shard in range(self._datastore.shards):
            head, self._starts[shard] = self._home(shard).run(shard_head.history, self._datastore.name, shard)
            self._reports[shard] = ShardReport(shard, head.generation, head.added_id)
            self._ahead += [found.shard for found in shard_head.ahead([head], time.time())]

    def _audit_counts(self) -> int:
        """Returns how many partitions the cells topic has, which somebody may have raised under the datastore (I8)."""
        datastore = self._datastore
        counts = self._progress.partition_counts
        for topic, count in counts.items():
            if count != datastore.partitions:
                detail = f"topic {topic} has {count} partitions, and datastore {datastore.name} {datastore.partitions}"
                self._findings.add(FindingKind.TOPIC_PARTITIONS, -1, detail)
        return counts[datastore.topic]

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
        self._storage.look()  # the topic may have cells of a shard that moved meanwhile
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

    def _audit_minions(self) -> None:
        """Reports minions that lack cells up to the heads that they show, and settings that make them lack some (I3).

        A minion that is away promises nothing, and the report says that it wasn't compared.
        """
        ids: ServerIds = {}
        for cluster in self._datastore.clusters:
            master = self._storage.master(cluster)
            master.run(ServerSettings(master.node, ids=ids).ask)
            for minion in self._storage.minions(cluster):
                settings = ServerSettings(minion.node, Role.MINION, ids=ids)
                try:
                    minion.run(settings.ask)
                    for head in minion.run(shard_head.heads_at_home, self._datastore.name):
                        self._audit_minion(minion, head)
                except StorageUnavailable as error:
                    self._unread.append(f"the minion {minion.node.name}: {error}")
                for fault in settings.faults:
                    if fault.hides:
                        self._findings.add(FindingKind.MINION_LACKS, -1, f"{minion.node.name}: {fault}")

    def _audit_minion(self, minion: SyncNode, head: Head) -> None:
        try:
            for cells in chunks(range(head.added_id), count_max=COUNTED_AT_ONCE):
                minion.run(shard_log.verify_dense, self._datastore, head.shard, cells[0], cells[-1] + 1)
        except NotWhole as error:  # what the master lacks too is named already
            missing = {head.shard: error.added_id}
            if self._home(head.shard).run(shard_log.digests, self._datastore, missing)[head.shard] is not None:
                self._findings.add(FindingKind.MINION_LACKS, head.shard, f"{minion.node.name}: {error}")
        except TableMissing as error:
            self._findings.add(FindingKind.MINION_LACKS, head.shard, str(error))

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
        # A version has no checkpoint until an indexer has seen it.
        running = {index.definition.consumer: index.definition.placed(self._datastore) for index in _audited(defined)}
        for index in defined:
            if index.state is IndexState.FAILED:
                detail = f"{index.definition.consumer} has failed: {index.order.reason}"
                self._findings.add(FindingKind.CHECKPOINT_BEHIND, -1, detail)
        return [
            ConsumerAudit(
                self._storage,
                self._datastore,
                running.get(name, self._datastore),
                name,
                self._heads(),
                self._starts,
                self._findings,
            ).run(patience)
            for name in sorted(names | running.keys())
            if name in running or not name.startswith(INDEX_PREFIX)
        ]

    def _audit_indexes(self, defined: Sequence[DefinedIndex]) -> list[IndexReport]:
        reports = []
        for index in _audited(defined):
            one = IndexAudit(self._storage, self._datastore, index.definition, self._heads(), self._findings)
            try:
                reports.append(one.run())
            except TableMissing:
                if index.definition in [each.definition for each in _audited(self._defined_indexes())]:
                    raise
                self._unread.append(f"index {index.name}, version {index.number}, was dropped meanwhile")
        return reports

    def _heads(self) -> dict[int, int]:
        """Returns by shard how far consumers can come: they follow the topic, which brings nothing of what waits for a
        resume.
        """
        return {shard: report.head - report.waiting for shard, report in self._reports.items()}

    def _home(self, shard: int) -> SyncNode:
        return self._storage.master(self._datastore.home(shard))


def _audited(defined: Sequence[DefinedIndex]) -> list[DefinedIndex]:
    return [index for index in defined if index.has_tables and index.state in AUDITED]


# One index against the cells (I11): every entry of a row, computed from its newest cells, is in the shard of its shard
# field with these values, and in no other shard.
#
# Rows are judged as of the heads that the audit fixed. A row with newer cells is counted, not judged.

PAGE_ROWS = 1000

Entries = dict[EntryKey, IndexEntry]


class IndexAudit:
    """The audit of one index. `heads` are the fixed heads by shard."""

    def __init__(
        self,
        storage: SyncStorage,
        datastore: Datastore,
        definition: IndexDefinition,
        heads: Mapping[int, int],
        findings: Findings,
    ) -> None:
        self.report = IndexReport(definition.name, number=definition.number)
        self._storage = storage
        self._datastore = datastore
        self._definition = definition
        self._placed = definition.placed(datastore)
        self._heads = heads
        self._findings = findings
        self._present_in: Counter[int] = Counter()  # entries that are where they should be, by index shard

    def run(self) -> IndexReport:
        for shard, head in self._heads.items():
            for row_keys in self._rows(shard, head):
                self._check_rows(shard, row_keys)
        for shard in self._heads:
            found = self._entries(shard).run(index_table.count_live, self._datastore, shard, self._definition)
            self.report.found += found
            if found != self._present_in[shard]:
                self._name_extras(shard)
        return self.report

    def _rows(self, shard: int, head: int) -> Iterator[list[RowKey]]:
        """Yields pages of row keys."""
        after = RowKey(b"")
        while True:
            page = self._home(shard).run(
                entity_table.row_keys, self._datastore, shard, self._definition.columns, head, after, PAGE_ROWS
            )
            if page:
                yield page
            if len(page) < PAGE_ROWS:
                return
            after = page[-1]

    def _check_rows(self, shard: int, row_keys: Sequence[RowKey]) -> None:
        """Checks that the entries of a source shard's rows are where they should be."""
        expected = self._expected(shard, row_keys)
        by_index_shard: dict[int, dict[RowKey, None]] = {}
        for (row_key, _), entry in expected.items():
            by_index_shard.setdefault(self._index_shard(entry), {})[row_key] = None
        found = self._found(by_index_shard)
        here = {
            key: found[index_shard, key]
            for key, entry in expected.items()
            if (index_shard := self._index_shard(entry), key) in found
        }
        self._present_in.update(self._index_shard(expected[key]) for key in here)
        self.report.expected += len(expected)
        wrong = [key for key, entry in expected.items() if here.get(key) != entry]
        self.report.matched += len(expected) - len(wrong)
        for key in self._judged(shard, wrong):
            kind = FindingKind.INDEX_DIFFERS if key in here else FindingKind.INDEX_MISSING
            self._add(kind, self._index_shard(expected[key]), key[0])

    def _name_extras(self, index_shard: int) -> None:
        """Reports entries of one index shard whose rows have none, or have it elsewhere."""
        for page in self._live_entries(index_shard):
            by_source: dict[int, list[EntryKey]] = {}
            for found in page:
                source = shard_of(found.row_key, self._datastore.shards)
                by_source.setdefault(source, []).append((found.row_key, found.element))
            for source, keys in by_source.items():
                expected = self._expected(source, list(dict.fromkeys(row_key for row_key, _ in keys)))
                extra = [key for key in keys if key not in expected or self._index_shard(expected[key]) != index_shard]
                for row_key, _ in self._judged(source, extra):
                    self._add(FindingKind.INDEX_EXTRA, index_shard, row_key)

    def _expected(self, shard: int, row_keys: Sequence[RowKey]) -> Entries:
        """Returns the entries of rows that have one, as of the shard's head."""
        entries: Entries = {}
        unread = row_keys
        while unread:
            rows = {shard: (self._heads[shard], unread)}
            page = self._home(shard).run(entity_table.newest_until, self._datastore, rows, self._definition.columns)
            bodies: dict[RowKey, dict[ColumnName, Body]] = {}
            for cell in page.cells:
                bodies.setdefault(cell.row_key, {})[cell.column_name] = decode_body(cell.body)
            for row_key, newest in bodies.items():
                for element, entry in enumerate(entries_for(self._definition, newest)):
                    if entry is not None:
                        entries[row_key, element] = entry
            unread = page.unread.get(shard, ())
        return entries

    def _found(self, row_keys: Mapping[int, Iterable[RowKey]]) -> dict[tuple[int, EntryKey], IndexEntry]:
        """Returns by index shard and key the entries that index shards hold of rows."""
        found: dict[tuple[int, EntryKey], IndexEntry] = {}
        for cluster, shards in self._placed.by_home(row_keys, lambda shard: shard).items():
            wanted = {shard: list(row_keys[shard]) for shard in shards}
            answers = self._storage.master(cluster).run(
                index_table.entries_of, self._datastore, self._definition, wanted
            )
            for shard, answer in answers.items():
                found.update({(shard, (item.row_key, item.element)): item.entry for item in answer})
        return found

    def _live_entries(self, index_shard: int) -> Iterator[list[FoundEntry]]:
        after = BEFORE_ALL
        while True:
            page = self._entries(index_shard).run(
                index_table.live_entries, self._datastore, index_shard, self._definition, after, PAGE_ROWS
            )
            if page:
                yield page
            if len(page) < PAGE_ROWS:
                return
            after = page[-1].row_key, page[-1].element

    def _judged(self, shard: int, keys: Sequence[EntryKey]) -> list[EntryKey]:
        """Returns the entries of rows without newer cells than the fixed head, and counts the others."""
        if not keys:
            return []
        moved = self._home(shard).run(
            entity_table.rows_changed_since,
            self._datastore,
            shard,
            self._definition.columns,
            self._heads[shard],
            list(dict.fromkeys(row_key for row_key, _ in keys)),
        )
        self.report.moved_on += len(moved)
        return [key for key in keys if key[0] not in moved]

    def _index_shard(self, entry: IndexEntry) -> int:
        return entry_shard(self._definition, entry, self._datastore.shards)

    def _home(self, shard: int) -> SyncNode:
        return self._storage.master(self._datastore.home(shard))

    def _entries(self, index_shard: int) -> SyncNode:
        return self._storage.master(self._placed.home(index_shard))

    def _add(self, kind: FindingKind, index_shard: int, row_key: RowKey) -> None:
        self._findings.add(kind, index_shard, f"index {self._definition.name}: row {row_key_text(row_key)}")


# Progress records, read by the audit itself: how far each shard of a partition is promised to be published (I7).

_TIMEOUT_S = 10.0


class _ProgressRecord(msgspec.Struct, frozen=True, gc=False):
    """Value of a progress record. Members that a later version adds are passed over. `topic` is an id, not a name."""

    shard: int
    generation: int
    added_id: int
    topic: str = ""
    digest: int | None = None


_decode = msgspec.msgpack.Decoder(_ProgressRecord).decode


class ProgressRecords:
    """Reads the progress of a datastore's partitions. A datastore without a progress topic has none."""

    def __init__(self, bootstrap: str, reader: PartitionReader, datastore: Datastore) -> None:
        self._reader = reader
        self._datastore = datastore
        require_ours(bootstrap, datastore)
        cells = describe_topic(bootstrap, datastore.topic, timeout_s=_TIMEOUT_S)
        self._topic_id = str(cells.topic_id)
        self.partition_counts = {datastore.topic: len(cells.partitions)}
        """By topic, how many partitions it has. A topic that doesn't exist is missing."""
        with suppress(TopicMissing):
            progress = describe_topic(bootstrap, datastore.progress_topic, timeout_s=_TIMEOUT_S)
            self.partition_counts[datastore.progress_topic] = len(progress.partitions)

    def read(self, partition: int, findings: Findings) -> Mapping[int, Position]:
        """Returns the last recorded position of each shard that was published to the present cells topic.

        A record that is not ours is a finding: tailers skip such a partition.
        """
        topic, found = self._datastore.progress_topic, {}
        if partition >= self.partition_counts.get(topic, 0):
            return {}
        span = self._reader.committed_span(topic, partition)
        for records in self._reader.read(topic, partition, span):
            for record in records:
                try:
                    entry = _decode(record.value)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    detail = f"{topic} [{partition}] offset {record.offset} is not ours: {error}"
                    findings.add(FindingKind.PROGRESS_WRONG, -1, detail)
                    continue
                found[entry.shard] = entry
        return {
            shard: Position(shard, entry.generation, entry.added_id, digest=entry.digest)
            for shard, entry in found.items()
            if entry.topic in ("", self._topic_id) and shard in self._datastore.shards_of_partition(partition)
        }
