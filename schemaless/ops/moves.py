"""Shards that move to another cluster: copied, compared, switched, followed back and completed. docs/growth.md.

One process moves shards from or to a cluster at a time. It holds a lock in a session of each master, and changes the
shard in these sessions only. If one is lost, it opens them anew and takes the lock again, so another process may have
come first. Whoever has the lock continues from the rows of `shard_move`. Placements are written to all masters.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from functools import partial
from types import TracebackType

import msgspec
import structlog

from schemaless.errors import Corrupt, SchemalessError, StateConflict, Unavailable
from schemaless.location import GenerationStart
from schemaless.storage import appointment_table, placement_table, schema, shard_copy, shard_head, shard_move_table
from schemaless.storage.appointment_table import REPLACED_AFTER_S, OrderState
from schemaless.storage.asyncmy_driver import LEASE_S
from schemaless.storage.everywhere import after, together
from schemaless.storage.failover import run_on_all
from schemaless.storage.operation import Operation, query
from schemaless.storage.pymysql_driver import SyncNode, SyncSession, SyncStorage
from schemaless.storage.shard_copy import CopiedPage, HomeTable, Known
from schemaless.storage.shard_head import Head
from schemaless.storage.shard_move_table import READY_BEHIND_CELLS, HomeHead, MoveState, ShardMove
from schemaless.storage.sql import Name, Script, sql, where
from schemaless.topology import Datastore, Placement

log = structlog.get_logger()

LOCK = "schemaless-mover"
READY_LAG_S = 1.0
PAUSE_S, PAUSE_MAX_S = 0.25, 1.0
"""A switch that isn't done after so long is taken back. Each time that one was, the next one has as much more, at
most: servers that are busy get there, too.
"""
SHOWN_TIMEOUT_S = 30.0
ENDED_WITHIN_S = 60.0
_SHOWN_LOOK_S = 5.0
_LOOK_S = 0.5
_HOLD_S = 0.5
_POLL_S = 0.002
_PAGE_CELLS_MIN = 50
_THREADS = 16
_MOMENTS = 256
_HISTORY_MARGIN_S = 10


class MoveStep(StrEnum):
    """What was just done. Tests kill the process at these points."""

    BEGUN = "begun"
    CUT = "cut back"
    PAGE = "page"
    READY = "ready"
    PREPARED = "prepared"
    ANNOUNCED = "announced"
    CLOSING = "closing"
    CLOSED = "closed"
    OPENED = "opened"
    SHOWN = "shown"
    PUBLISHED = "published"
    SETTLED = "settled"
    UNDONE = "undone"


Told = Callable[[MoveStep, ShardMove], None]


class Mover:
    """Sessions on the masters of some clusters, each of which holds the mover's lock.

    Raises StateConflict while another process moves shards from or to one of them.
    """

    def __init__(self, storage: SyncStorage, clusters: Collection[str], told: Told = lambda step, move: None) -> None:
        self.storage = storage
        self.told = told
        self.pool = ThreadPoolExecutor(_THREADS)
        self.sessions: dict[str, SyncSession] = {}
        self._moments: dict[str, deque[tuple[float, int]]] = {}
        with ExitStack() as opened:
            opened.callback(self.close)
            self.open_sessions(clusters)
            opened.pop_all()

    def open_sessions(self, clusters: Collection[str] = ()) -> None:
        """Opens sessions on the present masters, instead of those there were. Then it looks where shards live now.

        Raises StateConflict while another process has a lock.
        """
        wanted = sorted({*clusters, *self.sessions})
        self.storage.look()
        for cluster in wanted:
            if cluster in self.sessions:
                self.sessions[cluster].close()  # it stays, and refuses, until another one has the lock
            session = SyncSession(self.storage.master(cluster))
            if not session.run(shard_move_table.lock_mover, LOCK):
                session.close()
                raise StateConflict(
                    f"another process moves shards from or to {cluster}: `schemaless topology moves` shows them",
                    hint="wait for it, or end it: a move continues where it was",
                )
            self.sessions[cluster] = session
        self.storage.look()

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for session in self.sessions.values():
            session.close()

    def on_all(self, nodes: Sequence[SyncNode], ask: Callable[[SyncNode], None], within_s: float | None = None) -> None:
        """Asks nodes at once. Raises the first error, and TimeoutError."""
        until = None if within_s is None else time.monotonic() + within_s
        for asked in [self.pool.submit(ask, node) for node in nodes]:
            asked.result(until and max(0.0, until - time.monotonic()))

    def lag_s(self, clusters: Iterable[str]) -> float:
        """Returns for how long the masters of these clusters have shown what a voter still lacks. It is called again
        and again. A voter that doesn't answer is left out.
        """
        now, lag_s = time.monotonic(), 0.0
        for cluster in clusters:
            moments = self._moments.setdefault(cluster, deque(maxlen=_MOMENTS))
            moments.append((now, self.sessions[cluster].run(shard_move_table.latest)))
            voters = self.storage.minions(cluster)
            for asked in [self.pool.submit(voter.run, shard_move_table.latest) for voter in voters]:
                with suppress(SchemalessError):
                    shown = asked.result()
                    lag_s = max(lag_s, next((now - at for at, moment in moments if moment > shown), 0.0))
        return lag_s

    def verify_quiet(self, clusters: Collection[str]) -> None:
        """Raises StateConflict while a master changes, or while there is an order to a controller or to a command."""
        self.storage.look()
        for cluster in clusters:
            if self.storage.has_no_master(cluster) or not self.storage.is_open(cluster):
                raise StateConflict(f"the master of {cluster} changes now: wait until it is open")
            present = self.storage.master(cluster).node.name
            if self.sessions[cluster].node.name != present:
                raise StateConflict(f"{present} became the master of {cluster}: run the same command again")
        now = time.time()
        orders = together(run_on_all(self.storage.masters, appointment_table.orders).at_least_one())
        for order in orders.values():
            if order.state is OrderState.OPEN and now - order.changed_at / 1e6 < REPLACED_AFTER_S:
                raise StateConflict(f"{order.said}, and that isn't settled yet: wait until it is")


class _Pace:
    """How fast cells are copied, and how many a page has: fewer after a commit that took too long."""

    def __init__(self) -> None:
        self.page_cells = shard_copy.PAGE_CELLS
        self._began, self._cells = time.monotonic(), 0

    def took(self, cells: int, commit_s: float, commit_max_s: float) -> bool:
        """Returns False where copying is to wait."""
        self._cells += cells
        good = commit_s <= commit_max_s
        times = 2.0 if good else 0.25
        self.page_cells = round(min(shard_copy.PAGE_CELLS, max(_PAGE_CELLS_MIN, self.page_cells * times)))
        return good

    @property
    def cells_s(self) -> int:
        return round(self._cells / max(0.001, time.monotonic() - self._began))


class ShardMover:
    """One shard on its way from a cluster to another. `mover` holds the locks of both."""

    def __init__(self, mover: Mover, datastore: Datastore, shard: int, source: str, target: str) -> None:
        self._mover = mover
        self._datastore = datastore
        self._shard = shard
        self._clusters = (source, target)
        self._pace = _Pace()
        self._looked_at = 0.0
        self._ahead: Future[CopiedPage] | None = None
        self._in_switch: list[Known] = []
        self.move = ShardMove(datastore.name, shard, source, target, MoveState.COPYING, after(0))

    @property
    def _source(self) -> SyncSession:
        return self._mover.sessions[self._clusters[0]]

    @property
    def _target(self) -> SyncSession:
        return self._mover.sessions[self._clusters[1]]

    @property
    def _reader(self) -> SyncNode:
        return self._mover.storage.master(self._clusters[0])

    # Beginning, and continuing after a process that ended.

    def begin(self, *, lag_max_ms: int | None = None, commit_max_ms: int | None = None) -> None:
        """Makes the row and the table at the target, or continues from them. A switch that ended midway is taken back,
        or finished if it counts already.
        """
        here = self._source.run(shard_move_table.home_head, self._datastore.name, self._shard)
        if here is None or here.moved_to not in (None, self.move.target):
            raise StateConflict(f"shard {self._shard} doesn't live on {self.move.source} any more: look at the moves")
        found = self._target.run(shard_move_table.of_shard, self._datastore.name, self._shard)
        if found is None or found.state is MoveState.COMPLETE or found.source != self.move.source:
            there = self._target.run(shard_move_table.home_head, self._datastore.name, self._shard)
            if there is not None and there.moved_to is None:
                raise StateConflict(
                    f"shard {self._shard} of {self._datastore.name} lives on {self.move.target} already"
                )
            self._target.run(drop_entity_table, self._datastore, self._shard)
            self._target.run(schema.create_entity_table, self._datastore, self._shard)
            self._bring(shard_copy.PROGRAMS)
            self._target.run(shard_move_table.put, self.move)
        limits = {"lag_max_ms": lag_max_ms, "commit_max_ms": commit_max_ms}
        if given := {name: value for name, value in limits.items() if value is not None}:
            self._target.run(lambda: shard_move_table.set_limits(self._datastore.name, [self._shard], **given))
        self._read_row()
        self._texts = self._target.run(shard_copy.texts, self._datastore, self._shard)
        self._tell(MoveStep.BEGUN)
        self._recover(here)

    def _recover(self, here: HomeHead) -> None:
        if self.move.state is MoveState.OPEN:
            self.finish()
        elif self.move.state is MoveState.CLOSING or here.moved_to == self.move.target:
            self._undo("the process that switched it ended")
        elif (known := self._known()) is not None and known.coming == self.move.target:
            self._undo("the process that announced its switch ended")

    def _read_row(self) -> None:
        found = self._target.run(shard_move_table.of_shard, self._datastore.name, self._shard)
        if found is None:
            raise StateConflict(f"the move of shard {self._shard} was cancelled meanwhile")
        self.move = found

    def _tell(self, step: MoveStep) -> None:
        self._mover.told(step, self.move)

    # Copying.

    def copy(self, enough: int = 0) -> None:
        """Copies cells until at most `enough` are missing. It waits where the servers are behind, or slow."""
        torn: int | None = None
        while True:
            self._hold()
            head = self._look()
            if head.added_id - self.move.copied <= enough:
                return
            page = self._next_page(head)
            before = self._pace.cells_s
            self.move = msgspec.structs.replace(self.move, cells_s=before)
            try:
                commit_s = self._target.run(
                    shard_move_table.copy_page, self._datastore, self.move, self._texts, page, head
                )
            except Corrupt:
                self._ahead = None
                if self._look().generation == head.generation and torn == page.after:
                    raise
                torn = page.after
                continue  # a generation was opened, or a cell erased, while the page was read: it is read again
            torn = None
            self.move = msgspec.structs.replace(
                self.move,
                copied=page.until,
                generation=head.generation,
                head=head.added_id,
                state=shard_move_table.state_at(page.until, head.added_id),
            )
            self._tell(MoveStep.PAGE)
            if not self._pace.took(page.until - page.after, commit_s, self.move.commit_max_ms / 1000):
                self._waits(f"a commit on {self.move.target} took {commit_s * 1000:.0f} ms")

    def _look(self) -> Head:
        """Returns the source's head. Cells behind the start of a generation that is new there are copied again."""
        head, starts = self._reader.run(shard_head.history, self._datastore.name, self._shard)
        if head.generation != self.move.generation:
            new = [start.starts_at for start in starts if start.generation > self.move.generation]
            until = min([self.move.copied, *(starts_at - 1 for starts_at in new)])
            if until < self.move.copied:
                self._target.run(shard_move_table.cut_back, self._datastore, self.move, until, head.generation)
                self._ahead = None
                self._read_row()
                self._tell(MoveStep.CUT)
        return head

    def _next_page(self, head: Head) -> CopiedPage:
        """Returns the page behind what is copied, and begins to read the next one."""
        page = None if self._ahead is None else self._ahead.result()
        self._ahead = None
        if page is None or page.after != self.move.copied or page.until == page.after:
            page = self._read(self.move.copied, head.added_id)
        if page.until < head.added_id:
            self._ahead = self._mover.pool.submit(self._read, page.until, head.added_id)
        return page

    def _read(self, copied: int, until: int) -> CopiedPage:
        read, limit = shard_copy.read_page, self._pace.page_cells
        return self._reader.run(read, self._datastore, self._shard, self._texts, copied, until, limit)

    def _hold(self) -> None:
        """Waits while minions are too far behind. The limits are read again, because they may be changed meanwhile."""
        while time.monotonic() - self._looked_at >= _LOOK_S:
            self._looked_at = time.monotonic()
            self._read_row()
            if (lag_s := self._mover.lag_s(self._clusters)) <= self.move.lag_max_ms / 1000:
                return
            self._waits(f"a minion of {' or '.join(self._clusters)} is {lag_s:.1f} s behind")
            self._looked_at = 0.0

    def _waits(self, why: str) -> None:
        self._target.run(lambda: shard_move_table.change(self.move, told=f"waits: {why}"))
        time.sleep(_HOLD_S)

    # The switch.

    def switch(self) -> None:
        """Makes the target the home. What isn't ready is refused before the shard is closed.

        Raises StateConflict or Unavailable, and then the source is the home as before.
        """
        self.copy(READY_BEHIND_CELLS)
        self._verify_ready()
        with _uninterrupted():
            try:
                announced = self._announce()
                self._prepare()
                self.copy()
                closing = {"state": MoveState.CLOSING, "epoch": self._mover.storage.epoch(self.move.source)}
                self._target.run(lambda: shard_move_table.change(self.move, **closing))
                self.move = msgspec.structs.replace(self.move, **closing)
                self._tell(MoveStep.CLOSING)
                began = time.monotonic()
                self._close_and_open(began + min(PAUSE_MAX_S, PAUSE_S * (1 + self.move.attempt)))
                self._await_target()
                number = announced.number + 1
                self._publish(msgspec.structs.replace(announced, number=number, home=self.move.target, coming=None))
                pause_us = round((time.monotonic() - began) * 1e6)
                self._target.run(lambda: shard_move_table.change(self.move, pause_us=pause_us))
                self.move = msgspec.structs.replace(self.move, pause_us=pause_us)
                self._tell(MoveStep.PUBLISHED)
                self._settle()
            except SchemalessError as error:
                self._until_done(partial(self._undo, str(error)))
                if self.move.state is not MoveState.OPEN:
                    raise
                log.warning("a switch broke off, and was finished", shard=self._shard, why=str(error))

    def _until_done(self, end: Callable[[], None]) -> None:
        """Ends a switch either way, again and again with new sessions: until then the shard may have no home.

        Raises Unavailable after a minute, and StateConflict where another process ended the switch, and more.
        """
        deadline = time.monotonic() + ENDED_WITHIN_S
        while True:
            try:
                return end()
            except StateConflict:
                raise
            except SchemalessError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"shard {self._shard} may have no home now, and its puts are buffered: {error}",
                        hint="run the same command again: it continues where this one was",
                    ) from error
                time.sleep(_HOLD_S)
                with suppress(SchemalessError):
                    self._mover.open_sessions()

    def _verify_ready(self) -> None:
        self._mover.verify_quiet(self._clusters)
        away = run_on_all(self._mover.storage.masters, shard_move_table.latest).failures
        if away:
            raise StateConflict(f"the master of {', '.join(away)} is away: every cluster has to be told of the switch")
        deadline = time.monotonic() + READY_LAG_S
        try:
            for cluster in self._clusters:
                moment = self._mover.sessions[cluster].run(shard_move_table.latest)
                self._await_voters(cluster, partial(_has_reached, moment), deadline, "what its master has")
        except Unavailable as error:
            raise StateConflict(f"a voter is behind, or doesn't answer: {error}") from error
        self._target.run(lambda: shard_move_table.change(self.move, state=MoveState.READY, told=""))
        self.move = msgspec.structs.replace(self.move, state=MoveState.READY, told="")
        self._tell(MoveStep.READY)

    def _prepare(self) -> None:
        """Copies what else the shard has on its home. The switch itself takes what is new of it."""
        ((now,),) = self._reader.run(query, "SELECT UTC_TIMESTAMP(6)")
        self._bring(shard_copy.BESIDE)
        self._in_switch = [
            msgspec.structs.replace(known, since=f"ended_at >= '{now}' - INTERVAL {_HISTORY_MARGIN_S} SECOND")
            if known.table is shard_copy.HISTORY
            else known
            for known in self._known_rows(shard_copy.IN_SWITCH)
        ]
        self._tell(MoveStep.PREPARED)

    def _known_rows(self, tables: Sequence[HomeTable]) -> list[Known]:
        """Returns what the target has of the shard in these tables."""
        read = [Known(table, self._target.run(shard_copy.home_text, table)) for table in tables]
        return self._target.run(shard_copy.with_keys, read, self._datastore.name, self._shard)

    def _bring(self, tables: Sequence[HomeTable]) -> None:
        """Makes the target's rows those of the source."""
        known = self._known_rows(tables)
        for statement in self._reader.run(shard_copy.differences, known, self._datastore.name, self._shard):
            self._target.run(query, statement)

    def _announce(self) -> Placement:
        """Lets every process know that the source may be closed from now on. Returns what was written."""
        announced = self._next_placement(self.move.source, self.move.target)
        self._mover.on_all(self._mover.storage.masters, lambda node: node.run(placement_table.write, [announced]))
        self._await_voters(
            self.move.source, lambda: self._placed(announced), time.monotonic() + SHOWN_TIMEOUT_S, "the announcement"
        )
        time.sleep(LEASE_S)
        self._tell(MoveStep.ANNOUNCED)
        return announced

    def _close_and_open(self, deadline: float) -> None:
        head = self._source.run(shard_move_table.close_source, self.move)
        self._tell(MoveStep.CLOSED)
        reading = self._mover.pool.submit(self._read, self.move.copied, head.added_id)
        beside = self._mover.pool.submit(self._read_beside)
        self._await_voters(self.move.source, self._closed, deadline, "the close")
        page, (starts, statements) = reading.result(), beside.result()
        if page.until < head.added_id or time.monotonic() > deadline:
            raise Unavailable("the switch would have taken too long, and was taken back")
        if head.generation != self.move.generation and self.move.copied >= min(
            start.starts_at for start in starts if start.generation > self.move.generation
        ):
            raise Unavailable(f"a generation was opened on {self.move.source} meanwhile, and the switch was taken back")
        self._target.run(
            shard_move_table.open_target, self._datastore, self.move, self._texts, page, head, starts, statements
        )
        self._read_row()
        self._tell(MoveStep.OPENED)

    def _read_beside(self) -> tuple[list[GenerationStart], list[Script]]:
        """Returns the source's generations, and the statements that bring what lies beside the cells."""
        starts = self._reader.run(shard_head.generations, self._datastore.name, self._shard)
        return starts, self._reader.run(shard_copy.differences, self._in_switch, self._datastore.name, self._shard)

    def _undo(self, why: str) -> None:
        """Takes a switch back, unless it counts already. Then it is finished."""
        if not self._target.run(shard_move_table.take_back, self.move, why):
            self.finish()
            return
        self._source.run(shard_move_table.reopen_source, self.move)
        self._read_row()
        self._publish(self._next_placement(self.move.source, None))
        self.clear()
        self._tell(MoveStep.UNDONE)

    def clear(self) -> None:
        """Deletes what the target has beside the cells. It isn't the home."""
        for table in (*shard_copy.DELETED, shard_copy.CHECKPOINTS):
            self._target.run(query, shard_copy.deleting(table, self._datastore.name, self._shard))

    def finish(self) -> None:
        """Tells every process of a switch that counts, and settles what is left of it. It may be repeated.

        Raises StateConflict where another process did more since: what the source has isn't left over then.
        """
        self._read_row()
        there = self._target.run(shard_move_table.home_head, self._datastore.name, self._shard)
        if there is None or there.moved_to is not None:
            raise StateConflict(f"shard {self._shard} left {self.move.target}: run the command that took it away")
        if (self.move.state, self.move.source) != (MoveState.OPEN, self._clusters[0]):
            raise StateConflict(
                f"the move of shard {self._shard} to {self.move.target} is complete: nothing is left of it"
            )
        self._await_target()
        known = self._known()
        if known is None or (known.home, known.coming) != (self.move.target, None):
            known = self._next_placement(self.move.target, None)
        self._publish(known)
        self._tell(MoveStep.PUBLISHED)
        self._settle()

    def _known(self) -> Placement | None:
        """Returns what counts of where the shard lives, None if it never moved. Every master has it."""
        name, places = self._datastore.name, self._mover.storage.placements
        for session in (self._source, self._target):
            placement_table.learn(places, session.run(placement_table.of_shard, name, self._shard))
        return places.get(name, {}).get(self._shard)

    def _next_placement(self, home: str, coming: str | None) -> Placement:
        known = self._known()
        number = 1 if known is None else known.number + 1
        return Placement(self._datastore.name, self._shard, number, home, coming, after(0))

    def _publish(self, placement: Placement) -> None:
        """Writes where the shard lives to every master."""
        self._mover.on_all(self._mover.storage.masters, lambda node: node.run(placement_table.write, [placement]))
        placement_table.learn(self._mover.storage.placements, [placement])

    def _await_target(self) -> None:
        """Waits until whoever is promoted at the target would have the shard, for as long as that takes.

        A controller leaves out a voter that is silent. Without one nobody is promoted, so nobody is waited for.
        """
        storage, target = self._mover.storage, self.move.target
        while True:
            try:
                self._await_voters(target, self._opened, time.monotonic() + _SHOWN_LOOK_S, "its new head")
                break
            except Unavailable as error:
                if storage.epoch(target) == 0:
                    break
                told = f"is open, and waits until it may be told: {error}"
                self._target.run(lambda: shard_move_table.change(self.move, told=told[:300]))  # noqa: B023  # run at once
                storage.look()
        self._tell(MoveStep.SHOWN)

    def _settle(self) -> None:
        """Deletes what now has another home, and begins to follow back."""
        name = self._datastore.name
        for table in shard_copy.DELETED:
            self._source.run(query, shard_copy.deleting(table, name, self._shard))
        back = self._source.run(shard_move_table.of_shard, name, self._shard)
        if back is None or not back.is_back:
            back = ShardMove(
                name,
                self._shard,
                self.move.target,
                self.move.source,
                MoveState.READY,
                after(0),
                is_back=True,
                generation=self.move.generation,
                copied=self.move.copied,
                digest=self.move.digest,
                head=self.move.head,
                lag_max_ms=self.move.lag_max_ms,
                commit_max_ms=self.move.commit_max_ms,
            )
            self._source.run(shard_move_table.put, back)
        self._tell(MoveStep.SETTLED)

    # Waiting for voters.

    def _await_voters(self, cluster: str, shows: Callable[[], Operation[bool]], deadline: float, what: str) -> None:
        """Returns when every voter of a cluster shows something. Raises Unavailable after the deadline."""

        def wait(node: SyncNode) -> None:
            while not node.run(shows):
                if time.monotonic() > deadline:
                    raise Unavailable(f"shard {self._shard}: {node.node.name} doesn't show {what} in time")
                time.sleep(_POLL_S)

        try:
            self._mover.on_all(self._mover.storage.minions(cluster), wait, deadline - time.monotonic())
        except TimeoutError:
            raise Unavailable(f"shard {self._shard}: a voter of {cluster} doesn't show {what} in time") from None

    def _placed(self, placement: Placement) -> Operation[bool]:
        which = where(datastore=placement.datastore, shard=placement.shard)
        rows = yield from query(f"SELECT number FROM {placement_table.TABLE.name} {which}")
        return bool(rows) and rows[0][0] >= placement.number

    def _closed(self) -> Operation[bool]:
        found = yield from shard_move_table.home_head(self._datastore.name, self._shard)
        return found is not None and found.moved_to == self.move.target

    def _opened(self) -> Operation[bool]:
        found = yield from shard_move_table.of_shard(self._datastore.name, self._shard)
        return found is not None and found.state is MoveState.OPEN and found.attempt >= self.move.attempt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C wait: a shard isn't left closed by it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _has_reached(moment: int) -> Operation[bool]:
    return (yield from shard_move_table.latest()) >= moment


def drop_entity_table(datastore: Datastore, shard: int) -> Operation[None]:
    """Drops the cells of a shard that lives elsewhere. The tables of indexes stay."""
    ((there,),) = yield from query(
        "SELECT COUNT(*) FROM information_schema.schemata " + where(schema_name=datastore.database(shard))
    )
    if there:
        yield sql("DROP TABLE IF EXISTS %s.entity", Name(datastore.database(shard)))
