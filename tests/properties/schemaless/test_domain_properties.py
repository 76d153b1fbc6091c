"""Keys, locations, times and shards over all their values."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import (
    REF_KEY_MAX,
    created_at_text,
    parse_column_name,
    parse_ref_key,
    parse_row_key,
    parse_time,
    row_key_text,
)
from schemaless.errors import Invalid, Misconfigured
from schemaless.location import Location, ShardLocation, parse_location, parse_shard_location
from schemaless.sharding import by_rendezvous, murmur2, shard_of
from schemaless.storage.sql import Name, literal
from schemaless.topology import Datastore

GENERATIONS = st.integers(0, 2**31)
ADDED_IDS = st.integers(0, 2**63 - 1)
CLUSTERS = st.lists(st.text("abcdefgh", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)


@given(st.uuids())
def test_row_keys_read_back(value):
    """The text is the canonical one of the standard library."""
    assert row_key_text(value.bytes) == str(value)
    assert parse_row_key(str(value).upper()) == value.bytes


@given(st.integers(0, REF_KEY_MAX))
def test_ref_keys_read_back(ref_key):
    """As a number and as text."""
    assert parse_ref_key(str(ref_key)) == parse_ref_key(ref_key) == ref_key


@given(st.text(max_size=80))
def test_a_column_name_is_ascii_or_refused(text):
    """Whatever is accepted fits its column and a header."""
    try:
        assert parse_column_name(text).encode("ascii").isascii()
    except Invalid:
        return
    assert 1 <= len(text) <= 64


@given(st.integers(0, 2**52))
def test_times_read_back(microseconds):
    """created_at of an answer can be given as `since`."""
    assert parse_time(created_at_text(microseconds)) == microseconds


@given(GENERATIONS, ADDED_IDS, st.integers(0, 10**9 - 1))
def test_locations_read_back(generation, added_id, shard):
    """`next` of one answer is `after` of the following call."""
    location = Location(generation, added_id)
    assert parse_location(str(location)) == (generation, added_id)
    assert parse_shard_location(str(ShardLocation(shard, location))) == ShardLocation(shard, location)


@given(st.uuids(), st.integers(1, 5000))
def test_a_shard_is_in_range_and_stays(value, shards):
    """I2: a function of the key and the count only."""
    shard = shard_of(value.bytes, shards)
    assert 0 <= shard < shards
    assert shard == (murmur2(str(value).encode()) & 0x7FFFFFFF) % shards


@given(st.uuids(), st.integers(1, 64), st.integers(1, 64))
def test_a_partition_holds_whole_shards(value, partitions, factor):
    """I8: hashing by partitions and hashing by shards agree when partitions divides shards."""
    datastore = Datastore("d", partitions * factor, partitions, ("a",))
    shard = shard_of(value.bytes, datastore.shards)
    assert datastore.partition(shard) == shard_of(value.bytes, partitions)
    assert shard in datastore.shards_of_partition(datastore.partition(shard))


@given(st.integers(1, 500), st.integers(1, 500))
def test_partitions_that_do_not_divide_are_refused(shards, partitions):
    """I8 can't hold then."""
    if shards % partitions:
        with pytest.raises(Misconfigured):
            Datastore("d", shards, partitions, ("a",))


@given(st.uuids(), CLUSTERS)
def test_a_lost_cluster_moves_only_its_own_rows(value, clusters):
    """The order of the others stays: a worker finds a buffered cell again."""
    order = list(by_rendezvous(value.bytes, clusters))
    assert sorted(order) == sorted(clusters)
    lost = order[0]
    assert list(by_rendezvous(value.bytes, [name for name in clusters if name != lost])) == order[1:]


@given(st.binary(max_size=50), st.text(max_size=50))
def test_no_value_can_leave_its_literal(raw, text):
    """SQL: bytes and strings are hexadecimal, so nothing in them can end them."""
    for value in (raw, text):
        rendered = literal(value)
        assert bytes.fromhex(rendered.partition("x'")[2].removesuffix("'")) == (
            raw if isinstance(value, bytes) else text.encode()
        )
    name = literal(Name(str(uuid.UUID(int=0)) + "`;"))
    assert name.count("`") == 4
