"""What a tailer shows: how far behind each partition is, what holds shards up, and nothing that isn't known."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from schemaless.bus.partition_log import Progress
from schemaless.location import Location
from schemaless.names import Stall
from schemaless.position import Position
from schemaless.topology import Datastore
from tailer.metrics import TailerMetrics
from tailer.shard_queue import ShardQueue, TailState

DATASTORE = Datastore("trips", 4, 2, ("a", "b"))  # shards 0 and 2 are partition 0, with their homes a
NAMED = {"datastore": "trips", "partition": "0"}


@pytest.fixture
def queue():
    """The shards of partition 0, of which two cells each are published."""
    known = {shard: Position(shard, 1, 2) for shard in (0, 2)}
    return ShardQueue(DATASTORE, Progress(known, {}, set()))


@pytest.fixture
def tailing(queue):
    partitions = [SimpleNamespace(partition=0, shards=queue), SimpleNamespace(partition=1, shards=None)]
    datastore = SimpleNamespace(datastore=DATASTORE, partitions=partitions, stalls={Stall.QUOTA: "too little"})
    paused = set()
    return SimpleNamespace(
        datastores=[datastore],
        clusters={"a", "b"},
        unreadable_clusters=set(),
        paused=paused,
        is_paused=paused.__contains__,
    )


@pytest.fixture
def shown(tailing):
    """Returns the value of a sample, or None where there is none."""
    registry = CollectorRegistry()
    metrics = TailerMetrics(registry)
    metrics.watch(tailing)
    return lambda name, **labels: registry.get_sample_value(f"schemaless_tailer_{name}", labels)


async def test_the_lag_is_told_in_cells_and_in_seconds(queue, shown):
    """The age is that of the oldest cell that waits. When all is published it is 0."""
    queue.heads_moved({0: Location(1, 2), 2: Location(1, 2)})
    assert (shown("lag_cells", **NAMED), shown("lag_seconds", **NAMED)) == (0, 0)
    queue.heads_moved({0: Location(1, 5), 2: Location(1, 3)})
    assert shown("lag_cells", **NAMED) == 4
    queue[2].waiting_since -= 100
    assert shown("lag_seconds", **NAMED) == pytest.approx(100, abs=30)
    with queue.taken(TailState.BEHIND):
        queue[0].published_up_to(Position(0, 1, 4), created_at=0)
        assert shown("lag_seconds", **NAMED) > 10**9  # one of three is left, and the one before it is of 1970
        queue[0].published_up_to(Position(0, 1, 5), created_at=0)
        queue[2].published_up_to(Position(2, 1, 3), created_at=0)
    assert (shown("lag_cells", **NAMED), shown("lag_seconds", **NAMED)) == (0, 0)


async def test_what_isnt_known_is_absent_and_never_0(queue, tailing, shown):
    """A partition whose log isn't open, and one with shards on a cluster whose heads can't be read."""
    other = {**NAMED, "partition": "1"}
    assert shown("partition_open", **other) == 0
    assert (shown("lag_cells", **other), shown("lag_seconds", **other)) == (None, None)
    assert shown("lag_cells", **NAMED) == 0
    tailing.unreadable_clusters.add("a")
    assert (shown("lag_cells", **NAMED), shown("lag_seconds", **NAMED)) == (None, None)
    assert (shown("cluster_up", cluster="a"), shown("cluster_up", cluster="b")) == (0, 1)


async def test_a_datastore_has_its_partitions_though_the_group_assigned_none(tailing, shown):
    """While Kafka is away nobody has a partition, and an alert has to find that."""
    tailing.datastores[0].partitions = []
    assert shown("partitions", datastore="trips") == 2
    assert shown("partition_open", **NAMED) is None


async def test_a_shard_that_isnt_published_shows_its_cause_until_it_is(queue, tailing, shown):
    """Also between two attempts, when it only looks as if it were behind."""
    queue.heads_moved({0: Location(1, 5), 2: Location(1, 3)})
    with queue.taken(TailState.BEHIND) as behind:
        queue.back_off(behind[0], 0.0, Stall.NOT_DENSE)
        queue.refuse(behind[1], "another history", 60.0)
    held = {cause: shown("held_shards", datastore="trips", cause=cause.value) for cause in Stall}
    assert {cause for cause, count in held.items() if count} == {Stall.NOT_DENSE, Stall.OTHER_HISTORY}
    assert shown("shards", datastore="trips", state="refused") == 1
    queue[0].published_up_to(Position(0, 1, 5))
    assert shown("held_shards", datastore="trips", cause="not_dense") == 0
    assert {stall for stall in Stall if shown("stalled", datastore="trips", stall=stall)} == {Stall.QUOTA}
    assert shown("paused", datastore="trips") == 0
    tailing.paused.add("trips")
    assert shown("paused", datastore="trips") == 1


def test_transactions_count_by_outcome_and_their_parts_add_up():
    registry = CollectorRegistry()
    metrics = TailerMetrics(registry)
    metrics.published("trips", 10, 1000, {"read": 0.5, "wait": 0.25, "produce": 0.0, "flush": 0.125, "commit": 0.125})
    metrics.failed("trips", "BusUnavailable")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert samples["schemaless_tailer_cells_total", "trips"] == 10
    assert samples["schemaless_tailer_bytes_total", "trips"] == 1000
    assert samples["schemaless_tailer_transactions_total", "trips", "committed"] == 1
    assert samples["schemaless_tailer_transactions_total", "trips", "BusUnavailable"] == 1
    whole = [value for key, value in samples.items() if key[0] == "schemaless_tailer_stage_seconds_sum"]
    assert sum(whole) == 1.0
