"""Servers that have what their master never got, and what is done about them: kept, put again, made anew.

One thread does that for all clusters, one server after the other, beside the thread that decides. Nothing is kept here
that a controller needs after its death: the next one finds the tail again, and what was done is on the master.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import msgspec
import structlog

from controller.decide import Diverged, Keep, Remake
from controller.server import Observed, Server, acting
from controller.tail import Tail
from schemaless.cell import PutStatus
from schemaless.errors import NotWhole, SchemalessError, StateConflict, StorageUnavailable
from schemaless.quantity import quantity
from schemaless.runtime.events import Event, emit
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Appointment, Ballot, Topology

log = structlog.get_logger()

WAITING_AGAIN_S = 2.0
"""The pause before something is tried again that a server didn't take."""
REMAKE_AGAIN_S = 60.0
"""The least time between two tries to make a server anew."""
CAUGHT_UP_TIMEOUT_S = 10.0
STORAGE_TIMEOUT_S = 5.0
POLL_S = 0.05
REMAKING = "schemaless.remaking"
"""A lock on the master of a cluster: only one server of it is made anew at a time, by whichever controller."""

Tell = Callable[[Ballot, str, str], None]


class _Found(msgspec.Struct):
    """One server with a tail, as it was found: since its start, under this ballot. `epoch`: it is kept under that."""

    started_at: int
    ballot: Ballot
    epoch: int | None = None
    waiting: int | None = None
    kept: int = 0
    told: str = ""
    failed: str = ""

    def is_of(self, started_at: int, ballot: Ballot) -> bool:
        return (self.started_at, self.ballot) == (started_at, ballot)


class Rejoining:
    """`services` has the servers with the services' account, and `command` makes a server anew."""

    def __init__(self, topology: Topology, services: Topology, command: str | None) -> None:
        self.topology, self.services = topology, services
        self._command = shlex.split(command or "")
        self._found: dict[str, _Found] = {}
        self._not_before: dict[str, float] = {}
        self._at_work = ""
        self.remaking = ""
        """The server that is made anew now."""

    @property
    def remakes(self) -> bool:
        return bool(self._command)

    def found(self, name: str, seen: Observed, ballot: Ballot) -> None:
        """Notes that a server has a tail."""
        self._found[name] = _Found(seen.started_at, ballot)

    def tails(self, seen: Mapping[str, Observed], appointment: Appointment | None) -> dict[str, Diverged]:
        """Returns the servers with a tail. One that started again, or has another master, is looked at again."""
        now = time.monotonic()
        return {
            name: Diverged(
                found.waiting, not self._at_work and now >= self._not_before.get(name, 0.0), found.kept, found.failed
            )
            for name, found in self._found.items()
            if name in seen
            and appointment is not None
            and (name == self._at_work or found.is_of(seen[name].started_at, appointment.ballot))
        }

    def begin(self, decided: Keep | Remake, known: Iterable[Appointment], master: str, tell: Tell) -> None:
        """Begins to do it, and returns at once."""
        self._not_before[decided.node] = time.monotonic() + (
            REMAKE_AGAIN_S if isinstance(decided, Remake) else WAITING_AGAIN_S
        )
        self._at_work = decided.node
        self.remaking = decided.node if isinstance(decided, Remake) else ""
        work = (decided, list(known), master, tell)
        threading.Thread(target=self._do, args=work, name=f"rejoin-{decided.node}", daemon=True).start()

    def _do(self, decided: Keep | Remake, known: list[Appointment], master: str, tell: Tell) -> None:
        found = self._found[decided.node]
        try:
            if isinstance(decided, Keep):
                self._keep(decided.node, found, known, tell)
            else:
                self._remake(decided, found, master, tell)
        except (SchemalessError, OSError) as error:
            log.warning("a server can't rejoin now", node=decided.node, why=str(error))
            if str(error) != found.told:
                tell(found.ballot, "waits", f"{decided.node}: {error}")
                found.told = str(error)
        finally:
            self._at_work = self.remaking = ""

    def _keep(self, name: str, found: _Found, known: list[Appointment], tell: Tell) -> None:
        with SyncStorage(self.services, timeout_s=STORAGE_TIMEOUT_S) as storage:
            storage.learn(known)
            tail = Tail(storage, name)
            if found.epoch is None:
                epoch = tail.keep()
                found.kept = sum(tail.counts(epoch).values())
                tell(found.ballot, "kept", f"the tail of {name} is kept: {quantity(found.kept, 'cell')}")
                found.epoch = epoch
            tail.put_again(found.epoch)
            counts = tail.counts(found.epoch)
        found.waiting = counts.get(None, 0)
        told = ", ".join(
            f"{counts.get(status, 0)} {words}"
            for status, words in (
                (PutStatus.STORED, "stored"),
                (PutStatus.ALREADY_STORED, "already there"),
                (PutStatus.CONFLICT, "conflicts"),
                (None, "wait"),
            )
        )
        if told != found.told:
            tell(found.ballot, "put again", f"of the tail of {name}: {told}")
            found.told = told

    def _remake(self, decided: Remake, found: _Found, master: str, tell: Tell) -> None:
        """The donor has all that the master has now, so what was kept isn't lost with the master.

        The lock on the master goes with the command, which may outlive this process. The server's own session ends when
        another controller acts there, so one that was late finds that out, or finds what the other one did.
        """
        with ExitStack() as stack:
            first = stack.enter_context(Server(self.topology.nodes[master]))
            held = first.hold(REMAKING)
            self._await_caught_up(first, decided.donor)
            server = stack.enter_context(acting(self.topology.nodes[decided.node], found.ballot))
            emit(Event.REMAKE_BEGINS)
            _require_idle(first.look(), server, found)
            self._run(decided, found, held)
        tell(found.ballot, "made anew", f"{decided.node} is made anew from {decided.donor}")

    def _run(self, decided: Remake, found: _Found, held: int) -> None:
        server = decided.node
        log.info("a server is made anew", node=server, donor=decided.donor)
        with subprocess.Popen(
            [*self._command, server, decided.donor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(held,),
        ) as process:
            assert process.stdout is not None
            line = ""
            for line in process.stdout:
                log.info("a server is made anew", node=server, says=line.rstrip())
        if process.returncode:
            found.failed = f"{server} couldn't be made anew: {line.strip() or f'exit {process.returncode}'}"
            raise StorageUnavailable(found.failed)

    def _await_caught_up(self, first: Server, donor: str) -> None:
        with Server(self.topology.nodes[donor]) as copied:
            position, deadline = first.look().executed, time.monotonic() + CAUGHT_UP_TIMEOUT_S
            while missing := first.lacks(copied.look().executed, position):
                if time.monotonic() > deadline:
                    raise NotWhole(f"{donor} lacks what {first.node.name} has: {missing}")
                time.sleep(POLL_S)


def _require_idle(master: Observed, server: Server, found: _Found) -> None:
    """Raises StateConflict where a server was made anew, votes or is master since it was found. A new voter is on the
    present master before it is one, and a later change is on the server itself.
    """
    node, seen = server.node, server.look()
    known = max(
        (one for one in (*master.appointments, *seen.appointments) if one.cluster == node.cluster),
        key=lambda one: one.rank,
    )
    if not found.is_of(seen.started_at, known.ballot) or node.name in (known.master, *known.voters):
        raise StateConflict(f"{node.name} is another one meanwhile, so it isn't made anew: {known}")
