"""Sharding: which shard a key belongs to, permanently (I2). The hash is that of Kafka's default partitioner, so any
Kafka client that partitions by key co-partitions with us (I8). Golden vectors: tests/unit/schemaless/test_sharding.py.

Source: org.apache.kafka.common.utils.Utils.murmur2 and toPositive.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from schemaless.cell import row_key_text

_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
_POSITIVE = 0x7FFFFFFF


def murmur2(data: bytes) -> int:
    """Returns the 32-bit murmur2 that Kafka's Java client computes, unsigned."""
    m, mask = _M, _MASK  # locals are faster, and every put and every index entry is hashed here
    length = len(data)
    h = _SEED ^ length
    words = length & ~3
    for k in struct.unpack(f"<{words // 4}I", data[:words]):
        k = k * m & mask  # noqa: PLW2901
        h = (h * m ^ (k ^ (k >> 24)) * m) & mask
    if tail := data[words:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)


def shard_of_text(text: str, shards: int) -> int:
    """Returns the shard of any text. An index entry is placed by that of its shard field."""
    return (murmur2(text.encode()) & _POSITIVE) % shards


def shard_of(row_key: bytes, shards: int) -> int:
    """Returns the shard of a row key, which is given as 16 bytes."""
    return shard_of_text(row_key_text(row_key), shards)


def by_rendezvous(row_key: bytes, clusters: Sequence[str]) -> Sequence[str]:
    """Returns the clusters in the order in which a row prefers them as its secondary.

    The choice is as evenly spread as a random one, but it follows from the row key alone, so a reader knows where to
    look (highest random weight, Thaler and Ravishankar 1998).
    """
    if len(clusters) < 2:
        return clusters
    return sorted(clusters, key=lambda name: blake2b(row_key, key=name.encode(), digest_size=8).digest())
