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


class Digest(msgspec.Struct, frozen=True, gc=False):
    """A cell's place, and a hash of all that its record holds."""

    added_id: int
    hash: bytes


def digest_of(cell: StoredCell) -> bytes:
    return blake2b(encode_record(cell), digest_size=16).digest()


class StoredCells:
    """Iterates over the digests of a shard up to the head of its report, and adds findings for broken promises."""

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
        self._last: StoredCell | None = None

    def __iter__(self) -> Iterator[Digest]:
        after = 0
        while after < self._report.head:
            page = self._page(after)
            for cell in page:
                self._check(cell, after)
                after = cell.added_id
            yield from [Digest(cell.added_id, digest_of(cell)) for cell in page]
            if not page:
                break
        if after < self._report.head:
            self._missing(after + 1, self._report.head)

    def _page(self, after: int) -> list[StoredCell]:
        wanted = [LogRange(self._report.shard, after, min(self._page_cells, self._report.head - after))]
        (cells,) = self._node.run(shard_log.read, self._datastore, wanted, PAGE_BYTES)
        return [cell for cell in cells if cell.added_id <= self._report.head]

    def _check(self, cell: StoredCell, after: int) -> None:
        self._report.mysql += 1
        if cell.added_id != after + 1:
            self._missing(after + 1, cell.added_id - 1)
        if self._last is not None and cell.created_at < self._last.created_at:
            self._wrong(f"cell {cell.added_id} was created before cell {self._last.added_id}")
        starts = self._starts  # the audit judges generations by itself
        generation = max((start.generation for start in starts if start.starts_at <= cell.added_id), default=0)
        if cell.generation != generation:
            self._wrong(f"cell {cell.added_id} is of generation {cell.generation}")
        if shard_of(cell.row_key, self._datastore.shards) != self._report.shard:
            self._wrong(f"cell {cell.added_id} ({cell.key}) belongs to another shard")
        self._last = cell

    def _missing(self, first: int, last: int) -> None:
        named = f"cell {first}" if first == last else f"cells {first} to {last}"
        self._findings.add(FindingKind.MYSQL_MISSING, self._report.shard, named, count=last - first + 1)

    def _wrong(self, detail: str) -> None:
        self._findings.add(FindingKind.MYSQL_WRONG, self._report.shard, detail)


class ShardComparison:
    """Compares a shard's records with `stored`, its cells in MySQL up to the head. Pure.

    `cut` says that the topic has lost its beginning.
    """

    def __init__(self, report: ShardReport, stored: Iterator[Digest], findings: Findings, *, cut: bool) -> None:
        self.report = report
        self._stored = stored
        self._findings = findings
        self._cut = cut
        self._next: Digest | None = None
        self._begun = False
        self._last = 0

    @property
    def complete(self) -> bool:
        """True if the topic has brought everything up to the head."""
        return self._last >= self.report.head

    def take(self, record: Digest) -> None:
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
        """Ends the comparison: the cells that are left in MySQL are missing in the topic."""
        self._skip_to(self.report.head + 1)

    def _skip_to(self, added_id: int) -> None:
        """Skips cells of MySQL before `added_id`, which the topic does not hold."""
        if not self._begun:
            self._begun = True
            self._advance()
        not_held = self._cut and self._last == 0
        while self._next is not None and self._next.added_id < added_id:
            if not_held:
                self.report.not_held += 1
            else:
                self._found(FindingKind.TOPIC_MISSING, f"cell {self._next.added_id}")
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._stored, None)

    def _found(self, kind: FindingKind, detail: str) -> None:
        self._findings.add(kind, self.report.shard, detail)
