"""The watch tells a transaction without an end from the traffic of a busy partition."""

import pytest

from schemaless.bus import hanging_transactions
from schemaless.bus.hanging_transactions import HiddenRecordsWatch
from schemaless.errors import BusUnavailable

TOPIC = "cells"


class Scene:
    """A watch that asks every 2 s and waits for 10, its clock, and the offsets from which partitions hide records."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.hidden = {}
        monkeypatch.setattr(hanging_transactions.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(hanging_transactions, "hidden_records", self._hidden_records)
        self._watch = HiddenRecordsWatch("127.0.0.1:9", TOPIC, every_s=2.0, patience_s=10.0, timeout_s=1.0)

    def stuck_after(self, seconds, partitions=(0, 1)):
        self.now += seconds
        return self._watch.stuck(partitions)

    def _hidden_records(self, admin, places, *, timeout_s):
        if self.hidden is None:
            raise BusUnavailable("away")
        return {(topic, p): self.hidden[p] for topic, p in places if p in self.hidden}


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_the_same_records_hidden_for_long_are_told(scene):
    scene.hidden = {1: 40}
    assert scene.stuck_after(2) == []
    assert scene.stuck_after(9) == []
    assert scene.stuck_after(1) == []  # not asked again yet
    assert scene.stuck_after(1) == [1]


def test_a_busy_partition_hides_others_every_time(scene):
    for offset in range(10):
        scene.hidden = {0: offset}
        assert scene.stuck_after(3) == []


def test_a_partition_that_is_not_ours_meanwhile_counts_anew(scene):
    scene.hidden = {0: 7}
    assert scene.stuck_after(2) == []
    assert scene.stuck_after(9, partitions=(1,)) == []
    assert scene.stuck_after(2) == []
    assert scene.stuck_after(10) == [0]


def test_a_broker_that_is_away_tells_nothing_and_loses_nothing(scene):
    scene.hidden = {0: 7}
    assert scene.stuck_after(2) == []
    scene.hidden = None
    assert scene.stuck_after(9) == []
    scene.hidden = {0: 7}
    assert scene.stuck_after(2) == [0]
