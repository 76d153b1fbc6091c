"""The work of one consumer on one shard: what was handed over, what is in flight, and what isn't recorded yet."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from itertools import islice
from math import inf

import structlog

from schemaless.cell import StoredCell
from schemaless.consume.ports import (
    Advance,
    CheckpointStore,
    ForeignCode,
    Handler,
    Log,
    Mark,
    Outcome,
    Predecessor,
    Script,
    ShardCheckpoint,
)
from schemaless.errors import Fenced, LocationGone, SchemalessError, StorageUnavailable
from schemaless.position import Position, position_of
from schemaless.shard_cursor import CursorCounts, CursorState, ShardCursor
from schemaless.storage.checkpoint_table import NO_COUNTS
from schemaless.storage.shard_head import Head

log = structlog.get_logger()

PAGE_CELLS_MIN = 32
FAILURES_SHOWN = 5
"""After so many failures one after the other, which take seconds, people see the shard and its last error."""
READING = (CursorState.LOCATING, CursorState.BEHIND)
"""States in which delivery has something to read."""
HANDING_OVER = (CursorState.BEHIND, CursorState.LIVE, CursorState.REFUSED)
"""States in which cells that were handed over may be worked on."""

SCRIPT_CHARACTERS_MAX = 1 << 20
"""Of the scripts of a shard that wait to be stored. Those of one call more may come on top."""

_ERROR_CHARACTERS_MAX = 500
_CAREFUL_CALLS = 16
_QUEUE_CELLS_MAX = 1000  # what the topic brings beyond that is read from the log later
_QUEUE_BYTES_MAX = 1 << 20


def _text(error: Exception) -> str:
    """Returns what people are told of a failure. An error that isn't ours may have a text that raises."""
    if isinstance(error, SchemalessError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


class Assignment(Enum):
    """Whether a shard is ours, by the group's word."""

    OURS = "ours"
    SUSPENDED = "suspended"  # in a rebalance: nothing is begun, and nothing forgotten
    RELEASED = "released"  # somebody else's: its last call still runs
    RETURNING = "returning"  # ours again: it begins anew when its last call has ended

    @property
    def is_leaving(self) -> bool:
        """Whether its last call still runs, and nothing of it stays afterwards."""
        return self in (Assignment.RELEASED, Assignment.RETURNING)


class DeliveryCounts(CursorCounts):
    """Counts since the start. `delivered` cells were finished."""

    delivered: int = 0
    failures: int = 0


class QueuedBytes:
    """Bodies that wait in the queues of a process, in bytes."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


StageObserver = Callable[[str, str, float], None]
"""Called with a consumer, a stage of a call (wait, call, commit) and its seconds."""


class SharedWork:
    """What all deliveries of a process share."""

    def __init__(self) -> None:
        self.queued = QueuedBytes()
        self.marked_calls = MarkedCalls()
        self.observe: StageObserver = lambda consumer, stage, seconds: None

    def observe_call(self, consumer: str, works: Sequence[ShardWork], began: float, ended: float) -> float:
        """Says how long a call took, and how old its oldest cell was when it began. Returns when it ended."""
        call_s = ended - began
        oldest_us = min([work.called_us for work in works if work.called_us is not None], default=None)
        if oldest_us is not None:
            self.observe(consumer, "wait", max(0.0, time.time() - oldest_us / 1e6 - call_s))
            self.observe(consumer, "call", call_s)
        return ended


class Unrecorded:
    """What a checkpoint doesn't say yet: finished cells, what became of them, and scripts that join its move."""

    __slots__ = ("counts", "finished", "script_characters", "scripts", "stop_reason")

    def __init__(self) -> None:
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.finished or self.scripts or self.stop_reason or self.counts != NO_COUNTS)

    def clear(self) -> None:
        self.finished = 0
        self.counts = NO_COUNTS
        self.scripts: list[Script] = []
        self.script_characters = 0
        self.stop_reason: str | None = None

    def add(self, outcome: Outcome) -> None:
        self.finished += outcome.finished
        self.counts += outcome.counts
        if outcome.script:
            self.scripts.append(outcome.script)
            self.script_characters += len(outcome.script)
        self.stop_reason = outcome.stop_reason or self.stop_reason

    @property
    def is_full(self) -> bool:
        """Whether no more may be added before it is stored: a transaction has to fit a packet of the server."""
        return self.script_characters > SCRIPT_CHARACTERS_MAX

    def advance(self, to: Position, mark: Mark | None = None) -> Advance:
        """Returns the move that stores all of it."""
        return Advance(
            to, self.finished, self.stop_reason, mark=mark, counts=self.counts, effect=";".join(self.scripts)
        )

    def put_back(self, advance: Advance) -> None:
        """Takes back what a move didn't store. What was added since comes after it."""
        self.finished += advance.finished
        self.counts += advance.counts
        if advance.effect:
            self.scripts.insert(0, advance.effect)
            self.script_characters += len(advance.effect)
        self.stop_reason = self.stop_reason or advance.stop_reason


class ShardWork:
    """One shard: its cursor, and the cells that were handed over and that no call has begun yet.

    `busy`: a call works on it. The last call that was given cells was given those up to `begun`. `page_cells` bounds a
    page and a call, and is halved by a failure. It then grows only after `careful` more calls. What is `unrecorded` is
    stored at `record_at`, and a shard that `must_record` waits for that. At `due_at` the handler wants a call although
    nothing new came. `reported` is the last refusal in the log, and `error` that of the last of its `failures`, which
    came one after the other. `called_us` is when the first cell of the call in flight was created.
    """

    __slots__ = (
        "assignment", "begun", "busy", "called_us", "careful", "caution", "cells", "cells_bytes", "cursor", "due_at",
        "error", "failures", "is_paused", "must_record", "page_cells", "queued", "record_at", "reported", "served_at",
        "unrecorded", "wait_until",
    )  # fmt: skip

    def __init__(self, shard: int, counts: CursorCounts, queued: QueuedBytes) -> None:
        self.queued = queued
        self.cursor = ShardCursor(shard, counts)
        self.caution = ShardCaution()
        self.cells: deque[StoredCell] = deque()
        self.cells_bytes = 0
        self.called_us: int | None = None
        self.busy = False
        self.begun = self.cursor.at
        self.assignment = Assignment.OURS
        self.failures = 0
        self.error = ""
        self.page_cells = PAGE_CELLS_MIN
        self.careful = 0
        self.served_at = self.wait_until = 0.0
        self.unrecorded = Unrecorded()
        self.record_at = 0.0
        self.must_record = self.is_paused = False
        self.due_at = inf
        self.reported: str | None = None

    def __hash__(self) -> int:
        return self.shard  # a set of them has one order in every run, so a history that failed fails again

    @property
    def shard(self) -> int:
        return self.cursor.at.shard

    @property
    def oldest_us(self) -> int | None:
        """When the oldest cell that was handed over and isn't finished was created. None if there is none."""
        return self.called_us or (self.cells[0].created_at if self.cells else None)

    @property
    def at_rest(self) -> bool:
        """Whether nothing has to be done until something happens."""
        if self.busy or self.cells or self.unrecorded or self.cursor.state in READING:
            return False
        return self.due_at == inf or self.cursor.state not in HANDING_OVER

    def wants_page(self, now: float) -> bool:
        """Whether its log has to be read. One page waits while a call runs, but not beside a call that may fail."""
        return (
            self.cursor.state is CursorState.BEHIND
            and not self.cells
            and not (self.busy and self.failures)
            and self.is_ours(now)
        )

    def is_ours(self, now: float) -> bool:
        """Whether something may be done for it now."""
        return self.assignment is Assignment.OURS and not self.is_paused and now >= self.wait_until

    def may_be_located(self, now: float) -> bool:
        """Whether its checkpoint may be read now. Also of a paused shard, because it may have to be moved."""
        return self.assignment is Assignment.OURS and now >= self.wait_until

    def is_ready(self, now: float) -> bool:
        """Whether a call may begin."""
        return (
            (bool(self.cells) or now >= self.due_at)
            and not self.busy
            and not self.must_record
            and self.cursor.state in HANDING_OVER
            and self.is_ours(now)
        )

    @property
    def is_full(self) -> bool:
        return len(self.cells) > _QUEUE_CELLS_MAX or self.cells_bytes > _QUEUE_BYTES_MAX

    def position_after(self, cells: Sequence[StoredCell], finished: int) -> Position:
        """Returns how far the shard is finished when so many of these cells are."""
        return position_of(cells[finished - 1]) if finished else self.cursor.done

    def begin(self, checkpoint: ShardCheckpoint, head: Head | None) -> None:
        """Continues after a checkpoint. `head` is what the last look showed."""
        self.caution.begin(checkpoint.predecessor, checkpoint.kills)
        self.cursor.begin(checkpoint.position, None if head is None else head.location)

    def next_due_at(self, now: float) -> float:
        """When something has to be done, even if nothing happens until then."""
        retry_at = self.wait_until if now < self.wait_until and (self.cells or self.cursor.state in READING) else inf
        held_at = inf if self.busy or self.must_record or self.is_paused else max(self.due_at, self.wait_until)
        return min(retry_at, held_at, self.record_at if self.unrecorded else inf)

    def begin_anew(self) -> None:
        """Makes the shard read its checkpoint again, whatever it had."""
        self._drop_all()
        self.cursor.forget()

    def come_back(self) -> None:
        """Makes the shard ours again, after its last call. It begins anew.

        If that call lost the checkpoint, it waits for the group: the loss is later than the group's word.
        """
        self.assignment = Assignment.OURS
        if self.cursor.state is not CursorState.UNCONFIRMED:
            self.begin_anew()

    def _drop_all(self) -> None:
        self.drop()
        self.unrecorded.clear()
        self.must_record = False
        self.due_at = inf

    def lose(self) -> None:
        """Another process moved the checkpoint: nothing goes on until the group has confirmed the shard."""
        self._drop_all()
        self.cursor.lose()

    @property
    def is_failing(self) -> bool:
        """Whether it fails although it was tried again in ever smaller pages."""
        return self.failures >= FAILURES_SHOWN and not self.at_rest

    def fail(self, failures: int, wait_until: float, error: Exception, *, of_call: bool) -> None:
        """Makes the shard go on later, from the log and in smaller pages.

        If it wasn't the call in flight that failed, the shard goes on behind the cells of that call.
        """
        self.drop()
        self.failures, self.wait_until, self.error = failures, wait_until, _text(error)[:_ERROR_CHARACTERS_MAX]
        self.page_cells, self.careful = max(1, self.page_cells // 2), _CAREFUL_CALLS
        if self.cursor.state not in (CursorState.UNCONFIRMED, CursorState.STOPPED):
            self.cursor.rewind(self.cursor.done if of_call or self.called_us is None else self.begun)

    def queue(self, cells: Sequence[StoredCell]) -> None:
        self.cells.extend(cells)
        self._count(sum([len(cell.body) for cell in cells]))

    def put_back(self, cells: Sequence[StoredCell]) -> None:
        """Takes cells back that a call didn't finish. They are the next ones again."""
        self.cells.extendleft(reversed(cells))
        self._count(sum([len(cell.body) for cell in cells]))

    def next_cells(self, count_max: int, foreign: ForeignCode | None = None) -> list[StoredCell]:
        """Returns the cells of the next call. The handler's functions may ask for care."""
        if foreign is not None:
            count_max = self.caution.cells_of_call(self.cells, foreign.calls, count_max)
        cells = [self.cells.popleft() for _ in range(min(count_max, len(self.cells)))]
        self._count(-sum([len(cell.body) for cell in cells]))
        if cells:
            self.begun = position_of(cells[-1])
        return cells

    def drop(self) -> None:
        self.cells.clear()
        self._count(-self.cells_bytes)

    def _count(self, change: int) -> None:
        self.cells_bytes += change
        self.queued.total += change

    def leave_to_the_log(self) -> None:
        """Forgets what waits: the log has it, too. So a slow consumer costs no memory.

        The position before it has a digest, which proves that the log is still the same (I16).
        """
        before, done = self.cells[0].added_id - 1, self.cursor.done
        self.drop()
        self.cursor.rewind(done if done.added_id == before else self.begun)

    def report(self, consumer: str, refusal: str | None) -> None:
        """Logs why the shard waits, each reason once."""
        if refusal is not None and refusal != self.reported:
            log.warning(
                "a shard waits: its log contradicts what is known", consumer=consumer, shard=self.shard, why=refusal
            )
        self.reported = refusal


# Caution: how the calls of a shard are made after a process died that had it, so that the cell it died of is found.
#
# A call that kills its process leaves nothing but a checkpoint that names a dead process. Many cells were in flight
# then. So the next process calls the cells of such a shard one at a time, and marks each in the checkpoint before. A
# cell whose mark is found after another death is a suspect. It is called alone, so that nothing else can be what kills
# the process. Caution does no I/O.

CAREFUL_CELLS = 1000
"""How many cells of a shard are called one at a time after a process died."""


class Care(Enum):
    """What the next call of a shard needs."""

    NONE = "none"
    CLAIM = "claim"  # the checkpoint doesn't name this process yet
    MARK = "mark"  # a process died: one cell at a time, marked
    SUSPECT = "suspect"  # the call of the next cell has ended processes: it is marked, and called alone


class ShardCaution:
    """What is known about how the process ended that had a shard before.

    `cells_left` are to be called with care. `kills` counts the processes that the call of the next cell has ended.
    """

    __slots__ = ("cells_left", "is_claimed", "kills")

    def __init__(self) -> None:
        self.is_claimed = True
        self.cells_left = 0
        self.kills = 0

    @property
    def care(self) -> Care:
        if self.kills:
            return Care.SUSPECT
        if self.cells_left > 0:
            return Care.MARK
        return Care.NONE if self.is_claimed else Care.CLAIM

    def begin(self, predecessor: Predecessor, kills: int) -> None:
        """Takes what the checkpoint says when a shard begins."""
        self.is_claimed = predecessor is Predecessor.OURSELVES
        self.kills = kills
        if predecessor is Predecessor.DIED:
            self.cells_left = CAREFUL_CELLS

    def let_go(self) -> None:
        """Notes that the shard was given away. It has to be claimed again, also when it comes back at once."""
        self.is_claimed = False

    def mark(self) -> Mark:
        """Returns what the checkpoint has to say before the next call begins. Call `marked` when it does."""
        return Mark(begun=self.care is not Care.CLAIM, kills=self.kills)

    def marked(self) -> None:
        self.is_claimed = True

    def finished(self) -> None:
        """Notes that the next cell is finished: whatever was suspected of it was wrong."""
        self.kills = 0
        self.cells_left = max(0, self.cells_left - 1)

    def forget(self) -> None:
        """Notes that the next cell is another one now: a generation superseded it."""
        self.kills = 0

    def cells_of_call(self, waiting: Iterable[StoredCell], is_called: Callable[[StoredCell], bool], most: int) -> int:
        """Returns how many cells one call may take. With care that is one that calls a function, or those before it."""
        if self.care in (Care.NONE, Care.CLAIM):
            return most
        for n, cell in enumerate(islice(waiting, most)):
            if is_called(cell):
                return max(1, n)
        return most


class MarkedCalls:
    """The marked calls of one process. While a suspect is called, no other marked call runs. One event loop."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()  # held while a suspect waits or runs, so others wait behind it
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @asynccontextmanager
    async def turn(self, care: Care) -> AsyncIterator[None]:
        """Waits until a call with this care may run, and holds its place."""
        if care in (Care.NONE, Care.CLAIM):
            yield
        elif care is Care.SUSPECT:
            async with self._entry:
                await self._none_runs.wait()
                yield
        else:
            async with self._entry:
                self._running += 1
                self._none_runs.clear()
            try:
                yield
            finally:
                self._running -= 1
                if not self._running:
                    self._none_runs.set()


# What a consumer does about cells that its log has no more: it takes back what they caused (I13, I16).


class History:
    """Compares the checkpoints of one consumer with the history of a home's log."""

    def __init__(self, handler: Handler, checkpoints: CheckpointStore, home_log: Log) -> None:
        self._handler = handler
        self._checkpoints = checkpoints
        self._log = home_log

    async def prove(self, checkpoint: ShardCheckpoint) -> None:
        """Proves the positions of clusters that are further than others, or takes back what they have.

        A promotion takes the checkpoint on its own cluster back with the cells. The lowest position may be right then,
        while another cluster has effects of superseded cells. Raises LocationGone where a position is of another
        history and no generation says so yet, Fenced when another process moved the checkpoint, and StorageUnavailable.
        """
        for position in checkpoint.ahead:
            answer = (await self._log.read({position.shard: position}, 1)).get(position.shard)
            if not isinstance(answer, LocationGone):
                continue
            if answer.generation <= position.generation:
                raise answer
            await self.take_back(answer, checkpoint.position)

    async def identified(self, position: Position) -> Position:
        """Returns a position of the present history with the digest of its cell (I16). Raises StorageUnavailable."""
        answer = (await self._log.read({position.shard: position}, 0)).get(position.shard)
        if answer is None or isinstance(answer, LocationGone) or answer.digest is None:
            raise StorageUnavailable(f"the cell at {position.location} of shard {position.shard} can't be read now")
        return Position(position.shard, position.generation, position.added_id, digest=answer.digest)

    async def take_back(self, gone: LocationGone, to: Position) -> None:
        """Undoes what cells caused that a generation superseded, and moves their shard's checkpoint back.

        Raises Fenced when another process moved the checkpoint, and StorageUnavailable.
        """
        starts_at = gone.resume_at + 1
        log.warning(
            "cells are superseded",
            consumer=self._checkpoints.consumer,
            shard=to.shard,
            generation=gone.generation,
            starts_at=starts_at,
            continues_after=str(to.location),
        )
        effect = await self._handler.supersede(to.shard, starts_at, gone.generation)
        if await self._checkpoints.move({to.shard: Advance(to, restart=True)}, effect.scripts):
            raise Fenced("another process moved the checkpoint")
