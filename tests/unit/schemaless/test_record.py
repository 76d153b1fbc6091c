"""What a record of the topic says: ours is read, whatever else lies there gets a name and a reason, nothing raises."""

from datetime import timedelta

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless import ForeignRecord, FoundCell, decode_record
from schemaless.cell import EPOCH, Erased, StoredCell
from schemaless.codec import encode_body, encode_record
from schemaless.found_cell import ErasedBody, found_cell
from schemaless.record import Announcement, Seek, decode_stored

BODY = encode_body({"driver": "d-17"})
CELL = StoredCell(b"r" * 16, "BASE", 2, shard=3, generation=1, added_id=4, created_at=5, body=BODY)
MEMBERS = msgpack.unpackb(encode_record(CELL))
HEADERS = [("v", b"1"), ("kind", b"cell"), ("column", b"BASE")]


def headers(kind: bytes) -> dict[str, bytes]:
    return {"v": b"1", "kind": kind}


@pytest.mark.parametrize("given", [HEADERS, tuple(HEADERS), dict(HEADERS)], ids=["list", "tuple", "mapping"])
def test_a_cell_is_read_whatever_client_brought_it(given):
    """Headers come as pairs from one client, as a mapping from another."""
    found = decode_record(encode_record(CELL), given)
    assert found == found_cell(CELL)
    assert found.body == {"driver": "d-17"}
    assert decode_stored(encode_record(CELL), given) == CELL


def test_members_of_a_later_version_are_passed_over():
    """Adding to the contract is free."""
    assert decode_record(msgpack.packb(MEMBERS | {"later": [1, 2]}), HEADERS) == found_cell(CELL)


def test_a_cause_is_a_header_and_no_part_of_the_value():
    """A15: a record without it is byte by byte the same."""
    caused = msgspec.structs.replace(CELL, cause="billing/bill_rider@7:1:1000")
    assert encode_record(caused) == encode_record(CELL)
    for check_body in (True, False):
        given = [*HEADERS, ("cause", b"billing/bill_rider@7:1:1000")]
        assert decode_stored(encode_record(caused), given, check_body=check_body) == caused
    assert decode_record(encode_record(CELL), [*HEADERS, ("cause", b"\xff")]).cause == "\ufffd"


def test_a_cell_that_was_erased_before_it_was_published_has_no_body():
    """I19: the record doesn't say by what, and the log does. A cell with an empty body is no such record."""
    stub = msgspec.structs.replace(CELL, body=b"", erased=Erased(17, 8))
    value, given = encode_record(stub), headers(b"erased")
    assert decode_stored(value, given) == msgspec.structs.replace(stub, erased=None)
    found = decode_record(value, given)
    assert (found.body, found.erased, found.ref_key) == ({}, ErasedBody(), 2)
    assert found_cell(stub).erased == ErasedBody("0000000000000011", EPOCH + timedelta(microseconds=8))
    assert found_cell(CELL).erased is None
    assert isinstance(decode_stored(value, HEADERS), ForeignRecord)


def test_notices_are_read():
    """A generation that begins, and an operator's seek."""
    opening = msgpack.packb({"shard": 0, "generation": 2, "starts_at": 4})
    assert decode_record(opening, headers(b"generation")) == Announcement(0, 2, 4)
    sought = msgpack.packb({"shard": 0, "generation": 1, "added_id": 0})
    assert decode_record(sought, headers(b"seek")) == Seek(0, 1, 0)


@pytest.mark.parametrize(
    ("value", "given", "why"),
    [
        (None, None, "header v is missing"),
        (encode_record(CELL), [], "header v is missing"),
        (encode_record(CELL), [("v", b"2"), ("kind", b"cell")], "header v is b'2'"),
        (encode_record(CELL), [("v", b"1")], "kind missing is not known"),
        (encode_record(CELL), headers(b"x" * 999), "kind b'xxx"),
        (b"", HEADERS, "not a cell record"),
        (b"{}", HEADERS, "not a cell record"),
        (b"\x91" * 5000, HEADERS, "not a cell record"),
        (msgpack.packb({"row_key": b"r" * 16}), HEADERS, "column_name"),
        (msgpack.packb(MEMBERS | {"row_key": b"r" * 15}), HEADERS, "row_key"),
        (msgpack.packb(MEMBERS | {"row_key": "r" * 16}), HEADERS, "row_key"),
        (msgpack.packb(MEMBERS | {"column_name": ""}), HEADERS, "column_name"),
        (msgpack.packb(MEMBERS | {"added_id": 0}), HEADERS, "added_id"),
        (msgpack.packb(MEMBERS | {"added_id": 2**63}), HEADERS, "added_id"),
        (msgpack.packb(MEMBERS | {"shard": -1}), HEADERS, "shard"),
        (msgpack.packb(MEMBERS | {"created_at": 2**62}), HEADERS, "created_at"),
        (msgpack.packb(MEMBERS | {"body": b"no zlib"}), HEADERS, "a stored body can't be decoded"),
        (msgpack.packb(MEMBERS | {"body": BODY[:-1]}), HEADERS, "a stored body can't be decoded"),
        (msgpack.packb({"shard": 0, "generation": 2}), headers(b"generation"), "not a generation record"),
        (msgpack.packb({"shard": 0, "generation": 0, "added_id": 1}), headers(b"seek"), "not a seek record"),
    ],
)
def test_what_is_not_ours_gets_a_name_and_a_reason(value, given, why):
    """Topic, partition and offset tell where it lies."""
    found = decode_record(value, given, topic="t", partition=1, offset=9)
    assert isinstance(found, ForeignRecord)
    assert (found.topic, found.partition, found.offset) == ("t", 1, 9)
    assert why in found.why
    assert len(found.why) < 200
    assert str(found).startswith("t [1] offset 9: ")


KINDS = st.sampled_from([b"cell", b"generation", b"seek", b""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.none() | st.binary(max_size=200), KINDS)
def test_any_bytes_are_read_or_named(value, kind):
    """Nothing raises, whatever lies in the topic."""
    assert isinstance(decode_record(value, headers(kind)), FoundCell | Announcement | Seek | ForeignRecord)


@given(st.fixed_dictionaries({name: VALUES | st.just(value) for name, value in MEMBERS.items()}), KINDS)
def test_any_members_are_read_or_named(members, kind):
    """The same for values that are nearly right."""
    found = decode_record(msgpack.packb(members), headers(kind))
    assert isinstance(found, FoundCell | Announcement | Seek | ForeignRecord)


@given(st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)), max_size=4))
def test_any_headers_are_read_or_named(given):
    """The same for headers."""
    assert isinstance(decode_record(encode_record(CELL), given), FoundCell | ForeignRecord)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_cell_is_never_taken_for_another_body(place, byte):
    """zlib's checksum guards the body."""
    value = bytearray(encode_record(CELL))
    value[place % len(value)] = byte
    found = decode_record(bytes(value), HEADERS)
    assert isinstance(found, ForeignRecord) or found.body == {"driver": "d-17"}
