"""Consumer status: how far indexes and trigger programs are, from their checkpoints on all servers.

Servers add up the checkpoints of all consumers themselves. Only those of one program are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.location import GenerationStart, Location, kept_until
from schemaless.storage import checkpoint_table, consumer_summary, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts, Checkpoint, State
from schemaless.storage.consumer_summary import ConsumerSummary, StoppedShard
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Role


class SummariesReport(msgspec.Struct, frozen=True):
    """All consumers as one server has them. `stopped` names their stopped shards, of many only some."""

    heads_sum: int
    summaries: Sequence[ConsumerSummary]
    stopped: Sequence[StoppedShard] = ()


class CheckpointsReport(msgspec.Struct, frozen=True):
    """One consumer as one server has it, with heads and generations of the shards that live there."""

    heads: Mapping[int, int]
    checkpoints: Sequence[Checkpoint]
    starts: Mapping[int, Sequence[GenerationStart]]

    @property
    def heads_sum(self) -> int:
        return sum(self.heads.values())


class ConsumerStatus(msgspec.Struct, frozen=True):
    """How far a consumer is. `lag` is in cells. `stopped` has the reasons of stopped shards, of many only some."""

    state: State
    lag: int
    stopped: Mapping[int, str | None]


class ConsumerShard(msgspec.Struct, frozen=True):
    """How far a consumer has finished one shard. `lag` is in cells, and None while no server shows the shard's head.

    `kills`: how many processes the call of the next cell is known to have ended.
    """

    location: Location
    lag: int | None
    state: State
    reason: str | None
    kills: int = 0
    counts: CellCounts = NO_COUNTS
    counted_from: int = 0


class Unheard(msgspec.Struct, frozen=True):
    """Who didn't answer, with the reason by cluster: all servers of `clusters`, and of `masters` only the master.

    A minion tells then what it has, and no checkpoint moves on that cluster.
    """

    clusters: Mapping[str, str]
    masters: Mapping[str, str]

    def document(self) -> dict[str, Mapping[str, str]]:
        return {"unknown": self.clusters, "masters_away": self.masters}


class _OfOneServer(Protocol):
    @property
    def heads_sum(self) -> int: ...


Report = TypeVar("Report", bound=_OfOneServer)


async def read_consumers(
    storage: AsyncStorage, datastore: Datastore, timeout_s: float
) -> tuple[dict[str, ConsumerStatus], Unheard]:
    """Returns the consumers that are known by name, and who didn't answer in time."""
    reports, unheard = await _ask(storage, datastore, lambda: _summaries(datastore.name), timeout_s)
    return consumer_statuses(reports, whole=not unheard.clusters), unheard


async def read_consumer(
    storage: AsyncStorage, datastore: Datastore, consumer: str, timeout_s: float
) -> tuple[dict[int, ConsumerShard], Unheard]:
    """Returns the shards of one consumer, none if it has never run, and who didn't answer in time.

    Raises StorageUnavailable when no shard was found and a cluster didn't answer: nobody knows then.
    """
    reports, unheard = await _ask(storage, datastore, lambda: _checkpoints(datastore.name, consumer), timeout_s)
    shards = consumer_shards(reports.values())
    require_known(shards, unheard)
    return shards, unheard


def require_known(found: Collection[object], unheard: Unheard) -> None:
    """Raises StorageUnavailable when nothing was found and a cluster didn't answer: it may have what is missing."""
    if unheard.clusters and not found:
        raise StorageUnavailable("; ".join(f"cluster {name}: {why}" for name, why in unheard.clusters.items()))


def consumer_statuses(reports: Mapping[str, SummariesReport], *, whole: bool) -> dict[str, ConsumerStatus]:
    """Adds up the reports by cluster. `whole` says that they are of all clusters.

    Each shard's checkpoint at its home is compared with its head there. An index has a copy on every other cluster, and
    the cluster that is furthest behind counts.
    """
    homes: dict[str, int] = {}
    lags: dict[str, int] = {}
    stopped: dict[str, dict[int, str | None]] = {}
    states: dict[str, State] = {}
    for report in reports.values():
        for summary in report.summaries:
            name = summary.consumer
            homes[name] = homes.get(name, 0) + summary.lag
            states[name] = State.STOPPED if summary.stopped else states.get(name, State.RUNNING)
        for shard in report.stopped:
            stopped.setdefault(shard.consumer, {})[shard.shard] = shard.reason
    heads_sum = sum(report.heads_sum for report in reports.values())
    for report in reports.values():
        for summary in report.summaries if whole else ():
            if summary.away_shards:
                away = max(0, heads_sum - report.heads_sum - summary.away_finished)
                lags[summary.consumer] = max(lags.get(summary.consumer, 0), summary.lag + away)
    return {
        name: ConsumerStatus(state, max(homes[name], lags.get(name, 0)), dict(sorted(stopped.get(name, {}).items())))
        for name, state in sorted(states.items())
    }


def consumer_shards(reports: Iterable[CheckpointsReport]) -> dict[int, ConsumerShard]:
    """Returns one consumer by shard. The lowest of several clusters' checkpoints counts."""
    heads: dict[int, int] = {}
    starts: dict[int, Sequence[GenerationStart]] = {}
    found: dict[int, list[Checkpoint]] = {}
    for report in reports:
        heads.update(report.heads)
        starts.update(report.starts)
        for checkpoint in report.checkpoints:
            found.setdefault(checkpoint.shard, []).append(checkpoint)
    return {
        shard: _consumer_shard(standing, heads.get(shard), starts.get(shard, ()))
        for shard, standing in sorted(found.items())
    }


def in_all(shards: Mapping[int, ConsumerShard]) -> ConsumerStatus:
    """Adds up one consumer's shards. Those whose head is unknown add no lag."""
    stopped = {number: shard.reason for number, shard in shards.items() if shard.state is State.STOPPED}
    lag = sum(shard.lag or 0 for shard in shards.values())
    return ConsumerStatus(State.STOPPED if stopped else State.RUNNING, lag, stopped)


def _consumer_shard(
    standing: Sequence[Checkpoint], head: int | None, starts: Sequence[GenerationStart]
) -> ConsumerShard:
    lowest = min(standing, key=lambda checkpoint: kept_until(checkpoint.location, starts))
    stopped = next((checkpoint for checkpoint in standing if checkpoint.state is State.STOPPED), None)
    return ConsumerShard(
        lowest.location,
        None if head is None else max(0, head - kept_until(lowest.location, starts)),
        State.STOPPED if stopped else State.RUNNING,
        stopped.reason if stopped else None,
        lowest.kills,
        lowest.counts,
        lowest.counted_from,
    )


async def _ask(
    storage: AsyncStorage, datastore: Datastore, question: Callable[[], Operation[Report]], timeout_s: float
) -> tuple[dict[str, Report], Unheard]:
    """Asks every server. Returns the best answer of each cluster, and who didn't answer."""
    nodes = {name: node for name, node in storage.nodes.items() if node.node.cluster in datastore.clusters}
    questions = {name: node.run(question, timeout_s=timeout_s) for name, node in nodes.items()}
    answers = await answers_of_all(questions, tolerated=SchemalessError)
    by_cluster: dict[str, list[tuple[AsyncNode, Report]]] = {}
    for name, report in answers.found.items():
        by_cluster.setdefault(nodes[name].node.cluster, []).append((nodes[name], report))
    clusters: dict[str, str] = {}
    masters: dict[str, str] = {}
    for name, error in answers.failures.items():
        node = nodes[name].node
        if node.cluster not in by_cluster:
            clusters[node.cluster] = str(error)
        elif node.role is Role.MASTER:
            masters[node.cluster] = str(error)
    return {cluster: best(reports) for cluster, reports in sorted(by_cluster.items())}, Unheard(clusters, masters)


def best(reports: Sequence[tuple[AsyncNode, Report]]) -> Report:
    """Returns the master's report, or that of the most advanced minion. There is at least one."""
    return max(reports, key=lambda each: (each[0].node.role is Role.MASTER, each[1].heads_sum))[1]


def _summaries(datastore: str) -> Operation[SummariesReport]:
    summaries = yield from consumer_summary.summaries(datastore)
    named = [summary.consumer for summary in summaries if summary.stopped]
    stopped = yield from consumer_summary.stopped(datastore, named)
    moved = yield from shard_head.movement(datastore)  # last: a lag may be too high for a moment, never too low
    return SummariesReport(moved.heads_sum, summaries, stopped)


def _checkpoints(datastore: str, consumer: str) -> Operation[CheckpointsReport]:
    checkpoints = yield from checkpoint_table.of_consumer(datastore, consumer)
    starts = yield from shard_head.generations_of_all(datastore)
    heads = yield from shard_head.heads(datastore)  # last: a lag may be too high for a moment, never too low
    return CheckpointsReport({head.shard: head.added_id for head in heads}, checkpoints, starts)
