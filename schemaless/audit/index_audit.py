"""One index against the cells (I11): every entry of a row, computed from its newest cells, is in the shard of its shard
field with these values, and in no other shard.

Rows are judged as of the heads that the audit fixed. A row with newer cells is counted, not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from schemaless.audit.report import FindingKind, Findings, IndexReport
from schemaless.cell import ColumnName, RowKey, row_key_text
from schemaless.codec import Body, decode_body
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import IndexEntry, entries_for, entry_shard
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_table
from schemaless.storage.index_table import BEFORE_ALL, EntryKey, FoundEntry
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.topology import Datastore

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
        self._heads = heads
        self._findings = findings
        self._present_in: Counter[int] = Counter()  # entries that are where they should be, by index shard

    def run(self) -> IndexReport:
        for shard, head in self._heads.items():
            for row_keys in self._rows(shard, head):
                self._check_rows(shard, row_keys)
        for shard in self._heads:
            found = self._home(shard).run(index_table.count_live, self._datastore, shard, self._definition)
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
        for cluster, shards in self._datastore.by_home(row_keys, lambda shard: shard).items():
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
            page = self._home(index_shard).run(
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

    def _add(self, kind: FindingKind, index_shard: int, row_key: RowKey) -> None:
        self._findings.add(kind, index_shard, f"index {self._definition.name}: row {row_key_text(row_key)}")
