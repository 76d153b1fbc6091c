"""Events: the moments that logs, metrics and the fault tests observe."""

import pytest
from structlog.testing import capture_logs

from schemaless.runtime.events import Event, emit, log_event, observing


def test_an_observer_is_called_for_its_events_while_it_observes():
    """With the fields of the event, and neither before nor after."""
    seen = []
    emit(Event.COMMITTED, log="before")
    with observing(lambda event, fields: seen.append((event, dict(fields))), Event.COMMITTED, Event.ABORTED):
        emit(Event.COMMITTED, log="cells [1]")
        emit(Event.FLUSHED, log="cells [1]")
        emit(Event.ABORTED)
    emit(Event.COMMITTED, log="after")
    assert seen == [(Event.COMMITTED, {"log": "cells [1]"}), (Event.ABORTED, {})]


def test_observers_do_not_disturb_one_another():
    """Each goes by itself, whatever was raised meanwhile."""
    outer, inner = [], []
    with observing(lambda event, fields: outer.append(event)):
        with pytest.raises(ZeroDivisionError), observing(lambda event, fields: inner.append(1 / 0), Event.FLUSHED):
            emit(Event.FLUSHED)
        emit(Event.FLUSHED)
    assert (len(outer), len(inner)) == (2, 0)


def test_events_can_be_logged():
    """At debug level, under the event's own words."""
    with capture_logs() as logged, observing(log_event):
        emit(Event.COMMITTED, log="cells [1]")
    assert logged == [{"event": "a commit was acknowledged", "log": "cells [1]", "log_level": "debug"}]
