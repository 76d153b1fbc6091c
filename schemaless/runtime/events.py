"""Events: named moments of tailers, trigger workers and controllers.

Logs, metrics and the fault tests observe them under the same names.
`emit` calls the observers of an event, in the thread in which it happens. An event that nobody observes costs one
look-up, so events may lie on the path of every transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

import structlog

log = structlog.get_logger()


class Event(Enum):
    LOG_OPENING = "a partition's log is being opened"
    LOG_FENCED = "the former owner of a log is fenced"
    HANGING_TRANSACTION_ENDED = "a hanging transaction was ended"
    PROGRESS_READ = "progress was read"
    CELLS_READ = "cells were read from MySQL"
    TRANSACTION_BEGUN = "a transaction began"
    CELLS_PRODUCED = "the cells of a transaction were produced"
    PROGRESS_PRODUCED = "the progress of a transaction was produced"
    FLUSHED = "a transaction was flushed"
    COMMITTING = "a commit is being sent"
    COMMITTED = "a commit was acknowledged"
    ABORTED = "a transaction was aborted"
    PASS_FINISHED = "one pass over a partition finished"
    PARTITIONS_REVOKED = "the group revoked partitions"
    PARTITIONS_RELEASED = "the tails of revoked partitions have stopped"
    CALL_BEGINS = "a trigger function is called"
    CALL_ENDED = "a trigger function returned or raised"
    CELL_PARKED = "a cell is parked with the next checkpoint"
    REPLAY_BEGINS = "a row is called again"
    CHECKPOINTS_MOVING = "checkpoints are being moved"
    CHECKPOINTS_MOVED = "checkpoints were moved"
    VOTERS_PROMISED = "all who must be heard promised"
    MASTER_FENCED = "the old master is fenced"
    RECEIVED_APPLIED = "the new master applied what it had received"
    MASTER_APPOINTED = "the servers know the new master"
    HEADS_OPENED = "the heads have the new epoch"
    MASTER_OPENED = "the new master takes writes"
    TAIL_KEPT = "what a server has and its master lacks is kept"
    REMAKE_BEGINS = "a server is made anew next, if nobody used it since"
    ERASURE_KNOWN = "every master that answers has the row of an erasure"
    ERASED_AT_HOME = "a page of an erasure was emptied at home"
    ERASED_BESIDE = "bodies of an erasure were removed from a table beside the logs"
    ERASURE_SEARCHED = "a cluster was searched for an erasure, and that isn't written yet"
    TAIL_PAGE_PUT = "kept cells were put again, and their outcome isn't written yet"


Observer = Callable[[Event, Mapping[str, object]], None]
"""Called with the event and the fields that `emit` was given."""

_observers: dict[Event, list[Observer]] = {}


def emit(event: Event, **fields: object) -> None:
    """Calls the observers of the event. What an observer raises reaches the code that emitted it."""
    for observer in _observers.get(event, ()):
        observer(event, fields)


@contextmanager
def observing(observer: Observer, *events: Event) -> Iterator[None]:
    """Calls `observer` for these events while the context lasts, and for all events if none is named."""
    observed = events or tuple(Event)
    for event in observed:
        _observers[event] = [*_observers.get(event, ()), observer]
    try:
        yield
    finally:
        for event in observed:
            _observers[event] = [other for other in _observers[event] if other is not observer]


def log_event(event: Event, fields: Mapping[str, object]) -> None:
    """Logs an event at debug level. It is an observer, and services register it when their log level is debug."""
    log.debug(event.value, **fields)
