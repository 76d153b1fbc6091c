"""Tail drain: one tailer process publishes a backlog that is already in MySQL, beside its two raw limits.

The limits: PyMySQL reads the same rows and drops them; librdkafka produces the very same records, ready-made, in
transactions. Each of the three has the machine to itself, servers apart.
"""

from __future__ import annotations

import base64
import random
import uuid
from collections.abc import Iterator
from itertools import cycle, islice

from bench.cells_log import committed_reader, read_records, renew_topics, watch_drain
from bench.figures import Comparison, Values, at_least
from bench.filling import fill_ours
from bench.raw_limits import create_topic, produce_rate, read_rate
from bench.scale import PARTITIONS, Scale
from bench.servers import BenchStack, service
from bench.trips import COLUMN
from schemaless.cell import CellKey, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.sharding import shard_of
from schemaless.storage.entity_table import ShardCell

NOISE_BYTES = 260  # 300 bytes once stored
BODIES = 5_000  # distinct ones: more than any compression window holds
FLOOR = at_least(1 / 3)


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    fill_ours(stack, backlog(scale.cells_drained, stack.datastore.shards))
    tailed, read, produced = [], [], []
    for number in range(scale.drains):
        tailed.append(tail_rate(stack, scale.cells_drained))
        read.append(read_rate(stack))
        produced.append(raw_produce_rate(stack, scale.cells_drained, f"raw-{number}"))
    slower = [min(pair) for pair in zip(read, produced, strict=True)]
    return [
        _row("tailer beside PyMySQL reading and dropping", tailed, read),
        _row("tailer beside librdkafka producing", tailed, produced),
        Comparison("tailer beside the slower of the two", "cells/s", _values(tailed), _values(slower), FLOOR),
    ]


def backlog(cells: int, shards: int, seed: int = 4) -> Iterator[ShardCell]:
    """Returns cells whose stored bodies hardly compress. Another seed gives other cells."""
    draw = random.Random(seed)
    bodies = [encode_body({"noise": base64.b64encode(draw.randbytes(NOISE_BYTES)).decode()}) for _ in range(BODIES)]
    for body in islice(cycle(bodies), cells):
        row_key = RowKey(uuid.UUID(int=draw.getrandbits(128), version=4).bytes)
        yield ShardCell(CellKey(row_key, COLUMN, RefKey(1)), body, shard_of(row_key, shards))


def tail_rate(stack: BenchStack, cells: int) -> float:
    """Timed from the first progress that a committed reader sees to the last."""
    datastore = stack.datastore
    renew_topics(stack.kafka, datastore)
    with committed_reader(stack.kafka, [datastore.progress_topic], datastore.partitions) as reader:
        reader.poll(1.0)  # connected before there is anything to see
        with service(stack, "tailer", ["tailer"]):
            return watch_drain(reader, cells).rate


def raw_produce_rate(stack: BenchStack, cells: int, topic: str) -> float:
    """The records that the tailer published just now, once more, by librdkafka alone."""
    records = read_records(stack.kafka, stack.datastore, cells)
    create_topic(stack.kafka, topic, PARTITIONS)
    return produce_rate(stack.kafka, topic, records)


def _row(what: str, ours: list[float], theirs: list[float]) -> Comparison:
    return Comparison(what, "cells/s", _values(ours), _values(theirs))


def _values(rates: list[float]) -> Values:
    return Values(tuple(rates))
