"""How one index stands to one row: its entries, and why it has none, or others than the newest cells make. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schemaless.cell import ColumnName, StoredCell, created_at_text
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.errors import TooLarge
from schemaless.index.entry import IndexEntry, entries_for, entry_shard, stored_fields, why_no_entry
from schemaless.location import GenerationStart, kept_until
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.storage.index_table import FoundEntry

ENTRIES_MAX = 20
"""Entries of one row and index that are looked for: a row has more only where an array makes one for each element."""

_BODIES_BYTES_MAX = 4 << 20


class RowBodies:
    """The newest bodies of a row by column, decoded once for all indexes. Raises TooLarge for too many bytes."""

    def __init__(self, cells: Sequence[StoredCell | None]) -> None:
        self.cells = {cell.column_name: cell for cell in cells if cell is not None}
        self.by_column: dict[ColumnName, Body] = {}
        size = 0
        for column, cell in self.cells.items():
            packed = inflate_body(cell.body)
            size += len(packed)
            if size > _BODIES_BYTES_MAX:
                raise TooLarge("the row's cells are too large to be evaluated here")
            self.by_column[column] = decode_packed(packed)


class IndexStanding(msgspec.Struct, frozen=True):
    """One index and one row. `checkpoint` is the index's in the row's shard, on its home."""

    index: DefinedIndex
    checkpoint: Checkpoint | None
    starts: Sequence[GenerationStart]
    shards: int

    def expected(self, bodies: RowBodies) -> list[tuple[int, int, IndexEntry]]:
        """Returns shard, element and entry that the newest cells make, at most ENTRIES_MAX."""
        definition = self.index.definition
        made = entries_for(definition, bodies.by_column)
        found = [
            (entry_shard(definition, entry, self.shards), element, entry)
            for element, entry in enumerate(made)
            if entry is not None
        ]
        return found[:ENTRIES_MAX]

    def view(self, bodies: RowBodies | None, found: Mapping[int, Sequence[FoundEntry]] | None) -> dict[str, Any]:
        """Returns what people see. `found`, by shard of the index, are the row's entries where they are expected.

        None for `bodies` or `found` means that they couldn't be read.
        """
        checkpoint = self.checkpoint
        document: dict[str, Any] = {
            "name": self.index.name,
            "state": str(self.index.state),
            "reason": self.index.order.reason,
            "checkpoint": None
            if checkpoint is None
            else {
                "location": f"{checkpoint.shard}:{checkpoint.location}",
                "at": created_at_text(checkpoint.updated_at),
            },
            "entries": [],
            "late": None,
            "why": None,
        }
        if not self.index.has_tables:
            return {**document, "why": f"the index is {self.index.state}, and has no entries"}
        if bodies is None or found is None:
            return {**document, "why": "the row's entries couldn't be read"}
        definition = self.index.definition
        expected = self.expected(bodies)
        stored = {(shard, one.element): one.entry for shard, each in found.items() for one in each}
        document["entries"] = [
            {"shard": shard, "element": element, "fields": stored_fields(definition, entry)}
            for (shard, element), entry in sorted(stored.items(), key=lambda each: each[0])[:ENTRIES_MAX]
        ]
        missing = any(stored.get((shard, element)) != entry for shard, element, entry in expected)
        late = self.late(bodies)
        if late:
            document["late"] = f"{late[0].shard}:{late[0].location}"
            document["why"] = self._why_late(document["late"])
        elif missing:
            document["why"] = "the newest cells make other entries: compare with `schemaless audit`"
        elif not expected:
            document["why"] = why_no_entry(definition, bodies.by_column)
        return document

    def late(self, bodies: RowBodies) -> list[StoredCell]:
        """Returns the row's newest cells that the index has not reached."""
        reached = 0 if self.checkpoint is None else kept_until(self.checkpoint.location, self.starts)
        columns = self.index.definition.columns
        newest = [cell for column, cell in bodies.cells.items() if column in columns and cell.added_id > reached]
        return sorted(newest, key=lambda cell: cell.added_id)

    def _why_late(self, at: str) -> str:
        match self.index.state:
            case IndexState.FAILED:
                return f"the index has failed, before {at}: {self.index.order.reason}"
            case IndexState.PAUSED:
                return f"the index is paused, and has not reached {at}"
            case state:
                return f"the index is {state}, and has not reached {at}"
