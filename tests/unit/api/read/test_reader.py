"""Which node a read goes to, by read preference and breaker, and what a failed one leaves behind."""

from types import SimpleNamespace

import pytest

from api.http.response import problem_of, problem_response
from api.read.reader import ReadBreaker, Reader, Served, served_together
from schemaless.errors import (
    AccountRefused,
    LocationGone,
    Misconfigured,
    NodeRefuses,
    StaleTopology,
    StorageUnavailable,
    TableMissing,
)
from schemaless.topology import Role


class Node:
    def __init__(self, name, role):
        self.node, self.role = SimpleNamespace(name=name, cluster="a"), role
        self.error = self.refused = None
        self.asked = 0

    async def run(self, operation, timeout_s):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.node.name


@pytest.fixture
def nodes():
    return SimpleNamespace(
        master=Node("master", Role.MASTER), minions=[Node(f"minion-{n}", Role.MINION) for n in (1, 2)], leased=True
    )


@pytest.fixture
def breaker():
    return ReadBreaker()


@pytest.fixture
def reader(nodes, breaker):
    async def is_leased(cluster):
        return nodes.leased

    storage = SimpleNamespace(
        master=lambda cluster: nodes.master, minions=lambda cluster: nodes.minions, is_leased=is_leased
    )
    return Reader(storage, breaker, SimpleNamespace(lag_s=lambda node: 0.0), timeout_s=1)


async def answered_by(reader, read_from=None):
    name, served = await reader.read("a", None, read_from=read_from)
    assert (served.role is Role.MASTER) == (name == "master")
    return name


async def test_minions_take_reads_in_turns_and_the_master_by_default(reader):
    """A caller reads its own writes unless it asks for a minion."""
    assert [await answered_by(reader) for _ in range(3)] == ["master"] * 3
    names = [await answered_by(reader, Role.MINION) for _ in range(4)]
    assert names == ["minion-1", "minion-2"] * 2


async def test_a_master_that_nobody_confirms_answers_nobody_as_a_master(reader, nodes):
    """Another one may be open since. A minion's answer says that it is one."""
    nodes.leased = False
    assert await answered_by(reader) == "minion-1"
    with pytest.raises(StaleTopology, match="nobody confirms"):
        await answered_by(reader, Role.MASTER)


async def test_a_failed_master_costs_one_read_and_a_sample_brings_it_back(reader, breaker, nodes):
    """The read itself is answered by a minion; the next ones don't ask the master until the sampler reached it."""
    nodes.master.error = StorageUnavailable("down")
    assert await answered_by(reader) == "minion-1"
    assert await answered_by(reader) == "minion-2"
    assert nodes.master.asked == 1
    with pytest.raises(StorageUnavailable):
        await answered_by(reader, Role.MASTER)
    assert nodes.master.asked == 1
    nodes.master.error = None
    breaker.sampled("master", answered=True)
    assert await answered_by(reader, Role.MASTER) == "master"


async def test_an_answer_that_is_an_error_opens_no_breaker(reader, breaker, nodes):
    """The server answered. Only an unreachable one is left out."""
    nodes.master.error = Misconfigured("no table")
    with pytest.raises(Misconfigured):
        await answered_by(reader)
    assert breaker.answers(nodes.master)


@pytest.mark.parametrize("refusal", [TableMissing("1146"), NodeRefuses("1203"), NodeRefuses("9999")])
async def test_a_read_that_one_node_refuses_goes_to_the_next_and_opens_no_breaker(reader, breaker, nodes, refusal):
    """I15: an unknown error means that this node can't do it now. Other reads still go to it."""
    nodes.master.error = refusal
    assert await answered_by(reader) == "minion-1"
    assert breaker.answers(nodes.master)
    with pytest.raises(NodeRefuses):
        await answered_by(reader, Role.MASTER)


async def test_a_location_that_is_gone_names_the_node_that_said_so(reader, nodes):
    """I13: a minion's answer may only be late, so a 409 says who answered, as a 200 does."""
    nodes.minions[0].error = LocationGone("past the head", head=1, resume_at=1, generation=1)
    with pytest.raises(LocationGone) as gone:
        await answered_by(reader, Role.MINION)
    assert problem_response(gone.value).headers[-3:] == Served(Role.MINION, "a", 0.0).headers


async def test_the_last_node_that_fails_is_left_out_too(reader, breaker, nodes):
    """Nobody answers: the next read waits for none of them."""
    for node in (nodes.master, *nodes.minions):
        node.error = StorageUnavailable("down")
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await answered_by(reader)
    assert [node.asked for node in (nodes.master, *nodes.minions)] == [1, 1, 1]


async def test_a_read_that_nobody_is_asked_for_names_who_refuses_the_account(reader, breaker, nodes):
    """The sampler found it first. A minion that is down as well hides nothing."""
    shown = "master refuses the account 'schemaless'"
    nodes.master.refused = AccountRefused(f"{shown}: Access denied", shown)
    for node in (nodes.master, *nodes.minions):
        breaker.sampled(node.node.name, answered=False)
    with pytest.raises(AccountRefused, match="Access denied; minion-1 does not answer") as refused:
        await answered_by(reader)
    assert problem_of(refused.value)["detail"] == shown
    with pytest.raises(StorageUnavailable, match="minion-2 does not answer") as down:
        await answered_by(reader, Role.MINION)
    assert type(down.value) is StorageUnavailable


def test_an_answer_of_several_clusters_is_as_stale_as_its_worst_part():
    """The headers promise nothing that one part doesn't keep."""
    parts = [Served(Role.MASTER, "b", 0.0), Served(Role.MINION, "a", 1.5)]
    assert served_together(parts) == Served(Role.MINION, "a,b", 1.5)
