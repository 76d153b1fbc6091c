"""appointment, topology_order, topology_step and topology_state: who is master, what operators want, what controllers
did, and what they make of a cluster now.

Every server has the appointments of all clusters. Controllers write them, unlogged.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemaless.cell import created_at_text
from schemaless.errors import StaleTopology
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, Time, sql, where
from schemaless.storage.table import Table
from schemaless.topology import Appointment, Ballot

TABLE = Table("schemaless.appointment", Appointment, ballot=Table("", Ballot))


class Step(msgspec.Struct, frozen=True):
    """One thing that a controller did under a ballot. `at` is in microseconds since the epoch."""

    cluster: str
    ballot: Ballot
    step: str
    told: str
    at: int


REPLACED_AFTER_S = 60.0
"""An open order of this age may be replaced: no controller runs, or none can settle it, or its command was killed."""
PROMOTED, ACKNOWLEDGED = "promoted", "acknowledged"
"""Steps: a master was promoted automatically, and somebody looked at it since."""
STEPS = Table("schemaless.topology_step", Step, ballot=Table("", Ballot))


class OrderKind(StrEnum):
    SWITCH = "switch"
    PROMOTE = "promote"
    OPEN = "open"
    ACKNOWLEDGE = "acknowledge"
    REJOIN = "rejoin"
    ADD_CLUSTER = "add-cluster"
    ADD_NODE = "add-node"
    REMOVE_NODE = "remove-node"

    @property
    def is_for_controllers(self) -> bool:
        """False for what a command carries out itself. It is an order so that nobody gives another one beside it."""
        return self not in (OrderKind.ADD_CLUSTER, OrderKind.ADD_NODE, OrderKind.REMOVE_NODE)


class OrderState(StrEnum):
    OPEN = "open"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class RejoinStep(StrEnum):
    """How far a rejoin is. Until it is begun, nothing was done that a refusal would leave behind."""

    ORDERED = ""
    BEGUN = "begun"
    MADE_ANEW = "made anew"


class TopologyOrder(msgspec.Struct, frozen=True):
    """What an operator wants of the controller of a cluster. `without` names servers that need not be heard, because
    somebody fenced them. `told` says what came of it, or how far it is. `changed_at` is in microseconds since the
    epoch. `step` is of a rejoin, which takes longer than a controller may live. Its server promised `epoch` when it was
    begun.
    """

    cluster: str
    kind: OrderKind
    node: str | None
    without: tuple[str, ...]
    actor: str
    state: OrderState
    told: str
    job: str
    changed_at: int
    step: RejoinStep = RejoinStep.ORDERED
    epoch: int = 0

    @property
    def said(self) -> str:
        """Who ordered what, and when."""
        words = " ".join(filter(None, (self.kind, self.cluster, self.node)))
        return f"{self.actor} ordered `{words}` at {created_at_text(self.changed_at)}"

    def is_again(self, other: TopologyOrder) -> bool:
        """Returns whether the same caller orders the same."""
        return (self.kind, self.node, self.without, self.actor) == (other.kind, other.node, other.without, other.actor)


class NodeState(msgspec.Struct, frozen=True):
    """What a server is for the controller: master, voter, following, silent, diverged or remaking."""

    name: str
    state: str
    why: str = ""


class ClusterState(msgspec.Struct, frozen=True):
    """What a controller makes of a cluster. `changed_at` is when it said so last, in microseconds since the epoch."""

    cluster: str
    state: str
    why: str
    nodes: tuple[NodeState, ...]
    controller: str
    changed_at: int


STATES = Table("schemaless.topology_state", ClusterState)
ORDERS = Table("schemaless.topology_order", TopologyOrder, without="without_nodes")

ALL: Script = f"SELECT {TABLE.select} FROM {TABLE.name}"
"""What a server knows, for every cluster."""

NONE_NEWER: Script = "COALESCE((SELECT MAX(epoch) FROM schemaless.appointment), 0) <= @version"
"""A condition: this server knows of no master that the session's process doesn't know (`node_core.stamp`)."""


def none_later(cluster: str, epoch: int) -> Script:
    """Returns a condition: this server knows of no master of the cluster with a later epoch."""
    return f"NOT EXISTS (SELECT 1 FROM schemaless.appointment {where(cluster=cluster)} AND epoch > {epoch})"


def appointments() -> Operation[list[Appointment]]:
    """Returns what this server knows, for every cluster."""
    return (yield from TABLE.rows())


def verify_none_newer() -> Operation[None]:
    """Raises StaleTopology when this server knows of a master that this process doesn't know."""
    ((good,),) = yield from query(f"SELECT {NONE_NEWER}")
    if not good:
        raise StaleTopology("another master was appointed, and this process doesn't know it yet")


def put_order(order: TopologyOrder) -> Operation[None]:
    """Writes what an operator wants, unless a later order is stored."""
    yield ORDERS.newest(order)


def settle_order(order: TopologyOrder, state: OrderState, told: str, at: int) -> Operation[None]:
    """Writes what became of an order, or how far it is, unless the former is written or another order replaced it."""
    yield sql(
        f"UPDATE {ORDERS.name} SET state = %s, told = %s, step = %s, epoch = %s, changed_at = %s"
        " WHERE cluster = %s AND job = %s AND state = %s",
        state,
        told,
        order.step,
        order.epoch,
        Time(at),
        order.cluster,
        order.job,
        OrderState.OPEN,
    )


def orders() -> Operation[dict[str, TopologyOrder]]:
    """Returns the latest order by cluster."""
    return (yield from ORDERS.by("cluster"))


def states() -> Operation[dict[str, ClusterState]]:
    """Returns what controllers make of the clusters, by cluster."""
    return (yield from STATES.by("cluster"))


def steps(cluster: str, limit: int) -> Operation[list[Step]]:
    """Returns what controllers did last, in order."""
    found = yield from STEPS.rows("WHERE cluster = %s ORDER BY at DESC LIMIT %s", cluster, limit)
    return found[::-1]
