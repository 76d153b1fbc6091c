"""What a member of the tailers' group does with the answers of the watches beside it."""

import asyncio
from types import SimpleNamespace

import pytest

from schemaless.names import Stall
from schemaless.topology import Datastore
from tailer import datastore_tailer
from tailer.datastore_tailer import GroupMember, LeaveReason

DATASTORE = Datastore("trips", 4, 2, ("a",))
SETTINGS = SimpleNamespace(kafka="127.0.0.1:9", transaction_timeout_s=1.0, session_timeout_s=6.0)


class FakeTopics:
    """Each call of `changed` takes the next of `answers`. None is silence."""

    answers: list[bool | None]

    def __init__(self, *_, **__):
        self.answered = 0
        self.counts = {}

    def verify_settings(self):
        pass

    def changed(self):
        answer = FakeTopics.answers.pop(0)
        self.answered += answer is not None
        return bool(answer)


class FakeMembership:
    heard: list[str]
    was_away = False
    is_away = False
    refusal: str | None = None

    def __init__(self, *_, **__):
        pass

    def poll(self, timeout_s):
        FakeMembership.heard.append("poll")

    def kafka_answers(self):
        FakeMembership.heard.append("answer")
        return FakeMembership.was_away


@pytest.fixture
def member(monkeypatch):
    monkeypatch.setattr(datastore_tailer, "TopicsWatch", FakeTopics)
    monkeypatch.setattr(datastore_tailer, "Membership", FakeMembership)
    nothing_hangs = SimpleNamespace(hanging=lambda tailed: [])
    monkeypatch.setattr(datastore_tailer, "HangingTransactionsWatch", lambda *_, **__: nothing_hangs)
    FakeMembership.heard = []
    loop = asyncio.new_event_loop()
    yield GroupMember(SETTINGS, DATASTORE, loop, assigned=print, revoked=print, lost=print)
    loop.close()


def test_the_group_s_client_hears_that_kafka_answers_from_the_watch_of_the_topics(member):
    """That client tells of an outage, and not of its end. An answer counts only after it was polled."""
    FakeTopics.answers = [None, False]
    assert [member.poll([], []), member.poll([], [])] == [None, None]
    assert FakeMembership.heard == ["poll", "poll", "answer"]


def test_logs_are_opened_anew_after_kafka_was_away(member, monkeypatch):
    """A broker that comes back may have lost the end of its logs (I7)."""
    monkeypatch.setattr(FakeMembership, "was_away", True)
    FakeTopics.answers = [None, False]
    assert [member.poll([], []), member.poll([], [])] == [None, LeaveReason.KAFKA_WAS_AWAY]


def test_topics_that_were_deleted_are_an_answer_and_a_reason_to_leave(member):
    FakeTopics.answers = [True]
    assert member.poll([], []) is LeaveReason.TOPICS_DELETED
    assert FakeMembership.heard == ["poll", "answer"]


def test_a_refused_account_is_another_stall_than_a_kafka_that_is_away(member, monkeypatch):
    """Who reads that no broker answers looks for an outage."""
    assert member.stalls == {}
    monkeypatch.setattr(FakeMembership, "is_away", True)
    assert member.stalls == {Stall.NO_KAFKA: "no broker of Kafka answers"}
    monkeypatch.setattr(FakeMembership, "refusal", "Kafka at k:9092 refuses the account 'tailer'")
    assert member.stalls == {Stall.REFUSED: "Kafka at k:9092 refuses the account 'tailer'"}
