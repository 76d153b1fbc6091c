"""Rows that every cluster has, while some are away."""

from itertools import permutations
from types import SimpleNamespace

import pytest

from schemaless.errors import Misconfigured, StorageUnavailable
from schemaless.storage.everywhere import after, bring_up, latest, read_everywhere, together, write_everywhere

OLD, NEW = SimpleNamespace(changed_at=1, text="old"), SimpleNamespace(changed_at=2, text="new")
DOWN = StorageUnavailable("down")


class Server:
    def __init__(self, name, rows=None, error=None):
        self.node = SimpleNamespace(name=name, cluster=name[0])
        self.rows = {} if rows is None else rows
        self.error = error

    async def read(self):
        if self.error is not None:
            raise self.error
        return self.rows

    async def write(self, rows):
        await self.read()
        self.rows = self.rows | {row.text: row for row in rows}


class Storage:
    """Clusters a, b and c, each with a master and a minion."""

    def __init__(self, **errors):
        self.servers = {name: Server(name, error=errors.get(name)) for name in ("a", "a1", "b", "b1", "c", "c1")}
        self.topology = SimpleNamespace(clusters={name: None for name in "abc"})
        self.masters = [self.master(name) for name in "abc"]

    def master(self, cluster):
        return self.servers[cluster]

    def minions(self, cluster):
        return [self.servers[f"{cluster}1"]]


def test_whoever_answers_first_the_later_row_counts():
    for answers in permutations([{"x": OLD}, {"x": NEW, "y": OLD}, {}]):
        assert together(answers) == {"x": NEW, "y": OLD}
    assert latest([None, NEW, OLD]) is NEW
    assert latest([]) is None
    assert together([{"x": 1}, {"x": 2}], max) == {"x": 2}


def test_a_row_counts_instead_of_another_though_the_clock_is_behind():
    assert after(1 << 60) == (1 << 60) + 1
    assert after(0) > 1_700_000_000_000_000


async def test_a_minion_answers_for_its_master():
    """A cluster without any server that answers is named."""
    storage = Storage(a=DOWN, c=DOWN, c1=DOWN)
    storage.servers["a1"].rows = {"x": OLD}
    answers = await read_everywhere(storage, Server.read)
    assert answers.found == {"a": {"x": OLD}, "b": {}}
    assert answers.failures == {"c": DOWN}


async def test_one_master_is_enough_to_write():
    """Those that are away are named. If all are, nothing was written, and another error is no absence."""
    assert await write_everywhere(Storage(c=DOWN, a=DOWN).masters, Server.read) == ["a", "c"]
    with pytest.raises(StorageUnavailable, match="no server answers"):
        await write_everywhere(Storage(a=DOWN, b=DOWN, c=DOWN).masters, Server.read)
    with pytest.raises(Misconfigured):
        await write_everywhere(Storage(b=Misconfigured("no table")).masters, Server.read)


async def test_who_was_away_is_brought_up():
    """A cluster gets what it lacks or has otherwise. One that fails again keeps the others from nothing."""
    storage = Storage(a=DOWN)
    known = {"old": OLD, "new": NEW}
    await bring_up(storage, {"a": {}, "b": {"old": OLD}, "c": known}, known, Server.write)
    assert storage.servers["b"].rows == {"new": NEW}
    assert storage.servers["c"].rows == storage.servers["a"].rows == {}
