"""The cleaner's loops: what one pair of clusters meets is its own affair."""

import asyncio
from types import SimpleNamespace

import pytest

from cleaner import service
from cleaner.pair import Swept
from cleaner.service import Cleaner, pause_after
from schemaless.errors import (
    Busy,
    Corrupt,
    Misconfigured,
    NodeRefuses,
    SchemalessError,
    StorageUnavailable,
    TableMissing,
)


class Sweep:
    """Passes until `passes_max`, then asks the cleaner to stop. Each pass raises its error."""

    def __init__(self, stop, passes_max, error=None):
        self.name = ("a", "b", "rescue")
        self.passes = 0
        self._stop = stop
        self._passes_max = passes_max
        self._error = error

    async def step(self):
        self.passes += 1
        if self.passes == self._passes_max:
            self._stop.set()
        if self._error is not None:
            raise self._error
        return Swept()


@pytest.mark.parametrize(
    "error",
    [
        StorageUnavailable("down"),
        TableMissing("1146"),
        NodeRefuses("1203"),
        Busy("deadlock"),
        Corrupt("damaged"),
        Misconfigured("format 99"),
        SchemalessError("new"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_pass_that_fails_ends_no_process_and_holds_up_no_other(error, monkeypatch):
    """I6: cells of other homes are still rescued and confirmed, and the failing pair tries again."""
    refusing = SimpleNamespace(run=lambda *args, **timeout: _raise(error))
    storage = SimpleNamespace(topology=SimpleNamespace(clusters={"a": None}), master=lambda cluster: refusing)
    monkeypatch.setattr(service, "PASS_PAUSE_S", 0.0)
    cleaner = Cleaner(storage)
    stop = asyncio.Event()
    failing, healthy = Sweep(stop, 1000, error), Sweep(stop, 50)
    monkeypatch.setattr(cleaner, "_new_passes", iter([[(failing, healthy)], *[[]] * 100]).__next__)
    await cleaner.run(stop)
    assert healthy.passes == 50
    assert failing.passes > 1
    assert await cleaner.tidy() == 0


def test_the_pause_after_a_pass_grows_with_its_cost_and_while_nothing_changes():
    """Under load passes are few and large. An idle pass comes soon, and the next one of a backlog at once."""
    changed, idle = Swept(confirmed=1), Swept()
    assert pause_after(changed, took_s=0.01, before_s=1.0, shortest_s=0.2) == 0.2
    assert pause_after(changed, took_s=0.6, before_s=0.2, shortest_s=0.2) == 0.6
    assert pause_after(changed, took_s=60.0, before_s=0.2, shortest_s=0.2) == 1.0
    assert pause_after(Swept(rewritten=1), took_s=60.0, before_s=0.2, shortest_s=0.2) == 0.2
    assert pause_after(idle, took_s=0.01, before_s=0.2, shortest_s=0.2) == 0.4
    assert pause_after(idle, took_s=0.01, before_s=0.9, shortest_s=0.2) == 1.0
    assert pause_after(idle, took_s=0.7, before_s=0.2, shortest_s=0.2) == 0.7


async def _raise(error):
    raise error


def test_a_cluster_that_comes_is_swept_as_a_secondary_and_as_a_home():
    """The passes that run stay. A cluster that is only joining has no buffer yet. Where shards moved, rows may lie on
    their own home.
    """
    clusters, joining, placements = {"a": None, "b": None}, set(), {"trips": {}}
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=clusters),
        is_joining=joining.__contains__,
        placements=placements,
        master=lambda cluster: SimpleNamespace(node=SimpleNamespace(cluster=cluster)),
    )
    cleaner = Cleaner(storage)

    def new_pairs():
        return sorted("".join(confirmation.name[:2]) for confirmation, _ in cleaner._new_passes())

    assert new_pairs() == ["ab", "ba"]
    clusters["c"] = None
    joining.add("c")
    assert new_pairs() == []
    joining.clear()
    assert new_pairs() == ["ac", "bc", "ca", "cb"]
    assert new_pairs() == []
    placements["trips"][1] = "where it went"
    assert new_pairs() == ["aa", "bb", "cc"]
