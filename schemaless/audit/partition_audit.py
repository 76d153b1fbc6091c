"""One partition of the topic: checks every record for what subscribers rely on, and passes it to its shard (I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from schemaless.audit.report import FindingKind, Findings, Patience
from schemaless.audit.shard_audit import ShardComparison, fingerprint
from schemaless.bus.reader import PartitionReader, Span
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import decode_cell
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart
from schemaless.names import COLUMN_HEADER, KIND_CELL, KIND_GENERATION, KIND_SEEK, RECORD_VERSION, VERSION_HEADER
from schemaless.quantity import quantity
from schemaless.record import Record, decode_announcement
from schemaless.topology import Datastore


class PartitionAudit:
    """The audit of a partition. `starts` are those of each shard's generations. `cut`: its beginning is lost."""

    def __init__(
        self,
        datastore: Datastore,
        partition: int,
        comparisons: Mapping[int, ShardComparison],
        starts: Mapping[int, Sequence[GenerationStart]],
        findings: Findings,
        *,
        cut: bool,
    ) -> None:
        self.foreign = 0
        self.seeks = 0
        self._name = f"{datastore.topic} [{partition}]"
        self._comparisons = comparisons
        self._starts = starts
        self._findings = findings
        self._cut = cut
        self._begun = False
        self._announced: Counter[tuple[int, GenerationStart]] = Counter()

    @property
    def complete(self) -> bool:
        """True if all shards have been seen up to their heads."""
        return all(comparison.complete for comparison in self._comparisons.values())

    @property
    def compared(self) -> int:
        return sum(comparison.report.topic for comparison in self._comparisons.values())

    def take(self, record: Record) -> None:
        if record.kind == KIND_CELL:
            self._take_cell(record)
        elif record.kind == KIND_GENERATION:
            self._take_opening(record)
        elif record.kind == KIND_SEEK:
            self.seeks += 1
        else:
            self.foreign += 1

    def finish(self) -> None:
        for comparison in self._comparisons.values():
            comparison.finish()
        self._check_announcements()

    def _take_cell(self, record: Record) -> None:
        try:
            cell = decode_cell(record.value)
        except Corrupt as error:
            self._extra(-1, f"offset {record.offset}: {error}")
            return
        comparison = self._comparisons.get(cell.shard)
        if comparison is None:
            self._extra(cell.shard, f"offset {record.offset}: the shard does not belong to {self._name}")
            return
        self._note_beginning(cell)
        superseded_by = [
            start
            for start in self._starts[cell.shard]
            if start.generation > cell.generation and start.starts_at <= cell.added_id
        ]
        if any(self._announced[cell.shard, start] for start in superseded_by):
            detail = f"offset {record.offset}: cell {cell.location} comes after the generation that superseded it"
            self._extra(cell.shard, detail)
        elif superseded_by:
            comparison.report.superseded_by_generation[cell.generation] += 1
        else:
            self._check_envelope(record, cell)
            comparison.take(fingerprint(cell))

    def _note_beginning(self, cell: StoredCell) -> None:
        """Tells every shard when the first cell that the partition still holds was created."""
        if not self._begun:
            self._begun = True
            for comparison in self._comparisons.values():
                comparison.first_held_at = cell.created_at

    def _check_envelope(self, record: Record, cell: StoredCell) -> None:
        wrong = [
            name
            for name, fits in (
                ("key", record.key == row_key_text(cell.row_key).encode()),
                ("timestamp", record.timestamp_ms == cell.created_at // 1000),
                ("header v", record.headers.get(VERSION_HEADER) == RECORD_VERSION),
                ("header column", record.headers.get(COLUMN_HEADER) == cell.column_name.encode()),
            )
            if not fits
        ]
        if wrong:
            detail = f"cell {cell.added_id}, offset {record.offset}: wrong {', '.join(wrong)}"
            self._findings.add(FindingKind.TOPIC_DIFFERS, cell.shard, detail)

    def _take_opening(self, record: Record) -> None:
        try:
            opening = decode_announcement(record.value)
        except Corrupt as error:
            self._extra(-1, f"offset {record.offset}: {error}")
            return
        comparison = self._comparisons.get(opening.shard)
        if comparison is None:
            self._extra(opening.shard, f"offset {record.offset}: the shard does not belong to {self._name}")
            return
        start, starts = opening.start, self._starts[opening.shard]
        if start in starts:
            self._announced[opening.shard, start] += 1
        elif any(later.generation > start.generation and later.starts_at <= start.starts_at for later in starts):
            comparison.report.superseded_by_generation[start.generation] += 1  # a restored master doesn't know it
        else:
            self._extra(opening.shard, f"offset {record.offset}: generation {opening.generation} was never opened")

    def _check_announcements(self) -> None:
        """Checks that each generation but the first is announced once, if any of its records can be here."""
        for shard, comparison in self._comparisons.items():
            for start in self._starts[shard]:
                count = self._announced[shard, start]
                if count > 1:
                    self._extra(shard, f"generation {start.generation} is announced {quantity(count, 'time')}")
                elif start.generation > 1 and not count and self._must_hold(comparison, start):
                    self._findings.add(
                        FindingKind.TOPIC_MISSING, shard, f"announcement of generation {start.generation}"
                    )

    def _must_hold(self, comparison: ShardComparison, start: GenerationStart) -> bool:
        """Returns whether the topic must hold the announcement: what it stands between is published and held.

        A generation that a later one superseded as a whole may never have been seen by a tailer.
        """
        report, paused_at = comparison.report, comparison.paused_at
        if paused_at is not None and paused_at < start.starts_at:
            return False  # it waits with the cells of the generation
        hidden = any(
            later.generation > start.generation and later.starts_at <= start.starts_at
            for later in self._starts[report.shard]
        )
        if hidden or report.head < start.starts_at:
            return False
        return not self._cut or (report.held_from is not None and report.held_from < start.starts_at)

    def _extra(self, shard: int, detail: str) -> None:
        self._findings.add(FindingKind.TOPIC_EXTRA, shard, detail)


def read_partition(
    reader: PartitionReader, datastore: Datastore, partition: int, audit: PartitionAudit, patience: Patience
) -> None:
    """Passes all records of the partition to the audit, and waits for missing ones while tailers make progress."""
    span = reader.committed_span(datastore.topic, partition)
    while True:
        before = audit.compared
        for records in reader.read(datastore.topic, partition, span):
            for record in records:
                audit.take(record)
        if audit.compared > before:
            patience.renew()
        if audit.complete or not patience.wait():
            break
        span = Span(span.high, max(span.high, reader.committed_span(datastore.topic, partition).high))
    audit.finish()
