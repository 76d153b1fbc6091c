"""Servers: who answers, what each reports of one datastore, and what the buffers hold. Time-outs are short.

How far the consumers are is another question (consumers.py). A server that is too slow for that one still shows
its heads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from schemaless.errors import SchemalessError
from schemaless.ops.tailers import latest
from schemaless.storage import buffer_table, conflict_table, refusal_table, shard_head, tailer_order_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.buffer_table import Waiting
from schemaless.storage.failover import Answers, answers_of_all, ask_masters
from schemaless.storage.operation import Operation
from schemaless.storage.refusal_table import Refused
from schemaless.storage.shard_head import Head
from schemaless.storage.standstill import Standstill
from schemaless.storage.standstill import of_server as standstill_of
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore, Role

STATUS_TIMEOUT_S = 1.0
"""Time for each server when all are asked how they are."""


class _OfOneServer(Protocol):
    @property
    def heads_sum(self) -> int: ...


Report = TypeVar("Report", bound=_OfOneServer)


class Unheard(msgspec.Struct, frozen=True):
    """Who didn't answer, with the error by cluster: all servers of `clusters`, and of `masters` only the master.

    A minion tells then what it has, and no checkpoint moves on that cluster.
    """

    clusters: Mapping[str, Exception]
    masters: Mapping[str, Exception]

    def document(self) -> dict[str, dict[str, str]]:
        return {"unknown": texts(self.clusters), "masters_away": texts(self.masters)}


def texts(errors: Mapping[str, Exception]) -> dict[str, str]:
    return {name: str(error) for name, error in errors.items()}


class Heard(Generic[Report]):
    """The reports of servers, by name, and the errors of those that didn't answer in time.

    `best` has one of each cluster that answers at all: the master's, or that of the most advanced minion.
    """

    def __init__(self, nodes: Mapping[str, AsyncNode], answers: Answers[Report]) -> None:
        of, roles = {name: node.node for name, node in nodes.items()}, {name: node.role for name, node in nodes.items()}
        self.nodes, self.reports = nodes, answers.found
        self.errors = answers.failures
        self.failures = texts(self.errors)
        rising = sorted(self.reports, key=lambda name: (roles[name] is Role.MASTER, self.reports[name].heads_sum))
        best = {of[name].cluster: self.reports[name] for name in rising}
        self.best = {cluster: best[cluster] for cluster in sorted(best)}
        self.unheard = Unheard(
            {of[name].cluster: why for name, why in self.errors.items() if of[name].cluster not in self.best},
            {
                of[name].cluster: why
                for name, why in self.errors.items()
                if of[name].cluster in self.best and roles[name] is Role.MASTER
            },
        )


async def ask_servers(nodes: Mapping[str, AsyncNode], ask: Callable[[AsyncNode], Awaitable[Report]]) -> Heard[Report]:
    questions = {name: ask(node) for name, node in nodes.items()}
    return Heard(nodes, await answers_of_all(questions, tolerated=SchemalessError))


class NodeReport(msgspec.Struct, frozen=True):
    """The report of one server. `waiting` is what it buffers, and `refused` what of it is refused, by the home that it
    waits for. `commands` are the operators' commands to the tailers.
    """

    heads: Sequence[Head]
    waiting: Mapping[str, Waiting]
    refused: Mapping[str, Refused]
    conflicts: int
    commands: Mapping[str, TailerCommand]
    standstill: Standstill | None

    @property
    def heads_sum(self) -> int:
        return sum(head.added_id for head in self.heads)


Status = Heard[NodeReport]


async def read_status(storage: AsyncStorage, datastore: Datastore) -> Status:
    """Asks every server, and takes at most STATUS_TIMEOUT_S, whichever of them are unreachable."""
    name, timeout_s = datastore.name, STATUS_TIMEOUT_S
    return await ask_servers(
        storage.nodes,
        lambda node: node.run(_report, name, node.role, timeout_s=timeout_s, traffic=Traffic.PROBE),
    )


def is_tailing_paused(status: Status, datastore: str) -> bool:
    return latest(report.commands for report in status.best.values()).get(datastore, NO_COMMAND).paused


async def read_standstills(storage: AsyncStorage, datastore: Datastore) -> dict[str, Standstill]:
    """Returns what the masters that answer stand still for, by cluster."""
    clusters = datastore.clusters
    answers = await ask_masters(storage, clusters, standstill_of, Role.MASTER, timeout_s=STATUS_TIMEOUT_S)
    return {cluster: found for cluster, found in answers.found.items() if found is not None}


def _report(datastore: str, role: Role) -> Operation[NodeReport]:
    heads = yield from shard_head.heads_at_home(datastore)
    waiting, refused = yield from _buffered()
    conflicts = yield from conflict_table.count(datastore)
    commands = yield from tailer_order_table.all_of()
    standstill = yield from standstill_of(role)
    waiting_for = {home: one for (name, home), one in waiting.items() if name == datastore}
    refused_by = {home: one for (name, home), one in refused.items() if name == datastore}
    return NodeReport(heads, waiting_for, refused_by, conflicts, commands, standstill)


# Buffers: what those of all clusters hold and homes refuse, so that readiness and metrics know it.
#
# A backlog that doesn't shrink is one whose oldest row is older than a bound. Age is what grows when nothing is
# confirmed, whatever the traffic, and it falls as soon as the oldest rows go.

BACKLOG_AGE_MAX_S = 60.0
"""How long the oldest buffered cell may wait for confirmation. A healthy cleaner needs a few seconds."""


class Backlog(msgspec.Struct, frozen=True):
    """What one secondary buffers for one home. `refused` is what of it the home refuses."""

    datastore: str
    secondary: str
    home: str
    waiting: Waiting
    refused: Refused | None

    @property
    def is_stalled(self) -> bool:
        """Whether it doesn't shrink, or has cells that their home refuses."""
        return self.refused is not None or self.waiting.oldest_s > BACKLOG_AGE_MAX_S


async def read_backlogs(storage: AsyncStorage) -> list[Backlog]:
    """Asks every master. One that doesn't answer has no backlog here."""
    answers = await ask_masters(storage, storage.topology.clusters, _buffered, timeout_s=STATUS_TIMEOUT_S)
    return [
        Backlog(datastore, secondary, home, one, refused.get((datastore, home)))
        for secondary, (waiting, refused) in answers.found.items()
        for (datastore, home), one in waiting.items()
    ]


def _buffered() -> Operation[tuple[Mapping[tuple[str, str], Waiting], Mapping[tuple[str, str], Refused]]]:
    waiting = yield from buffer_table.waiting()
    return waiting, (yield from refusal_table.refused()) if waiting else {}
