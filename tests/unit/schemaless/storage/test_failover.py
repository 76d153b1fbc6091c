"""Asking several nodes: the next one when one is unreachable, and all of them while some are."""

from types import SimpleNamespace

import pytest

from schemaless.errors import AccountRefused, LocationGone, Misconfigured, StorageUnavailable
from schemaless.storage.failover import (
    all_masters,
    answers_of_all,
    ask_clusters,
    ask_masters,
    first_answer,
    run_on_all,
    without_frames,
)


class Node:
    """Answers with its name, or raises its error. Remembers who was asked, in order."""

    def __init__(self, name, asked, error=None):
        self.node = SimpleNamespace(name=name, cluster=name)
        self._asked = asked
        self._error = error

    def run(self, operation):
        self._asked.append(self.node.name)
        if self._error is not None:
            raise self._error
        return self.node.name

    async def ask(self):
        return self.run(None)


def nodes_of(asked, **errors):
    return [Node(name, asked, error) for name, error in errors.items()]


DOWN = StorageUnavailable("down")


async def test_the_next_node_is_asked_only_after_one_failed():
    """The failure is reported before the next node is taken; nodes after the answer are left in peace."""
    events = []
    nodes = nodes_of(events, a=DOWN, b=None, c=None)
    answer, node = await first_answer(
        iter(nodes), Node.ask, on_failure=lambda node, error: events.append(f"{node.node.name} {error}")
    )
    assert (answer, node) == ("b", nodes[1])
    assert events == ["a", "a down", "b"]


async def test_the_last_failure_is_raised_when_no_node_answers():
    """Without nodes the error says what the caller gave for that."""
    nodes = nodes_of([], a=DOWN, b=StorageUnavailable("down too"))
    with pytest.raises(StorageUnavailable, match="down too"):
        await first_answer(nodes, Node.ask)
    with pytest.raises(StorageUnavailable, match="none can be asked"):
        await first_answer([], Node.ask)


async def test_a_refusal_of_nodes_that_are_not_asked_is_named():
    """Whoever skips a node knows why. The text has all, and a caller is shown who refuses whom."""
    refused = AccountRefused("a refuses the account 'u': Access denied", "a refuses the account 'u'")
    with pytest.raises(AccountRefused, match=r"Access denied; down") as raised:
        await first_answer([], Node.ask, skipped=iter([refused, DOWN]))
    assert raised.value.shown == "a refuses the account 'u'"


def test_an_error_that_is_kept_holds_nothing_of_what_was_under_way():
    """Its frames have the rows of a batch, and so have those of its causes."""
    with pytest.raises(AccountRefused) as raised:
        raise AccountRefused("why", "shown") from OSError("1045")
    kept = without_frames(raised.value)
    assert (type(kept), str(kept), kept.shown) == (AccountRefused, "why", "shown")
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
    gone = without_frames(LocationGone("past", head=1, resume_at=2, generation=3))
    assert (str(gone), gone.head, gone.generation) == ("past", 1, 3)


async def test_an_error_that_is_an_answer_goes_to_the_caller():
    """No other node is asked: it would say the same."""
    asked = []
    with pytest.raises(Misconfigured):
        await first_answer(nodes_of(asked, a=Misconfigured("no table"), b=None), Node.ask)
    assert asked == ["a"]


async def test_all_are_asked_and_what_answers_is_kept():
    """In the order of the questions; with no answer at all the failures are named."""
    nodes = nodes_of([], a=None, b=DOWN, c=None)
    answers = await answers_of_all({node.node.name: node.ask() for node in nodes})
    assert answers.at_least_one() == ["a", "c"]
    assert answers.failures == {"b": DOWN}
    assert run_on_all(nodes, None).found == answers.found
    with pytest.raises(StorageUnavailable, match="down"):
        run_on_all(nodes_of([], a=DOWN, b=DOWN), None).at_least_one()


async def test_only_tolerated_errors_are_kept_as_failures():
    """A server without the tables answers, and most callers must hear that."""
    broken = Misconfigured("no table")
    with pytest.raises(Misconfigured):
        await answers_of_all({"a": Node("a", [], broken).ask()})
    answers = await answers_of_all({"a": Node("a", [], broken).ask()}, tolerated=Misconfigured)
    assert answers.failures == {"a": broken}


class Server:
    """Answers with its name, or raises its error, and notes with which time-out it was asked."""

    def __init__(self, name, error, asked):
        self.name, self.error, self.asked = name, error, asked

    async def run(self, operation, *args, timeout_s):
        self.asked.append((self.name, operation, args, timeout_s))
        if self.error is not None:
            raise self.error
        return self.name


class Servers:
    """Clusters, each with a master and a minion called after it."""

    def __init__(self, **errors):
        self.asked = []
        self._servers = {name: Server(name, error, self.asked) for name, error in errors.items()}

    def master(self, cluster):
        return self._servers[cluster]

    def minions(self, cluster):
        return [self._servers[f"{cluster}_1"]]


async def test_masters_are_asked_and_those_that_are_away_are_named():
    """With the same arguments and time-out. `all_masters` needs every one."""
    servers = Servers(a=None, b=DOWN, c=Misconfigured("no table"))
    answers = await ask_masters(servers, ["a", "b", "c"], "heads", "trips", timeout_s=1)
    assert (answers.found, answers.failures.keys()) == ({"a": "a"}, {"b", "c"})
    assert servers.asked[0] == ("a", "heads", ("trips",), 1)
    with pytest.raises(Misconfigured):
        await ask_masters(servers, ["a", "c"], "heads", tolerated=StorageUnavailable)
    assert await all_masters(servers, ["a"], "heads") == {"a": "a"}
    with pytest.raises(StorageUnavailable):
        await all_masters(servers, ["a", "b"], "heads")
    assert len(servers.asked) == 8


async def test_a_minion_answers_for_its_cluster_only_while_the_master_does_not():
    servers = Servers(a=None, a_1=None, b=DOWN, b_1=None, c=DOWN, c_1=DOWN)
    answers = await ask_clusters(servers, ["a", "b", "c"], "heads", timeout_s=1)
    assert (answers.found, answers.failures) == ({"a": "a", "b": "b_1"}, {"c": DOWN})
    assert [name for name, *_ in servers.asked].count("a_1") == 0
