"""How fresh a minion is, from samples of sums of heads."""

from collections import deque
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from schemaless.errors import NodeRefuses, Overloaded, StorageUnavailable
from schemaless.storage import shard_head
from schemaless.storage.replica_lag import ReplicaLag, fresh_until
from schemaless.storage.shard_head import Head, ServerPosition, ahead

MASTER = deque([(100.0, 10), (101.0, 10), (102.0, 25), (103.0, 40)])


@pytest.mark.parametrize(
    ("shown", "expected"), [(40, 103.0), (99, 103.0), (39, 102.0), (25, 102.0), (24, 101.0), (10, 101.0)]
)
def test_a_minion_is_as_fresh_as_the_last_moment_whose_cells_it_shows(shown, expected):
    """The latest sample at which the master showed no more than the minion does now."""
    assert fresh_until(MASTER, ServerPosition(shown, 0)) == expected


def test_a_minion_behind_all_samples_is_judged_by_its_newest_cell():
    """Further back than the samples go, and right after the start with the master away."""
    assert fresh_until(MASTER, ServerPosition(9, 55_000_000)) == 55.0
    assert fresh_until(deque(), ServerPosition(9, 55_000_000)) == 55.0


class Master:
    """Shows a clock that is `ahead_s` ahead of ours, or raises its error."""

    def __init__(self, clock, ahead_s, name="master"):
        self.node = SimpleNamespace(name=name, cluster="a")
        self.settings = SimpleNamespace(lacking=[])
        self.ahead_s = ahead_s
        self.error = None
        self._clock = clock

    async def run(self, operation, *args, timeout_s, traffic):
        if operation is not shard_head.position:
            return [], False  # no holes
        if self.error is not None:
            raise self.error
        return ServerPosition(0, 0, int((self._clock() + self.ahead_s) * 1e6))


@pytest.mark.parametrize(
    ("a", "b", "believed_of_a_s"),
    [
        (0, 0, 60),
        (86_400, 0, 60),  # a jumped
        (86_400, 86_400, 86_460),  # this process is a day behind: both masters say so
        (0, -86_400, 60),  # b is behind: a is as right as this process
    ],
)
async def test_a_master_is_believed_unless_it_is_ahead_of_us_and_of_the_others(a, b, believed_of_a_s):
    """I4: one host with a slow clock must not refuse healthy masters."""
    masters = {"a": Master(lambda: 1000.0, a, "a"), "b": Master(lambda: 1000.0, b, "b")}
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=masters), master=masters.__getitem__, others=lambda cluster: []
    )
    lag = ReplicaLag(storage, clock=lambda: 1000.0)
    await lag.step()
    assert lag.latest_created_at("a") == (1000 + believed_of_a_s) * 1_000_000
    masters["b"].error = StorageUnavailable("down")
    await lag.step()
    assert lag.latest_created_at("a") == 1_060_000_000


@pytest.mark.parametrize(("of_minions", "believed_of_a_s"), [(120, 180), (0, 60)])
async def test_minions_tell_whose_clock_is_right_while_the_other_master_is_away(of_minions, believed_of_a_s):
    """B14: a process two minutes behind must not refuse the master that is left. A master that jumped is refused."""
    masters = {"a": Master(lambda: 1000.0, 120, "a"), "b": Master(lambda: 1000.0, 0, "b")}
    masters["b"].error = StorageUnavailable("down")
    minions = {name: [Master(lambda: 1000.0, of_minions, f"{name}-minion")] for name in masters}
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=masters), master=masters.__getitem__, others=minions.__getitem__
    )
    lag = ReplicaLag(storage, clock=lambda: 1000.0)
    with capture_logs() as told:
        await lag.step()
    assert lag.latest_created_at("a") == (1000 + believed_of_a_s) * 1_000_000
    assert [line["behind_s"] for line in told] == ([120.0] if of_minions else [])


async def test_clocks_are_known_while_they_are_asked_again():
    """Each second all servers are asked. A late process must not refuse its masters meanwhile."""
    masters = {"a": Master(lambda: 1000.0, 120, "a"), "b": Master(lambda: 1000.0, 120, "b")}
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=masters), master=masters.__getitem__, others=lambda cluster: []
    )
    lag, believed = ReplicaLag(storage, clock=lambda: 1000.0, on_sample=lambda node, answered: None), []
    await lag.step()
    for master in masters.values():
        ask = master.run

        async def run(*args, ask=ask, **options):
            believed.append(lag.latest_created_at("a"))
            return await ask(*args, **options)

        master.run = run
    await lag.step()
    assert believed == [1_180_000_000] * 2


def test_a_shard_that_met_a_clock_ahead_is_named():
    """Its created_at stands still until then (I4)."""
    heads = [Head(0, 1, 5, 1_059_000_000), Head(1, 1, 5, 1_061_000_000)]
    assert ahead(heads, 1000.0) == [heads[1]]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, [("master", True)]),
        (NodeRefuses("no table yet"), [("master", True)]),
        (StorageUnavailable("down"), [("master", False)]),
        (Overloaded("no connection was free"), []),
    ],
)
async def test_what_a_sample_says_of_its_server(error, said):
    """S8: nothing, where this process had too much to do. The read breaker would take it for a dead server."""
    master = Master(lambda: 1000.0, 0)
    master.error = error
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters={"a": master}), master=lambda cluster: master, others=lambda cluster: []
    )
    seen = []
    lag = ReplicaLag(storage, clock=lambda: 1000.0, on_sample=lambda node, answered: seen.append((node, answered)))
    await lag.step()
    assert seen == said
