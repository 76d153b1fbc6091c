"""Status: reports of all servers about one datastore. They are asked concurrently with a short time-out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemaless.errors import SchemalessError
from schemaless.location import Location
from schemaless.ops.tailer_control import latest
from schemaless.storage import buffer_table, checkpoint_table, conflict_table, shard_head, tailer_order_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.shard_head import Head
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore, Role


class NodeReport(msgspec.Struct, frozen=True):
    """The report of one server. `buffered` counts waiting rows by the home that they wait for. `commands` are the
    operators' commands to the tailers.
    """

    heads: Sequence[Head]
    checkpoints: Sequence[Checkpoint]
    buffered: Mapping[str, int]
    conflicts: int
    commands: Mapping[str, TailerCommand]

    @property
    def heads_sum(self) -> int:
        return sum(head.added_id for head in self.heads)


class NodeStatus(msgspec.Struct, frozen=True):
    """`report` is None for a server that didn't answer in time, and `why` has its error then."""

    node: AsyncNode
    report: NodeReport | None
    why: str = ""

    @property
    def is_master(self) -> bool:
        return self.node.node.role is Role.MASTER


class ConsumerShard(msgspec.Struct, frozen=True):
    """How far a consumer has finished one shard. `lag` is in cells, and None while no server shows the shard's head."""

    location: Location
    lag: int | None
    state: State
    reason: str | None


class Status(msgspec.Struct, frozen=True):
    nodes: Sequence[NodeStatus]

    def of_cluster(self, cluster: str) -> list[NodeStatus]:
        return [status for status in self.nodes if status.node.node.cluster == cluster]

    def clusters(self) -> list[str]:
        return sorted({status.node.node.cluster for status in self.nodes})

    def best_report(self, cluster: str) -> NodeReport | None:
        """Returns the master's report, or that of the most advanced minion while the master is unreachable."""
        answered = [status for status in self.of_cluster(cluster) if status.report is not None]
        answered.sort(key=lambda status: (status.is_master, status.report.heads_sum if status.report else 0))
        return answered[-1].report if answered else None

    def reports(self) -> list[NodeReport]:
        """Returns one report of each cluster that answers at all."""
        return [report for report in map(self.best_report, self.clusters()) if report is not None]

    def tailing_paused(self, datastore: str) -> bool:
        return latest(report.commands for report in self.reports()).get(datastore, NO_COMMAND).paused

    def consumers(self) -> dict[str, dict[int, ConsumerShard]]:
        """Returns consumers by name and shard. The lowest of several clusters' checkpoints counts."""
        reports = self.reports()
        heads = {head.shard: head.added_id for report in reports for head in report.heads}
        found: dict[str, dict[int, list[Checkpoint]]] = {}
        for checkpoint in (checkpoint for report in reports for checkpoint in report.checkpoints):
            found.setdefault(checkpoint.consumer, {}).setdefault(checkpoint.shard, []).append(checkpoint)
        return {
            consumer: {shard: _consumer_shard(standing, heads.get(shard)) for shard, standing in sorted(shards.items())}
            for consumer, shards in sorted(found.items())
        }


async def read_status(storage: AsyncStorage, datastore: Datastore, timeout_s: float) -> Status:
    """Asks every server, and takes at most `timeout_s` whichever of them are unreachable."""
    questions = {name: node.run(_report, datastore.name, timeout_s=timeout_s) for name, node in storage.nodes.items()}
    answers = await answers_of_all(questions, tolerated=SchemalessError)
    return Status(
        [
            NodeStatus(node, answers.found.get(name), str(answers.failures.get(name, "")))
            for name, node in storage.nodes.items()
        ]
    )


def _report(datastore: str) -> Operation[NodeReport]:
    heads = yield from shard_head.heads(datastore)
    checkpoints = yield from checkpoint_table.all_of(datastore)
    depths = yield from buffer_table.depths()
    conflicts = yield from conflict_table.count(datastore)
    commands = yield from tailer_order_table.all_of()
    waiting = {home: count for (name, home), count in depths.items() if name == datastore}
    return NodeReport(heads, checkpoints, waiting, conflicts, commands)


def _consumer_shard(standing: Sequence[Checkpoint], head: int | None) -> ConsumerShard:
    lowest = min(standing, key=lambda checkpoint: checkpoint.location)
    stopped = next((checkpoint for checkpoint in standing if checkpoint.state is State.STOPPED), None)
    return ConsumerShard(
        lowest.location,
        None if head is None else max(0, head - lowest.location.added_id),
        State.STOPPED if stopped else State.RUNNING,
        stopped.reason if stopped else None,
    )


def total_lag(shards: Iterable[ConsumerShard]) -> int:
    """Returns the lag of the shards whose head is known, in cells."""
    return sum(shard.lag or 0 for shard in shards)
