"""Reading several partitions at once: where a bounded reading ends, and what it never passes."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from schemaless.bus import reader
from schemaless.bus.reader import TopicStream
from schemaless.errors import BusUnavailable


class Message:
    def __init__(self, partition, offset, error=None):
        self.partition, self.offset = lambda: partition, lambda: offset
        self.error = lambda: None if error is None else SimpleNamespace(code=lambda: error)
        self.topic, self.key, self.value = lambda: "cells", lambda: None, lambda: b""
        self.headers, self.timestamp = list, lambda: (1, 0)


def end(partition, offset):
    """The end of a partition, with the offset behind its last marker."""
    return Message(partition, offset, KafkaError._PARTITION_EOF)


@pytest.fixture
def stream(monkeypatch):
    """Makes a stream over batches of messages; then nothing arrives any more."""

    def make(*batches):
        waiting = list(batches)
        consumer = SimpleNamespace(assigned=[])
        consumer.assign = lambda places: consumer.assigned.extend((each.partition, each.offset) for each in places)
        consumer.consume = lambda count, timeout_s: waiting.pop(0) if waiting else []
        monkeypatch.setattr(reader, "Consumer", lambda settings: consumer)
        return consumer, TopicStream("127.0.0.1:9", "cells", timeout_s=-1.0)

    return make


def offsets(batches):
    return [(record.partition, record.offset) for batch in batches for record in batch]


def test_a_bounded_reading_ends_at_its_ends(stream):
    """At a record, or behind a marker; records beyond the end are left out, and empty partitions are not read."""
    consumer, made = stream([Message(0, 3), Message(1, 7)], [Message(0, 4), Message(0, 5), end(1, 9)])
    found = list(made.read({0: 3, 1: 7, 2: 5}, {0: 5, 1: 9, 2: 5}))
    assert offsets(found) == [(0, 3), (1, 7), (0, 4)]
    assert consumer.assigned == [(0, 3), (1, 7)]


def test_nothing_is_read_where_there_is_nothing(stream):
    consumer, made = stream()
    assert list(made.read({0: 3}, {0: 3})) == []
    assert consumer.assigned == []


def test_a_bounded_reading_that_stops_is_an_error(stream):
    """The broker is unreachable, or a transaction hangs."""
    _, made = stream([Message(0, 3)])
    with pytest.raises(BusUnavailable, match="can't be read to its end"):
        list(made.read({0: 3}, {0: 5}))


def test_following_continues_past_every_end(stream):
    """An empty list says that nothing is there yet."""
    _, made = stream([Message(0, 3), end(0, 4)], [], [Message(0, 4)])
    following = made.follow({0: 3})
    assert [offsets([next(following)]) for _ in range(4)] == [[(0, 3)], [], [(0, 4)], []]
