"""Bodies and records as bytes: JSON at the edge, zlib over MessagePack in MySQL and in Kafka.

Owns what a valid body is and when two bodies are the same (I1). The stored form is plain MessagePack in plain zlib:
msgspec and isal write it here because they are two to four times faster. The tests read it with `msgpack` and `zlib`.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from isal import isal_zlib

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell, cause_and_trace, created_at_text, row_key_text
from schemaless.errors import Corrupt, Invalid, Malformed, UnreadableCell
from schemaless.location import INT64_MAX
from schemaless.shapes import shape

BODY_BYTES_MAX = 1 << 20
DEPTH_MAX = 64
CONTAINERS_MAX = 50_000
"""Arrays and objects of a body. Each costs the decoder about as much as a hundred bytes of text."""
# Decompressed bodies: MessagePack of a 1 MiB JSON text is at most 9 bytes for two ("0," -> one float), far below this.
_INFLATED_BYTES_MAX = 16 << 20
_INFLATE_ERROR = cast("type[Exception]", isal_zlib.error)  # its stub says that it is an instance
_LEVEL = 1  # on bodies of a few hundred bytes, higher levels save less than 1 %
# A shorter body goes into its zlib stream as it is: deflate would take ten times as long to save 2 to 9 % of it (trips
# of 231 bytes: 227, flights of 170: 167).
_DEFLATED_BYTES_MIN = 256
_STORED_BLOCK = struct.Struct("<HBHH")  # RFC 1950 header (fastest), RFC 1951 final stored block, length, its complement

_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder().decode
_encode_sorted = msgspec.msgpack.Encoder(order="sorted").encode
_MINUS_ZERO, _ZERO = _encode_msgpack(-0.0), _encode_msgpack(0.0)
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode

Body = Mapping[str, Any]


def parse_json_body(raw: bytes) -> bytes:
    """Returns the stored form of a body that came as JSON text. Raises Malformed or Invalid."""
    brackets = _brackets(raw)
    if brackets > CONTAINERS_MAX:  # some of them may stand in strings
        check_containers(_brackets(_without_strings(raw)))
    value = parse_json(raw)
    return encode_body(value, check_shape=brackets > DEPTH_MAX)


def _brackets(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[")


def _without_strings(raw: bytes) -> bytes:
    """Returns what stands outside of a JSON text's strings. It costs less than decoding a hostile text."""
    return b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def check_depth(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise Invalid("body", f"is nested more than {DEPTH_MAX} levels deep")


def check_containers(count: int) -> None:
    if count > CONTAINERS_MAX:
        raise Invalid("body", f"has more than {CONTAINERS_MAX} arrays and objects")


_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def json_fault(raw: bytes, error: Exception) -> str:
    """Returns what is wrong with a JSON text. The decoder calls half a surrogate pair an input that was truncated."""
    found = _LONE_SURROGATE.search(raw.replace(rb"\\", b"  "))
    return f"{found[0].decode()} is a surrogate without its other half" if found else str(error)


def parse_json(raw: bytes) -> Any:
    """Raises Malformed: not JSON, not UTF-8, or a number that is none (NaN, Infinity) or doesn't fit a double."""
    try:
        return _decode_json(raw)
    except RecursionError:
        raise Invalid("body", f"is nested more than {DEPTH_MAX} levels deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"the payload is not valid JSON: {json_fault(raw, error)}") from error


def encode_body(value: Any, *, check_shape: bool = True) -> bytes:
    """Returns the stored form of a JSON object given as Python values. Raises Invalid or Malformed."""
    if not isinstance(value, dict):
        raise Invalid("body", "must be a JSON object")
    if check_shape:
        _check(value)
    try:
        packed = _encode_msgpack(value)
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise Invalid("body", f"can't be stored: {error}") from error
    return _zlib(packed)


def _zlib(packed: bytes) -> bytes:
    """Returns a zlib stream (RFC 1950) of the bytes."""
    size = len(packed)
    if size >= _DEFLATED_BYTES_MIN:
        return bytes(isal_zlib.compress(packed, _LEVEL))
    return _STORED_BLOCK.pack(0x0178, 1, size, size ^ 0xFFFF) + packed + zlib.adler32(packed).to_bytes(4, "big")


def decode_body(stored: bytes) -> dict[str, Any]:
    """Raises Corrupt when the bytes are no stored body."""
    return decode_packed(inflate_body(stored))


def cell_view(cell: StoredCell) -> dict[str, Any]:
    """Returns a cell's members, in the contract's order. Only a cell that has a cause shows one. One that waits in a
    buffer has no place. One whose body was erased says so in its place.

    Raises UnreadableCell when its body can't be decoded.
    """
    try:
        body = decode_body(cell.body) if cell.erased is None else None
    except Corrupt as error:
        key = f"{row_key_text(cell.row_key)} {cell.column_name} {cell.ref_key}"
        location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
        raise UnreadableCell(f"the cell {key} at {location} can't be read: {error}") from error
    view = {
        "row_key": row_key_text(cell.row_key),
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "body": body,
        "shard": cell.shard,
        "generation": cell.generation,
        "added_id": cell.added_id,
        "created_at": created_at_text(cell.created_at),
    }
    if cell.erased is not None:
        del view["body"]
        view["erased"] = {"erasure": cell.erased.erasure_id, "erased_at": created_at_text(cell.erased.at)}
    if cell.is_buffered:
        view |= {"generation": None, "added_id": None, "created_at": None, "buffered": True}
    if cell.cause is not None:
        cause, trace = cause_and_trace(cell.cause)
        view |= ({} if cause is None else {"cause": cause}) | ({} if trace is None else {"trace": trace})
    return view


def decode_packed(packed: bytes) -> dict[str, Any]:
    """Decodes the MessagePack of a stored body. Raises Corrupt."""
    try:
        value = _decode_msgpack(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"a stored body can't be decoded: {error}") from error
    if not isinstance(value, dict):
        raise Corrupt("a stored body is not an object")
    return value


def inflate_body(stored: bytes) -> bytes:
    """Returns the MessagePack of a stored body. Raises Corrupt."""
    if len(stored) < _DEFLATED_BYTES_MIN and _zlib(packed := stored[_STORED_BLOCK.size : -4]) == stored:
        return packed  # as `_zlib` made it. To begin an inflation takes longer
    inflate = isal_zlib.decompressobj()
    try:
        packed = inflate.decompress(stored, _INFLATED_BYTES_MAX)
    except _INFLATE_ERROR as error:
        raise Corrupt(f"a stored body can't be decoded: {error}") from error
    if inflate.unconsumed_tail:
        raise Corrupt("a stored body inflates beyond its bound")
    if not inflate.eof:
        raise Corrupt("a stored body can't be decoded: it was cut short")
    return bytes(packed)


def body_json(stored: bytes) -> bytes:
    """Returns the JSON text of a stored body, with members in the order first stored. Raises Corrupt."""
    try:
        return bytes(_encode_json(decode_body(stored)))
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise Corrupt(f"a stored body is no JSON object: {error}") from error


def same_body(body: bytes, stored: bytes) -> bool:
    """Says whether two stored bodies are the same JSON value: members in any order, numbers of the same kind (I1)."""
    return BodyComparison(stored).same(body)


def may_be_same_body(body: bytes, stored_bytes: int) -> bool:
    """Says whether a stored body of that length could be the same value. It costs nothing, so it is asked first."""
    return stored_bytes <= packed_bytes(body) * 1.01 + 1024  # what can't be compressed grows by less


def packed_bytes(body: bytes) -> int:
    """Returns the length of a body's MessagePack."""
    return len(inflate_body(body))


class BodyComparison:
    """Compares bodies with one stored body, which is decoded at most once and only if it has to be.

    The same value has the same length in MessagePack, whatever the order of its members. So a comparison costs what
    the given body is worth, however large the stored one is: that is inflated no further than it could be the same.
    """

    def __init__(self, stored: bytes) -> None:
        self._stored = stored
        self._canonical: bytes | None = None
        self.compared_bytes = 0
        """What the last comparison inflated of the given body: it inflated and decoded no more of the stored one."""

    def same(self, body: bytes) -> bool:
        """Raises Corrupt when one of them is no stored body."""
        self.compared_bytes = 0
        if body == self._stored:
            return True
        try:
            self.compared_bytes = size = packed_bytes(body)
            inflate = isal_zlib.decompressobj()
            shown = len(inflate.decompress(self._stored, size + 1))
            if shown != size and (shown > size or inflate.eof):
                return False
        except _INFLATE_ERROR as error:
            raise Corrupt(f"a stored body can't be decoded: {error}") from error
        if self._canonical is None:
            self._canonical = _encode_sorted(decode_body(self._stored))
        canonical = _encode_sorted(decode_body(body))
        if canonical == self._canonical:
            return True
        # 0.0 and -0.0 are the same number, and other bytes. The value decides wherever only such bytes differ. It can,
        # although Python takes 1, 1.0 and True for equal: up to the first bytes that differ both have the same kinds.
        if canonical.replace(_MINUS_ZERO, _ZERO) != self._canonical.replace(_MINUS_ZERO, _ZERO):
            return False
        return bool(_decode_msgpack(canonical) == _decode_msgpack(self._canonical))


def encode_record(cell: StoredCell) -> bytes:
    """Returns the value of a cell's record: a MessagePack map, with the body as it is stored (docs/subscribers.md).

    The fields of StoredCell are the members of the map, by name and in order. A cause is a header of the record.
    """
    if cell.cause is not None or cell.erased is not None:
        cell = msgspec.structs.replace(cell, cause=None, erased=None)
    return _encode_msgpack(cell)


_COLUMN_NAME_BYTES_MAX = 64
_CREATED_AT_MAX = 253_402_300_799_999_999  # the end of the year 9999: what a datetime and created_at's text can hold

_Positive = Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class _Record(msgspec.Struct, frozen=True, gc=False):
    """Members that a later version may add are passed over."""

    row_key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    column_name: Annotated[str, msgspec.Meta(min_length=1, max_length=_COLUMN_NAME_BYTES_MAX)]
    ref_key: _NotNegative
    shard: _NotNegative
    generation: _Positive
    added_id: _Positive
    created_at: Annotated[int, msgspec.Meta(ge=0, le=_CREATED_AT_MAX)]
    body: bytes


_decode_record = msgspec.msgpack.Decoder(_Record).decode


def decode_cell(value: bytes) -> StoredCell:
    """Returns the cell of a record's value without decoding its body. Raises Corrupt when the bytes are no cell."""
    try:
        record = _decode_record(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a cell record: {error}") from error
    return StoredCell(
        row_key=RowKey(record.row_key),
        column_name=ColumnName(record.column_name),
        ref_key=RefKey(record.ref_key),
        shard=record.shard,
        generation=record.generation,
        added_id=record.added_id,
        created_at=record.created_at,
        body=record.body,
    )


class Erasing(msgspec.Struct, frozen=True, gc=False):
    """What an entry of the log says: which cells of its row were erased, by column their ref_keys."""

    erasure: int
    cells: Mapping[ColumnName, Sequence[RefKey]]


def erasing(body: bytes) -> Erasing:
    """Reads the stored body of an entry in ERASE_COLUMN. Raises Corrupt."""
    try:
        return msgspec.convert({**(found := decode_body(body)), "erasure": int(found["erasure"], 16)}, shape(Erasing))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"not an entry of an erasure: {error}") from error


def _check(value: Any) -> None:
    """Raises Invalid for a body that is nested too deeply or has too many containers. A hostile one must not exhaust
    the stack: no recursion.
    """
    level: list[Any] = [value]
    depth = count = 0
    while level:
        depth += 1
        check_depth(depth)
        count += len(level)
        check_containers(count)
        level = [child for container in level for child in _containers_in(container)]


_CONTAINERS = frozenset((dict, list, tuple))


def _containers_in(container: Any) -> list[Any]:
    members = container.values() if isinstance(container, dict) else container
    if _CONTAINERS.isdisjoint(map(type, members)):  # at C's speed: a long list of numbers costs next to nothing
        return []
    return [member for member in members if isinstance(member, dict | list | tuple)]
