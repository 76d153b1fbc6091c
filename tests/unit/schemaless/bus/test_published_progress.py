"""Progress records: what their format keeps apart, and the digest that they carry (I7, I16)."""

import msgspec
import pytest

from schemaless.bus.published_progress import PROGRESS_FORMAT, committed_progress, progress_key, progress_value
from schemaless.bus.reader import Span
from schemaless.errors import Misconfigured
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
    assert read(of_format(1), progress_value(position(3), "id")).positions == {0: position(3)}


@pytest.mark.parametrize(
    ("version", "what_to_do"),
    [(1, "delete that topic. Tailers make it again"), (PROGRESS_FORMAT + 1, "run the newer program")],
)
def test_another_format_is_refused_with_what_to_do(version, what_to_do):
    with pytest.raises(Misconfigured, match=rf"trips.progress has a record of format {version}.*{what_to_do}"):
        read(progress_value(position(1), "id"), of_format(version))
