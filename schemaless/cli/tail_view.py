"""Tail: what `schemaless tail` makes of the topic's records: verifies all of them, shows those that are asked for.

Pure: records go in, lines come out, and what is wrong is told at once. Keeps I14: nothing is remembered but positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from enum import Enum

import msgspec

from schemaless.cell import RowKey, StoredCell, created_at_text, parse_column_name, parse_row_key, row_key_text
from schemaless.codec import body_json
from schemaless.errors import Corrupt
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.subscriber.density import DensityCheck

_FOREIGN_TOLD_MAX = 20

Tell = Callable[[str], None]


class Filter(msgspec.Struct, frozen=True):
    """Which cells are shown. Nothing named: all. `since`: in microseconds since the epoch."""

    shards: Collection[int] = ()
    columns: Collection[str] = ()
    row_keys: Collection[RowKey] = ()
    since: int = 0

    def passes(self, cell: StoredCell) -> bool:
        return (
            cell.created_at >= self.since
            and (not self.shards or cell.shard in self.shards)
            and (not self.columns or cell.column_name in self.columns)
            and (not self.row_keys or cell.row_key in self.row_keys)
        )


def parse_filter(shards: Iterable[int], columns: Iterable[str], rows: Iterable[str], since: int) -> Filter:
    """Raises Invalid."""
    return Filter(
        shards=frozenset(shards),
        columns=frozenset(parse_column_name(column, "column") for column in columns),
        row_keys=frozenset(map(parse_row_key, rows)),
        since=since,
    )


def _text(record: Record, cell: StoredCell) -> bytes:
    location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
    named = f"{location} {row_key_text(cell.row_key)} {cell.column_name} {cell.ref_key} "
    return named.encode() + body_json(cell.body) + b"\n"


def _json(record: Record, cell: StoredCell) -> bytes:
    """The API's cell, and where its record lies."""
    members = {
        "row_key": row_key_text(cell.row_key),
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "body": msgspec.Raw(body_json(cell.body)),
        "shard": cell.shard,
        "generation": cell.generation,
        "added_id": cell.added_id,
        "created_at": created_at_text(cell.created_at),
        "partition": record.partition,
        "offset": record.offset,
    }
    return msgspec.json.encode(members) + b"\n"


def _msgpack(record: Record, cell: StoredCell) -> bytes:
    """The value as it is: MessagePack tells its own length, so values follow one another without anything between."""
    return record.value


class Form(Enum):
    TEXT = "text"
    JSON = "json"
    MSGPACK = "msgpack"


_WRITERS = {Form.TEXT: _text, Form.JSON: _json, Form.MSGPACK: _msgpack}


class TailView:
    """`partitions`: of the topic; `complete`: those that are read from their very beginning."""

    def __init__(self, partitions: int, complete: Container[int], wanted: Filter, form: Form, tell: Tell) -> None:
        self.records = self.foreign = 0
        self._partitions = partitions
        self._complete = complete
        self._wanted = wanted
        self._line = _WRITERS[form]
        self._tell = tell
        self._check = DensityCheck()

    @property
    def faults(self) -> int:
        """Holes, repeats and disorder so far."""
        return self._check.findings

    def take(self, records: Sequence[Record]) -> Iterator[bytes]:
        """The lines of the cells that are shown."""
        for record in records:
            self.records += 1
            found = decoded(record)
            if not isinstance(found, ForeignRecord) and found.shard % self._partitions != record.partition:
                found = misplaced(record, found.shard)
            if isinstance(found, StoredCell):
                yield from self._take_cell(record, found)
            else:
                self._take_other(record, found)

    def summary(self) -> str:
        verdict = f"{self.faults} FAULTS" if self.faults else "no hole, no repeat, no disorder"
        foreign = f", {self.foreign} records are not ours" if self.foreign else ""
        return f"{self.records} records verified: {verdict}{foreign}"

    def _take_cell(self, record: Record, cell: StoredCell) -> Iterator[bytes]:
        self._verify(record, cell)
        if self._wanted.passes(cell):
            try:
                yield self._line(record, cell)
            except Corrupt as error:
                self._pass_over(ForeignRecord(record.topic, record.partition, record.offset, str(error)))

    def _take_other(self, record: Record, found: Announcement | Seek | ForeignRecord) -> None:
        if isinstance(found, ForeignRecord):
            self._pass_over(found)
        elif isinstance(found, Announcement):
            self._tell(f"shard {found.shard}: generation {found.generation} starts at {found.starts_at}")
            self._verify(record, found)
        else:
            self._tell(
                f"shard {found.shard}: an operator's seek to {found.location}: cells may come twice or be missing"
            )

    def _verify(self, record: Record, found: StoredCell | Announcement) -> None:
        finding = self._check.take(found, complete=record.partition in self._complete)
        if finding is not None:
            self._tell(f"{finding} (partition {record.partition}, offset {record.offset})")

    def _pass_over(self, found: ForeignRecord) -> None:
        self.foreign += 1
        if self.foreign <= _FOREIGN_TOLD_MAX:
            self._tell(f"not ours: {found}")
        if self.foreign == _FOREIGN_TOLD_MAX:
            self._tell("further records that are not ours are only counted")
