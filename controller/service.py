"""Looks at all clusters again and again, and carries out what was decided.

One thread acts, and each server has one that looks. Nothing is kept here that a controller needs after its death:
appointments, promises and orders are on the servers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog

from controller.change import CHOSEN, WITHOUT, ClusterChange, Published
from controller.decide import (
    Decision,
    Establish,
    Fence,
    Follow,
    Hole,
    Keep,
    ObservedCluster,
    Open,
    Promote,
    Rejoin,
    Remake,
    RemoveVoters,
    Switch,
    Wait,
    decide,
    how_far,
    node_states,
)
from controller.rejoin import Rejoining
from controller.server import Observed, Server
from schemaless.config import ControllerMode
from schemaless.errors import AccountRefused, Fenced, LostHistory, SchemalessError
from schemaless.storage.appointment_table import (
    ACKNOWLEDGED,
    PROMOTED,
    ClusterState,
    OrderKind,
    OrderState,
    RejoinStep,
    Step,
    TopologyOrder,
)
from schemaless.storage.everywhere import after
from schemaless.topology import Appointment, Ballot, FollowedFile, Node, Topology

log = structlog.get_logger()

PERIOD_S = 0.3
FRESH_S = 1.0
"""A server that showed nothing for so long says nothing."""
DEAF_S = 4.0
"""A controller that heard no server for so long gives up its turn."""
ORDER_AGE_MAX_S = 600.0
"""An order that nobody began for so long isn't begun any more: what it was given for may be over."""
SAID_AGAIN_S = 10.0
"""What a controller makes of a cluster is written when it changes, and after so long."""
AGAIN_S = 2.0
AGAIN_MAX_S = 60.0
"""The pauses before something is tried again that failed: the first one, and the longest."""
STAYS_HOLED_S = 5.0
"""How long a minion shows holes before it is made anew. After a start it is asked again within a second or two."""
HOLED_AGAIN_S = 3600.0
"""The least time until one that was made anew for its holes is made anew for others: what made them goes on, then."""
LEAVE_OUT_AGAIN_S = 10.0
"""The same before voters are left out: each try draws an epoch, and puts wait meanwhile."""

SETTLED_BY: Mapping[OrderKind, tuple[type, ...]] = {
    OrderKind.SWITCH: (Switch,),
    OrderKind.PROMOTE: (Promote,),
    OrderKind.OPEN: (Open, Promote),
    OrderKind.REJOIN: (Rejoin,),
}
"""What carries out an order, or begins it. Anything else comes before it, such as the end of a change."""

CHANGES: Mapping[type, Callable[[ClusterChange, Any], None]] = {
    Establish: ClusterChange.establish,
    Open: ClusterChange.open_again,
    Switch: ClusterChange.switch,
    Promote: ClusterChange.promote,
    RemoveVoters: ClusterChange.remove_voters,
    Fence: ClusterChange.fence,
}

T = TypeVar("T")
Orders = Mapping[str, TopologyOrder]
Settle = Callable[[TopologyOrder, OrderState, str], None]


class Watched:
    """One server, which a thread of its own asks again and again, so that one that hangs delays no other."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.was_asked = False
        self.refusal = ""
        """What a server says that runs, and doesn't let us in."""
        self._found: Observed | None = None
        self._answered_at = time.monotonic()
        self._failed_since = time.monotonic()
        self._failures = 0
        self._server: Server | None = None
        self._over = threading.Event()
        self._using = threading.Lock()
        threading.Thread(target=self._keep_looking, name=f"look-{node.name}", daemon=True).start()

    @property
    def seen(self) -> Observed | None:
        """What the server showed just now, None if it says nothing."""
        return self._found if time.monotonic() - self._answered_at < FRESH_S else None

    @property
    def silent_s(self) -> float:
        """How long it has said nothing, or refused us: a silence after refusals begins anew, because until then it ran.

        Time in which nobody looked says nothing of it, such as a stop of ourselves.
        """
        return time.monotonic() - self._failed_since if self._failures > 1 else 0.0

    def look(self) -> None:
        with self._using:
            asked_at, refusal = time.monotonic(), ""
            try:
                if self._server is None:
                    self._server = Server(self.node)
                self._found, self._answered_at = self._server.look(), asked_at
                self._failures = 0
            except SchemalessError as error:
                refusal = str(error) if isinstance(error, AccountRefused) else ""
                self._found = None
                if self._failures == 0 or (self.refusal and not refusal):
                    self._failed_since, self._failures = asked_at, 0
                self._failures += 1
                self._drop()
            self.was_asked, self.refusal = True, refusal

    def use(self, act: Callable[[Server], T]) -> T | None:
        """Writes to a server that answers, or asks it. What fails is done the next time, or by others."""
        if (seen := self.seen) is not None and seen.tables:
            with self._using, suppress(SchemalessError):
                if self._server is not None:
                    return act(self._server)
        return None

    def close(self) -> None:
        self._over.set()

    def _keep_looking(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(PERIOD_S)
        self._drop()

    def _drop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class Controller:
    """All clusters of a topology with an administrators' account, and of `services` with the services' account.
    `settle` says what became of an order, and `published` tells how far shards were published. `remake_command` makes a
    server anew, None if a person does.
    """

    def __init__(
        self,
        topology: Topology,
        mode: ControllerMode,
        *,
        services: Topology,
        remake_command: str | None = None,
        name: str = "",
        settle: Settle = lambda order, state, told: None,
        published: Published = lambda datastores: {},
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"[:64]
        self.known: dict[str, Appointment] = {}
        self.states: dict[str, Wait] = {}
        """By cluster what it waits for, or that it is healthy."""
        self._topology = topology
        self._mode = mode
        self._write_settled = settle
        self._published = published
        self.holes: Callable[[], Mapping[str, Hole]] = dict
        """Asked for what minions lack of what their masters show."""
        self._counted: dict[str, tuple[int, Hole]] = {}
        self._made_anew_at: dict[str, float] = {}
        self._holed_since: dict[str, tuple[int, float]] = {}
        self._settled: dict[str, tuple[str, OrderState, str]] = {}
        self._begun: dict[str, TopologyOrder] = {}
        self._watched: dict[str, Watched] = {}
        self._watch()
        self._file, self._services_file = FollowedFile(topology), FollowedFile(services)
        self._rejoining = Rejoining(topology, services, remake_command)
        self._said: dict[str, ClusterState] = {}
        self._closed_since: dict[str, float] = {}
        self._starts: dict[str, tuple[str, int]] = {}  # by cluster the master that was compared, and its start
        self._stepped_at = 0.0
        self._failures: dict[str, int] = {}
        self._failed_at: dict[str, tuple[float, object]] = {}
        self._leave_out_after: dict[str, float] = {}

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()

    @property
    def is_deaf(self) -> bool:
        """True if no server has answered for `DEAF_S`. Then another controller may hear more."""
        return all(watched.silent_s > DEAF_S for watched in self._watched.values())

    def step(self, orders: Orders) -> None:
        """Does at most one thing for each cluster."""
        if time.monotonic() - self._stepped_at > DEAF_S:  # another one may have acted
            self._starts.clear()
        self._read_again()
        for watched in self._watched.values():
            for appointment in seen.appointments if (seen := watched.seen) else ():
                known = self.known.get(appointment.cluster)
                if known is None or appointment.rank > known.rank:
                    self.known[appointment.cluster] = appointment
            self._bring_up(watched)
        for cluster in self._topology.clusters:
            order = self._still_open(orders.get(cluster))
            if order is not None and order.kind is OrderKind.ACKNOWLEDGE:
                self._acknowledge(order)
                order = None
            self._step(cluster, order)
        self._stepped_at = time.monotonic()

    def _read_again(self) -> None:
        """Takes over which clusters and servers there are, after a change of one of the files."""
        masters = {name: one.master for name, one in self.known.items() if name in self._topology.clusters}
        if (found := self._file.changed(masters)) is not None:
            self._topology = self._rejoining.topology = found
            self._watch()
        if (services := self._services_file.changed({})) is not None:
            self._rejoining.services = services

    def _watch(self) -> None:
        nodes = self._topology.nodes
        for name, watched in list(self._watched.items()):
            if name not in nodes or not nodes[name].is_same_server(watched.node):
                self._watched.pop(name).close()
            else:
                watched.node = nodes[name]  # perhaps with another account
        self._watched |= {name: Watched(node) for name, node in nodes.items() if name not in self._watched}

    def _still_open(self, order: TopologyOrder | None) -> TopologyOrder | None:
        """Returns an order that is to be carried out. One that was settled may be shown open for a moment.

        A controller that just started would refuse it, because no server has shown anything yet.
        """
        if (
            order is None
            or order.state is not OrderState.OPEN
            or not order.kind.is_for_controllers
            or not all(one.was_asked for one in self._watched.values())
        ):
            return None
        job, state, told = self._settled.get(order.cluster, ("", order.state, ""))
        if order.job != job:
            begun = self._begun.get(order.cluster, order)  # what was read may be older, or another controller's
            job = order.job
            order = max(order, begun, key=lambda one: (one.job == job, list(RejoinStep).index(one.step)))
            age_s = time.time() - order.changed_at / 1e6
            if order.step or age_s < ORDER_AGE_MAX_S:
                return order
            state, told = OrderState.REFUSED, f"no controller began it for {age_s:.0f} s: order it again"
        self._settle(order, state, told)
        return None

    def _settle(self, order: TopologyOrder, state: OrderState, told: str) -> None:
        """Says what became of an order. Where no server takes that, the next step says it again."""
        self._settled[order.cluster] = order.job, state, told
        try:
            self._write_settled(order, state, told)
        except SchemalessError as error:
            log.warning("no server took what became of an order", cluster=order.cluster, told=told, why=str(error))

    def _go_on(self, view: ObservedCluster) -> TopologyOrder | None:
        """Returns the order if it is still open, as it is now. What is new of a rejoin is written before it counts."""
        order = view.order
        if order is None or not order.step or (now := how_far(view, order)) == order:
            return order
        if now.state is not OrderState.OPEN:
            self._settle(order, now.state, now.told)
            return None
        self._begin(now)
        return now

    def _begin(self, order: TopologyOrder) -> None:
        """Notes how far a rejoin is. Raises what keeps all servers from taking it."""
        self._write_settled(order, order.state, order.told)
        self._begun[order.cluster] = order
        log.info("a rejoin", cluster=order.cluster, node=order.node, step=order.step, told=order.told)

    def _acknowledge(self, order: TopologyOrder) -> None:
        promoted = self._promoted(order.cluster)
        if promoted is None:
            told = f"no automatic promotion of {order.cluster} waits to be acknowledged"
        else:
            seen = f"{order.actor} acknowledged the promotion under {promoted.ballot}"
            ballot = self.known[order.cluster].ballot
            self._note(Step(order.cluster, ballot, ACKNOWLEDGED, seen, after(promoted.at)))
            told = f"the next master of {order.cluster} is promoted automatically again"
        self._settle(order, OrderState.DONE, told)

    def _promoted(self, cluster: str) -> Step | None:
        """Returns the last automatic promotion if nobody acknowledged it. The servers know it, also after our death."""
        last = self._last_step(cluster, (PROMOTED, ACKNOWLEDGED))
        return last if last is not None and last.step == PROMOTED else None

    def _last_step(self, cluster: str, names: tuple[str, ...]) -> Step | None:
        found = [watched.use(lambda server: server.last_step(cluster, names)) for watched in self._watched.values()]
        return max((step for step in found if step is not None), key=lambda step: step.at, default=None)

    def _bring_up(self, watched: Watched) -> None:
        """Writes to a server what it doesn't know yet, such as one that was away."""
        if (seen := watched.seen) is None:
            return
        there = {one.cluster: one.rank for one in seen.appointments}
        if lacking := [one for name, one in self.known.items() if name not in there or there[name] < one.rank]:
            watched.use(lambda server: server.appoint(lacking))

    def view(self, cluster: str, order: TopologyOrder | None) -> ObservedCluster:
        nodes = {node.name: node for node in self._topology.cluster(cluster).nodes}
        seen = {name: found for name in nodes if (found := self._watched[name].seen) is not None}
        appointment, now = self.known.get(cluster), time.monotonic()
        appointed = "" if appointment is None else appointment.master
        master = seen.get(appointed)
        if master is not None and master.read_only:
            self._closed_since.setdefault(cluster, now)
        else:
            self._closed_since.pop(cluster, None)
        if master is not None and (master.read_only or self._starts.get(cluster, ("", 0))[0] != appointed):
            self._starts[cluster] = appointed, master.started_at
        promoted = self._promoted(cluster) if appointment is not None and master is None else None
        return ObservedCluster(
            cluster,
            nodes,
            seen,
            {name: self._watched[name].silent_s for name in nodes},
            appointment,
            {name: refusal for name in nodes if (refusal := self._watched[name].refusal)},
            now - self._closed_since.get(cluster, now),
            master is not None and self._starts[cluster][1] != master.started_at,
            len(self._topology.clusters),
            [
                known.master
                for name, known in self.known.items()
                if name != cluster and known.master in self._watched and self._watched[known.master].seen is None
            ],
            None if promoted is None else max(0.0, time.time() - promoted.at / 1e6),
            self._mode,
            order,
            self._rejoining.tails(seen, appointment),
            self._rejoining.remakes,
            self._rejoining.remaking,
            time.monotonic() >= self._leave_out_after.get(cluster, 0.0),
            self._holes(seen, is_open=master is not None and not master.read_only),
            self._promoted_without(cluster) if self._rejoining.tails(seen, appointment) else "",
        )

    def _promoted_without(self, cluster: str) -> str:
        """Returns what the last promotion by order went on without, '' if nothing. The servers know it, as above."""
        last = self._last_step(cluster, (CHOSEN,))
        return last.told if last is not None and WITHOUT in last.told else ""

    def _holes(self, seen: Mapping[str, Observed], *, is_open: bool) -> dict[str, Hole]:
        """Returns what is known of holes: what those who count found, and without a master what a promotion did."""
        found, now = self.holes(), time.monotonic()
        self._holed_since = {
            name: since for name, since in self._holed_since.items() if name not in seen or name in found
        }
        holes = {}
        for name, hole in found.items():
            if (one := seen.get(name)) is None:
                continue
            started_at, since = self._holed_since.get(name, (None, now))
            if started_at != one.started_at:  # one that was just made anew is believed to lack what it lacked
                self._holed_since[name] = one.started_at, (since := now)
            again_at = self._made_anew_at.get(name, -HOLED_AGAIN_S) + HOLED_AGAIN_S
            is_due = now - since > STAYS_HOLED_S and now > again_at
            holes[name] = msgspec.structs.replace(hole, is_due=is_due)
        counted = {} if is_open else self._counted
        return holes | {
            name: hole
            for name, (started_at, hole) in counted.items()
            if name not in holes and name in seen and seen[name].started_at == started_at
        }

    def _step(self, cluster: str, given: TopologyOrder | None) -> None:
        view = self.view(cluster, given)
        self._say(view)
        try:
            order = self._go_on(view)
        except SchemalessError as error:
            self._waits(cluster, Wait("stuck", str(error)))
            return
        decision = decide(msgspec.structs.replace(view, order=order))
        waiting = None if order is None or order.step else order
        if isinstance(decision, Wait):
            if waiting is None:
                self._waits(cluster, decision)
            else:
                self._settle(waiting, OrderState.REFUSED, decision.why)
            return
        shown = decision, {name: (one.started_at, one.replication) for name, one in view.seen.items()}
        if waiting is None and time.monotonic() < self._again_at(cluster, shown):
            return
        try:
            self._carry_out(view, decision)
            if waiting is not None and isinstance(decision, SETTLED_BY[waiting.kind]):
                self._carried_out(waiting)
        except SchemalessError as error:
            failures = self._failures.get(cluster, 0) + 1
            self._failures[cluster], self._failed_at[cluster] = failures, (time.monotonic(), shown)
            if isinstance(decision, RemoveVoters):
                self._leave_out_after[cluster] = time.monotonic() + LEAVE_OUT_AGAIN_S
            self._waits(cluster, Wait("lost_history" if isinstance(error, LostHistory) else "stuck", str(error)))
            if waiting is not None and not isinstance(error, Fenced):  # the other controller carries it out
                self._settle(waiting, OrderState.REFUSED, str(error))
            return
        self._failures.pop(cluster, None)

    def _again_at(self, cluster: str, shown: object) -> float:
        """When something that failed is tried again. A try may take an epoch, so while servers show the same the pauses
        grow.
        """
        failures = self._failures.get(cluster, 0)
        if failures == 0:
            return 0.0
        failed_at, then = self._failed_at[cluster]
        return failed_at + (AGAIN_S if shown != then else min(AGAIN_MAX_S, AGAIN_S * 2 ** (failures - 1)))

    def _carried_out(self, order: TopologyOrder) -> None:
        if order.kind is OrderKind.REJOIN:
            told = f"{order.node} is being made anew: `schemaless topology history {order.cluster}` has the steps"
            epoch = self.known[order.cluster].ballot.epoch
            self._begin(msgspec.structs.replace(order, step=RejoinStep.BEGUN, epoch=epoch, told=told))
        else:
            self._settle(order, OrderState.DONE, f"{self.known[order.cluster].master} is the master of {order.cluster}")

    def _carry_out(self, view: ObservedCluster, decision: Decision) -> None:
        cluster = view.cluster
        how = (self._tell(cluster), self._published)
        change = ClusterChange(self._topology, cluster, self.name, self.known, view.seen, *how)
        match decision:
            case Follow():
                if change.follow(decision):
                    self._rejoining.found(decision.node, view.seen[decision.node], self.known[cluster].ballot)
            case Rejoin():
                change.detach(decision)
                self._made_anew_at[decision.node] = time.monotonic()
                self._rejoining.found(decision.node, view.seen[decision.node], self.known[cluster].ballot)
            case Keep() | Remake():
                self._rejoining.begin(decision, self.known.values(), self.known[cluster].master, self._tell(cluster))
            case _:
                try:
                    CHANGES[type(decision)](change, decision)
                finally:
                    lacking = {name: Hole(cell.removeprefix("lacks ")) for name, cell in change.holed.items()}
                    self._counted |= {name: (view.seen[name].started_at, hole) for name, hole in lacking.items()}
        for name in view.seen:  # what was seen before is over
            self._watched[name].look()

    def _say(self, view: ObservedCluster) -> None:
        """Writes what became of the last step on all servers that answer, for those who ask how a cluster is."""
        wait = self.states.get(view.cluster, Wait("unknown"))
        now = time.time_ns() // 1000
        state = ClusterState(view.cluster, wait.state, wait.why, node_states(view), self.name, now)
        said = self._said.get(view.cluster, state)
        if (
            said is state
            or said != msgspec.structs.replace(state, changed_at=said.changed_at)
            or (now - said.changed_at > SAID_AGAIN_S * 1e6)
        ):
            self._said[view.cluster] = state
            for watched in self._watched.values():
                watched.use(lambda server: server.note_state(state))

    def _waits(self, cluster: str, wait: Wait) -> None:
        if self.states.get(cluster) != wait:
            log.info("a cluster", cluster=cluster, state=wait.state, why=wait.why)
        self.states[cluster] = wait

    def _tell(self, cluster: str) -> Callable[[Ballot, str, str], None]:
        """Returns what notes the steps of a change on every server that answers."""

        def tell(ballot: Ballot, step: str, told: str) -> None:
            self._note(Step(cluster, ballot, step, told, time.time_ns() // 1000))

        return tell

    def _note(self, step: Step) -> None:
        log.info("a master changes", cluster=step.cluster, epoch=step.ballot.epoch, step=step.step, told=step.told)
        for watched in self._watched.values():
            watched.use(lambda server: server.note([step]))
