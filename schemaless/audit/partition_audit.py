"""One partition of the topic: checks every record for what subscribers rely on, and passes it to its shard (I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import msgspec

from schemaless.audit.report import FindingKind, Findings, Patience, ShardReport
from schemaless.bus.reader import PartitionReader, Span
from schemaless.cell import StoredCell, row_key_text
from schemaless.codec import decode_cell, encode_record
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart
from schemaless.names import (
    COLUMN_HEADER,
    KIND_CELL,
    KIND_ERASED,
    KIND_GENERATION,
    KIND_SEEK,
    RECORD_VERSION,
    VERSION_HEADER,
)
from schemaless.quantity import quantity
from schemaless.record import Record, decode_announcement
from schemaless.sharding import shard_of
from schemaless.storage import shard_log
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.storage.shard_log import LogRange
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
        if record.kind in (KIND_CELL, KIND_ERASED):
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
            comparison.take(fingerprint(cell), partial(without_body, cell))

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


# One shard: its cells in MySQL, checked on the way, beside its records in the topic, both in added_id order.
#
# MySQL promises dense cells in order (I2 to I4). The topic promises every cell up to the head exactly once, in order
# and with the same content (I7). Both are read in one pass and in bounded pages.

PAGE_CELLS_MAX = 1000
PAGE_CELLS_MIN = 50
CELLS_BESIDE_MAX = 100_000  # digests held for all shards of a partition
PAGE_BYTES = 8 << 20


class Fingerprint(msgspec.Struct, frozen=True, gc=False):
    """A cell's place, and a hash of all that its record holds. `created_at` is in microseconds since the epoch.

    `is_erased`: MySQL says what erased its body.
    """

    added_id: int
    created_at: int
    hash: bytes
    is_erased: bool = False


def fingerprint(cell: StoredCell) -> Fingerprint:
    """Returns the fingerprint of a cell: another shard, generation, added_id, time, key or body changes it."""
    content = blake2b(encode_record(cell), digest_size=16).digest()
    return Fingerprint(cell.added_id, cell.created_at, content, cell.erased is not None)


def without_body(cell: StoredCell) -> bytes:
    """Returns the hash of a cell's fingerprint once its body is erased (I19)."""
    return fingerprint(msgspec.structs.replace(cell, body=b"")).hash


class Published(msgspec.Struct, frozen=True):
    """What is promised to have been published of a shard, for a partition whose beginning is gone.

    `until` is the added_id of the shard's progress record. None: there is no record that counts.
    """

    until: int | None

    def covers(self, cell: Fingerprint, first_held_at: int | None) -> bool:
        """Returns whether the cell was published, so that the topic held it once.

        Progress moves in the transaction that publishes a cell, so a record says it exactly. Without one, a cell that
        is older than the partition's first record, created at `first_held_at`, is taken to have been published.
        """
        if self.until is not None:
            return cell.added_id <= self.until
        return first_held_at is not None and cell.created_at < first_held_at


class StoredCells:
    """Iterates over the fingerprints of a shard up to the head of its report, and adds findings for broken promises.

    It holds one page of fingerprints. The bodies of a page are let go before the next cell is asked for.
    """

    def __init__(
        self,
        node: SyncNode,
        datastore: Datastore,
        report: ShardReport,
        starts: Sequence[GenerationStart],
        findings: Findings,
        *,
        shards_beside: int = 1,
    ) -> None:
        self._node = node
        self._datastore = datastore
        self._report = report
        self._starts = starts
        self._findings = findings
        self._page_cells = max(PAGE_CELLS_MIN, min(PAGE_CELLS_MAX, CELLS_BESIDE_MAX // shards_beside))
        self._last: Fingerprint | None = None

    def __iter__(self) -> Iterator[Fingerprint]:
        after = 0
        while after < self._report.head:
            page = self._page(after)
            if not page:
                break
            after = page[-1].added_id
            yield from page
        if after < self._report.head:
            self._missing(after + 1, self._report.head)

    def _page(self, after: int) -> list[Fingerprint]:
        """Reads and checks the cells that follow."""
        wanted = [LogRange(self._report.shard, after, min(self._page_cells, self._report.head - after))]
        (cells,) = self._node.run(shard_log.read, self._datastore, wanted, PAGE_BYTES)
        return [self._check(cell) for cell in cells if cell.added_id <= self._report.head]

    def _check(self, cell: StoredCell) -> Fingerprint:
        self._report.mysql += 1
        self._report.erased += cell.is_erased
        before = self._last or Fingerprint(0, 0, b"")
        if cell.added_id != before.added_id + 1:
            self._missing(before.added_id + 1, cell.added_id - 1)
        if cell.created_at < before.created_at:
            self._wrong(f"cell {cell.added_id} was created before cell {before.added_id}")
        starts = self._starts  # the audit judges generations by itself
        generation = max((start.generation for start in starts if start.starts_at <= cell.added_id), default=0)
        if cell.generation != generation:
            self._wrong(f"cell {cell.added_id} is of generation {cell.generation}")
        if shard_of(cell.row_key, self._datastore.shards) != self._report.shard:
            self._wrong(f"cell {cell.added_id} ({cell.key}) belongs to another shard")
        self._last = fingerprint(cell)
        return self._last

    def _missing(self, first: int, last: int) -> None:
        named = f"cell {first}" if first == last else f"cells {first} to {last}"
        self._findings.add(FindingKind.MYSQL_MISSING, self._report.shard, named, count=last - first + 1)

    def _wrong(self, detail: str) -> None:
        self._findings.add(FindingKind.MYSQL_WRONG, self._report.shard, detail)


class ShardComparison:
    """Compares a shard's records with `stored`, its cells in MySQL up to the head. Pure.

    `published` is None for a partition that has its beginning: then the topic must hold every cell. `first_held_at` is
    when the partition's first record was created, in microseconds since the epoch, once it was read.

    `paused_at` is given while an operator has paused tailing: up to there the shard was published, and the rest waits.
    """

    def __init__(
        self,
        report: ShardReport,
        stored: Iterator[Fingerprint],
        findings: Findings,
        published: Published | None,
        paused_at: int | None = None,
    ) -> None:
        self.report = report
        self.paused_at = paused_at
        self.first_held_at: int | None = None
        self._stored = stored
        self._findings = findings
        self._published = published
        self._next: Fingerprint | None = None
        self._begun = False
        self._last = 0

    @property
    def complete(self) -> bool:
        """True if the topic has brought everything up to the head, or held it once and has nothing left.

        While tailing is paused, it brings nothing beyond what was published.
        """
        once = self._published.until if self._published is not None and self._last == 0 else None
        until = self.report.head if self.paused_at is None else min(self.report.head, self.paused_at)
        return max(self._last, once or 0) >= until

    def take(self, record: Fingerprint, without_body: Callable[[], bytes]) -> None:
        """Takes the shard's next record in the topic. `without_body` returns its hash where MySQL has it erased."""
        report = self.report
        report.topic_end = max(report.topic_end, record.added_id)
        if record.added_id > report.head:
            return  # written after the heads were fixed, or lost in MySQL: a later look at the head decides
        report.topic += 1
        if report.held_from is None:
            report.held_from = record.added_id
        self._skip_to(record.added_id)
        if record.added_id <= self._last:
            self._found(FindingKind.TOPIC_EXTRA, f"cell {record.added_id} comes again, or after cell {self._last}")
            return
        self._last = record.added_id
        if self._next is None or self._next.added_id != record.added_id:
            self._found(FindingKind.TOPIC_EXTRA, f"cell {record.added_id} is not in MySQL")
            return
        if self._next.hash == record.hash or (self._next.is_erased and self._next.hash == without_body()):
            report.matched += 1
        else:
            self._found(FindingKind.TOPIC_DIFFERS, f"cell {record.added_id} has another content than in MySQL")
        self._advance()

    def finish(self) -> None:
        """Ends the comparison: the cells that are left in MySQL are missing in the topic, or wait for a resume."""
        report = self.report
        self._skip_to((report.head if self.paused_at is None else min(report.head, self.paused_at)) + 1)
        while self._next is not None:
            report.waiting += 1
            self._advance()
        if self._published is not None and self._published.until is None and report.head and report.held_from is None:
            detail = "nothing shows how much was published: the topic's beginning and the progress record are gone"
            self._found(FindingKind.PROGRESS_WRONG, detail)

    def _skip_to(self, added_id: int) -> None:
        """Skips cells of MySQL before `added_id`, which the topic does not hold.

        They were held once only if they are before every record of the shard, and a promise says so.
        """
        if not self._begun:
            self._begun = True
            self._advance()
        published = self._published if self._last == 0 else None
        while self._next is not None and self._next.added_id < added_id:
            if published is not None and published.covers(self._next, self.first_held_at):
                self.report.not_held += 1
            else:
                self._found(FindingKind.TOPIC_MISSING, f"cell {self._next.added_id}")
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._stored, None)

    def _found(self, kind: FindingKind, detail: str) -> None:
        self._findings.add(kind, self.report.shard, detail)
