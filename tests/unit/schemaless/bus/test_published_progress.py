"""Progress records: what their format keeps apart, and the digest that they carry (I7, I16)."""

import msgspec
import pytest

from schemaless.bus.partition_log import (
    PROGRESS_FORMAT,
    beginning,
    committed_progress,
    progress_key,
    progress_value,
    read_progress,
)
from schemaless.bus.reader import Span
from schemaless.cell import StoredCell
from schemaless.codec import encode_body, encode_record
from schemaless.errors import Misconfigured
from schemaless.names import KIND_CELL, KIND_HEADER, RECORD_VERSION, VERSION_HEADER
from schemaless.position import Position, cell_digest
from schemaless.record import Record
from schemaless.topology import Datastore
from tests.shard_histories import position

DATASTORE = Datastore("trips", 1, 1, ("a",))


class ProgressTopic:
    """A reader of one partition of progress."""

    def __init__(self, *values):
        self.values = values

    def committed_span(self, topic, partition):
        return Span(0, len(self.values))

    def read(self, topic, partition, span):
        yield [
            Record(topic, partition, offset, 0, progress_key(0), value, {}) for offset, value in enumerate(self.values)
        ]


def of_format(version):
    fields = {"shard": 0, "generation": 1, "added_id": 2, "topic": "id"}
    return msgspec.msgpack.encode(fields if version == 1 else fields | {"digest": 7, "format": version})


def read(*values):
    return committed_progress(ProgressTopic(*values), DATASTORE, 0, "id")


def test_the_last_record_of_a_shard_counts():
    """Also behind one of an older format, which compaction hasn't removed yet."""
    assert read(of_format(1), progress_value(position(3), "id", "")).positions == {0: position(3)}


@pytest.mark.parametrize(
    ("version", "what_to_do"),
    [(1, "delete that topic. Tailers make it again"), (PROGRESS_FORMAT + 1, "run the newer program")],
)
def test_another_format_is_refused_with_what_to_do(version, what_to_do):
    with pytest.raises(Misconfigured, match=rf"trips.progress has a record of format {version}.*{what_to_do}"):
        read(progress_value(position(1), "id", ""), of_format(version))


SHARDS = Datastore("trips", 3, 1, ("a",))
CELL_HEADERS = {VERSION_HEADER: RECORD_VERSION, KIND_HEADER: KIND_CELL}


class Topics:
    """A reader of one partition of both topics, which a test cuts."""

    def __init__(self, cells, progress):
        self.values = {SHARDS.topic: cells, SHARDS.progress_topic: progress}

    def committed_span(self, topic, partition):
        return Span(0, len(self.values[topic]))

    def read(self, topic, partition, span):
        values = self.values[topic][span.low : span.high]
        yield [Record(topic, partition, at, 0, b"0", value, CELL_HEADERS) for at, value in enumerate(values, span.low)]

    def opened(self):
        """Reads progress and records what is unrecorded, as the log does. Returns the number of each shard."""
        found = read_progress(self, SHARDS, 0, "id")
        self.values[SHARDS.progress_topic] += [progress_value(at, "id", "") for at in found.unrecorded.values()]
        return {shard: at.added_id for shard, at in found.positions.items()}


def test_a_topic_that_loses_its_end_again_before_anything_is_published_gets_both_again():
    """After the first loss the newest record of progress names the topic's new end, so the next one is seen (I16)."""
    cells = [
        StoredCell(b"r" * 16, "BASE", 0, shard, 1, 1, created_at=0, body=encode_body({"n": 1})) for shard in range(3)
    ]
    reached = [Position(cell.shard, 1, 1, digest=cell_digest(cell)) for cell in cells]
    topics = Topics(
        [encode_record(cell) for cell in cells],
        [progress_value(at, "id", "") for at in (*map(beginning, range(3)), *reached)],
    )
    assert topics.opened() == {0: 1, 1: 1, 2: 1}
    del topics.values[SHARDS.topic][2:]
    assert topics.opened() == {0: 1, 1: 1, 2: 0}
    del topics.values[SHARDS.topic][1:]
    assert topics.opened() == {0: 1, 1: 0, 2: 0}
