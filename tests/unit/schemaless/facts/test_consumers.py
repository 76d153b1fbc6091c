"""How far consumers are, from the answers of servers: what is added up, and what is said when servers don't answer."""

from types import SimpleNamespace

import pytest

from schemaless.errors import StorageUnavailable
from schemaless.facts.consumers import (
    CheckpointsReport,
    SummariesReport,
    consumer_shards,
    consumer_statuses,
    in_all,
    read_consumer,
    read_consumers,
)
from schemaless.facts.servers import Unheard
from schemaless.location import GenerationStart, Location
from schemaless.position import Position
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.consumer_summary import ConsumerSummary, StoppedShard
from schemaless.topology import Datastore, Role

DATASTORE = Datastore("mezzanine", 2, 1, ("a", "b"))
BILLING = "trigger:billing"


class StandIn:
    """A server that answers every question with one report, or with none in time."""

    def __init__(self, cluster, report, role=Role.MASTER):
        self.node, self.role = SimpleNamespace(cluster=cluster), role
        self.report = report

    async def run(self, question, *args, timeout_s):
        if self.report is None:
            raise StorageUnavailable(f"{self.node.cluster}: no answer within {timeout_s} s")
        return self.report


def storage(**nodes):
    return SimpleNamespace(nodes=nodes)


def checkpoint(shard, location, state=State.RUNNING, reason=None):
    position = Position(shard, location.generation, location.added_id)
    return Checkpoint(BILLING, position, 0, location.added_id, 0, state, reason, 0)


def report(head=10, checkpoints=(), shard=0, starts=()):
    return CheckpointsReport({shard: head}, checkpoints, {shard: starts} if starts else {})


async def test_a_program_is_unknown_only_if_every_cluster_says_so():
    """Nobody has a checkpoint of it: none. Nobody has one and a cluster timed out: that may be where it is."""
    assert await read_consumer(storage(a=StandIn("a", report()), b=StandIn("b", report())), DATASTORE, BILLING) == (
        {},
        Unheard({}, {}),
    )
    with pytest.raises(StorageUnavailable, match=r"cluster b: .* no answer"):
        await read_consumer(storage(a=StandIn("a", report()), b=StandIn("b", None)), DATASTORE, BILLING)


async def test_a_program_that_was_found_is_shown_with_the_clusters_that_are_unknown():
    """What is missing is said."""
    answered = StandIn("a", report(10, [checkpoint(0, Location(1, 7))]))
    shards, unheard = await read_consumer(storage(a=answered, b=StandIn("b", None)), DATASTORE, BILLING)
    assert (shards[0].lag, list(unheard.clusters), unheard.masters) == (3, ["b"], {})


async def test_a_minion_stands_in_for_its_master():
    """The cluster's answer is the minion's. Nothing is unknown, and people are told whom they hear."""
    minion = StandIn("a", report(10, [checkpoint(0, Location(1, 9))]), Role.MINION)
    other = StandIn("b", report(shard=1))
    shards, unheard = await read_consumer(storage(a=StandIn("a", None), m=minion, b=other), DATASTORE, BILLING)
    assert shards[0].lag == 1
    assert unheard.document() == {"unknown": {}, "masters_away": {"a": "a: no answer within 1.0 s"}}


async def test_a_list_without_any_answer_says_why():
    """No consumers, and the error of each cluster."""
    found, unheard = await read_consumers(storage(a=StandIn("a", None), b=StandIn("b", None)), DATASTORE)
    assert (found, sorted(unheard.clusters)) == ({}, ["a", "b"])


def test_a_superseded_checkpoint_lags_from_where_the_new_generation_starts():
    """At 1:100, with generation 2 from 90 and the head at 95: six cells are not handled, though 95 is below 100."""
    starts = [GenerationStart(2, 90)]
    shards = consumer_shards([report(95, [checkpoint(0, Location(1, 100))], starts=starts)])
    assert shards[0].lag == 6


def test_the_slowest_copy_of_an_index_counts():
    """Its checkpoints are on every cluster: the one that is furthest behind says how far the shard is."""
    copies = [report(10, [checkpoint(0, Location(1, 10))]), report(4, [checkpoint(0, Location(1, 8))], shard=1)]
    assert consumer_shards(copies)[0].lag == 2


def test_one_stopped_shard_stops_the_program():
    """Its reason is kept, and the lags are added up."""
    checkpoints = [checkpoint(0, Location(1, 4), State.STOPPED, "card refused"), checkpoint(1, Location(1, 9))]
    total = in_all(consumer_shards([CheckpointsReport({0: 10, 1: 10}, checkpoints, {})]))
    assert (total.state, total.lag, total.stopped) == (State.STOPPED, 7, {0: "card refused"})


def summary(consumer, lag, *, stopped=0, away=(0, 0)):
    return ConsumerSummary(consumer, 2, stopped, lag, *away)


def test_summaries_of_a_program_are_added_up():
    """Each cluster's masters compare the shards that live there."""
    reports = {
        "a": SummariesReport(10, [summary(BILLING, 3)]),
        "b": SummariesReport(20, [summary(BILLING, 4, stopped=1)], [StoppedShard(BILLING, 1, "card refused")]),
    }
    found = consumer_statuses(reports, whole=True)[BILLING]
    assert (found.lag, found.state, found.stopped) == (7, State.STOPPED, {1: "card refused"})


@pytest.mark.parametrize(("whole", "lag"), [(True, 6), (False, 0)])
def test_an_index_lags_by_its_copy_that_is_furthest_behind(whole, lag):
    """Cluster b has a copy of a's shards. It is six cells behind a's heads, which only both clusters together tell."""
    reports = {
        "a": SummariesReport(10, [summary("index:by_n", 0, away=(1, 20))]),
        "b": SummariesReport(20, [summary("index:by_n", 0, away=(1, 4))]),
    }
    assert consumer_statuses(reports, whole=whole)["index:by_n"].lag == lag
