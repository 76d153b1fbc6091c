"""Record: one record of the cells topic, and the one place where Kafka's bytes become values of ours.

A record that isn't ours becomes a `ForeignRecord`, which says where it is and what is wrong with it. Readers count and
skip it. docs/subscribers.md lists kinds, versions and fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec

from schemaless.cell import StoredCell, cause_and_trace, sampled_trace, traceparent, with_trace
from schemaless.codec import decode_body, decode_cell
from schemaless.errors import Corrupt
from schemaless.found_cell import FoundCell, found_cell
from schemaless.location import ADDED_ID_MAX, GenerationStart, Location
from schemaless.names import (
    CAUSE_HEADER,
    KIND_CELL,
    KIND_ERASED,
    KIND_GENERATION,
    KIND_HEADER,
    KIND_SEEK,
    RECORD_VERSION,
    TRACE_HEADER,
    VERSION_HEADER,
)

_SHOWN_MAX = 40  # of a foreign header, in a reason

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]] | None
"""Headers in the forms of confluent-kafka, aiokafka and Faust. The last of several with one name counts."""

T = TypeVar("T")
_NotNegative = Annotated[int, msgspec.Meta(ge=0, le=ADDED_ID_MAX)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=ADDED_ID_MAX)]


def noted_headers(cell: StoredCell) -> list[tuple[str, str | bytes | None]]:
    """Returns the headers of a record for the cell's cause and its trace, where it has them."""
    cause, trace = cause_and_trace(cell.cause)
    noted = {CAUSE_HEADER: cause, TRACE_HEADER: trace and traceparent(trace)}
    return [(name, text.encode()) for name, text in noted.items() if text is not None]


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as it was read from a topic. Nothing in it is verified yet."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]

    @property
    def kind(self) -> bytes:
        return self.headers.get(KIND_HEADER, b"")


class Announcement(msgspec.Struct, frozen=True, gc=False):
    """Announces that a generation of a shard begins. Its first cell has the added_id `starts_at` (I13)."""

    shard: _NotNegative
    generation: _Positive
    starts_at: _Positive

    @property
    def start(self) -> GenerationStart:
        return GenerationStart(self.generation, self.starts_at)


class Seek(msgspec.Struct, frozen=True, gc=False):
    """Says that an operator moved a shard's progress. Cells behind the location may follow twice, or be missing."""

    shard: _NotNegative
    generation: _Positive
    added_id: _NotNegative

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


class ForeignRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that isn't ours, or has a kind or version that this program doesn't know."""

    topic: str
    partition: int
    offset: int
    why: str

    def __str__(self) -> str:
        return f"{self.topic} [{self.partition}] offset {self.offset}: {self.why}"


DecodedRecord = StoredCell | Announcement | Seek | ForeignRecord


def decode_record(
    value: bytes | None, headers: Headers, *, topic: str = "", partition: int = -1, offset: int = -1
) -> FoundCell | Announcement | Seek | ForeignRecord:
    """Decodes any bytes without raising. `topic`, `partition` and `offset` are for a ForeignRecord."""
    found = decode_stored(value, headers, topic=topic, partition=partition, offset=offset, check_body=False)
    try:
        return found_cell(found) if isinstance(found, StoredCell) else found
    except Corrupt as error:
        return ForeignRecord(topic, partition, offset, str(error))


def decode_stored(  # the last ones have defaults
    value: bytes | None,
    headers: Headers,
    *,
    topic: str = "",
    partition: int = -1,
    offset: int = -1,
    check_body: bool = True,
) -> DecodedRecord:
    """Decodes as `decode_record` does, and leaves the cell as it is stored.

    A body is decoded only to check it. `check_body=False` leaves that to the first that needs the body. A cell whose
    body was erased before it was published has an empty one.
    """
    try:
        found = dict(headers or ())
        version, kind = found.get(VERSION_HEADER), found.get(KIND_HEADER)
        if version != RECORD_VERSION:
            raise Corrupt(f"header {VERSION_HEADER} is {_shown(version)}: no record of version 1")
        decode = _KINDS.get(kind)
        if decode is None:
            raise Corrupt(f"kind {_shown(kind)} is not known")
        decoded = decode_cell(value or b"") if kind == KIND_CELL and not check_body else decode(value or b"")
        given, traced = found.get(CAUSE_HEADER), found.get(TRACE_HEADER)
        if (given or traced) and isinstance(decoded, StoredCell):
            cause = given.decode("ascii", "replace") if given else None
            trace = sampled_trace(traced.decode("ascii", "replace")) if traced else None
            return msgspec.structs.replace(decoded, cause=cause if trace is None else with_trace(cause, trace))
        return decoded
    except Corrupt as error:
        return ForeignRecord(topic, partition, offset, str(error))


def decoded(record: Record, *, check_body: bool = True) -> DecodedRecord:
    """Decodes a record that one of our readers read."""
    return decode_stored(
        record.value,
        record.headers,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        check_body=check_body,
    )


def misplaced(record: Record, shard: int) -> ForeignRecord:
    """Returns the record as a foreign one, because its shard doesn't belong to its partition (I8)."""
    return ForeignRecord(
        record.topic, record.partition, record.offset, f"shard {shard} does not belong to this partition"
    )


def decode_announcement(value: bytes) -> Announcement:
    """Decodes the value of a record of kind `generation`. Raises Corrupt."""
    return _notice(_decode_opening, value, "generation")


def _decode_seek(value: bytes) -> Seek:
    return _notice(_decode_sought, value, "seek")


def _decode_cell(value: bytes) -> StoredCell:
    cell = decode_cell(value)
    decode_body(cell.body)
    return cell


_KINDS: dict[bytes | None, Callable[[bytes], StoredCell | Announcement | Seek]] = {
    KIND_CELL: _decode_cell,
    KIND_ERASED: decode_cell,
    KIND_GENERATION: decode_announcement,
    KIND_SEEK: _decode_seek,
}


def _shown(value: bytes | None) -> str:
    return "missing" if value is None else repr(value[:_SHOWN_MAX])


_decode_opening = msgspec.msgpack.Decoder(Announcement).decode
_decode_sought = msgspec.msgpack.Decoder(Seek).decode


def _notice(decode: Callable[[bytes], T], value: bytes, kind: str) -> T:
    try:
        return decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a {kind} record: {error}") from error
