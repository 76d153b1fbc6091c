"""/topology: the servers and their masters, and orders to the controllers, which alone change a master."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from api.http.serving import Asked, serves
from api.state import ApiState
from schemaless.access import ALL_DATASTORES
from schemaless.cell import created_at_text
from schemaless.contract import services
from schemaless.contract.services import (
    ControllerWordView,
    MoveView,
    OperationView,
    TopologyOrderRequest,
    TopologyOrderView,
    VoterView,
)
from schemaless.errors import Forbidden, Invalid, NotFound, SchemalessError, StateConflict, Unavailable
from schemaless.storage import appointment_table, shard_move_table
from schemaless.storage.appointment_table import (
    REPLACED_AFTER_S,
    ClusterState,
    OrderKind,
    OrderState,
    TopologyOrder,
)
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.everywhere import after, read_everywhere, together, write_everywhere
from schemaless.storage.failover import Answers
from schemaless.storage.operation import Operation
from schemaless.storage.shard_move_table import ShardMove
from schemaless.topology import Appointment, Datastore

T = TypeVar("T")

_POLL_S = 0.1
_READ_TIMEOUT_S = 1.0
_WRITE_TIMEOUT_S = 5.0


@serves(services.TOPOLOGY)
async def get_topology(asked: Asked[None]) -> dict[str, Any]:
    return await topology_of(asked.state, asked.datastore)


async def topology_of(state: ApiState, datastore: Datastore) -> dict[str, Any]:
    storage = state.storage
    orders, said, moves = await asyncio.gather(
        _read(storage, appointment_table.orders),
        _read(storage, appointment_table.states),
        _read(storage, partial(shard_move_table.under_way, datastore.name)),
    )
    states = together(said.found.values())
    given = together(orders.found.values())
    open_ones = [one for one in given.values() if one.state is OrderState.OPEN]
    return {
        "datastore": datastore.name,
        "version": storage.version,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "installation": datastore.installation,
        "placement": datastore.homes,
        "clusters": {
            name: _servers_view(state, name, states.get(name), given.get(name)) for name in storage.topology.clusters
        },
        "operation": _operation_view(open_ones[0]) if open_ones else None,
        "moves": [_move_view(move) for _, move in sorted(together(moves.found.values()).items())],
    }


@serves(services.TOPOLOGY_ORDER)
async def order_topology(asked: Asked[TopologyOrderRequest]) -> tuple[int, TopologyOrderView]:
    if (token := asked.request.token) is not None and not token.reaches(ALL_DATASTORES):
        raise Forbidden(f"the token {token.name!r} was not issued for every datastore, and a master serves all of them")
    state, wanted = asked.state, asked.payload
    asked.request.action = f"{wanted.order} {wanted.cluster} {wanted.node or ''}".rstrip()
    appointment = _verify(state.storage, wanted)
    if wanted.dry_run:
        told = f"{appointment.master} is the master of {wanted.cluster}, and nothing was ordered"
        return 200, _order_view(state, wanted.cluster, None, "dry_run", told)
    order = await _given(state, wanted, appointment, asked.who)
    settled = await _settled(state.storage, order, time.monotonic() + wanted.wait, state.draining.is_set)
    if settled.state in (OrderState.REFUSED, OrderState.FAILED):
        raise StateConflict(settled.told)
    await state.storage.look()
    if settled.state is OrderState.DONE:
        return 200, _order_view(state, order.cluster, order.job, "done", settled.told)
    told = settled.told or "no controller has settled it yet"
    return 202, _order_view(state, order.cluster, order.job, "open", told)


def _verify(storage: AsyncStorage, wanted: TopologyOrderRequest) -> Appointment:
    """Returns the appointment that an order is about. What only a controller can see, it refuses itself."""
    cluster = storage.topology.clusters.get(wanted.cluster)
    if cluster is None:
        there = ", ".join(storage.topology.clusters)
        raise NotFound(f"there is no storage cluster {wanted.cluster!r}: there are {there}")
    names = [node.name for node in cluster.nodes]
    for name in (*wanted.without, *([wanted.node] if wanted.node is not None else [])):
        if name not in names:
            raise NotFound(f"cluster {cluster.name} has no server {name!r}: it has {', '.join(names)}")
    kind = OrderKind(wanted.order)
    if wanted.node is not None and kind in (OrderKind.OPEN, OrderKind.ACKNOWLEDGE):
        raise Invalid("node", f"{kind} takes no server: leave it out")
    if wanted.node is None and kind is OrderKind.REJOIN:
        raise Invalid("node", "which server is to be made anew")
    if wanted.without and kind is not OrderKind.PROMOTE:
        raise Invalid("without", f"{kind} hears every server that it needs: only promote goes without one")
    if wanted.without and not wanted.fenced:
        unheard = " and ".join(wanted.without)
        raise Invalid(
            "without",
            f"a server that still takes writes would be a second master: stop {unheard} or cut it off, and then say so"
            " with `fenced`",
        )
    appointment = storage.appointments.get(cluster.name)
    if appointment is None:
        raise Unavailable(
            f"no controller has appointed a master of {cluster.name}, so nobody would carry the order out",
            hint="start a controller: `python -m controller` (docs/failover.md)",
        )
    return appointment


async def _given(state: ApiState, wanted: TopologyOrderRequest, appointment: Appointment, actor: str) -> TopologyOrder:
    """Writes an order, and returns it. The same order of the same caller that is still open is that one.

    A switch names its server here, so that a controller that reads it twice doesn't switch twice. Raises StateConflict.
    """
    orders = together((await _read(state.storage, appointment_table.orders)).at_least_one())
    present = orders.get(wanted.cluster)
    kind, node = OrderKind(wanted.order), wanted.node
    if node is None and kind is OrderKind.SWITCH:
        voters = state.storage.minions(wanted.cluster)
        node = min(voters, key=partial(_lag_s, state)).node.name if voters else None
    order = TopologyOrder(
        wanted.cluster, kind, node, tuple(wanted.without), actor, OrderState.OPEN, "",
        secrets.token_hex(8), after(present.changed_at if present is not None else 0),
    )  # fmt: skip
    is_urgent = kind in (OrderKind.PROMOTE, OrderKind.OPEN)  # a cluster without a master can't wait
    for other in orders.values():
        is_growth = other.state is OrderState.OPEN and not other.kind.is_for_controllers
        if (
            is_growth
            and not is_urgent
            and kind is not OrderKind.ACKNOWLEDGE
            and order.changed_at - other.changed_at < REPLACED_AFTER_S * 1e6
        ):
            raise StateConflict(f"{other.said}, and that changes servers: wait until it is settled")
    if present is not None and present.state is OrderState.OPEN:
        if present.is_again(order):
            return present
        is_begun = is_urgent and (present.step or not present.kind.is_for_controllers)
        if not is_begun and order.changed_at - present.changed_at < REPLACED_AFTER_S * 1e6:
            raise StateConflict(f"{present.said}, and no controller has settled that yet: wait until it is settled")
    await write_everywhere(
        state.storage.masters, lambda node: node.run(appointment_table.put_order, order, timeout_s=_WRITE_TIMEOUT_S)
    )
    return order


async def _settled(
    storage: AsyncStorage, order: TopologyOrder, until: float, stopping: Callable[[], bool]
) -> TopologyOrder:
    """Returns the order once it is settled, or as it is when the time is over. Raises StateConflict."""
    while True:
        present = together((await _read(storage, appointment_table.orders)).found.values()).get(order.cluster)
        if present is not None and present.job != order.job and present.changed_at >= order.changed_at:
            raise StateConflict(f"{present.said} at the same time, and that order counts")
        if present is not None and present.job == order.job:
            order = present
        if order.state is not OrderState.OPEN:
            return order
        if time.monotonic() >= until or stopping():
            return order
        await asyncio.sleep(_POLL_S)


async def _read(storage: AsyncStorage, rows: Callable[[], Operation[T]]) -> Answers[T]:
    return await read_everywhere(storage, lambda node: node.run(rows, timeout_s=_READ_TIMEOUT_S), SchemalessError)


def _move_view(move: ShardMove) -> MoveView:
    return MoveView(
        move.shard, move.source, move.target, move.state.value, move.copied, move.head, move.cells_s, move.told
    )


def _operation_view(order: TopologyOrder) -> OperationView:
    return OperationView(
        order.cluster, order.kind, order.node, order.actor, created_at_text(order.changed_at),
        order.job, order.state.value, order.told,
    )  # fmt: skip


def _order_view(state: ApiState, cluster: str, job: str | None, step: Any, told: str) -> TopologyOrderView:
    appointment = state.storage.appointments[cluster]
    voters = [VoterView(voter.node.name, _lag_s(state, voter)) for voter in state.storage.minions(cluster)]
    return TopologyOrderView(job, step, told, appointment.master, voters)


def _lag_s(state: ApiState, node: AsyncNode) -> float:
    return round(state.lag.lag_s(node), 3)


def _servers_view(
    state: ApiState, cluster: str, said: ClusterState | None, given: TopologyOrder | None
) -> dict[str, Any]:
    storage, master = state.storage, state.storage.present_master(cluster)
    nodes = sorted([master, *storage.others(cluster)], key=lambda node: node.node.name)
    states = {one.name: {"state": one.state, "why": one.why} for one in said.nodes} if said else {}
    return {
        "epoch": storage.epoch(cluster),
        "state": storage.state(cluster),
        "master": _server_view(master),
        "voters": list(map(_server_view, storage.minions(cluster))),
        "nodes": [
            _server_view(node)
            | {"lag_s": _lag_s(state, node), "state": None, "why": ""}
            | states.get(node.node.name, {})
            for node in nodes
        ],
        "controller": said
        and ControllerWordView(said.state, said.why, said.controller, created_at_text(said.changed_at)),
        "order": given and _operation_view(given),
    }


def _server_view(asked: AsyncNode) -> dict[str, Any]:
    """Shows a server without its account."""
    return {"name": asked.node.name, "role": asked.role, "host": asked.node.host, "port": asked.node.port}


ROUTES = (get_topology, order_topology)
