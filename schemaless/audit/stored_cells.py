"""The cells of one shard as its home's master holds them: read in bounded pages, and checked on the way (I2 to I4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from schemaless.audit.report import FindingKind, Findings, ShardReport
from schemaless.audit.shard_comparison import Digest
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


def digest_of(cell: StoredCell) -> bytes:
    return blake2b(encode_record(cell), digest_size=16).digest()


class StoredCells:
    """Iterates over the digests of a shard up to the head of its report; adds findings for what breaks a promise."""

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
        batch = self._node.run(shard_log.read, self._datastore, wanted, PAGE_BYTES)
        return [cell for cell in batch.cells[0] if cell.added_id <= self._report.head]

    def _check(self, cell: StoredCell, after: int) -> None:
        self._report.mysql += 1
        if cell.added_id != after + 1:
            self._missing(after + 1, cell.added_id - 1)
        if self._last is not None and cell.created_at < self._last.created_at:
            self._wrong(f"cell {cell.added_id} was created before cell {self._last.added_id}")
        if cell.generation != self._generation_at(cell.added_id):
            self._wrong(f"cell {cell.added_id} is of generation {cell.generation}")
        if shard_of(cell.row_key, self._datastore.shards) != self._report.shard:
            self._wrong(f"cell {cell.added_id} ({cell.key}) belongs to another shard")
        self._last = cell

    def _generation_at(self, added_id: int) -> int:
        return max((start.generation for start in self._starts if start.starts_at <= added_id), default=0)

    def _missing(self, first: int, last: int) -> None:
        named = f"cell {first}" if first == last else f"cells {first} to {last}"
        self._findings.add(FindingKind.MYSQL_MISSING, self._report.shard, named, count=last - first + 1)

    def _wrong(self, detail: str) -> None:
        self._findings.add(FindingKind.MYSQL_WRONG, self._report.shard, detail)
