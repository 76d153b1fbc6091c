"""Status: reports of all servers about one datastore. They are asked concurrently with a short time-out.

How far the consumers are is another question (consumers.py). A server that is too slow for that one still shows
its heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from api.status.consumers import best
from schemaless.errors import SchemalessError
from schemaless.ops.tailer_control import latest
from schemaless.storage import buffer_table, conflict_table, refusal_table, shard_head, tailer_order_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import Waiting
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.refusal_table import Refused
from schemaless.storage.shard_head import Head
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore

T = TypeVar("T")


class NodeReport(msgspec.Struct, frozen=True):
    """The report of one server. `waiting` is what it buffers, and `refused` what of it is refused, by the home that it
    waits for. `commands` are the operators' commands to the tailers.
    """

    heads: Sequence[Head]
    waiting: Mapping[str, Waiting]
    refused: Mapping[str, Refused]
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


class Status(msgspec.Struct, frozen=True):
    nodes: Sequence[NodeStatus]

    def of_cluster(self, cluster: str) -> list[NodeStatus]:
        return [status for status in self.nodes if status.node.node.cluster == cluster]

    def clusters(self) -> list[str]:
        return sorted({status.node.node.cluster for status in self.nodes})

    def best_report(self, cluster: str) -> NodeReport | None:
        """Returns the master's report, or that of the most advanced minion while the master is unreachable."""
        answered = [(status.node, status.report) for status in self.of_cluster(cluster) if status.report is not None]
        return best(answered) if answered else None

    def reports(self) -> list[NodeReport]:
        """Returns one report of each cluster that answers at all."""
        return [report for report in map(self.best_report, self.clusters()) if report is not None]

    def tailing_paused(self, datastore: str) -> bool:
        return latest(report.commands for report in self.reports()).get(datastore, NO_COMMAND).paused


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
    waiting = yield from buffer_table.waiting()
    refused = yield from refusal_table.refused()
    conflicts = yield from conflict_table.count(datastore)
    commands = yield from tailer_order_table.all_of()
    return NodeReport(heads, of_datastore(datastore, waiting), of_datastore(datastore, refused), conflicts, commands)


def of_datastore(datastore: str, found: Mapping[tuple[str, str], T]) -> dict[str, T]:
    """Returns what belongs to one datastore, by home."""
    return {home: one for (name, home), one in found.items() if name == datastore}
