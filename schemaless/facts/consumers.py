"""Consumers: how far indexes and trigger programs are, who works on them, and what holds them up.

Servers add up the checkpoints of all consumers themselves. Only those of one program are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from schemaless.facts.servers import STATUS_TIMEOUT_S, Heard, Report, Unheard, ask_servers
from schemaless.location import GenerationStart, Location, kept_until
from schemaless.names import INDEX_PREFIX, INDEXER, TAILER, TRIGGER_PREFIX, Stall
from schemaless.ops.datastores import Catalogue
from schemaless.storage import (
    checkpoint_table,
    consumer_summary,
    parked_selection,
    shard_head,
    shard_log,
    trigger_order_table,
    worker_table,
)
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts, Checkpoint, State
from schemaless.storage.consumer_summary import ConsumerSummary, StoppedShard, TriggerProgress
from schemaless.storage.failover import ask_clusters, nobody_answers
from schemaless.storage.operation import Args, Operation
from schemaless.storage.parked_selection import ParkedSummary
from schemaless.storage.trigger_order_table import TriggerOrders, latest
from schemaless.storage.worker_table import SEEN_WITHIN_S, WaitingShard, WorkerRow
from schemaless.topology import Datastore


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


async def read_consumers(storage: AsyncStorage, datastore: Datastore) -> tuple[dict[str, ConsumerStatus], Unheard]:
    """Returns the consumers that are known by name, and who didn't answer in time."""
    heard = await _ask(storage, datastore, _summaries, datastore.name)
    return consumer_statuses(heard.best, whole=not heard.unheard.clusters), heard.unheard


async def read_consumer(
    storage: AsyncStorage, datastore: Datastore, consumer: str
) -> tuple[dict[int, ConsumerShard], Unheard]:
    """Returns the shards of one consumer, none if it has never run, and who didn't answer in time.

    Raises StorageUnavailable when no shard was found and a cluster didn't answer: nobody knows then.
    """
    heard = await _ask(storage, datastore, _checkpoints, datastore.name, consumer)
    shards = consumer_shards(heard.best.values())
    require_known(shards, heard.unheard)
    return shards, heard.unheard


def require_known(found: Collection[object], unheard: Unheard) -> None:
    """Raises StorageUnavailable when nothing was found and a cluster didn't answer: it may have what is missing."""
    if unheard.clusters and not found:
        raise nobody_answers(unheard.clusters.values(), f"no server answers of cluster {', '.join(unheard.clusters)}")


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
    storage: AsyncStorage, datastore: Datastore, operation: Callable[[*Args], Operation[Report]], *args: *Args
) -> Heard[Report]:
    nodes = {name: node for name, node in storage.nodes.items() if node.node.cluster in datastore.clusters}
    return await ask_servers(nodes, lambda node: node.run(operation, *args, timeout_s=STATUS_TIMEOUT_S))


def _summaries(datastore: str) -> Operation[SummariesReport]:
    summaries = yield from consumer_summary.summaries(datastore)
    named = [summary.consumer for summary in summaries if summary.stopped]
    stopped = yield from consumer_summary.stopped(datastore, named)
    heads_sum = yield from shard_head.sum_at_home(datastore)  # last: a lag may be too high for a moment, never too low
    return SummariesReport(heads_sum, summaries, stopped)


def _checkpoints(datastore: str, consumer: str) -> Operation[CheckpointsReport]:
    checkpoints = yield from checkpoint_table.of_consumer(datastore, consumer)
    starts = yield from shard_head.generations_of_all(datastore)
    # Last: a lag may be too high for a moment, never too low.
    heads = {head.shard: head.added_id for head in (yield from shard_head.heads_at_home(datastore))}
    return CheckpointsReport(heads, checkpoints, {shard: starts[shard] for shard in heads if shard in starts})


# Workers: the processes that run trigger programs and maintain indexes, from the rows in which they report.


async def read_workers(storage: AsyncStorage, datastore: Datastore) -> list[WorkerRow]:
    """Returns the processes that were seen lately. They report to all clusters, so any of them that answers will do.

    A minion is asked only where its master doesn't answer: it may still show a process that has ended.
    """
    operation = worker_table.of_datastore
    answers = await ask_clusters(storage, datastore.clusters, operation, datastore.name, timeout_s=STATUS_TIMEOUT_S)
    return present_workers(answers.found.values())


def present_workers(answers: Iterable[Sequence[WorkerRow]]) -> list[WorkerRow]:
    """Returns the newest row of each process, without those that weren't seen for a while."""
    newest: dict[tuple[str, int], WorkerRow] = {}
    for row in (row for answer in answers for row in answer):
        known = newest.get((row.consumer, row.worker))
        if row.age_s <= SEEN_WITHIN_S and (known is None or row.age_s < known.age_s):
            newest[row.consumer, row.worker] = row
    return [row for _, row in sorted(newest.items())]


def stall_of(rows: Iterable[WorkerRow], consumer: str) -> tuple[Stall, str] | None:
    """Returns why a consumer doesn't continue: its processes all say so. Indexers do the work of every index."""
    name = INDEXER if consumer.startswith(INDEX_PREFIX) else consumer
    found = [row.report for row in rows if row.consumer == name]
    stalled = [
        (report.stall, report.stall_reason) for report in found if report.stall not in (None, Stall.PARTITION_COUNT)
    ]
    return min(stalled) if stalled and len(stalled) == len(found) else None


def tripped(rows: Iterable[WorkerRow]) -> list[str]:
    """Returns why the breakers of workers are open, of those whose breaker is."""
    return [row.report.tripped for row in rows if row.report.tripped is not None]


def tailing_of(rows: Sequence[WorkerRow]) -> tuple[str, str | None]:
    """Returns the state of tailing, and why. A topic whose partitions were raised is named while all is published."""
    if not any(row.consumer == TAILER for row in rows):
        return Stall.NO_PARTITIONS, "no tailer has reported lately, so nothing is published"
    raised = [row.report.stall_reason for row in rows if row.report.stall is Stall.PARTITION_COUNT]
    return stall_of(rows, TAILER) or ("running", next(iter(raised), None))


def tailing_stall(rows: Sequence[WorkerRow], shard: int) -> str | None:
    """Returns why the cells of a shard aren't published."""
    held = {waiting.shard: waiting.reason for waiting in waiting_shards(rows, TAILER)}
    word, why = tailing_of(rows)
    return held.get(shard) or (None if word == "running" else f"{word}: {why}")


def waiting_shards(rows: Iterable[WorkerRow], consumer: str) -> list[WaitingShard]:
    """Returns the shards in which a consumer doesn't go on, of many only some, and why."""
    shards = (shard for row in rows for shard in (*row.report.failing_shards, *row.report.refused))
    return [shard for shard in shards if shard.consumer == consumer]


# Programs: counts, parked cells, orders and the oldest unfinished cell of trigger programs, over all clusters.


class _ClusterPart(msgspec.Struct, frozen=True):
    """What one cluster knows of all programs, by consumer."""

    progress: Mapping[str, TriggerProgress]
    parked: Mapping[str, ParkedSummary]
    orders: Mapping[str, TriggerOrders]
    oldest_us: Mapping[str, int]


class ProgramSummary(msgspec.Struct, frozen=True):
    """One program over all clusters that answered. Times are in microseconds."""

    counts: CellCounts = NO_COUNTS
    counted_from: int = 0
    parked: int = 0
    oldest_parked_at: int | None = None
    lag_us: int = 0
    orders: TriggerOrders = TriggerOrders()


async def read_summaries(storage: AsyncStorage, datastore: Datastore) -> dict[str, ProgramSummary]:
    """Returns the programs that are known by consumer. Clusters that don't answer are left out."""
    answers = await ask_clusters(storage, datastore.clusters, _part, datastore, timeout_s=STATUS_TIMEOUT_S)
    parts = list(answers.found.values())
    names = {name for part in parts for name in (*part.progress, *part.parked, *part.orders)}
    return {name: _of_program(parts, name) for name in sorted(names)}


def _of_program(parts: Sequence[_ClusterPart], name: str) -> ProgramSummary:
    progress = [part.progress[name] for part in parts if name in part.progress]
    parked = [part.parked[name] for part in parts if name in part.parked]
    return ProgramSummary(
        sum((one.counts for one in progress), NO_COUNTS),
        sum(one.counted_from for one in progress),
        sum(one.parked for one in parked),
        min((one.oldest_at for one in parked if one.oldest_at is not None), default=None),
        max((part.oldest_us.get(name, 0) for part in parts), default=0),
        orders_of_all([part.orders[name] for part in parts if name in part.orders]),
    )


def orders_of_all(orders: Sequence[TriggerOrders]) -> TriggerOrders:
    """Returns the orders for one program that several clusters have."""
    return TriggerOrders(
        latest(orders),
        {shard: reason for one in orders for shard, reason in sorted(one.paused.items())},
        {shard: seek for one in orders for shard, seek in sorted(one.seeks.items())},
    )


def _part(datastore: Datastore) -> Operation[_ClusterPart]:
    progress = yield from consumer_summary.programs(datastore.name)
    parked = yield from parked_selection.summaries(datastore.name)
    orders = yield from trigger_order_table.of_datastore(datastore.name)
    oldest: dict[str, int] = {}
    for name in progress:
        behind = yield from consumer_summary.behind(datastore.name, name)
        found = (yield from shard_log.oldest_after(datastore, behind)) if behind else {}
        oldest[name] = max((one.age_us for one in found.values() if one is not None), default=0)
    return _ClusterPart(progress, parked, orders, oldest)


def is_program(consumer: str) -> bool:
    return consumer.startswith(TRIGGER_PREFIX)


class ProgramSample(msgspec.Struct, frozen=True):
    """One program over all clusters that answered, and its processes that were seen lately."""

    summary: ProgramSummary
    workers: Sequence[WorkerRow]


Programs = dict[tuple[str, str], ProgramSample]
"""By (datastore, program)."""


async def sample_programs(storage: AsyncStorage, catalogue: Catalogue) -> Programs:
    """Returns the programs of all datastores. Raises StorageUnavailable."""
    found: Programs = {}
    for datastore in (await catalogue.readable()).values():
        summaries = await read_summaries(storage, datastore)
        workers = await read_workers(storage, datastore) if summaries else []
        for name, summary in summaries.items():
            if is_program(name):
                own = [row for row in workers if row.consumer == name]
                found[datastore.name, name.partition(":")[2]] = ProgramSample(summary, own)
    return found
