"""What counts as the group's word that this process is still its member: the answer to this very question."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from schemaless.bus import membership
from schemaless.bus.membership import Membership
from schemaless.errors import BusUnavailable
from schemaless.stack.plan import free_ports
from schemaless.topology import Datastore

DATASTORE = Datastore("trips", 2, 1, ("a",))
REFUSED = "UNKNOWN_MEMBER_ID"


class FakeConsumer:
    """Each poll brings the next answer of `answers`: the number of a question, and its error if it has one."""

    def __init__(self, settings):
        self.on_commit = settings["on_commit"]
        self.asked = []
        self.answers = []
        self.unassigned = []

    def subscribe(self, topics, **callbacks):
        self.callbacks = callbacks

    def incremental_unassign(self, places):
        self.unassigned.append(places)

    def commit(self, *, offsets, asynchronous):
        assert asynchronous, "else a coordinator that hangs would hold the thread"
        self.asked += [(place.topic, place.offset) for place in offsets]
        self.said = offsets[0].metadata

    def poll(self, timeout_s):
        if self.answers:
            number, error = self.answers.pop(0)
            self.on_commit(None, [SimpleNamespace(offset=number, error=error)])


@pytest.fixture
def member(monkeypatch):
    monkeypatch.setattr(membership, "Consumer", FakeConsumer)
    return Membership("127.0.0.1:9", DATASTORE, session_timeout_s=6.0, assigned=print, revoked=print, lost=print)


def test_an_answer_without_error_confirms(member):
    member._consumer.answers += [(1, None)]
    assert member.ask(5.0) == 1
    assert member._consumer.asked == [(DATASTORE.progress_topic, 1)]


@pytest.mark.parametrize(
    ("answers", "confirmed"),
    [([], 0), ([(2, REFUSED)], 0), ([(1, None)], 1), ([(1, REFUSED), (2, None)], 2)],
    ids=["silence", "refused", "to the first one, late", "to the second one"],
)
def test_an_answer_counts_for_its_own_question_however_late_it_comes(member, answers, confirmed):
    """The first question was not answered in time. A coordinator that is always slow is no reason to wait for ever."""
    assert member.ask(0.0) == 0
    member._consumer.answers += answers
    for _ in answers:
        member.poll(0.0)
    assert member.ask(0.0) == confirmed
    assert member.asked == 2


def test_challenges_are_answered_until_the_group_has_it(member):
    """The group refuses it while it is being assigned. A question of later leaves what was said where it is."""
    consumer = member._consumer
    member.answer(["b", "a"])
    member.answer(["b", "a"])
    assert (consumer.said, member.asked) == ("b,a", 1)
    consumer.answers += [(1, REFUSED), (2, None)]
    member.poll(0.0)
    member.answer(["b", "a"])
    member.poll(0.0)
    member.answer(["b", "a"])
    assert member.asked == 2
    member.ask(0.0)
    assert (consumer.said, member.asked) == ("b,a", 3)


def test_a_group_that_is_not_heard_is_no_revocation(monkeypatch):
    """The partitions may be anybody's. What is revoked is ours until `revoked` has returned."""
    told = []
    monkeypatch.setattr(membership, "Consumer", FakeConsumer)
    named = {name: lambda partitions, name=name: told.append((name, partitions)) for name in ("revoked", "lost")}
    member = Membership("127.0.0.1:9", DATASTORE, session_timeout_s=6.0, assigned=print, **named)
    consumer, places = member._consumer, [SimpleNamespace(partition=0)]
    consumer.callbacks["on_revoke"](consumer, places)
    consumer.callbacks["on_lost"](consumer, places)
    assert told == [("revoked", [0]), ("lost", [0])]
    assert consumer.unassigned == [places, places]


def test_a_member_whose_brokers_are_all_away_says_so():
    """The real client. The log of a tailer said only that it has no partitions any more."""
    (port,) = free_ports(1)
    member = Membership(
        f"127.0.0.1:{port}", DATASTORE, session_timeout_s=6.0, assigned=print, revoked=print, lost=print
    )
    try:
        with capture_logs() as lines:
            while not lines:  # bounded by the time-out of every test
                with suppress(BusUnavailable):
                    member.poll(0.05)
        with capture_logs() as back:
            member.kafka_answers()
            member.kafka_answers()
    finally:
        member.close()
    assert (lines[0]["event"], lines[0]["group"]) == ("no broker of Kafka answers", "schemaless.trips.tailer")
    assert "1/1 brokers are down" in lines[0]["why"]
    assert [(line["event"], line["group"]) for line in back] == [("Kafka answers again", "schemaless.trips.tailer")]


def test_a_member_that_missed_nobody_does_not_say_that_kafka_is_back(member):
    with capture_logs() as lines:
        member.kafka_answers()
    assert lines == []
