"""GroupReader over a client that is a script: nothing that was read is lost to an error beside it."""

import pytest
from confluent_kafka import KafkaError

from schemaless.bus import plain_transport
from schemaless.bus.plain_transport import GroupReader
from schemaless.errors import BusUnavailable


class Message:
    def __init__(self, offset, error=None):
        self._offset, self._error = offset, error

    def error(self):
        return self._error

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return None

    def value(self):
        return b"v"

    def headers(self):
        return []

    def topic(self):
        return "t"

    def timestamp(self):
        return (1, 0)


class Client:
    """Returns the messages of one fetch after the other."""

    def __init__(self, settings):
        self.settings = settings
        self.fetches = []

    def poll(self, wait_s):
        return self.fetches[0].pop(0) if self.fetches else None

    def consume(self, count, wait_s):
        return self.fetches.pop(0)


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(plain_transport, "Consumer", Client)
    return GroupReader("127.0.0.1:1", "t", "g", lambda partitions: None)


def test_an_error_between_records_is_raised_after_them(reader):
    failed = KafkaError(KafkaError._TRANSPORT, "the connection broke")
    reader._consumer.fetches = [[Message(1), Message(2, failed), Message(3)], [Message(4)]]
    assert [record.offset for record in reader.consume(0.0)] == [1, 3]
    with pytest.raises(BusUnavailable):
        reader.consume(0.0)
    assert [record.offset for record in reader.consume(0.0)] == [4]


def test_an_error_alone_is_raised_at_once(reader):
    reader._consumer.fetches = [[Message(1, KafkaError(KafkaError._TRANSPORT, "the connection broke"))]]
    with pytest.raises(BusUnavailable):
        reader.consume(0.0)


@pytest.mark.parametrize(("session_s", "heartbeat_ms"), [(1.0, 333), (2.4, 800), (10.0, 1000)])
def test_a_session_has_time_for_three_heartbeats(monkeypatch, session_s, heartbeat_ms):
    """Or one that is late ends it. A long session hears of rebalances within a second."""
    monkeypatch.setattr(plain_transport, "Consumer", Client)
    reader = GroupReader("127.0.0.1:1", "t", "g", lambda partitions: None, session_timeout_s=session_s)
    found = reader._consumer.settings
    assert (found["session.timeout.ms"], found["heartbeat.interval.ms"]) == (session_s * 1000, heartbeat_ms)
