"""The status of the tailers' topics and group, as a broker answers that has just started."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemaless.bus import partition_log
from schemaless.bus.partition_log import read_publish_status
from schemaless.errors import BusUnavailable
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 2, ("a",))


class Admin:
    """An AdminClient. Its group is refused with `errors`, then has no member."""

    def __init__(self, errors):
        self._errors = list(errors)

    def describe_consumer_groups(self, groups, request_timeout):
        answer = Future()
        if self._errors:
            answer.set_exception(KafkaException(KafkaError(self._errors.pop(0))))
        else:
            answer.set_result(SimpleNamespace(members=[]))
        return dict.fromkeys(groups, answer)


@pytest.fixture
def refused(monkeypatch):
    """Sets the errors that the question for the group meets."""
    monkeypatch.setattr(partition_log, "metadata_of", lambda *_: SimpleNamespace(topics={}))
    monkeypatch.setattr(partition_log, "_POLL_S", 0.0)
    return lambda *errors: monkeypatch.setattr(partition_log, "AdminClient", lambda _: Admin(errors))


def test_a_group_whose_coordinator_is_chosen_just_now_is_asked_for_again(refused):
    """A broker answers with a number alone until the group's partition is loaded: `up`, and then `tailer status`."""
    refused(KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    assert not read_publish_status("none", DATASTORE).exists


def test_another_error_is_told_at_once(refused):
    """It isn't asked for again: the second answer would be a group without members."""
    refused(KafkaError.REQUEST_TIMED_OUT)
    with pytest.raises(BusUnavailable, match="asking Kafka for group"):
        read_publish_status("none", DATASTORE)


def test_the_coordinator_is_not_waited_for_for_ever(refused):
    refused(*[KafkaError.NOT_COORDINATOR] * 3)
    with pytest.raises(BusUnavailable, match=r"(?i)not.coordinator"):
        read_publish_status("none", DATASTORE, timeout_s=-1.0)
