"""TailView: verifies all records of the topic for `schemaless tail`, and makes lines of those that were asked for.

It is pure: records go in, lines and notices of faults come out. It remembers nothing but positions (I14).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from enum import Enum

import msgspec

from schemaless.cell import RowKey, StoredCell, created_at_text, parse_column_name, parse_row_key, row_key_text
from schemaless.codec import body_json
from schemaless.errors import Corrupt
from schemaless.quantity import noun_for, quantity
from schemaless.record import Announcement, ForeignRecord, Record, Seek, decoded, misplaced
from schemaless.subscriber.density import DensityCheck

_FOREIGN_NOTICES_MAX = 20

Notice = Callable[[str], None]


class TailFilter(msgspec.Struct, frozen=True):
    """Which cells are shown. An empty collection means all. `since` is in microseconds since the epoch."""

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


def parse_filter(shards: Iterable[int], columns: Iterable[str], rows: Iterable[str], since: int) -> TailFilter:
    """Parses what the options name. Raises Invalid."""
    return TailFilter(
        shards=frozenset(shards),
        columns=frozenset(parse_column_name(column, "column") for column in columns),
        row_keys=frozenset(map(parse_row_key, rows)),
        since=since,
    )


class TailFormat(Enum):
    """The format of a line of `schemaless tail`."""

    TEXT = "text"
    JSON = "json"
    """The API's JSON of a cell, with the partition and the offset of its record."""
    MSGPACK = "msgpack"
    """The record's value. MessagePack knows its own length, so nothing is needed between values."""

    def line(self, record: Record, cell: StoredCell) -> bytes:
        """Returns the line of a cell. Raises Corrupt for a body that can't be decoded."""
        if self is TailFormat.MSGPACK:
            return record.value
        if self is TailFormat.TEXT:
            location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
            named = f"{location} {row_key_text(cell.row_key)} {cell.column_name} {cell.ref_key} "
            return named.encode() + body_json(cell.body) + b"\n"
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


class TailView:
    """The lines and faults of the records of a topic. `complete` are the partitions that are read from offset 0."""

    def __init__(
        self, partitions: int, complete: Container[int], wanted: TailFilter, form: TailFormat, notice: Notice
    ) -> None:
        self.records = self.foreign = 0
        self._partitions = partitions
        self._complete = complete
        self._wanted = wanted
        self._format = form
        self._notice = notice
        self._check = DensityCheck()

    @property
    def faults(self) -> int:
        """Number of holes, repeats and disorder so far."""
        return self._check.findings

    def take(self, records: Sequence[Record]) -> Iterator[bytes]:
        """Verifies all records, and yields the lines of the cells that the filter lets pass."""
        for record in records:
            self.records += 1
            found = decoded(record)
            if not isinstance(found, ForeignRecord) and found.shard % self._partitions != record.partition:
                found = misplaced(record, found.shard)
            if isinstance(found, StoredCell):
                self._verify(record, found)
                if self._wanted.passes(found):
                    try:
                        yield self._format.line(record, found)
                    except Corrupt as error:
                        self._skip(ForeignRecord(record.topic, record.partition, record.offset, str(error)))
            elif isinstance(found, Announcement):
                self._notice(f"shard {found.shard}: generation {found.generation} starts at {found.starts_at}")
                self._verify(record, found)
            elif isinstance(found, Seek):
                self._notice(
                    f"shard {found.shard}: an operator's seek to {found.location}: cells may come twice or be missing"
                )
            else:
                self._skip(found)

    def summary(self) -> str:
        verdict = (
            f"{self.faults} {noun_for(self.faults, 'FAULT').upper()}"
            if self.faults
            else "no hole, no repeat, no disorder"
        )
        foreign = f", {quantity(self.foreign, 'foreign record')}" if self.foreign else ""
        return f"{quantity(self.records, 'record')} verified: {verdict}{foreign}"

    def _verify(self, record: Record, found: StoredCell | Announcement) -> None:
        fault = self._check.take(found, complete=record.partition in self._complete)
        if fault is not None:
            self._notice(f"{fault} (partition {record.partition}, offset {record.offset})")

    def _skip(self, found: ForeignRecord) -> None:
        self.foreign += 1
        if self.foreign <= _FOREIGN_NOTICES_MAX:
            self._notice(f"not ours: {found}")
        if self.foreign == _FOREIGN_NOTICES_MAX:
            self._notice("further records that are not ours are only counted")
