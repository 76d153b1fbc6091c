"""The topic read backwards: the present history of one shard, whatever was superseded or published twice."""

import msgspec
import pytest

from schemaless.bus.reader import Span, TopicHistory
from schemaless.codec import encode_body, encode_record
from schemaless.names import KIND_CELL, KIND_GENERATION, KIND_HEADER, RECORD_VERSION, VERSION_HEADER
from schemaless.position import cell_digest
from schemaless.record import Announcement, Record
from schemaless.topology import Datastore
from tests.shard_histories import cell

DATASTORE = Datastore("trips", 2, 1, ("a",))


def stored(added_id, generation=1, shard=0):
    return msgspec.structs.replace(cell(added_id, generation), shard=shard, body=encode_body({}))


class Partition:
    """A reader of one partition, whose first `cut` records are gone."""

    def __init__(self, values, cut=0):
        self.values = values
        self.cut = cut

    def committed_span(self, topic, partition):
        return Span(self.cut, len(self.values))

    def read(self, topic, partition, span):
        assert self.cut <= span.low < span.high <= len(self.values)
        yield [record(offset, self.values[offset]) for offset in range(span.low, span.high)]


def record(offset, value):
    is_cell = not isinstance(value, Announcement)
    encoded = encode_record(value) if is_cell else msgspec.msgpack.encode(msgspec.structs.asdict(value))
    headers = {VERSION_HEADER: RECORD_VERSION, KIND_HEADER: KIND_CELL if is_cell else KIND_GENERATION}
    return Record("trips", 0, offset, 0, None, encoded, headers)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_it_yields_what_a_reader_of_the_topic_has_at_the_end_last_cells_first(window):
    """Superseded cells and other shards are left out, also those of a generation that a lower one hides."""
    kept = [stored(1), stored(2), stored(3, 3), stored(4, 3)]
    values = [
        *kept[:2],
        *(stored(n) for n in (3, 4, 5)),
        stored(9, shard=1),
        Announcement(0, 2, 5),
        stored(5, 2),
        stored(6, 2),
        Announcement(0, 3, 3),
        *kept[2:],
        stored(10, shard=1),
    ]
    history = TopicHistory(Partition(values), DATASTORE, 0, window=window)
    assert history.is_whole
    found = [position for piece in history for position in piece]
    assert [(at.generation, at.added_id, at.digest) for at in found] == [
        (one.generation, one.added_id, cell_digest(one)) for one in reversed(kept)
    ]


def test_an_announcement_alone_supersedes_what_was_before_it():
    """No cell of the new generation was published yet."""
    values = [stored(1), stored(2), stored(3), Announcement(0, 2, 2)]
    assert [[at.added_id for at in piece] for piece in TopicHistory(Partition(values), DATASTORE, 0)] == [[1]]


def test_a_cut_topic_is_not_whole():
    """Nothing before its first record can be read."""
    history = TopicHistory(Partition([stored(1), stored(2)], cut=1), DATASTORE, 0)
    assert (history.is_whole, [at.added_id for piece in history for at in piece]) == (False, [2])
