"""What the controller decides: a table of what servers show, and what is done then, and each order's end."""

import itertools

import msgspec
import pytest

from controller.decide import (
    Diverged,
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
from controller.server import Observed
from schemaless.config import ControllerMode
from schemaless.storage.admin_session import ReplicationStatus
from schemaless.storage.appointment_table import NodeState, OrderKind, OrderState, RejoinStep, TopologyOrder
from schemaless.topology import Appointment, Ballot, Node

NODES = {name: Node(name, "a", "127.0.0.1", port, "root", "") for port, name in enumerate(("a1", "a2", "a3"), 3301)}
BALLOT = Ballot(5, "x")
APPOINTMENT = Appointment("a", BALLOT, 0, "a1", True, ("a2", "a3"), 0, 0)
CLOSED = msgspec.structs.replace(APPOINTMENT, is_open=False)
ALL = ("a1", "a2", "a3")
IDS = itertools.count(1)


def follows(master, *, connected=True, receiving=True, applying=True, error=""):
    return ReplicationStatus("127.0.0.1", NODES[master].port, receiving, connected, applying, 0, "", error)


def server(master=None, *, read_only=None, tables=True, promise=None, **how):
    """One that follows a master, or is open."""
    read_only = master is not None if read_only is None else read_only
    return Observed(
        next(IDS), 0, True, read_only, tables, promise, [], None if master is None else follows(master, **how), "", ""
    )


HEALTHY = {"a1": server(), "a2": server("a1"), "a3": server("a1")}
RESTARTED = HEALTHY | {"a1": server(read_only=True)}
DEAD = {"a2": server("a1", connected=False), "a3": server("a1", connected=False)}
LONE = {"a2": server("a1", connected=False)}
NEW = {name: server(read_only=True, tables=False) for name in ALL}


def view(seen, appointment=APPOINTMENT, **others):
    silent = {name: 0.0 if name in seen else 9.0 for name in others.get("nodes", NODES)}
    shown = {"nodes": NODES, "seen": seen, "silent_s": silent, "appointment": appointment}
    return ObservedCluster("a", **(shown | others))


def automatic(seen, **others):
    return decide(view(seen, **others))


def ordered(kind, seen, appointment=APPOINTMENT, *, node=None, without=(), step="", **others):
    order = TopologyOrder("a", kind, node, without, "ops", OrderState.OPEN, "", "1", 0, RejoinStep(step))
    return decide(view(seen, appointment, order=order, **others))


OPENED_ITSELF = Fence("a1", "was open at its start, before it was compared: give it read_only=ON")


def without(seen, *names):
    return {name: one for name, one in seen.items() if name not in names}


DECISIONS = {
    "nothing is to do": (HEALTHY, {}, Wait("healthy")),
    "a first master is appointed": (NEW, {"appointment": None}, Establish("a1")),
    "minions that follow it already are no obstacle": (HEALTHY, {"appointment": None}, Establish("a1")),
    "a server that is open and isn't the master is fenced": (HEALTHY | {"a2": server()}, {}, Fence("a2")),
    "a master that opened itself is closed, and then compared": (HEALTHY, {"opened_itself": True}, OPENED_ITSELF),
    "nobody else is open before": (HEALTHY | {"a2": server()}, {"opened_itself": True}, Fence("a2")),
    "an empty one that is open follows": (HEALTHY | {"a2": server(tables=False)}, {}, Follow("a2")),
    "a change that was begun ends": (HEALTHY, {"appointment": CLOSED}, Promote("a1", ["a2", "a3"])),
    "so does one of which there is only a promise": (
        HEALTHY | {"a2": server("a1", promise=Ballot(6, "y"))}, {}, Promote("a1", ["a2", "a3"], "a1")
    ),
    "and then the master that answers stays, whoever doesn't": (
        without(HEALTHY, "a3") | {"a2": server("a1", promise=Ballot(6, "y"))}, {"others_away": ["b1"]},
        Promote("a1", ["a2"], "a1"),
    ),
    "also one that started again": (
        without(RESTARTED, "a3") | {"a2": server("a1", promise=Ballot(6, "y"))}, {"waited_s": 11.0},
        Promote("a1", ["a2"], "a1"),
    ),
    "a promise that isn't higher is no change": (HEALTHY | {"a2": server("a1", promise=BALLOT)}, {}, Wait("healthy")),
    "it ends also when the old master is away": (DEAD, {"appointment": CLOSED}, Promote("a1", ["a2", "a3"])),
    "a restarted master is compared and opened": (RESTARTED, {}, Open("a1", ["a2", "a3"])),
    "one minion will do after a while": (without(RESTARTED, "a3"), {"waited_s": 11.0}, Open("a1", ["a2"])),
    "a dead master is replaced": (DEAD, {}, Promote("a1", ["a2", "a3"])),
    "also long after another promotion": (DEAD, {"promoted_s": 4000.0}, Promote("a1", ["a2", "a3"])),
    "a server that follows another one follows": (HEALTHY | {"a2": server("a3")}, {}, Follow("a2")),
    "a server that stopped follows again": (HEALTHY | {"a3": server("a1", receiving=False)}, {}, Follow("a3")),
    "an error of replication is a person's": (
        HEALTHY | {"a3": server("a1", applying=False, error="row missing")}, {}, Wait("healthy")
    ),
}  # fmt: skip


REFUSES = "a1 refuses the account 'admin': Access denied"
LOCKED_OUT = {"refusals": {"a1": REFUSES}}
VOTER = {"refusals": {"a3": "a3 refuses the account 'admin': Access denied"}}
ACCOUNTS = {
    "a master that lives keeps its place": (DEAD, LOCKED_OUT, Wait("refused", f"{REFUSES}. It runs, so nobody takes"
        " its place")),
    "also one that minions hear": (without(HEALTHY, "a1"), LOCKED_OUT, Wait("refused", f"{REFUSES}. It runs, so nobody"
        " takes its place")),
    "also where a change was begun": (
        DEAD, {"appointment": CLOSED, **LOCKED_OUT}, Wait("closed", f"a change of the master was begun, and {REFUSES}")
    ),
    "a voter is left out like a silent one, and receives": (
        without(HEALTHY, "a3"), VOTER, RemoveVoters(["a3"], ["a2"])
    ),
    "or is heard before another master is opened": (
        LONE, VOTER, Wait("dead", "a1 is dead, and a3 refuses the account 'admin': Access denied. It may have what was"
        " confirmed: let the controller's account in")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_refused_account_is_no_silence(name):
    """Whoever refuses it runs, and a master takes writes of others. A voter would hold up a promotion."""
    seen, others, decided = ACCOUNTS[name]
    assert automatic(seen, **others) == decided


def test_a_person_may_promote_in_place_of_a_master_that_refuses():
    assert ordered(OrderKind.PROMOTE, DEAD, **LOCKED_OUT) == Promote("a1", ["a2", "a3"], None, True)


def test_what_a_server_refuses_is_shown_beside_it():
    told = {
        state.name: (state.state, state.why) for state in node_states(view(LONE, refusals={"a1": "no", "a3": "no"}))
    }
    assert (told["a1"], told["a3"]) == (("master", "no"), ("refused", "no"))


FEWER = {name: node for name, node in NODES.items() if name != "a3"}
"""What the file has once somebody took a3 out of it."""
ALONE = {"a1": NODES["a1"]}
TOLD = Diverged(0, kept=1)
GONE = {
    "it is no voter any more": (without(HEALTHY, "a3"), {"nodes": FEWER}, RemoveVoters(["a3"], ["a2"])),
    "not while the other one is silent, and may come back": (
        without(HEALTHY, "a2", "a3"), {"nodes": FEWER, "silent_s": {"a2": 1.0}}, Wait("healthy")
    ),
    "nor while the one that stays doesn't receive": (
        without(HEALTHY, "a3") | {"a2": server("a1", receiving=False)}, {"nodes": FEWER}, Follow("a2")
    ),
    "nor while another master is away": (
        without(HEALTHY, "a3"), {"nodes": FEWER, "others_away": ["b1"]}, Wait("healthy")
    ),
    "one with a tail leaves, before it is made anew": (
        HEALTHY, {"tails": {"a3": TOLD}, "remakes": True}, RemoveVoters(["a3"], ["a2"])
    ),
    "and stays as it is while it can't": (
        HEALTHY, {"tails": {"a3": TOLD}, "remakes": True, "may_leave_out": False}, Wait("healthy", "what only a3 had is"
        " kept and put again, and its data folder is to be made anew")
    ),
    "the last ones go, too": (without(HEALTHY, "a2", "a3"), {"nodes": ALONE}, RemoveVoters(["a2", "a3"], [])),
    "it is heard before another master is opened": (
        without(DEAD, "a3"), {"nodes": FEWER}, Wait("dead", "a1 is dead, and a3 isn't in the controller's file any"
        " more, and may have what was confirmed: put it back, or fence it and `schemaless topology promote a"
        " --without a3 --fenced`")
    ),
    "a master stays where it is, whatever a file of another machine says": (
        without(HEALTHY, "a1"), {"nodes": {name: NODES[name] for name in ("a2", "a3")}},
        Wait("stuck", "the controller's file lacks a1, which is the master: put it back")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GONE)
def test_what_is_done_about_a_voter_that_goes(name):
    seen, others, decided = GONE[name]
    assert automatic(seen, **others) == decided
    assert node_states(view(seen, **others))


@pytest.mark.parametrize("name", DECISIONS)
def test_what_is_done_without_an_order(name):
    seen, others, decided = DECISIONS[name]
    assert automatic(seen, **others) == decided


WAITS = {
    "all servers of a new cluster": (without(NEW, "a3"), {"appointment": None}, "waiting", "a3 doesn't"),
    "a first server that follows": (
        NEW | {"a1": server("a2")}, {"appointment": None}, "waiting", "follows another one"
    ),
    "a minion of another server": (
        HEALTHY | {"a3": server("a2")}, {"appointment": None}, "waiting", "a3 follows another server than a1"
    ),
    "a server with tables that follows nobody": (
        HEALTHY | {"a3": server()}, {"appointment": None}, "waiting", "make it anew"
    ),
    "a voter of a change that was begun": (
        without(HEALTHY, "a3"), {"appointment": CLOSED}, "closed", "promote a --without a3 --fenced"
    ),
    "any server": (
        {}, {"appointment": msgspec.structs.replace(CLOSED, voters=())}, "closed", "no server of a answers"
    ),
    "all minions, also after a promise": (
        without(RESTARTED, "a3") | {"a2": server("a1", promise=Ballot(6, "y"))}, {}, "closed", "all its minions"
    ),
    "a master that missed one look, after a promise": (
        DEAD | {"a2": server("a1", connected=False, promise=Ballot(6, "y"))},
        {"silent_s": {"a1": 0.9}, "mode": ControllerMode.MANUAL}, "silent", "doesn't answer",
    ),
    "a minion that keeps two controllers apart": (
        {"a1": server(promise=Ballot(6, "y"))}, {"may_leave_out": False}, "closed", "no minion of a answers"
    ),
    "all minions, to compare": (without(RESTARTED, "a3"), {}, "closed", "compared with all its minions"),
    "one minion, to compare": ({"a1": RESTARTED["a1"]}, {"waited_s": 11.0}, "closed", "what a1 lost"),
    "a master that minions hear": (without(HEALTHY, "a1"), {}, "unreachable", "still sends its log to a2"),
    "a master that is silent for a moment": (DEAD, {"silent_s": {"a1": 1.0}}, "silent", "doesn't answer"),
    "an unheard voter": (LONE, {}, "dead", "promote a --without a3 --fenced"),
    "a minion that may be promoted": (
        {}, {"appointment": msgspec.structs.replace(APPOINTMENT, voters=())}, "dead", "no minion of a can be promoted"
    ),
    "a person, by the mode": (DEAD, {"mode": ControllerMode.MANUAL}, "dead", "mode is manual"),
    "a person, with one cluster": (DEAD, {"clusters": 1}, "dead", "one cluster"),
    "a person, when others are away": (DEAD, {"others_away": ["b1"]}, "dead", "b1 doesn't answer either"),
    "a person, soon after a promotion": (DEAD, {"promoted_s": 60.0}, "dead", "schemaless topology acknowledge a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_what_is_waited_for(name):
    seen, others, state, why = WAITS[name]
    decided = automatic(seen, **others)
    assert isinstance(decided, Wait)
    assert decided.state == state
    assert why in decided.why


SWITCH, PROMOTE, OPEN = OrderKind.SWITCH, OrderKind.PROMOTE, OrderKind.OPEN
ORDERS = {
    "switch": (SWITCH, HEALTHY, {}, Switch("a1", "a2")),
    "switch to a server": (SWITCH, HEALTHY, {"node": "a3"}, Switch("a1", "a3")),
    "switch to one that follows": (
        SWITCH, HEALTHY | {"a2": server("a1", applying=False)}, {}, Switch("a1", "a3")
    ),
    "switch, once a master that started again is open": (SWITCH, RESTARTED, {}, Open("a1", ["a2", "a3"])),
    "switch, once a change that was begun has ended": (
        SWITCH, HEALTHY, {"appointment": CLOSED}, Promote("a1", ["a2", "a3"])
    ),
    "promote": (PROMOTE, DEAD, {}, Promote("a1", ["a2", "a3"], None, True)),
    "promote a server": (PROMOTE, DEAD, {"node": "a3"}, Promote("a1", ["a2", "a3"], "a3", True)),
    "promote at once, where minions hear the master, too": (
        PROMOTE, without(HEALTHY, "a1"), {"silent_s": {"a1": 0.1}}, Promote("a1", ["a2", "a3"], None, True)
    ),
    "promote without one that was fenced": (
        PROMOTE, LONE, {"without": ("a3",)}, Promote("a1", ["a2"], None, True)
    ),
    "promote in place of one that can't be opened": (
        PROMOTE, RESTARTED, {"node": "a2"}, Promote("a1", ["a2", "a3"], "a2", True)
    ),
    "promote whatever the mode is": (
        PROMOTE, DEAD, {"mode": ControllerMode.MANUAL, "promoted_s": 1.0}, Promote("a1", ["a2", "a3"], None, True)
    ),
    "promote where a change was begun": (
        PROMOTE, LONE, {"appointment": CLOSED, "without": ("a3",)}, Promote("a1", ["a2"], None, True)
    ),
    "open without a minion that doesn't answer": (OPEN, without(RESTARTED, "a3"), {}, Open("a1", ["a2"], True)),
    "open where a change was begun": (OPEN, HEALTHY, {"appointment": CLOSED}, Promote("a1", ["a2", "a3"])),
    "a fence comes first": (SWITCH, HEALTHY | {"a3": server()}, {"node": "a2"}, Fence("a3")),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_how_an_order_is_carried_out(name):
    kind, seen, others, decided = ORDERS[name]
    assert ordered(kind, seen, **others) == decided


NOBODY = msgspec.structs.replace(APPOINTMENT, voters=())
REFUSED = {
    "before there is a master": (SWITCH, without(NEW, "a3"), {"appointment": None}, "once all servers answer"),
    "an unknown server": (SWITCH, HEALTHY, {"node": "z9"}, "a has no server z9: it has a1, a2, a3"),
    "a switch to the master": (SWITCH, HEALTHY, {"node": "a1"}, "a1 is the master already"),
    "a switch to no voter": (
        SWITCH, HEALTHY, {"node": "a3", "appointment": msgspec.structs.replace(APPOINTMENT, voters=("a2",))},
        "a3 is no voter, so it may lack what others confirmed: name one of the voters (a2)",
    ),
    "a switch without a minion": (SWITCH, HEALTHY, {"appointment": NOBODY}, "a has no minion"),
    "a switch to one that doesn't follow": (
        SWITCH, HEALTHY | {"a2": server("a1", receiving=False)}, {"node": "a2"}, "a2 doesn't follow a1 now"
    ),
    "a switch from a dead master": (SWITCH, DEAD, {}, "start it, or `schemaless topology promote a`"),
    "a switch from one that can't be opened": (SWITCH, without(RESTARTED, "a3"), {}, "before it is opened"),
    "a switch where a change can't end": (
        SWITCH, without(HEALTHY, "a3"), {"appointment": CLOSED}, "promote a --without a3 --fenced"
    ),
    "a promotion beside an open master": (PROMOTE, HEALTHY, {}, "a1 is open: `schemaless topology switch a`"),
    "a promotion of the master": (PROMOTE, DEAD, {"node": "a1"}, "`schemaless topology open a` opens it again"),
    "a promotion of no voter": (PROMOTE, DEAD, {"node": "a3", "appointment": NOBODY}, "a3 is no voter"),
    "a promotion of a silent server": (PROMOTE, LONE, {"node": "a3", "without": ("a3",)}, "a3 doesn't answer"),
    "a promotion with an unheard voter": (PROMOTE, LONE, {}, "a3 doesn't answer, and may have what was confirmed"),
    "one in place of a closed master, too": (
        PROMOTE, without(RESTARTED, "a3"), {}, "a1 isn't open, and a3 doesn't answer"
    ),
    "a promotion without a minion": (PROMOTE, {}, {"without": ("a2", "a3")}, "no minion of a can be promoted"),
    "an opening of an open master": (OPEN, HEALTHY, {}, "a1 is open already"),
    "an opening of a dead one": (OPEN, DEAD, {}, "a1 doesn't answer: start it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_why_an_order_is_refused(name):
    """Each sentence says what to do, or that it is done."""
    kind, seen, others, why = REFUSED[name]
    decided = ordered(kind, seen, **others)
    assert isinstance(decided, Wait)
    assert decided.state == "refused"
    assert why in decided.why


SHORT = {"silent_s": {"a2": 4.9, "a3": 9.0}}
PROMISED = HEALTHY | {"a2": server("a1", promise=Ballot(6, "y"))}
OUT = RemoveVoters(["a3"], ["a2"])
SILENT = {
    "it is none any more": (without(HEALTHY, "a3"), {}, OUT),
    "by any mode": (without(HEALTHY, "a3"), {"mode": ControllerMode.MANUAL}, OUT),
    "not at once": (without(HEALTHY, "a3"), {"silent_s": {"a3": 4.9}}, Wait("healthy")),
    "but not the last ones: nothing could be promoted": (without(HEALTHY, "a2", "a3"), {}, Wait("healthy")),
    "nor again soon after that failed": (without(HEALTHY, "a3"), {"may_leave_out": False}, Wait("healthy")),
    "all together, or none": (without(HEALTHY, "a2", "a3"), SHORT, Wait("healthy")),
    "and not where another master can't be told": (without(HEALTHY, "a3"), {"others_away": ["b1"]}, Wait("healthy")),
    "nor while the master is closed": (without(RESTARTED, "a3"), {"waited_s": 11.0}, Open("a1", ["a2"])),
    "a controller that died at that is followed by one that does it": (without(PROMISED, "a3"), {}, OUT),
    "once another one receives": (
        without(HEALTHY, "a3") | {"a2": server("a1", receiving=False)}, {}, Follow("a2")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_is_done_about_a_silent_voter(name):
    seen, others, decided = SILENT[name]
    assert automatic(seen, **others) == decided


def test_an_order_comes_before_a_silent_voter():
    assert ordered(SWITCH, without(HEALTHY, "a3")) == Switch("a1", "a2")


LEFT = msgspec.structs.replace(APPOINTMENT, voters=("a2",))


def test_a_server_that_receives_and_is_no_voter_becomes_one():
    """It was left out while the controller alone didn't hear it."""
    assert automatic(HEALTHY, appointment=LEFT) == Follow("a3")


NINE, SEVEN = Hole("added_id 9 of t_0001"), Hole("added_id 7 of t_0001")
HOLE = {"holes": {"a3": SEVEN}}
DUE = msgspec.structs.replace(SEVEN, is_due=True)
LASTING = {"holes": {"a3": DUE}, "remakes": True}
FILTERED = {"holes": {"a3": msgspec.structs.replace(DUE, cause="a filter is there")}, "remakes": True}
BOTH = {"holes": {"a2": NINE, "a3": SEVEN}}
TWIN = msgspec.structs.replace(server("a1"), server_id=HEALTHY["a1"].server_id)
HOLED = {
    "it votes no more": (HEALTHY, HOLE, OUT),
    "nor does one that has its master's server id": (HEALTHY | {"a3": TWIN}, {}, OUT),
    "the last one does": (HEALTHY, BOTH, Wait("healthy", "a2 lacks added_id 9 of t_0001; a3 lacks added_id 7 of"
        " t_0001")),
    "and does while no other follows": (HEALTHY | {"a2": server("a1", receiving=False)}, HOLE, Follow("a2")),
    "and while another is silent": (without(HEALTHY, "a2"), HOLE | {"silent_s": {"a2": 1.0}},
        Wait("healthy", "a3 lacks added_id 7 of t_0001")),
    "and stays one while another is silent for long: that one has all": (without(HEALTHY, "a2"), HOLE,
        Wait("healthy", "a3 lacks added_id 7 of t_0001")),
    "it gets no vote": (HEALTHY, HOLE | {"appointment": LEFT}, Wait("healthy", "a3 lacks added_id 7 of t_0001")),
    "it is made anew": (HEALTHY, LASTING | {"appointment": LEFT}, Rejoin("a3", "because it lacks added_id 7 of"
        " t_0001")),
    "not while more is left out": (HEALTHY, FILTERED | {"appointment": LEFT},
        Wait("healthy", "a3 lacks added_id 7 of t_0001, and a filter is there")),
    "by a person where no command does": (HEALTHY, LASTING | {"appointment": LEFT, "remakes": False},
        Wait("healthy", "a3 lacks added_id 7 of t_0001")),
    "from one that has all": (HEALTHY, {"appointment": LEFT, "remakes": True, "holes": {"a2": NINE, "a3": DUE}},
        Wait("healthy", "a2 lacks added_id 9 of t_0001; a3 lacks added_id 7 of t_0001")),
    "it is the last to be promoted": (DEAD, {"holes": {"a2": NINE}},
        Promote("a1", ["a3", "a2"])),
    "nor is a change ended that was begun": (DEAD, BOTH | {"appointment": CLOSED}, Wait("closed", "a change of the"
        " master was begun, and a2 lacks added_id 9 of t_0001; a3 lacks added_id 7 of t_0001: start the master, or"
        " `schemaless topology promote a`, which goes on without these cells")),
    "but by the old master, which answers": (RESTARTED, BOTH | {"appointment": CLOSED}, Promote("a1", ["a2", "a3"])),
    "and never alone without a person": (DEAD, BOTH, Wait("dead", "a1 is dead: a2 lacks added_id 9 of t_0001; a3"
        " lacks added_id 7 of t_0001: start the master, or `schemaless topology promote a`, which goes on without"
        " these cells")),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLED)
def test_what_is_done_about_a_minion_that_lacks_cells(name):
    seen, others, decided = HOLED[name]
    assert automatic(seen, **others) == decided


def test_a_person_may_promote_one_that_lacks_cells():
    assert ordered(PROMOTE, DEAD, **BOTH) == Promote("a1", ["a2", "a3"], by_hand=True)


def test_one_that_a_person_fenced_is_not_heard_although_it_answers():
    """It may replicate well, and be unable to write its promise."""
    assert ordered(PROMOTE, DEAD, without=("a3",)) == Promote("a1", ["a2"], by_hand=True)


def test_no_switch_goes_to_one_that_lacks_cells():
    assert ordered(SWITCH, HEALTHY, holes={"a2": NINE}) == Switch("a1", "a3")
    refused = ordered(SWITCH, HEALTHY, node="a3", **HOLE)
    assert refused == Wait("refused", "a3 lacks added_id 7 of t_0001")


def test_one_that_lacks_cells_is_no_copy_of_another_one_that_does():
    refused = ordered(OrderKind.REJOIN, HEALTHY, node="a3", remakes=True, **BOTH)
    why = "no other minion of a follows a1 and has all its cells, so none can be copied: make a3 anew by hand"
    assert refused == Wait("refused", why)


def test_one_that_lacks_cells_rejoins_by_order_and_says_what_it_lacks():
    assert ordered(OrderKind.REJOIN, HEALTHY, LEFT, node="a3", remakes=True, **HOLE) == Rejoin("a3")
    assert node_states(view(HEALTHY, LEFT, **HOLE))[2] == NodeState("a3", "following", "lacks added_id 7 of t_0001")


BACK = {"a1": server(), "a2": server("a1"), "a3": server(read_only=True)}
UNKEPT, UNPUT, PUT = Diverged(None), Diverged(3), Diverged(0)
KEPT = "what only a3 had is kept and put again"
LATER = Wait("healthy", "a3 has what a1 never got, and that is kept and put again")
BY_HAND = Wait("healthy", f"{KEPT}, and its data folder is to be made anew")
TAILS = {
    "a tail is kept": (BACK, UNKEPT, {}, Keep("a3")),
    "and put again": (BACK, UNPUT, {}, Keep("a3")),
    "and after a pause again": (BACK, Diverged(3, is_due=False), {}, LATER),
    "then the server is made anew": (BACK, PUT, {}, Remake("a3", "a2")),
    "or waits for a person": (BACK, PUT, {"remakes": False}, BY_HAND),
    "or for one who puts again what the master was promoted without": (BACK, PUT, {"without": "a1 is chosen by order,"
        " and lacks added_id 9 of t_0001"}, Wait("healthy", f"{KEPT}. a1 is chosen by order, and lacks added_id 9 of"
        " t_0001: put again what a3 has of that, then `schemaless topology rejoin a a3`")),
    "or for its turn": (BACK, Diverged(0, is_due=False), {}, BY_HAND),
    "or for a minion, because the master is never copied": (
        without(BACK, "a2"), PUT, {"silent_s": {"a2": 1.0}}, Wait("healthy", f"{KEPT}, and no minion can be copied")
    ),
    "another server follows first": (BACK | {"a2": server("a1", receiving=False)}, PUT, {}, Follow("a2")),
    "another master comes first": (
        without(BACK, "a1") | {"a2": server("a1", connected=False)}, PUT, {}, Promote("a1", ["a2"])
    ),
    "a server with a tail that is open is fenced": (BACK | {"a3": server()}, PUT, {}, Fence("a3")),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_what_is_done_about_a_tail(name):
    """It is made anew only when it is kept and put again, and holds nothing else up."""
    seen, tail, others, decided = TAILS[name]
    assert automatic(seen, **({"appointment": LEFT, "tails": {"a3": tail}, "remakes": True} | others)) == decided


REJOIN = OrderKind.REJOIN
STOPPED = HEALTHY | {"a3": server("a1", applying=False, error="row missing")}
COPIED = HEALTHY | {"a3": server("a1", receiving=False)}
PROMISED = {"a3": server(read_only=True, promise=BALLOT)}
BEGUN, MADE_ANEW = RejoinStep.BEGUN, RejoinStep.MADE_ANEW
REJOINED = {
    "a voter is none first, because it forgets its promises": (
        STOPPED, APPOINTMENT, "", {}, RemoveVoters(["a3"], ["a2"])
    ),
    "then it is taken for one with a tail": (STOPPED, LEFT, "", {}, Rejoin("a3")),
    "also one whose tail was put again before the order": (BACK, LEFT, "", {"tails": {"a3": PUT}}, Rejoin("a3")),
    "a controller that didn't begin it takes it so, too": (HEALTHY | PROMISED, LEFT, BEGUN, {}, Rejoin("a3")),
    "its tail is kept": (HEALTHY | PROMISED, LEFT, BEGUN, {"tails": {"a3": UNKEPT}}, Keep("a3")),
    "one whose tail is put again is made anew": (BACK, LEFT, BEGUN, {"tails": {"a3": PUT}}, Remake("a3", "a2")),
    "a copy follows": (COPIED, LEFT, MADE_ANEW, {}, Follow("a3")),
    "one that another controller let follow before it was a copy is left out again": (
        STOPPED, APPOINTMENT, BEGUN, {}, RemoveVoters(["a3"], ["a2"])
    ),
    "one that just begins to follow is left alone": (
        HEALTHY | {"a3": server("a1", connected=False)}, APPOINTMENT, BEGUN, {}, Wait("healthy")
    ),
    "another minion follows first": (
        STOPPED | {"a2": server("a1", receiving=False)}, LEFT, BEGUN, {}, Follow("a2")
    ),
    "a master that dies meanwhile is replaced": (DEAD, LEFT, BEGUN, {}, Promote("a1", ["a2"])),
    "and one that starts again is opened": (RESTARTED, LEFT, BEGUN, {}, Open("a1", ["a2"])),
    "one that is away meanwhile is waited for": (
        without(STOPPED, "a3"), LEFT, BEGUN, {}, Wait("healthy", "a3 is to be made anew, and doesn't answer")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJOINED)
def test_how_a_server_rejoins_by_order(name):
    """What a cluster needs comes first, and an order that was begun is no more refused."""
    seen, appointment, step, others, decided = REJOINED[name]
    assert ordered(REJOIN, seen, appointment, node="a3", step=step, remakes=True, **others) == decided


OLDER = {"a3": server("a1", promise=Ballot(4, "x"))}
FAILED = {"tails": {"a3": Diverged(0, failed="no room")}}
HOW_FAR = {
    "it isn't copied yet": (HEALTHY | PROMISED, BEGUN, {}, (OrderState.OPEN, BEGUN)),
    "it follows, and what was read is late": (HEALTHY, BEGUN, {}, (OrderState.DONE, BEGUN)),
    "it is the master": (HEALTHY, MADE_ANEW, {"node": "a1"}, (OrderState.DONE, MADE_ANEW)),
    "a copy promised nothing": (COPIED, BEGUN, {"appointment": LEFT}, (OrderState.OPEN, MADE_ANEW)),
    "or less, where the other one was once a copy of it": (
        HEALTHY | OLDER, BEGUN, {"appointment": LEFT}, (OrderState.OPEN, MADE_ANEW)
    ),
    "the command failed": (HEALTHY | PROMISED, BEGUN, FAILED, (OrderState.FAILED, BEGUN)),
    "it votes and doesn't receive yet": (
        HEALTHY | {"a3": server("a1", connected=False)}, MADE_ANEW, {}, (OrderState.OPEN, MADE_ANEW)
    ),
    "it receives and doesn't vote": (HEALTHY, MADE_ANEW, {"appointment": LEFT}, (OrderState.OPEN, MADE_ANEW)),
    "it votes and receives": (HEALTHY, MADE_ANEW, {}, (OrderState.DONE, MADE_ANEW)),
    "its replication stopped again": (STOPPED, MADE_ANEW, {}, (OrderState.FAILED, MADE_ANEW)),
    "it is away": (without(HEALTHY, "a3"), MADE_ANEW, {}, (OrderState.OPEN, MADE_ANEW)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOW_FAR)
def test_how_far_a_rejoin_is(name):
    """The servers show it, and the order's own row, so no controller has to remember it."""
    seen, step, others, (state, now) = HOW_FAR[name]
    node, others = others.get("node", "a3"), {key: value for key, value in others.items() if key != "node"}
    order = TopologyOrder("a", REJOIN, node, (), "ops", OrderState.OPEN, "", "1", 0, step, BALLOT.epoch)
    found = how_far(view(seen, **others), order)
    assert (found.state, found.step) == (state, now)
    assert bool(found.told) == (found != order)


NOT_REJOINED = {
    "the master": ("a1", STOPPED, {}, "a1 is the master: `schemaless topology switch a`"),
    "one that follows well": ("a2", STOPPED, {}, "a2 follows a1 well"),
    "one that isn't reached": ("a3", without(STOPPED, "a3"), {}, "a3 doesn't answer: start it"),
    "one whose tail isn't kept": ("a3", BACK, {"tails": {"a3": UNKEPT}}, "a1 never got, and it isn't kept yet"),
    "one whose cells wait": ("a3", BACK, {"tails": {"a3": UNPUT}}, "3 of its cells wait"),
    "one that is just made anew": ("a3", BACK, {"tails": {"a3": Diverged(0, is_due=False)}}, "a minute ago"),
    "without a command": ("a3", STOPPED, {"remakes": False}, "make a3 anew by hand"),
    "without a minion to copy": ("a3", without(STOPPED, "a2"), {}, "none can be copied"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_REJOINED)
def test_what_does_not_rejoin_by_order(name):
    node, seen, others, why = NOT_REJOINED[name]
    decided = ordered(
        REJOIN, seen, LEFT if "tails" in others else APPOINTMENT, node=node, **({"remakes": True} | others)
    )
    assert isinstance(decided, Wait)
    assert why in decided.why


MADE = TopologyOrder("a", REJOIN, "a3", (), "ops", OrderState.OPEN, "it follows next", "1", 0, MADE_ANEW)
STATES = {
    "a minion that votes": (HEALTHY, {}, ("voter", "")),
    "one that doesn't answer": (without(HEALTHY, "a3"), {}, ("silent", "")),
    "one that follows and doesn't vote yet": (HEALTHY, {"appointment": LEFT}, ("following", "")),
    "one that doesn't receive": (BACK, {"appointment": LEFT}, ("following", "doesn't receive a1")),
    "one whose replication failed": (STOPPED, {}, ("voter", "row missing")),
    "one with a tail": (BACK, {"tails": {"a3": Diverged(3, kept=5)}}, ("diverged", "tail kept 5, waiting 3")),
    "one whose tail isn't kept": (BACK, {"tails": {"a3": UNKEPT}}, ("diverged", "its tail isn't kept yet")),
    "one that rejoins": (COPIED, {"appointment": LEFT, "order": MADE}, ("following", "it follows next")),
    "one that is down, because it is made anew": (without(BACK, "a3"), {"remaking": "a3"}, ("remaking", "")),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_server_is_called(name):
    """The master is always called so. Whether it answers is said beside it."""
    seen, others, (state, why) = STATES[name]
    found = node_states(view(seen, **others))
    assert [one.name for one in found] == list(ALL)
    assert (found[0].state, found[2].state, found[2].why) == ("master", state, why)
    assert node_states(view(DEAD))[0] == NodeState("a1", "master", "it doesn't answer")


def test_a_switch_comes_before_a_tail():
    assert ordered(SWITCH, BACK, LEFT, tails={"a3": UNKEPT}) == Switch("a1", "a2")
