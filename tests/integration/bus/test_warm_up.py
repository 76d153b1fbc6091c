"""A broker is warmed for a bounded time, and nothing of it stays."""

from itertools import count

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from schemaless.bus import warm_up
from schemaless.errors import BusUnavailable
from tests.waiting import until


@pytest.fixture
def admin(kafka):
    return AdminClient({"bootstrap.servers": kafka})


def await_deletion(admin):
    until(lambda: warm_up.TOPIC not in admin.list_topics(timeout=60).topics)


def test_it_commits_until_its_time_is_over(admin, kafka):
    """Each look at the clock takes a second here, and the first one starts the time."""
    assert warm_up.warm_up(kafka, at_most_s=5.0, clock=count().__next__) == 4
    await_deletion(admin)


def test_it_ends_after_a_number_of_transactions(kafka, monkeypatch):
    """A quick broker is warm sooner."""
    monkeypatch.setattr(warm_up, "TRANSACTIONS", 7)
    assert warm_up.warm_up(kafka, at_most_s=60.0) == 7


def test_a_topic_that_a_killed_start_left_is_used_and_deleted(admin, kafka):
    await_deletion(admin)
    admin.create_topics([NewTopic(warm_up.TOPIC, 4, 1)])[warm_up.TOPIC].result()
    assert warm_up.warm_up(kafka, at_most_s=3.0, clock=count().__next__) == 2
    await_deletion(admin)


def test_a_broker_that_does_not_answer_is_unavailable(monkeypatch):
    monkeypatch.setattr(warm_up, "_STEP_TIMEOUT_S", 0.3)
    with pytest.raises(BusUnavailable):
        warm_up.warm_up("127.0.0.1:1", at_most_s=1.0)
