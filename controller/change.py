"""How the master of a cluster changes: the steps, in the order that loses nothing.

Each step may be repeated, and a controller that dies leaves a state from which the next one goes on: `decide` sees that
the appointment isn't open, or that somebody promised a higher ballot, and begins again with a higher one.

| step | what is so afterwards |
|---|---|
| PROMISED | all who must be heard obey this ballot and no lower one |
| FENCED | the old master takes no write (a planned change, or it answers) |
| CLOSED | who can be told knows that the master changes: puts are buffered (an unplanned one) |
| CHOSEN | the candidate has all that any of them has |
| APPLIED | it has applied all that it received |
| APPOINTED | all other masters and all who were heard know the new master |
| OPENED | its heads have the new epoch, and a generation where history may have ended; it takes writes |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

import structlog

from controller.decide import Establish, Fence, Follow, Open, Promote, Rejoin, RemoveVoters, Switch
from controller.server import Acting, Observed, Server, acting
from schemaless.errors import (
    LockTimeout,
    LostHistory,
    Misconfigured,
    NotWhole,
    SchemalessError,
    StateConflict,
    StorageUnavailable,
)
from schemaless.location import Location
from schemaless.runtime.events import Event, emit
from schemaless.storage import schema
from schemaless.storage.appointment_table import PROMOTED
from schemaless.storage.asyncmy_driver import LEASE_S
from schemaless.storage.pymysql_driver import SyncNode
from schemaless.storage.replica_lag import WALK_S
from schemaless.storage.server_settings import shows
from schemaless.storage.shard_log import DensityWalk
from schemaless.topology import Appointment, Ballot, Datastore, ReplicationAccount, Topology

log = structlog.get_logger()

APPLY_TIMEOUT_S = 30.0
SWITCH_TIMEOUT_S = 2.0
"""How long a planned change keeps the old master closed. Then it is opened again."""
READY_TIMEOUT_S = 0.5
"""How long a minion may be late for a change that isn't begun before."""

CHOSEN = "chosen"
WITHOUT = "is chosen by order, and "
"""How a step tells of a promotion which went on without some cells."""
COUNT_TIMEOUT_S = 1.0
"""How long a server may take to count some cells of a candidate, or to show one."""

Tell = Callable[[Ballot, str, str], None]
"""Told of each step: its ballot, its name and a sentence."""
Heads = Mapping[tuple[str, int], Location]
Published = Callable[[Iterable[Datastore]], Heads]
"""Tells how far the shards of datastores were published. Raises SchemalessError where Kafka doesn't answer soon."""


class ClusterChange:
    """Changes one cluster. `known` has what is known of all clusters, which every write carries along. `seen` has the
    cluster's servers that answer: nobody waits for one that hangs.
    """

    def __init__(
        self,
        topology: Topology,
        cluster: str,
        controller: str,
        known: dict[str, Appointment],
        seen: Mapping[str, Observed],
        tell: Tell,
        published: Published,
    ) -> None:
        self._topology = topology
        self._cluster = topology.cluster(cluster)
        self._nodes = {node.name: node for node in self._cluster.nodes}
        self._controller = controller
        self._known = known
        self._seen = seen
        self._tell = tell
        self._published = published
        self._decided_for = known.get(cluster)
        self.holed: dict[str, str] = {}
        """What candidates of a promotion lack and others show, by name, as far as it was found."""

    def establish(self, decided: Establish) -> None:
        """Makes the tables on the first master, and opens it. Minions get the tables when they follow it."""
        master = self._nodes[decided.master]
        SyncNode(master).run(schema.create_server_tables)
        voters = tuple(name for name in self._nodes if name != decided.master)
        with ExitStack() as stack:
            ballot = self._next_ballot()
            self._open(self._begin(stack, decided.master, ballot), ballot, voters, [], must_tell=True)

    def open_again(self, decided: Open) -> None:
        """Opens the appointed master after its start. Raises NotWhole where a minion shows what it lacks, and
        LostHistory where it lacks what was published.

        One that wasn't opened since it was appointed is opened as it would have been then: a controller died meanwhile.
        """
        appointment = self._known[self._cluster.name]
        with ExitStack() as stack:
            master = self._begin(stack, decided.master, appointment.ballot)
            position, heads = master.look().executed, master.heads()
            for name in decided.hear:
                minion = stack.enter_context(Server(self._nodes[name]))
                seen = minion.look()  # one without tables followed nobody yet
                lacks = master.lacks(position, seen.received, seen.writes_as)
                if lost := seen.tables and (lacks or _behind(heads, minion.heads())):
                    raise NotWhole(
                        f"{decided.master} lacks what {name} has ({lost}): it was restored, or lost its disk."
                        f" Promote {name}: `schemaless topology promote {self._cluster.name} {name}`"
                    )
            if not decided.by_hand and master.has_opened(appointment.generation):  # or what it lacks is superseded
                self._require_published(decided.master, heads)
            if not master.has_opened(appointment.ballot.epoch):
                self._appoint(appointment, [], must_tell=bool(appointment.generation))
                time.sleep(LEASE_S + 0.1)
            master.open_heads(appointment.ballot.epoch, appointment.generation)
            master.open()
        self._tell(appointment.ballot, "opened", f"{decided.master} started again, and lacks nothing of {decided.hear}")

    def switch(self, decided: Switch) -> None:
        """Opens another master without a new generation. Where it is late, the old one is opened again.

        Raises StateConflict then. Nothing has changed where the old one runs a long statement, the new one is late
        before (NotWhole), or another master is away (StorageUnavailable).
        """
        appointment = self._known[self._cluster.name]
        with ExitStack() as stack:
            self._other_masters(stack)
            master, minion = (stack.enter_context(Server(self._nodes[name])) for name in (decided.old, decided.new))
            if statement := master.long_statement():
                raise StateConflict(f"{decided.old} can't be closed before the end of a long statement: {statement}")
            self._await_position([minion], master.look().executed, READY_TIMEOUT_S)
            if cell := self._left_out(decided.new, [decided.old]):
                raise NotWhole(f"{decided.new} {cell}, which {decided.old} has: it is no next master")
            ballot = self._next_ballot()
            old, new = (self._begin(stack, name, ballot) for name in (decided.old, decided.new))
            others = [
                self._begin(stack, name, ballot)
                for name in appointment.voters
                if name != decided.new and name in self._seen
            ]
            self._tell(ballot, "promised", f"{decided.old} gives way to {decided.new}")
            emit(Event.VOTERS_PROMISED)
            try:
                old.fence()
                emit(Event.MASTER_FENCED)
                self._await_position([new], old.look().executed)
                if new.heads() != old.heads():
                    raise NotWhole(f"{decided.new} shows other heads than {decided.old}")
            except SchemalessError as error:
                old.open_heads(ballot.epoch)  # first: one that couldn't be fenced is open, and nobody opens it later
                self._open(old, ballot, appointment.voters, [new, *others], must_tell=False)
                raise StateConflict(f"{decided.old} is open again: {error}") from error
            emit(Event.RECEIVED_APPLIED)
            new.detach()
            self._open(new, ballot, [other.node.name for other in others], [old, *others], must_tell=True)

    def promote(self, decided: Promote) -> None:
        """Opens the server that has most. A generation begins, unless it is the old master itself."""
        old, known = decided.old, self._known[self._cluster.name]
        with ExitStack() as stack:
            ballot = self._next_ballot()
            heard = {name: self._begin(stack, name, ballot) for name in decided.hear}
            if fenced := old in self._seen:
                heard.setdefault(old, self._begin(stack, old, ballot))
            self._tell(ballot, "promised", f"{' and '.join(heard)} obey this change and none before it")
            emit(Event.VOTERS_PROMISED)
            late = _fence(heard[old]) if fenced else None
            told_at = self._close(ballot, heard.values())
            for name, server in heard.items():
                if name != old:
                    server.stop_receiving()
            chosen = self._choose(heard, decided, late)
            server = heard[chosen]
            if late is not None:
                server.open_heads(ballot.epoch)  # it is open, and stays so
            lacks = self.holed.get(chosen)
            has = f"has all that {' and '.join(heard)} have" if lacks is None else f"{WITHOUT}{lacks}"
            self._tell(ballot, CHOSEN, f"{chosen} {has}")
            if chosen != old:
                emit(Event.RECEIVED_APPLIED)
                if not decided.by_hand:  # written before anybody is appointed, so that it outlives us
                    self._tell(ballot, PROMOTED, f"{chosen} takes the place of {old}, and nobody ordered it")
                server.detach()
            others = [other for name, other in heard.items() if name != chosen]
            # An old master may have been appointed and never opened: then what its predecessor gave ends here, too.
            ends_history = chosen != old or not server.has_opened(known.generation)
            self._open(
                server,
                ballot,
                [name for name in (known.voters if chosen == old else heard) if name not in (chosen, old)],
                others,
                must_tell=ends_history and not decided.by_hand,
                generation=ballot.epoch if ends_history else 0,
                leases_from=None if fenced else told_at,
            )

    def remove_voters(self, decided: RemoveVoters) -> None:
        """Appoints the master again without voters that are silent, or will be made anew.

        The heads get a new epoch first. What such a one receives from then on has an epoch that nobody believes who
        counts it, so its word counts no more, and its last word is on the master before the opening. One that stays has
        the opening before anybody learns of it. Until then puts wait. Raises NotWhole where all are late for it.
        """
        known = self._known[self._cluster.name]
        with ExitStack() as stack:
            self._other_masters(stack)
            seen = [stack.enter_context(Server(self._nodes[name])) for name in (known.master, *decided.stay)]
            self._await_position(seen[1:], seen[0].look().executed, READY_TIMEOUT_S)
            ballot = self._next_ballot()
            master, *stay = (self._begin(stack, name, ballot) for name in (known.master, *decided.stay))

            def appoint(voters: Sequence[str], *, must_tell: bool) -> None:
                again = self._appointment(ballot, known.master, voters, generation=known.generation)
                self._appoint(again, [master, *stay], must_tell=must_tell)

            master.open_heads(ballot.epoch)
            emit(Event.HEADS_OPENED)
            try:
                self._await_position(stay, master.look().executed, READY_TIMEOUT_S)
                appoint(decided.stay, must_tell=True)
            except SchemalessError:
                appoint(known.voters, must_tell=False)
                raise
            emit(Event.MASTER_APPOINTED)
            master.open_heads(ballot.epoch)  # of shards that were made meanwhile
        names = " and ".join(decided.leave)
        self._tell(ballot, "left out", f"{names} is no voter until it follows {known.master} again")

    def follow(self, decided: Follow) -> str:
        """Lets a server follow the master. It is a voter before it receives anything.

        Returns why one can't follow, '' if it can: it has what the master lacks, and wrote that when it was master, or
        it lacks what it wrote itself.
        """
        appointment = self._known[self._cluster.name]
        account = self._account()
        with ExitStack() as stack:
            master = stack.enter_context(Server(self._nodes[appointment.master]))
            server = self._begin(stack, decided.node, appointment.ballot)
            server.stop_following()  # so that it applies nothing that the look doesn't show
            if diverged := _diverged(server, master):
                if server.look().replication is not None:  # it grows no more
                    server.detach()
                self._tell(appointment.ballot, "diverged", diverged)
                return diverged
            if decided.node not in appointment.voters:
                voters = (*appointment.voters, decided.node)
                joined = self._appointment(
                    appointment.ballot, appointment.master, voters, generation=appointment.generation
                )
                others = [self._begin(stack, name, appointment.ballot) for name in appointment.voters]
                self._appoint(joined, [master, *others, server], must_tell=True)
            node = self._nodes[appointment.master]
            server.follow(node.host, node.port, account.user, account.password)
            server.start_receiving()
        self._tell(appointment.ballot, "follows", f"{decided.node} follows {appointment.master}")
        return ""

    def detach(self, decided: Rejoin) -> None:
        """Lets a minion forget its master, so that what is kept of it grows no more."""
        known = self._known[self._cluster.name]
        with ExitStack() as stack:
            server = self._begin(stack, decided.node, known.ballot)
            if server.look().replication is not None:
                server.detach()
        self._tell(known.ballot, "rejoins", f"{decided.node} is made anew, {decided.why}")

    def fence(self, decided: Fence) -> None:
        """Closes a server that takes writes and shouldn't."""
        ballot = self._known[self._cluster.name].ballot
        with ExitStack() as stack:
            self._begin(stack, decided.node, ballot).fence()
        self._tell(ballot, "fenced", f"{decided.node} {decided.why}")

    def _open(
        self,
        server: Acting,
        ballot: Ballot,
        voters: Sequence[str],
        others: Iterable[Acting],
        *,
        must_tell: bool,
        generation: int = 0,
        leases_from: float | None = None,
    ) -> None:
        """Appoints a master and opens it. `generation`: begins where a shard has no head of this epoch yet.
        `leases_from`: a process that reaches nobody but the old master may believe in it since then.
        """
        server.make_durable()  # services look at it once they know who is master
        appointment = self._appointment(ballot, server.node.name, voters, generation=generation)
        self._appoint(appointment, [server, *others], must_tell=must_tell)
        emit(Event.MASTER_APPOINTED)
        if leases_from is not None:
            time.sleep(max(0.0, min(leases_from, time.monotonic()) + LEASE_S + 0.1 - time.monotonic()))
        server.open_heads(ballot.epoch, generation)
        emit(Event.HEADS_OPENED)
        server.open()
        emit(Event.MASTER_OPENED)
        begun = f", and generation {generation} begins" if generation else ""
        self._tell(ballot, "opened", f"{server.node.name} takes writes{begun}")

    def _close(self, ballot: Ballot, heard: Iterable[Acting]) -> float:
        """Lets everybody who can be told know that there is no master now: puts are buffered at once.

        Returns since when no lease is renewed, infinity if a master wasn't told.
        """
        known = self._known[self._cluster.name]
        closed = self._appointment(ballot, known.master, known.voters, is_open=False, generation=known.generation)
        told = self._appoint(closed, heard, must_tell=False)
        return time.monotonic() if told else math.inf

    def _appointment(
        self, ballot: Ballot, master: str, voters: Sequence[str], *, is_open: bool = True, generation: int = 0
    ) -> Appointment:
        known = self._known.get(self._cluster.name)
        revision = known.revision + 1 if known is not None and known.ballot == ballot else 0
        now = time.time_ns() // 1000
        return Appointment(self._cluster.name, ballot, revision, master, is_open, tuple(voters), generation, now)

    def _appoint(self, appointment: Appointment, servers: Iterable[Server], *, must_tell: bool) -> bool:
        """Writes who is master on all other masters, and then on these servers. Returns whether all have it.

        Raises StorageUnavailable, with nothing written, when one is away that must be told.
        """
        with ExitStack() as stack:
            masters = self._other_masters(stack, tolerant=not must_tell)
            self._known[appointment.cluster] = appointment
            rows = list(self._known.values())
            for server in (*masters, *servers):
                server.appoint(rows)
        return len(masters) == len(rows) - 1

    def _other_masters(self, stack: ExitStack, *, tolerant: bool = False) -> list[Server]:
        found = []
        for cluster, known in self._known.items():
            if cluster != self._cluster.name:
                nodes = {node.name: node for node in self._topology.cluster(cluster).nodes}
                try:
                    found.append(stack.enter_context(Server(nodes[known.master])))
                except StorageUnavailable as error:
                    if not tolerant:
                        raise
                    log.warning("a master isn't told who is master", cluster=cluster, why=str(error))
        return found

    def _begin(self, stack: ExitStack, name: str, ballot: Ballot) -> Acting:
        """Obtains a server's promise. Raises StateConflict where it knows more than what was decided for."""
        server = stack.enter_context(acting(self._nodes[name], ballot))
        decided_for = None if self._decided_for is None else self._decided_for.rank
        for one in server.look().appointments:
            if one.cluster == self._cluster.name and (decided_for is None or one.rank > decided_for):
                raise StateConflict(f"{name} knows another decision meanwhile: {one}")
        return server

    def _next_ballot(self) -> Ballot:
        """Above all that is known of any cluster, and all generations: an epoch is one counter of the installation."""
        epochs = [appointment.ballot.epoch for appointment in self._known.values()]
        for name in self._seen:
            with Server(self._nodes[name]) as server:
                seen = server.look()
                epochs += [one.ballot.epoch for one in seen.appointments]
                epochs += [seen.promise.epoch] if seen.promise else []
                epochs += [head.generation for head in server.heads().values()] if seen.tables else []
        return Ballot(max(epochs, default=0) + 1, self._controller)

    def _choose(self, heard: Mapping[str, Acting], decided: Promote, late: LockTimeout | None) -> str:
        """Returns who has all that anybody has, and has applied it. `late`: why the old master is still open, so that
        nobody else can be. By hand it may lack cells that another one shows. Raises NotWhole where none has all: then a
        person decides.

        What a minion wrote itself doesn't count: nobody confirmed it. What it wrote while it was master is followed by
        what its successor wrote.
        """
        looks = {name: server.look() for name, server in heard.items()}
        own = {name: look.writes_as for name, look in looks.items() if name != decided.old}
        received = {name: look.received for name, look in looks.items()}
        have_applied = {name for name, look in looks.items() if not heard[name].lacks(look.executed, look.received)}
        names = [decided.old, *sorted(heard, key=lambda name: name not in have_applied)]
        late_ones: list[NotWhole] = []
        lost: dict[str, str] = {}
        for name in names if decided.wanted is None else [decided.wanted]:
            if name not in heard:
                continue
            lacks = {one: heard[name].lacks(received[name], received[one], own.get(one, "")) for one in heard}
            lost = {other: missing for other, missing in lacks.items() if missing}
            if lost:
                continue
            if name == decided.old:
                return name
            if late is not None:
                raise late
            try:
                self._apply(heard[name], received[name])
            except NotWhole as error:
                late_ones.append(error)
                continue
            cell = self._left_out(name, heard)
            if not cell:
                return name
            self.holed[name] = cell
        if self.holed and decided.by_hand:
            return next(iter(self.holed))
        if self.holed:
            holed = "; ".join(f"{name} {cell}" for name, cell in self.holed.items())
            raise NotWhole(f"{holed}: `schemaless topology promote {self._cluster.name}` goes on without these cells")
        raise late_ones[0] if late_ones else NotWhole(f"no server has all that the others have: {lost}")

    def _apply(self, server: Acting, received: str) -> None:
        """Lets a server apply what it had received. Raises NotWhole where it doesn't, or has lost that."""
        server.apply_received(APPLY_TIMEOUT_S)
        if missing := server.lacks(server.look().executed, received):
            raise NotWhole(f"{server.node.name} lost what it had received: {missing}")

    def _left_out(self, name: str, others: Iterable[str]) -> str:
        """Returns what a server left out and another one shows, although its position is no earlier, else ''.

        It looks for a moment, first at the newest cells. What it can't look at says nothing.
        """
        walk, goes_on, until = DensityWalk(), True, time.monotonic() + WALK_S
        with ExitStack() as stack, suppress(SchemalessError):
            own, *nodes = (
                stack.enter_context(closing(SyncNode(self._nodes[one], timeout_s=COUNT_TIMEOUT_S)))
                for one in (name, *(other for other in others if other != name))
            )
            while goes_on and time.monotonic() < until:
                holes, goes_on = own.run(walk.look)
                for hole in holes:
                    if any(node.run(shows, hole.database, hole.added_id) for node in nodes):
                        return f"lacks added_id {hole.added_id} of {hole.database}"
                    walk.pass_over(hole)
        return ""

    def _await_position(self, servers: Sequence[Server], position: str, timeout_s: float = SWITCH_TIMEOUT_S) -> None:
        """Returns once one of the servers has a position, or where there is none."""
        deadline = time.monotonic() + timeout_s
        while servers and all(missing := [server.lacks(server.look().executed, position) for server in servers]):
            if time.monotonic() > deadline:
                names = " and ".join(server.node.name for server in servers)
                raise NotWhole(f"{names} hasn't applied {missing[0]} after {timeout_s} s")
            time.sleep(0.005)

    def _require_published(self, master: str, heads: Heads) -> None:
        """Raises LostHistory where a master is behind what was published. While Kafka is away, nobody knows that."""
        with closing(SyncNode(self._nodes[master])) as node:
            datastores = node.run(schema.datastores)
        try:
            published = self._published(datastores.values())
        except SchemalessError as error:
            log.warning("a master isn't compared with what was published", node=master, why=str(error))
            return
        here = {
            (name, shard): location
            for (name, shard), location in published.items()
            if datastores[name].home(shard) == self._cluster.name
        }
        if lost := _behind(heads, here):
            raise LostHistory(
                f"{master} lacks what was published of {lost}, and no minion has it: restore a newer copy, or"
                f" `schemaless topology open {self._cluster.name}` and then `schemaless tailer new-generation` for each"
                " shard that a tailer refuses"
            )

    def _account(self) -> ReplicationAccount:
        if self._topology.replication is None:
            raise Misconfigured("the administrators' topology has no replication account")
        return self._topology.replication


def _diverged(server: Server, master: Server) -> str:
    """Returns why a server has another history than the master, '' if it hasn't."""
    name, seen, position = server.node.name, server.look(), master.look().executed
    if seen.tables and (tail := master.lacks(position, seen.executed)):
        return f"{name} has what {master.node.name} lacks: {tail}"
    if lost := master.lacks_own(seen, position):
        return f"{name} was restored: it lacks what it wrote itself, which it wouldn't receive: {lost}"
    return ""


def _fence(server: Acting) -> LockTimeout | None:
    """Closes a master, and returns why it takes writes still: a statement takes long."""
    try:
        server.fence()
    except LockTimeout as error:
        return error
    emit(Event.MASTER_FENCED)
    return None


def _behind(heads: Heads, other: Heads) -> str:
    """Names a shard in which `heads` are behind others, '' without one."""
    for (datastore, shard), location in other.items():
        if heads.get((datastore, shard), Location(0, 0)) < location:
            return f"shard {shard} of {datastore}"
    return ""
