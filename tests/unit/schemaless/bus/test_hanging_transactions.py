"""The watch distinguishes a hanging transaction from the traffic of a busy partition."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException

from schemaless.bus import partition_log
from schemaless.bus.partition_log import HangingTransactionsWatch, OpenTransactions, open_transactions

TOPIC = "cells"


class Scene:
    """A watch that asks every 2 s and waits for 10, its clock, and where the open transactions begin."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.open = {}
        self.away = set()
        monkeypatch.setattr(partition_log, "open_transactions", self._open_transactions)
        self._watch = HangingTransactionsWatch(
            "127.0.0.1:9", TOPIC, every_s=2.0, patience_s=10.0, timeout_s=1.0, clock=lambda: self.now
        )

    def hanging_after(self, seconds, partitions=(0, 1)):
        self.now += seconds
        return self._watch.hanging(partitions)

    def _open_transactions(self, admin, places, *, timeout_s):
        answered = {
            place: self.open[place[1]] for place in places if place[1] in self.open and place[1] not in self.away
        }
        return OpenTransactions(answered, {place: "no answer" for place in places if place[1] in self.away})


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_a_transaction_that_is_open_for_long_hangs(scene):
    scene.open = {1: 40}
    assert scene.hanging_after(2) == []
    assert scene.hanging_after(9) == []
    assert scene.hanging_after(1) == []  # not asked again yet
    assert scene.hanging_after(1) == [1]


def test_a_busy_partition_has_another_one_open_every_time(scene):
    for offset in range(10):
        scene.open = {0: offset}
        assert scene.hanging_after(3) == []


def test_a_partition_that_was_not_ours_meanwhile_counts_anew(scene):
    scene.open = {0: 7}
    assert scene.hanging_after(2) == []
    assert scene.hanging_after(9, partitions=(1,)) == []
    assert scene.hanging_after(2) == []
    assert scene.hanging_after(10) == [0]


def test_an_unreachable_broker_reports_nothing_and_forgets_nothing(scene):
    scene.open = {0: 7}
    assert scene.hanging_after(2) == []
    scene.away = {0, 1}
    assert scene.hanging_after(9) == []
    scene.away = set()
    assert scene.hanging_after(2) == [0]


def test_a_broker_that_is_away_hides_no_transaction_of_another_broker(scene):
    scene.open, scene.away = {0: 7, 1: 9}, {1}
    assert scene.hanging_after(2) == []
    assert scene.hanging_after(10) == [0]
    scene.away = set()
    assert scene.hanging_after(2) == [0]
    assert scene.hanging_after(10) == [0, 1]


class FakeAdmin:
    """Says for each partition where it ends, for all readers and for committed ones, or fails.

    Like librdkafka's, it may take seconds for a topic of which it wasn't asked who leads it. So it refuses that.
    """

    def __init__(self, *ends):
        self._ends = ends
        self._known = set()

    def list_topics(self, topic, timeout_s):
        self._known.add(topic)

    def list_offsets(self, wanted, *, isolation_level, request_timeout):
        answers = {}
        for place in wanted:
            assert place.topic in self._known, f"who leads {place.topic} isn't known"
            answers[place] = answer = Future()
            end = self._ends[place.partition]
            if isinstance(end, int):
                answer.set_exception(KafkaException(KafkaError(end)))
            else:
                answer.set_result(SimpleNamespace(offset=end[isolation_level is IsolationLevel.READ_COMMITTED]))
        return answers


class FakeAdminOfAll(FakeAdmin):
    """Fails a question about several partitions where one of them has no leader."""

    def list_offsets(self, wanted, **settings):
        if len(wanted) > 1:
            failed = FakeAdmin(*[KafkaError._NOENT] * len(self._ends))
            failed.list_topics(TOPIC, 1.0)
            return failed.list_offsets(wanted, **settings)
        return super().list_offsets(wanted, **settings)


@pytest.mark.parametrize("timeout_s", [1.0, 0.0], ids=["in time", "the first question took all the time"])
def test_a_partition_without_a_leader_hides_no_transaction_of_another(timeout_s):
    """librdkafka fails the whole question for it, now and then."""
    admin = FakeAdminOfAll((9, 7), KafkaError._NOENT)
    found = open_transactions(admin, [(TOPIC, 0), (TOPIC, 1)], timeout_s=timeout_s)
    assert (found.first, list(found.errors)) == ({(TOPIC, 0): 7}, [(TOPIC, 1)])


def test_what_a_broker_does_not_say_is_no_end():
    """librdkafka gives -1001 and no error for a broker that hangs. A log would be opened over a hanging transaction."""
    admin = FakeAdmin((9, 7), (9, 9), (-1001, -1001), KafkaError._TIMED_OUT)
    found = open_transactions(admin, [(TOPIC, partition) for partition in range(4)], timeout_s=1.0)
    assert found.first == {(TOPIC, 0): 7}
    assert {place: error.code() for place, error in found.errors.items()} == {
        (TOPIC, 2): KafkaError._TIMED_OUT, (TOPIC, 3): KafkaError._TIMED_OUT,
    }  # fmt: skip


def test_a_broker_that_does_not_say_who_leads_hides_no_leader():
    """The one that was asked may hang, and the leaders may answer."""

    class AdminBesideBroken(FakeAdmin):
        def list_topics(self, topic, timeout_s):
            super().list_topics(topic, timeout_s)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    found = open_transactions(AdminBesideBroken((9, 7), KafkaError._TIMED_OUT), [(TOPIC, 0), (TOPIC, 1)], timeout_s=1.0)
    assert (found.first, list(found.errors)) == ({(TOPIC, 0): 7}, [(TOPIC, 1)])
