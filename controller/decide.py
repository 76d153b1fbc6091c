"""What a cluster needs, decided from what its servers show. Nothing here asks a server or a clock.

A cluster has one appointed master. Everything else follows from that: a server that is open and isn't appointed is
fenced, one that isn't open and is appointed is compared and opened, the others follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from controller.server import Observed
from schemaless.config import ControllerMode
from schemaless.storage.appointment_table import NodeState, OrderKind, OrderState, RejoinStep, TopologyOrder
from schemaless.topology import Appointment, Ballot, Node

DEAD_AFTER_S = 3.0
"""A master that says nothing for so long is dead, if no minion receives from it."""
WAIT_FOR_VOTERS_S = 10.0
"""How long the opening of a master waits for all its minions. Then one will do."""
SILENT_VOTER_S = 5.0
"""A voter that says nothing for so long is none any more, while its master is open. It would hold up a promotion."""
BLOCKED_S = 3600.0
"""After an automatic promotion the next one is a person's, for so long or until `schemaless topology acknowledge`."""


class Diverged(msgspec.Struct, frozen=True):
    """What is done about a server that has what the master never got, its tail. `kept`: the cells that are kept.
    `waiting`: those that weren't put again, None while not all are kept. `is_due`: the next thing may be begun.
    `failed`: why the command that makes it anew failed.
    """

    waiting: int | None
    is_due: bool = True
    kept: int = 0
    failed: str = ""


class Hole(msgspec.Struct, frozen=True):
    """A cell that a minion lacks and its master shows. `cause`: what will leave out more, such as a filter. `is_due`:
    it has lacked cells for a while since its start, so it may be made anew.
    """

    cell: str
    cause: str = ""
    is_due: bool = False

    def __str__(self) -> str:
        return f"lacks {self.cell}" + (f", and {self.cause}" if self.cause else "")


class ObservedCluster(msgspec.Struct, frozen=True):
    """A cluster at one moment. `silent_s`: how long each server has said nothing, 0 if it answered. `refusals`: what
    those say that run and refuse our account, so nobody knows what they have, and they aren't dead. `waited_s`: how
    long the appointed master has answered and wasn't open. `opened_itself`: it started again, and was open before it
    was compared. `others_away`: masters of other clusters that don't answer. `remakes`: a controller can make a server
    anew. `may_leave_out`: voters weren't tried to be left out just now, without success. `remaking`: the one that it
    makes anew now. `holes`: what minions lack of what their master shows. `without`: what the present master lacked
    when an order promoted it all the same.
    """

    cluster: str
    nodes: Mapping[str, Node]
    seen: Mapping[str, Observed]
    silent_s: Mapping[str, float]
    appointment: Appointment | None
    refusals: Mapping[str, str] = {}
    waited_s: float = 0.0
    opened_itself: bool = False
    clusters: int = 2
    others_away: Sequence[str] = ()
    promoted_s: float | None = None
    mode: ControllerMode = ControllerMode.AUTOMATIC
    order: TopologyOrder | None = None
    tails: Mapping[str, Diverged] = {}
    remakes: bool = False
    remaking: str = ""
    may_leave_out: bool = True
    holes: Mapping[str, Hole] = {}
    without: str = ""

    @property
    def ordered(self) -> OrderKind | None:
        return None if self.order is None else self.order.kind

    @property
    def rejoining(self) -> str:
        """The server that is to be made anew by order, and isn't yet. It doesn't follow before."""
        order = self.order
        is_meant = order is not None and order.kind is OrderKind.REJOIN and order.step is not RejoinStep.MADE_ANEW
        return order.node or "" if order is not None and is_meant else ""

    @property
    def promised(self) -> Ballot:
        """The highest ballot that a server of the cluster promised to obey."""
        return max((one.promise for one in self.seen.values() if one.promise), default=Ballot())

    def unheard(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.seen]


class Wait(msgspec.Struct, frozen=True):
    """Nothing is done, and why not. `state` is one word of the controller's log."""

    state: str
    why: str = ""


class Establish(msgspec.Struct, frozen=True):
    """The first master of a new cluster is appointed."""

    master: str


class Open(msgspec.Struct, frozen=True):
    """The appointed master is open again after its start. `hear`: minions that must show nothing that it lacks. By hand
    it may lack what was published.
    """

    master: str
    hear: Sequence[str]
    by_hand: bool = False


class Switch(msgspec.Struct, frozen=True):
    """A planned change of the master. Nothing is lost, so no generation begins."""

    old: str
    new: str


class Promote(msgspec.Struct, frozen=True):
    """Another master is opened. All of `hear` must promise. `wanted` is chosen if nobody has more than it. By hand
    masters of other clusters need not be told.
    """

    old: str
    hear: Sequence[str]
    wanted: str | None = None
    by_hand: bool = False


class RemoveVoters(msgspec.Struct, frozen=True):
    """Voters that are silent, lack cells, or will be made anew, are none until they follow again. `stay` don't."""

    leave: Sequence[str]
    stay: Sequence[str]


class Fence(msgspec.Struct, frozen=True):
    """A server that is open and shouldn't be is closed."""

    node: str
    why: str = "was open, and isn't the master"


class Follow(msgspec.Struct, frozen=True):
    """A server is told to follow the master."""

    node: str


class Keep(msgspec.Struct, frozen=True):
    """A server's tail is kept, and put again."""

    node: str


class Rejoin(msgspec.Struct, frozen=True):
    """A minion that doesn't follow, or lacks cells, is taken for one with a tail: what only it has is kept, and it is
    made anew.
    """

    node: str
    why: str = "by order"


class Remake(msgspec.Struct, frozen=True):
    """A server whose tail is kept and put again becomes a copy of another minion."""

    node: str
    donor: str


Decision = Wait | Establish | Open | Switch | Promote | RemoveVoters | Fence | Follow | Keep | Rejoin | Remake
HEALTHY = Wait("healthy")


def decide(view: ObservedCluster) -> Decision:
    """Decides on one act. An order is begun or refused: it doesn't wait for what may never come."""
    decided = _decide(view)
    if view.order is not None and not view.order.step and isinstance(decided, Wait):
        return Wait("refused", decided.why)
    return decided


def _decide(view: ObservedCluster) -> Decision:
    appointment = view.appointment
    if appointment is None:
        return _first(view)
    if appointment.master not in view.nodes:
        return Wait("stuck", f"the controller's file lacks {appointment.master}, which is the master: put it back")
    if (refused := _order_refused(view)) is not None:
        return refused
    if (fence := _open_unasked(view, appointment)) is not None:
        return fence
    if not appointment.is_open:
        return _finish(view, appointment)
    master = view.seen.get(appointment.master)
    if master is None:
        return _without_master(view, appointment)
    if view.promised > appointment.ballot:
        return _silent_voters(view, appointment) or _finish_with(view, appointment, master)
    if master.read_only:
        return _open_again(view, appointment)
    if view.order is not None and view.ordered is not OrderKind.REJOIN:
        return _switch(view, appointment, view.order)
    return _silent_voters(view, appointment) or _unfit_voters(view, appointment) or _followers(view, appointment)


def _first(view: ObservedCluster) -> Decision:
    """The first node of the file becomes the first master, once all servers answer."""
    first, *others = view.nodes
    if away := view.unheard(list(view.nodes)):
        return Wait("waiting", f"the first master is appointed once all servers answer: {', '.join(away)} doesn't")
    if view.seen[first].replication is not None:
        return Wait("waiting", f"{first} is the first server of {view.cluster} in the file, and follows another one")
    for name in others:
        one = view.seen[name]
        if one.replication is not None and not _is_from(view, name, first):
            return Wait("waiting", f"{name} follows another server than {first}")
        if one.replication is None and one.tables:
            return Wait("waiting", f"{name} has tables, and follows nobody: make it anew, or let it follow {first}")
    return Establish(first)


def _open_unasked(view: ObservedCluster, appointment: Appointment) -> Fence | None:
    for name, one in view.seen.items():
        if not one.read_only and name != appointment.master and one.tables:
            return Fence(name)
    if view.opened_itself and appointment.is_open:
        return Fence(appointment.master, "was open at its start, before it was compared: give it read_only=ON")
    return None


def _finish(view: ObservedCluster, appointment: Appointment) -> Decision:
    """Somebody began to change the master, and didn't finish: all who must be heard are heard again."""
    if blocking := _blocking(view, appointment):
        return Wait("closed", f"a change of the master was begun, and {_must_be_heard(view, blocking)}")
    promotion = _promotion(view, appointment)
    if not promotion.by_hand and (refusal := view.refusals.get(appointment.master)):
        return Wait("closed", f"a change of the master was begun, and {refusal}")
    if not promotion.by_hand and appointment.master not in view.seen and (holed := _all_holed(view, promotion.hear)):
        return Wait("closed", f"a change of the master was begun, and {holed}")
    if not promotion.hear and appointment.master not in view.seen:
        return Wait("closed", f"a change of the master was begun, and no server of {view.cluster} answers")
    return promotion


def _finish_with(view: ObservedCluster, appointment: Appointment, master: Observed) -> Decision:
    """A change was begun, and the master of before answers. It has all that was confirmed, so it stays."""
    if master.read_only:
        opened = _open_again(view, appointment)
        return Promote(appointment.master, opened.hear, appointment.master) if isinstance(opened, Open) else opened
    hear = [name for name in appointment.voters if name in view.seen]
    if appointment.voters and not hear:  # their promises keep two controllers apart
        return Wait("closed", f"a change was begun, and no minion of {view.cluster} answers")
    return Promote(appointment.master, hear, appointment.master)


def _without_master(view: ObservedCluster, appointment: Appointment) -> Decision:
    master = appointment.master
    if view.ordered is OrderKind.PROMOTE:
        return _promote(view, appointment, f"{master} doesn't answer")
    if refusal := view.refusals.get(master):
        return Wait("refused", f"{refusal}. It runs, so nobody takes its place")
    receiving = [name for name, one in view.seen.items() if one.replication is not None and one.replication.connected]
    if receiving:
        hears = " and ".join(receiving)
        return Wait("unreachable", f"{master} doesn't answer here, and still sends its log to {hears}")
    if view.silent_s.get(master, 0.0) < DEAD_AFTER_S:
        return Wait("silent", f"{master} doesn't answer")
    return _promote(view, appointment, f"{master} is dead")


def _promote(view: ObservedCluster, appointment: Appointment, why: str) -> Decision:
    """Another master is opened if all were heard who may have what the old one confirmed."""
    if blocking := _blocking(view, appointment):
        return Wait("dead", f"{why}, and {_must_be_heard(view, blocking)}")
    promotion = _promotion(view, appointment)
    if not promotion.hear:
        return Wait("dead", f"{why}, and no minion of {view.cluster} can be promoted")
    if not promotion.by_hand and (not_alone := _not_by_itself(view) or _all_holed(view, promotion.hear)):
        return Wait("dead", f"{why}: {not_alone}")
    return promotion


def _blocking(view: ObservedCluster, appointment: Appointment) -> list[str]:
    """Returns the voters that don't answer, and that nobody fenced."""
    without = view.order.without if view.order is not None else ()
    return [name for name in view.unheard(appointment.voters) if name not in without]


def _must_be_heard(view: ObservedCluster, names: Sequence[str]) -> str:
    if refusals := [view.refusals[name] for name in names if name in view.refusals]:
        return f"{' and '.join(refusals)}. It may have what was confirmed: let the controller's account in"
    fenced = " ".join(f"--without {name}" for name in names)
    gone = not view.nodes.keys() >= set(names)
    why = "isn't in the controller's file any more" if gone else "doesn't answer"
    return (
        f"{', '.join(names)} {why}, and may have what was confirmed: {'put it back' if gone else 'start it'},"
        " or fence it and"
        f" `schemaless topology promote {view.cluster} {fenced} --fenced`"
    )


def _promotion(view: ObservedCluster, appointment: Appointment) -> Promote:
    """The first is chosen of those that have equally much, so one that lacks cells comes last. One that a person fenced
    isn't heard, although it answers.
    """
    by_hand = view.ordered is OrderKind.PROMOTE
    without = view.order.without if view.order is not None and by_hand else ()
    heard = (name for name in appointment.voters if name in view.seen and name not in without)
    hear = sorted(heard, key=lambda name: bool(_holed(view, name)))
    return Promote(appointment.master, hear, view.order.node if view.order and by_hand else None, by_hand)


def _not_by_itself(view: ObservedCluster) -> str | None:
    """Returns why nothing is promoted without a person."""
    if view.mode is ControllerMode.MANUAL:
        return f"the controller's mode is manual, so `schemaless topology promote {view.cluster}` is yours"
    if view.clusters < 2:
        return "there is one cluster, so nothing shows that we aren't cut off ourselves: promote by hand"
    if view.others_away:
        return f"{', '.join(view.others_away)} doesn't answer either, so we may be cut off: promote by hand"
    if view.promoted_s is not None and view.promoted_s < BLOCKED_S:
        return (
            "a master was promoted within the last hour, and nobody looked since:"
            f" `schemaless topology acknowledge {view.cluster}`, or promote by hand"
        )
    return None


def _all_holed(view: ObservedCluster, hear: Sequence[str]) -> str | None:
    holes = [f"{name} {why}" for name in hear if (why := _holed(view, name))]
    back = f"start the master, or `schemaless topology promote {view.cluster}`, which goes on without these cells"
    return f"{'; '.join(holes)}: {back}" if holes and len(holes) == len(hear) else None


def _open_again(view: ObservedCluster, appointment: Appointment) -> Decision:
    """A master that started again is opened once its minions show nothing that it lacks."""
    if view.ordered is OrderKind.PROMOTE:
        return _promote(view, appointment, f"{appointment.master} isn't open")
    by_hand = view.ordered is OrderKind.OPEN
    voters = [name for name in appointment.voters if name in view.seen]
    if view.unheard(appointment.voters) and not by_hand:
        if view.waited_s < WAIT_FOR_VOTERS_S:
            return Wait("closed", f"{appointment.master} is compared with all its minions before it is opened")
        if not voters:
            return Wait(
                "closed", f"no minion of {view.cluster} answers, so nobody can tell what {appointment.master} lost"
            )
    return Open(appointment.master, voters, by_hand)


def _switch(view: ObservedCluster, appointment: Appointment, order: TopologyOrder) -> Decision:
    """The master is open. `_order_refused` saw that a minion is ready, and lets no promotion come here."""
    if order.kind is not OrderKind.SWITCH:
        return Wait("refused", f"{appointment.master} is open already")
    candidates = appointment.voters if order.node is None else (order.node,)
    return Switch(appointment.master, next(name for name in candidates if _is_ready(view, name)))


def _rejoin(view: ObservedCluster, appointment: Appointment) -> RemoveVoters | Rejoin | Wait | None:
    """Returns what a rejoin needs before the server has the way of one with a tail, None if nothing.

    Made anew, a server forgets its promises, so it is no voter then.
    """
    name, order = view.rejoining, view.order
    if order is None or not name or (order.step and name in view.tails):
        return None
    if name not in view.seen:
        return Wait("healthy", f"{name} is to be made anew, and doesn't answer")
    if name in appointment.voters:
        replication = view.seen[name].replication
        if order.step and replication is not None and replication.receiving and not replication.error:
            return None  # another controller lets it follow just now
        stay = [other for other in appointment.voters if other != name]
        if away := view.unheard(stay):
            return Wait("healthy", f"{' and '.join(away)} doesn't answer, and must stay a voter: start it first")
        return RemoveVoters([name], stay)
    return Rejoin(name)


def how_far(view: ObservedCluster, order: TopologyOrder) -> TopologyOrder:
    """Returns a rejoin that was begun as it is now.

    A server that is a copy of another one has lost its promise, or has an older one, which the other one had as a copy.
    """
    name, change = order.node or "", partial(msgspec.structs.replace, order)
    if view.appointment is None or name not in view.seen:
        return order
    master, one = view.appointment.master, view.seen[name]
    replication, votes = one.replication, name in view.appointment.voters
    if name == master:
        return change(state=OrderState.DONE, told=f"{name} is the master")
    if votes and _receives(view, name) and replication is not None and replication.connected:
        return change(state=OrderState.DONE, told=f"{name} follows {master} again")
    if order.step is RejoinStep.BEGUN:
        if one.tables and (one.promise or Ballot()).epoch < order.epoch:
            return change(step=RejoinStep.MADE_ANEW, told=f"{name} is made anew, and follows {master} next")
        failed = view.tails[name].failed if name in view.tails else ""
        return change(state=OrderState.FAILED, told=failed) if failed else order
    if votes and replication is not None and replication.error and _is_from(view, name, master):
        why = f"{name} is made anew, and its replication stopped again: {replication.error}"
        return change(state=OrderState.FAILED, told=why)
    return order


def _donors(view: ObservedCluster, appointment: Appointment, name: str) -> list[str]:
    """Returns the minions of which a server may be a copy. The master is never stopped for one."""
    ready = [other for other in appointment.voters if _is_ready(view, other)]
    return [other for other in ready if other not in view.tails and other != name]


def _silent_voters(view: ObservedCluster, appointment: Appointment) -> RemoveVoters | None:
    """Returns the voters that are silent for long, or aren't in the file any more. None without one, or while that
    can't be changed.

    One that receives has to stay. Without voters nothing could be promoted, and nobody could say what a master lost.
    Only a person takes the last one out of the file.
    """
    master = view.seen.get(appointment.master)
    if master is None or master.read_only or not appointment.is_open or view.others_away:
        return None
    silent = view.unheard(appointment.voters)
    stay = [name for name in appointment.voters if name in view.seen]
    if not silent or any(view.silent_s.get(name, SILENT_VOTER_S) < SILENT_VOTER_S for name in silent):
        return None
    is_ready = any(_is_ready(view, name) for name in stay) or not view.nodes.keys() & set(appointment.voters)
    return RemoveVoters(silent, stay) if is_ready and view.may_leave_out else None


def _unfit_voters(view: ObservedCluster, appointment: Appointment) -> RemoveVoters | None:
    """Returns the voters that lack cells or have a tail, where another one stays. Promoted, one would have lost what
    was confirmed, and made anew, what it promised.
    """
    leave = [name for name in appointment.voters if name in view.tails or _holed(view, name)]
    stay = [name for name in appointment.voters if name not in leave]
    if not leave or view.others_away or view.unheard(stay) or not any(_is_ready(view, name) for name in stay):
        return None
    return RemoveVoters(leave, stay) if view.may_leave_out else None


def _followers(view: ObservedCluster, appointment: Appointment) -> Decision:
    """The next server that doesn't follow or vote. One whose replication stopped with an error is a person's, and one
    that lacks cells gets no vote.
    """
    for name, one in view.seen.items():
        if name in (appointment.master, view.rejoining) or name in view.tails:
            continue
        if name in appointment.voters and _receives(view, name):
            continue
        if name not in appointment.voters and _holed(view, name):
            continue
        if one.replication is not None and one.replication.error and _is_from(view, name, appointment.master):
            continue
        return Follow(name)
    return _rejoin(view, appointment) or _tails(view, appointment)


def _tails(view: ObservedCluster, appointment: Appointment) -> Decision:
    """A server with a tail, or without some cells, holds nothing up: the cluster is healthy without it."""
    reasons = []
    for name in view.nodes:
        if name in view.tails or not (why := _holed(view, name)):
            continue
        is_due = name in view.holes and view.holes[name].is_due and not view.holes[name].cause
        is_next = is_due and name not in appointment.voters and view.remakes and not view.tails
        if is_next and _donors(view, appointment, name):
            return Rejoin(name, f"because it {why}")
        reasons.append(f"{name} {why}")
    for name, tail in view.tails.items():
        if tail.waiting != 0:
            if tail.is_due:
                return Keep(name)
            reasons.append(f"{name} has what {appointment.master} never got, and that is kept and put again")
            continue
        if view.without and (view.ordered is not OrderKind.REJOIN or view.order is None or view.order.node != name):
            again = f"put again what {name} has of that, then `schemaless topology rejoin {view.cluster} {name}`"
            reasons.append(f"what only {name} had is kept and put again. {view.without}: {again}")
            continue
        donors = _donors(view, appointment, name)
        if view.remakes and donors and tail.is_due and name not in appointment.voters:
            return Remake(name, donors[0])
        why = "no minion can be copied" if view.remakes and not donors else "its data folder is to be made anew"
        reasons.append(f"what only {name} had is kept and put again, and {why}")
    return Wait("healthy", "; ".join(reasons)) if reasons else HEALTHY


def node_states(view: ObservedCluster) -> tuple[NodeState, ...]:
    """Says what each server is for the controller, in the order of the file."""
    return tuple(_node_state(view, name) for name in view.nodes)


def _node_state(view: ObservedCluster, name: str) -> NodeState:
    one, appointment = view.seen.get(name), view.appointment
    if appointment is not None and name == appointment.master:
        return NodeState(name, "master", "" if one is not None else view.refusals.get(name) or "it doesn't answer")
    if name == view.remaking:
        return NodeState(name, "remaking")
    if one is None:
        return NodeState(name, "refused" if name in view.refusals else "silent", view.refusals.get(name, ""))
    if (tail := view.tails.get(name)) is not None:
        kept = "its tail isn't kept yet" if tail.waiting is None else f"tail kept {tail.kept}, waiting {tail.waiting}"
        return NodeState(name, "diverged", kept)
    why = ""
    if view.order is not None and view.order.step and name == view.order.node:
        why = view.order.told
    elif appointment is not None and not _receives(view, name):
        why = (one.replication.error if one.replication is not None else "") or f"doesn't receive {appointment.master}"
    else:
        why = _holed(view, name)
    return NodeState(name, "voter" if appointment is not None and name in appointment.voters else "following", why)


def _receives(view: ObservedCluster, name: str) -> bool:
    replication = view.seen[name].replication
    assert view.appointment is not None
    return (
        replication is not None
        and _is_from(view, name, view.appointment.master)
        and replication.receiving
        and replication.applying
    )


def _holed(view: ObservedCluster, name: str) -> str:
    """Returns what a minion lacks of its master's cells, or why it soon will, '' if nothing is known of that."""
    if view.appointment is None:
        return ""
    one, master = view.seen.get(name), view.seen.get(view.appointment.master)
    if one is None or one is master:
        return ""
    if master is not None and one.server_id == master.server_id:
        return f"has the server id of {view.appointment.master}, and takes what that wrote for its own"
    return str(view.holes.get(name, ""))


def _is_ready(view: ObservedCluster, name: str) -> bool:
    """True for a minion that may be the next master, or be copied."""
    return name in view.seen and _receives(view, name) and not _holed(view, name)


def _is_from(view: ObservedCluster, name: str, master: str) -> bool:
    replication, node = view.seen[name].replication, view.nodes.get(master)
    if replication is None or node is None:
        return False
    return (replication.host, replication.port) == (node.host, node.port)


def _order_refused(view: ObservedCluster) -> Wait | None:
    """Returns why an order can't be carried out, None without one or where it can."""
    order, appointment = view.order, view.appointment
    if order is None or order.step or appointment is None:
        return None
    if order.node is not None and order.node not in view.nodes:
        return Wait("refused", f"{view.cluster} has no server {order.node}: it has {', '.join(view.nodes)}")
    master = view.seen.get(appointment.master)
    if order.kind is OrderKind.PROMOTE:
        return _promotion_refused(view, appointment, order.node)
    if master is None:
        return Wait(
            "refused",
            f"{appointment.master} doesn't answer: start it, or `schemaless topology promote {view.cluster}`",
        )
    if order.kind is OrderKind.REJOIN and order.node is not None:
        why = _rejoin_refused(view, appointment, order.node)
        return None if why is None else Wait("refused", why)
    return _not_ready(view, appointment, order.node) if order.kind is OrderKind.SWITCH else None


def _rejoin_refused(view: ObservedCluster, appointment: Appointment, name: str) -> str | None:
    """Returns why a server isn't made anew, None where it is."""
    if name == appointment.master:
        return f"{name} is the master: `schemaless topology switch {view.cluster}` makes it a minion"
    if name not in view.seen:
        return f"{name} doesn't answer: start it, so that what only it has can be kept"
    if name in appointment.voters and _is_ready(view, name):
        return f"{name} follows {appointment.master} well, and needs no new copy"
    if not view.remakes:
        return f"no command makes servers anew here (SCHEMALESS_CONTROLLER_REMAKE_COMMAND): make {name} anew by hand"
    tail = view.tails.get(name)
    if tail is not None and tail.waiting != 0:
        left = "it isn't kept yet" if tail.waiting is None else f"{tail.waiting} of its cells wait"
        return (
            f"{name} has what {appointment.master} never got, and {left}: `schemaless topology history {view.cluster}`"
        )
    if tail is not None and not tail.is_due:
        return f"{name} is being made anew, or was a minute ago: `schemaless topology history {view.cluster}`"
    if not _donors(view, appointment, name):
        return (
            f"no other minion of {view.cluster} follows {appointment.master} and has all its cells, so none can be"
            f" copied: make {name} anew by hand"
        )
    return None


def _promotion_refused(view: ObservedCluster, appointment: Appointment, wanted: str | None) -> Wait | None:
    master = view.seen.get(appointment.master)
    if master is not None and not master.read_only:
        return Wait(
            "refused",
            f"{appointment.master} is open: `schemaless topology switch {view.cluster}` changes it without a gap",
        )
    if wanted == appointment.master:
        return Wait("refused", f"{wanted} is the master: `schemaless topology open {view.cluster}` opens it again")
    if wanted is not None and wanted not in appointment.voters:
        return Wait("refused", _no_voter(wanted, appointment))
    if wanted is not None and wanted not in view.seen:
        return Wait("refused", f"{wanted} doesn't answer: start it, or name another server")
    return None


def _no_voter(name: str, appointment: Appointment) -> str:
    voters = ", ".join(appointment.voters) or "none"
    return f"{name} is no voter, so it may lack what others confirmed: name one of the voters ({voters})"


def _not_ready(view: ObservedCluster, appointment: Appointment, wanted: str | None) -> Wait | None:
    if wanted == appointment.master:
        return Wait("refused", f"{wanted} is the master already")
    if wanted is not None and wanted not in appointment.voters:
        return Wait("refused", _no_voter(wanted, appointment))
    candidates = appointment.voters if wanted is None else (wanted,)
    if not candidates:
        return Wait("refused", f"{view.cluster} has no minion that could be the master: add one first")
    if not any(_is_ready(view, name) for name in candidates):
        holed = [f"{name} {why}" for name in candidates if (why := _holed(view, name))]
        late = f"{' and '.join(candidates)} doesn't follow {appointment.master} now: look at its replication"
        return Wait("refused", "; ".join(holed) or late)
    return None
