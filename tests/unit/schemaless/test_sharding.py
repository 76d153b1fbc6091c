"""Golden vectors: a row key's shard is fixed for ever (I2), and Kafka's default partitioner agrees (I8)."""

import uuid
from collections import Counter

import pytest

from schemaless.sharding import by_rendezvous, murmur2, shard_of, shard_of_text

# org.apache.kafka.common.utils.UtilsTest.testMurmur2, signed 32 bit.
KAFKA_VECTORS = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize(("text", "signed"), KAFKA_VECTORS.items())
def test_murmur2_is_kafkas(text, signed):
    """I2: Kafka's own test vectors."""
    assert murmur2(text.encode()) == signed & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("text", "of_4096", "of_64"),
    [
        ("00000000-0000-0000-0000-000000000000", 2941, 61),
        ("f81d4fae-7dec-11d0-a765-00a0c91e6bf6", 1196, 44),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", 242, 50),
    ],
)
def test_a_row_keys_shard_is_for_ever(text, of_4096, of_64):
    """I2: by the canonical text; these numbers may never change."""
    row_key = uuid.UUID(text).bytes
    assert (shard_of(row_key, 4096), shard_of(row_key, 64)) == (of_4096, of_64)
    assert shard_of_text(text, 4096) == of_4096


def test_partitions_follow_shards():
    """I8: hashing by partitions gives the shard's partition, when partitions divides shards."""
    for _ in range(200):
        key = uuid.uuid4().bytes
        assert shard_of(key, 64) % 8 == shard_of(key, 8)


def test_secondaries_are_spread_and_stay():
    """Each of three others is preferred by about a third; when one goes away only its rows move."""
    keys = [uuid.UUID(int=n).bytes for n in range(3000)]
    first = {key: by_rendezvous(key, ["b", "c", "d"])[0] for key in keys}
    assert all(900 < count < 1100 for count in Counter(first.values()).values())
    for key in keys:
        assert by_rendezvous(key, ["d", "b"])[0] == (first[key] if first[key] != "c" else by_rendezvous(key, "bcd")[1])


def test_order_of_the_clusters_does_not_matter():
    """Any process that knows the clusters finds the same secondary."""
    key = uuid.uuid4().bytes
    assert by_rendezvous(key, ["b", "c", "d"]) == by_rendezvous(key, ["d", "c", "b"])
    assert list(by_rendezvous(key, ["b"])) == ["b"]
