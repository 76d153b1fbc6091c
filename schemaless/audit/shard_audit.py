"""One shard: its cells in MySQL, checked on the way, beside its records in the topic, both in added_id order.

MySQL promises dense cells in order (I2 to I4). The topic promises every cell up to the head exactly once, in order and
with the same content (I7). Both are read in one pass and in bounded pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from schemaless.audit.report import FindingKind, Findings, ShardReport
from schemaless.cell import StoredCell
from schemaless.codec import encode_record
from schemaless.location import GenerationStart
from schemaless.sharding import shard_of
from schemaless.storage import shard_log
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.storage.shard_log import LogRange
from schemaless.topology import Datastore

PAGE_CELLS_MAX = 1000
PAGE_CELLS_MIN = 50
CELLS_BESIDE_MAX = 100_000  # digests held for all shards of a partition
PAGE_BYTES = 8 << 20


class Fingerprint(msgspec.Struct, frozen=True, gc=False):
    """A cell's place, and a hash of all that its record holds. `created_at` is in microseconds since the epoch."""

    added_id: int
    created_at: int
    hash: bytes


def fingerprint(cell: StoredCell) -> Fingerprint:
    """Returns the fingerprint of a cell: another shard, generation, added_id, time, key or body changes it."""
    return Fingerprint(cell.added_id, cell.created_at, blake2b(encode_record(cell), digest_size=16).digest())


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

    def take(self, record: Fingerprint) -> None:
        """Takes the shard's next record in the topic."""
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
        if self._next.hash == record.hash:
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
