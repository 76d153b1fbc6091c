"""Which node of a cluster the tailer asks: what is left out, what comes last, and when it is used again."""

import asyncio
from types import SimpleNamespace

import pytest

from schemaless.errors import AccountRefused, Overloaded, StorageUnavailable, TableMissing
from schemaless.names import Stall
from schemaless.storage.shard_head import ServerPosition
from schemaless.storage.standstill import stall_after
from schemaless.topology import Role
from tailer.cluster_reader import ClusterReader

SHORT_S = 2.0


class Node:
    """Answers with its name, or its heads' sum; `error` is raised instead. While it hangs, only short queries end."""

    def __init__(self, role: Role) -> None:
        self.node, self.role = SimpleNamespace(name=role.value), role
        self.error: Exception | None = None
        self.heads_sum = 0
        self.hangs = False
        self.calls = 0

    async def run(self, operation, *args, timeout_s):
        self.calls += 1
        if self.hangs and timeout_s > SHORT_S:
            await asyncio.Event().wait()
        if self.hangs:
            raise StorageUnavailable("no answer in time")
        if self.error is not None:
            raise self.error
        return self.node.name if operation is ASK else ServerPosition(self.heads_sum, 0)


def ASK():
    raise AssertionError("a fake node never begins an operation")


@pytest.fixture
def nodes():
    return SimpleNamespace(master=Node(Role.MASTER), minion=Node(Role.MINION), now=0.0)


@pytest.fixture
def reader(nodes):
    def make(tail_from):
        storage = SimpleNamespace(
            master=lambda cluster: nodes.master,
            present_master=lambda cluster: nodes.master,
            others=lambda cluster: [nodes.minion],
        )
        return ClusterReader(storage, "a", tail_from=tail_from, lag_max_s=5, timeout_s=SHORT_S, clock=lambda: nodes.now)

    return make


@pytest.mark.parametrize(
    ("tail_from", "first", "second"), [("master", "master", "minion"), ("minion", "minion", "master")]
)
async def test_a_node_that_fails_is_left_out_until_it_answers_a_check(nodes, reader, tail_from, first, second):
    """The other one is asked at once, and nobody asks the failed one but the check beside the work."""
    asked = reader(Role(tail_from))
    assert await asked.run(ASK) == first
    getattr(nodes, first).error = StorageUnavailable("away")
    assert await asked.run(ASK) == second
    getattr(nodes, first).error = None
    assert await asked.run(ASK) == second
    await asked.check()
    assert await asked.run(ASK) == first


async def test_a_minion_that_lags_is_read_last_and_better_than_nothing(nodes, reader):
    """It shows less than the master did five seconds ago: the master is asked, and the minion when that fails."""
    asked = reader(Role.MINION)
    nodes.master.heads_sum = 10
    await asked.check()
    assert await asked.run(ASK) == "minion"
    nodes.now = 6.0
    await asked.check()
    assert await asked.run(ASK) == "master"
    nodes.master.error = StorageUnavailable("away")
    assert await asked.run(ASK) == "minion"
    nodes.master.error, nodes.minion.heads_sum = None, 10
    await asked.check()
    assert await asked.run(ASK) == "minion"


async def test_a_long_question_ends_when_a_short_one_finds_the_node_unreachable(nodes, reader):
    """A server hangs: who waits ten seconds for its cells goes over with the first question that times out."""
    asked = reader(Role.MASTER)
    nodes.master.hangs = True
    async with asyncio.timeout(2):
        assert await asyncio.gather(asked.run(ASK, timeout_s=10), asked.run(ASK)) == ["minion", "minion"]


async def test_what_a_minion_has_not_got_yet_is_asked_of_the_master(nodes, reader):
    """A new datastore's tables come to a minion later: that is no failure of it."""
    asked = reader(Role.MINION)
    nodes.minion.error = TableMissing("no such table")
    assert await asked.run(ASK) == "master"
    nodes.minion.error = None
    assert await asked.run(ASK) == "minion"


async def test_a_check_that_gets_no_connection_leaves_no_node_out(nodes, reader):
    """This process has too much to do, which says nothing about a server."""
    asked = reader(Role.MINION)
    nodes.minion.error = Overloaded("no connection was free")
    await asked.check()
    nodes.minion.error = None
    assert await asked.run(ASK) == "minion"


async def test_a_master_that_is_away_is_not_waited_for(nodes, reader):
    """What only a master can tell is refused at once while it is known to be away."""
    asked = reader(Role.MASTER)
    nodes.master.error = StorageUnavailable("away")
    await asked.run(ASK)
    calls = nodes.master.calls
    with pytest.raises(StorageUnavailable):
        await asked.ask_master(ASK)
    assert nodes.master.calls == calls


async def test_a_refused_account_is_no_master_that_is_down(nodes, reader):
    """Nobody is asked then but by checks, and what the servers said last is told: an operator lets the account in."""
    asked = reader(Role.MASTER)
    for node in (nodes.master, nodes.minion):
        shown = f"{node.node.name} refuses the account 'schemaless'"
        node.error = AccountRefused(f"{shown}: Access denied", shown)
    for ask in (asked.run, asked.run, asked.ask_master):
        with pytest.raises(AccountRefused, match=r"(master|minion) refuses") as refused:
            await ask(ASK)
        assert stall_after(refused.value) is Stall.REFUSED
    assert (nodes.master.calls, nodes.minion.calls) == (1, 1)
    for node in (nodes.master, nodes.minion):
        node.error = StorageUnavailable("away")
    await asked.check()
    with pytest.raises(StorageUnavailable, match="away") as down:
        await asked.run(ASK)
    assert stall_after(down.value) is Stall.MASTER_DOWN


async def test_a_long_question_ends_with_what_a_short_one_was_told(nodes, reader):
    """Its open connection tells nothing of the account."""
    asked = reader(Role.MINION)
    nodes.minion.error = StorageUnavailable("away")
    assert await asked.run(ASK) == "master"
    nodes.master.hangs = True
    long = asyncio.create_task(asked.run(ASK, timeout_s=10))
    await asyncio.sleep(0)
    nodes.master.hangs, nodes.master.error = False, AccountRefused("master refuses the account 'u'")
    with pytest.raises(AccountRefused):
        await asked.run(ASK)
    async with asyncio.timeout(2):
        with pytest.raises(AccountRefused):
            await long


async def test_servers_that_come_are_read_and_those_that_go_are_not(nodes):
    """A minion that is gone isn't asked, also if it was unreachable before."""
    others = [nodes.minion]
    storage = SimpleNamespace(
        master=lambda cluster: nodes.master, present_master=lambda cluster: nodes.master, others=lambda cluster: others
    )
    reader = ClusterReader(storage, "a", tail_from=Role.MINION, timeout_s=SHORT_S, clock=lambda: nodes.now)
    nodes.minion.error = StorageUnavailable("away")
    assert await reader.run(ASK) == "master"
    added = Node(Role.MINION)
    added.node = SimpleNamespace(name="added")
    others[:] = [added]
    calls = nodes.minion.calls
    assert await reader.run(ASK) == "added"
    await reader.check()
    assert (nodes.minion.calls, reader._unreachable) == (calls, {})
