"""The handler of trigger programs: it calls a program's functions for each row's cells in order (I12).

A failed call holds its row until the next attempt, and every other row continues. After the last attempt the cell is
parked. Its record is stored in the transaction that moves the checkpoint past it. Later cells of the row wait behind
it. They aren't stored again, because the entity table has them.

A call of the handler is a pass over one shard. It carries out orders, calls what is due again, and then the cells of
its run. So replayed and live cells of a row never overtake each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.codec import erasing
from schemaless.config import ConsumerSettings
from schemaless.consume.breaker import PROBE_MAX_S, Breaker
from schemaless.consume.cell_calls import PASS_S, Call, CellCalls, FailedCall, Lanes, Place, Plan, TriggerCalls
from schemaless.consume.parked_rows import ParkedRows, Pass, Replay, cancel, counted
from schemaless.consume.parked_store import ParkedStore
from schemaless.consume.ports import Death, Effect, HungCall, Outcome, Predecessor, Run, ShardCheckpoint
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.errors import SchemalessError
from schemaless.names import ERASE_COLUMN
from schemaless.quantity import quantity
from schemaless.runtime.events import Event, emit
from schemaless.storage.parked_table import Cause, Ending, Order, ParkedCell
from schemaless.storage.worker_table import FAILING_MAX, FailingCell, OldestCall
from schemaless.topology import Datastore
from schemaless.triggers.context import Context, ContextServices
from schemaless.triggers.decorator import ParkMode, Trigger

log = structlog.get_logger()

_WAITING_MAX = 10_000  # rows of a shard that wait for their next attempt. With more, the shard waits
_FULL_PAUSE_S = 0.25
_RECENT_S = 10.0
_CAUSES_MAX = 5
_ASKS_WITHIN_S = PROBE_MAX_S + 0.5  # a shard with something to call asks for a probe at least so often


class _Turn(msgspec.Struct):
    """When a shard was probed last, and when it asked last. While the breaker is open all shards ask often.

    `can_tell`: it can call the function that fails, so that its probe tells whether the outage is over.
    `probed_failed`: the last probe was of a row that had failed.
    """

    probed_at: float = 0.0
    asked_at: float = 0.0
    can_tell: bool = False
    probed_failed: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """The lowest is the next one."""
        return not self.can_tell, self.probed_at


class TriggerHandler:
    """Calls the functions of one program. `clock` counts seconds, as time.monotonic does, and `now_us` microseconds
    since the epoch. `services` are those of its calls' contexts, by default clients of the API.
    """

    together = False
    """A slow or failing shard must not hold up others."""

    record_within_s = 0.25
    """A kill repeats no more calls of a shard than those of this time."""

    def __init__(
        self,
        program: TriggerProgram,
        datastore: Datastore,
        settings: ConsumerSettings,
        parked: ParkedStore,
        clock: Callable[[], float] = time.monotonic,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        services: ContextServices | None = None,
    ) -> None:
        self._program = program
        self._datastore = datastore
        self._settings = settings
        self._parked = parked
        self._clock = clock
        self._now_us = now_us
        self._breaker = Breaker(settings.breaker, clock)
        self.parallel = program.parallel(settings.parallel)
        lanes = Lanes(max(self.parallel.values()), clock, self._want)
        limits = {name: most for name, most in self.parallel.items() if most < lanes.parallel}
        self._calls = TriggerCalls(settings.attempt_timeout_s, settings.call_limit_s, clock, limits)
        context = Context(program.name, datastore.name, 1, services=services)
        self._cell_calls = CellCalls(program, context, settings, self._breaker, clock, now_us)
        self._run_calls = RunCalls(self._cell_calls, self._calls, self._breaker, lanes, clock)
        self._replays = Replays(
            self._cell_calls, self._calls, self._breaker, parked, lanes, kills_max=settings.kills_max, clock=clock
        )
        self._turns: dict[int, _Turn] = {}
        self._shards: dict[int, ParkedRows] = {}
        self._ended_calls: deque[tuple[float, int, Counter[str]]] = deque()
        self._had_since: dict[int, int] = {}  # microseconds, also of shards that were begun anew
        self._listeners: list[Callable[[Iterable[int]], None]] = []

    # What delivery asks for

    async def handle(self, runs: Sequence[Run]) -> Effect:
        return Effect([await self._before_erasure(run.before_erasure) for run in runs])

    async def take_over(self, checkpoints: Mapping[int, ShardCheckpoint]) -> Mapping[int, float]:
        found = await self._parked.of_shards(checkpoints)
        if self._breaker.stops and any([one.stop_reason is None for one in checkpoints.values()]):
            self._breaker.reset()  # a person resumed a shard: those that are still stopped are read again all the time
        for shard, checkpoint in checkpoints.items():
            self.forget(shard)
            rows = ParkedRows(shard, checkpoint.position.added_id, checkpoint.counted_from, self._now_us())
            self._shards[shard] = rows
            since = self._had_since.get(shard) if checkpoint.predecessor is Predecessor.OURSELVES else None
            if since is None:
                self._had_since[shard] = rows.began_at
            for record in found.get(shard, ()):
                died = checkpoint.predecessor is Predecessor.DIED
                self._replays.take_record(rows, record, died=died, since=since)
        return {shard: self._shards[shard].due_in_s(self._clock()) for shard in checkpoints}

    def forget(self, shard: int) -> None:
        self._turns.pop(shard, None)
        if (rows := self._shards.pop(shard, None)) is not None:
            cancel(rows.replays.values())

    def listen(self, wanted: Callable[[Iterable[int]], None]) -> None:
        self._listeners.append(wanted)

    async def supersede(self, shard: int, starts_at: int, generation: int) -> Effect:
        """Calls that were made can't be taken back. The cells of the new generation come as any others."""
        if (rows := self._shards.get(shard)) is not None:
            rows.supersede(starts_at)
        return Effect([], {self._datastore.home(shard): self._parked.delete_from(shard, starts_at, Ending.SUPERSEDED)})

    @property
    def foreign_code(self) -> TriggerHandler:
        return self

    def calls(self, cell: StoredCell) -> bool:
        return cell.column_name in self._program.triggers and not cell.is_erased

    def judge_suspect(self, cell: StoredCell, kills: int, death: Death) -> Outcome | None:
        """Parks a cell that has ended too many processes."""
        if kills < self._settings.kills_max:
            return None
        rows = self._rows(cell.shard, cell.added_id - 1)
        made = self._begin_pass(rows)
        name, text = (
            self._cell_calls.first_function(cell).name,
            f"{death.value}: its call ended {quantity(kills, 'process')}",
        )
        record = msgspec.structs.replace(
            self._cell_calls.waiting_head(cell, name, text), cause=Cause(death.value), attempts=kills, kills=kills
        )
        made.count("parked", of=cell.added_id)
        self._cell_calls.park(rows, made, record)
        rows.seen = cell.added_id
        made.durable = True
        outcome = made.outcome(1, due_in_s=rows.due_in_s(self._clock()))
        return self._erased(outcome, cell) if cell.column_name == ERASE_COLUMN else outcome

    # What the worker asks for

    def order(self, records: Iterable[ParkedCell]) -> None:
        """Takes orders of records that people gave, when they are due. One that is known already changes nothing."""
        ordered = set()
        for record in records:
            if (rows := self._shards.get(record.shard)) is not None and rows.knows(record):
                rows.orders[record.added_id] = record
                ordered.add(record.shard)
        self._want(ordered)

    def oldest_call(self) -> OldestCall | None:
        return self._calls.oldest()

    @property
    def attempts(self) -> Mapping[tuple[str, str], int]:
        """Calls by function and outcome since the start."""
        return self._cell_calls.attempts

    @property
    def tripped(self) -> str | None:
        """Why its breaker is open, or None."""
        return self._breaker.cause

    def failing(self) -> tuple[int, int, list[FailingCell]]:
        """Returns how many cells wait for their next attempt, how many of them failed, and those that are due first.

        A cell whose function only ever raised Retry didn't fail: that asks to be called later, and uses no attempt up.
        """
        waiting = [
            replay
            for rows in list(self._shards.values())
            for replay in list(rows.replays.values())
            if replay.record.cause is Cause.WAITING and replay.record.attempted_at
        ]
        first = sorted(waiting, key=lambda replay: replay.due_at)[:FAILING_MAX]
        erred = sum(replay.record.attempts > 0 or not replay.is_asked for replay in waiting)
        return len(waiting), erred, [self._cell_calls.failing(replay) for replay in first]

    def recent_calls(self) -> tuple[int, dict[str, int]]:
        """Returns how many calls ended in the last ten seconds or so, and how many of them failed, by the most frequent
        causes. It has to be asked for often.
        """
        now = self._clock()
        self._ended_calls.append((now, sum(self.attempts.values()), Counter(self._cell_calls.failures)))
        while len(self._ended_calls) > 1 and now - self._ended_calls[0][0] > _RECENT_S:
            self._ended_calls.popleft()
        (_, before, failed_before), (_, ended, failed) = self._ended_calls[0], self._ended_calls[-1]
        return ended - before, dict((failed - failed_before).most_common(_CAUSES_MAX))

    def hung_call(self) -> HungCall | None:
        """Returns a call above the limit, with what has to be stored before the process ends."""
        found = self._calls.hung()
        if found is None:
            return None
        call, age_s = found
        place, cell = call.place, call.cell
        assert isinstance(place, Place)
        text = f"{call.marked.name} on {cell.key} hasn't returned for {age_s:.0f} s"
        rows, record = self._shards.get(cell.shard), place.record
        if rows is None or place.made.rows is not rows:  # the shard was given away since, or began anew
            return HungCall(cell, Outcome(0), None, text, is_next=False)
        if (replay := rows.replays.get(cell.added_id)) is not None and replay.task is not None:
            record = replay.record  # the checkpoint has passed the cell, and its pass is recorded
        if record is None:
            last = place.run.cells[place.finished - 1] if place.finished else None
            return HungCall(cell, place.made.outcome(place.finished), last, text)
        made = self._begin_pass(rows)
        kills = record.kills + 1
        hung = msgspec.structs.replace(record, error=text, kills=kills, begun=False, again_in_us=0)
        if kills >= self._settings.kills_max:
            hung = msgspec.structs.replace(hung, cause=Cause.HUNG)
            made.count("parked", counted(record), of=record.added_id)
        made.put(hung)
        return HungCall(cell, made.outcome(0), None, text, is_next=False)

    # A pass

    def _rows(self, shard: int, seen: int) -> ParkedRows:
        return self._shards.setdefault(shard, ParkedRows(shard, seen, 0, self._now_us()))

    def _begin_pass(self, rows: ParkedRows, *, is_probe: bool = False) -> Pass:
        return Pass(self._parked, rows, self._clock() + PASS_S, is_probe=is_probe)

    async def _before_erasure(self, run: Run) -> Outcome:
        outcome = await self._pass(run)
        if run.erasing is None or not outcome.finished:
            return outcome
        await self._parked.forget_calls(run.cells[0].row_key)
        return self._erased(outcome, run.cells[0])

    def _erased(self, outcome: Outcome, entry: StoredCell) -> Outcome:
        """Returns the outcome of the entry of an erasure. No error tells of what was erased any longer (I19)."""
        script = self._parked.erase(entry.row_key, erasing(entry.body))
        return msgspec.structs.replace(outcome, script=";".join(filter(None, [outcome.script, script])), idle=False)

    async def _pass(self, run: Run) -> Outcome:
        rows = self._rows(run.shard, run.after.added_id)
        if not (rows.replays or rows.has_duties or any([self._cell_calls.wants(cell) for cell in run.cells])):
            rows.seen = run.cells[-1].added_id if run.cells else rows.seen
            made = self._begin_pass(rows)
            for cell in run.cells:
                made.count("filtered", of=cell.added_id)
            return msgspec.structs.replace(made.outcome(len(run.cells)), idle=True)
        if self._breaker.is_tripped:
            return await self._while_tripped(run, rows)
        made = self._begin_pass(rows)
        self._replays.carry_out(rows, made)
        finished, retry_in_s = 0, 0.0
        if not (run.careful and run.cells):
            ends_at = made.deadline
            made.deadline -= PASS_S / 2 if run.cells else 0.0  # half of the time is for live cells
            await self._replays.call_due(run, rows, made)
            made.deadline = max(ends_at, self._clock() + PASS_S / 2)
        if len(rows.replays) >= _WAITING_MAX:
            retry_in_s = _FULL_PAUSE_S
        elif run.cells and not (made.durable or made.is_full or made.stop_reason or self._breaker.is_tripped):
            finished = await self._run_calls.call(run, rows, made)
        return self._ended(run, rows, made, finished, retry_in_s)

    def _ended(self, run: Run, rows: ParkedRows, made: Pass, finished: int, retry_in_s: float = 0.0) -> Outcome:
        if finished:
            rows.seen = run.cells[finished - 1].added_id
        return made.outcome(finished, retry_in_s=retry_in_s, due_in_s=rows.due_in_s(self._clock()))

    async def _while_tripped(self, run: Run, rows: ParkedRows) -> Outcome:
        """Tries one call when it is time for that, of the shard whose last one is longest ago."""
        made = self._begin_pass(rows, is_probe=True)
        if self._breaker.stops:
            made.stop_reason = self._breaker.cause
            return made.outcome(0)
        if passed := self._run_calls.pass_over(run, rows, made):
            return self._ended(run, rows, made, passed)
        function = self._breaker.function
        now = self._clock()
        failed = [
            r
            for r in rows.replays.values()
            if r.task is None and r.record.cause is Cause.WAITING and not (r.is_asked and r.due_at > now)
        ]
        failed_alike = [r for r in failed if r.record.function_name == function]
        is_live_alike = bool(run.cells) and function in self._cell_calls.called_for(run.cells[0])
        can_tell = bool(failed_alike) or is_live_alike
        if not (self._is_turn(run.shard, can_tell) and self._breaker.take_probe()):
            pause_s = self._breaker.next_probe_s
            return made.outcome(0, retry_in_s=pause_s, due_in_s=pause_s)
        turn = self._turns[run.shard]
        turn.probed_at = self._clock()
        self._replays.carry_out(rows, made)
        finished = 0
        retries, may_call_live = (failed_alike, is_live_alike) if can_tell else (failed, bool(run.cells))
        # In turns: rows that failed may all be poison, and then only another row shows that the outage is over.
        turn.probed_failed = bool(retries) and not (turn.probed_failed and may_call_live)
        if turn.probed_failed:
            oldest = min(retries, key=lambda replay: replay.record.parked_at)
            await self._replays.replay(rows, oldest, made, run)
        elif run.cells:
            first = msgspec.structs.replace(run, cells=run.cells[:1])
            finished = await self._run_calls.call(first, rows, made)
        if not self._breaker.is_tripped:
            log.info("calls go on: the outage is over", program=self._program.name)
            for others in self._shards.values():
                others.began_at = self._now_us()  # an outage makes no cell too old to be tried again
            self._want(self._shards)
        pause_s = self._breaker.next_probe_s if self._breaker.is_tripped else 0.0
        return self._ended(run, rows, made, finished, pause_s)

    def _is_turn(self, shard: int, can_tell: bool) -> bool:
        """Returns whether no other shard that asks has waited longer for its probe, or can tell more by it."""
        now = self._clock()
        turn = self._turns.setdefault(shard, _Turn())
        turn.asked_at, turn.can_tell = now, can_tell
        return turn.rank <= min(t.rank for t in self._turns.values() if now - t.asked_at < _ASKS_WITHIN_S)

    def _want(self, shards: Iterable[int]) -> None:
        wanted = list(shards)
        for listener in self._listeners if wanted else ():
            listener(wanted)


# RunCalls: calls a program's functions for the cells of a run, one after the other or rows beside each other.


class Lane:
    """The cells of one row that one pass calls. `replay` is its record once the pass has ended without it."""

    __slots__ = ("cells", "marked", "replay", "task")

    def __init__(self, cells: deque[StoredCell]) -> None:
        self.cells = cells
        self.replay: Replay | None = None
        self.task: asyncio.Task[None]
        self.marked: Trigger | None = None


@dataclass(eq=False)
class RunCalls:
    """Runs of one program. `clock` counts seconds."""

    cell_calls: CellCalls
    calls: TriggerCalls
    breaker: Breaker
    lanes: Lanes
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        triggers = self.cell_calls.program.triggers
        self._has_async = any(marked.is_async for found in triggers.values() for marked in found)

    async def call(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Calls the functions for the cells of a run. Returns how many are finished or set aside."""
        if self.lanes.parallel > 1 and not (run.careful or made.is_probe):
            return await self._in_lanes(run, rows, made)
        plan = self._plan_run(run, rows, made)
        return await (self.calls.drive(plan) if self._has_async else self.calls.drive_in_thread(plan))

    def pass_over(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Finishes the first cells of a run, up to one that a function is called for. Returns how many."""
        for n, cell in enumerate(run.cells):
            if cell.row_key in rows.held and self.cell_calls.wants(cell):
                made.count("waiting", of=cell.added_id)
            elif not self.cell_calls.called_for(cell):
                made.count("filtered", of=cell.added_id)
            else:
                return n
        return len(run.cells)

    def _plan_run(self, run: Run, rows: ParkedRows, made: Pass) -> Plan[int]:
        """Calls one cell after the other."""
        held, deadline = rows.held, made.deadline
        for n, cell in enumerate(run.cells):
            if n and (self.clock() > deadline or made.is_full):
                return n
            if not self.cell_calls.wants(cell):
                made.count("filtered", of=cell.added_id)
            elif cell.row_key in held:
                made.count("waiting", of=cell.added_id)
            else:
                failed = yield from self.cell_calls.plan(cell, made, Place(made, run, n), None)
                if failed:
                    if not self.cell_calls.set_aside(rows, made, cell, failed, None):
                        return n
                    if self.breaker.is_tripped:
                        return n + 1
        return len(run.cells)

    async def _in_lanes(self, run: Run, rows: ParkedRows, made: Pass) -> int:
        """Calls rows beside each other, the cells of each in order. A call that takes long goes on beyond the pass."""
        lanes: dict[bytes, Lane] = {}
        dispatched = 0
        for cell in run.cells:
            if made.stop_reason or self.breaker.is_tripped or made.is_full:
                break
            if dispatched and self.clock() > made.deadline:
                break
            if not self.cell_calls.wants(cell):
                made.count("filtered", of=cell.added_id)
            elif cell.row_key in rows.held:
                made.count("waiting", of=cell.added_id)
            elif (lane := lanes.get(cell.row_key)) is not None and not lane.task.done():
                lane.cells.append(cell)
            elif await self.lanes.has_free([lane.task for lane in lanes.values()], rows, made):
                lane = lanes[cell.row_key] = Lane(deque([cell]))
                lane.task = asyncio.create_task(self._call_lane(lane, run, rows, made))
            else:
                break
            dispatched += 1
        await self._end(lanes.values(), rows, made)
        return dispatched

    async def _end(self, lanes: Collection[Lane], rows: ParkedRows, made: Pass) -> None:
        """Waits a little for the calls in flight. The checkpoint passes those that take longer."""
        if running := [lane.task for lane in lanes if not lane.task.done()]:
            await asyncio.wait(running, timeout=max(0.0, made.deadline - self.clock()) + PASS_S)
        for lane in lanes:
            if lane.task.done():
                lane.task.result()
            if lane.cells:
                self._detach(lane, rows, made)

    async def _call_lane(self, lane: Lane, run: Run, rows: ParkedRows, made: Pass) -> None:
        while lane.cells and made.stop_reason is None:
            cell = lane.cells[0]
            plan = self.cell_calls.plan(cell, made, Place(made, run, 0), None)
            try:
                call = next(plan)
                while True:
                    lane.marked = call.marked
                    error = await self.calls.make(call)
                    if (replay := lane.replay) is not None:  # the pass has ended without it
                        return self.lanes.ended(replay, error, rows)
                    call = plan.send(error)
            except StopIteration as stop:
                failed = stop.value
            if failed and not self.cell_calls.set_aside(rows, made, cell, failed, None):
                return
            lane.cells.popleft()
            if failed:
                for behind in lane.cells:
                    made.count("waiting", of=behind.added_id)
                lane.cells.clear()

    def _detach(self, lane: Lane, rows: ParkedRows, made: Pass) -> None:
        """Lets the checkpoint pass cells that no pass waits for. Their row has a record until they are finished."""
        cell, now = lane.cells[0], self.clock()
        marked = lane.marked or self.cell_calls.first_function(cell)
        record = self.cell_calls.waiting_head(cell, marked.name, "its call takes long")
        made.put(record)
        for waiting in lane.cells:
            made.count("waiting", of=waiting.added_id)
        replay = rows.wait(record, now)
        if not lane.task.done():
            lane.replay = replay
            self.lanes.leave(replay, lane.task, rows)


# Replays: calls parked cells again, and then the cells of their rows that wait behind them, in order (I12).
#
# It carries out what people ordered, and what records of a former owner of the shard ask for. Where rows are called
# beside each other, a pass doesn't wait for a call that takes long, so it holds its own row only.

_STORAGE_PAUSE_S = 1.0
_LANE_MIN_S = 0.02  # a call that begins at the end of a pass has so long until it outlasts the pass


class ReplayLane:
    """The replay of one row in one pass. `call` runs now. `left`: the record that it is of, once the pass has ended."""

    __slots__ = ("call", "left", "replay", "task")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.call: Call | None = None
        self.left: Replay | None = None
        self.task: asyncio.Task[None]

    @property
    def is_in_pass(self) -> bool:
        return self.left is None and not self.task.done()


@dataclass(eq=False)
class Replays:
    """The replays of one program. `clock` counts seconds."""

    cell_calls: CellCalls
    calls: TriggerCalls
    breaker: Breaker
    parked: ParkedStore
    lanes: Lanes
    kills_max: int
    clock: Callable[[], float]

    def take_record(self, rows: ParkedRows, record: ParkedCell, *, died: bool, since: int | None) -> None:
        """Takes a record of a shard that begins. If a process died while it called the cell, the cell may be why.

        `since`: this process has had the shard from then on, in microseconds, None if it takes it only now.
        """
        marked, was = self.cell_calls.function_of(record), counted(record)
        if record.begun:
            kills = record.kills + died
            record = msgspec.structs.replace(record, begun=False, kills=kills)
            if kills < self.kills_max:
                rows.to_unmark.append(record)
            else:
                error = f"{Death.KILLED.value}: its call ended {quantity(kills, 'process')}"
                record = msgspec.structs.replace(record, cause=Cause.KILLED, error=error, ordered=None)
                rows.to_put.append((record, was))
        elif record.cause is Cause.WAITING and marked is None:
            record = msgspec.structs.replace(record, cause=Cause.ERROR, error=self.cell_calls.no_function(record))
            rows.to_put.append((record, was))
        if record.cause is Cause.WAITING:
            inherited = bool(record.attempted_at) and (since is None or record.attempted_at[-1] < since)
            due_at = self.clock() + record.again_in_us / 1e6
            rows.wait(record, due_at, is_asked=True).inherited = inherited
        elif not record.holds_row:
            rows.apart.add(record.added_id)
        else:
            rows.park(record, holds_row=marked is None or marked.park is ParkMode.ROW, now=self.clock())

    def carry_out(self, rows: ParkedRows, made: Pass) -> None:
        """Stores what taking over changed, and begins what people ordered."""
        for record, was in rows.to_put:
            made.put(record)
            made.count(counted(record), was, of=record.added_id)
        rows.to_put.clear()
        for record in rows.to_unmark:
            made.unmark(record)
        rows.to_unmark.clear()
        for record in rows.orders.values():
            replay = rows.replays.get(record.added_id)
            if not rows.knows(record) or (replay is not None and replay.task is not None):
                continue
            if record.ordered is Order.RETRY and self.cell_calls.function_of(record) is None:
                made.put(msgspec.structs.replace(record, error=self.cell_calls.no_function(record)))
                continue
            if replay is None:
                replay = rows.replays[record.added_id] = Replay(record, self.clock())
            elif replay.after >= record.added_id:
                continue  # what waits behind it is being called. The order comes again
            elif replay.order_due_at == record.due_at:
                continue  # it is being carried out
            replay.due_at, replay.ordered, replay.order_due_at = self.clock(), record.ordered, record.due_at
            replay.record = msgspec.structs.replace(replay.record, job=record.job)
        rows.orders.clear()

    async def call_due(self, run: Run, rows: ParkedRows, made: Pass) -> None:
        """Calls what is due again, rows beside each other up to the limit."""
        due = rows.due(self.clock())
        if run.careful and due:
            replay = due[0]
            if not replay.record.begun and replay.ordered is not Order.DISCARD:
                replay.record = msgspec.structs.replace(replay.record, begun=True)
                return made.begin(replay.record)
            return await self.replay(rows, replay, made, run)
        waiting = deque(sorted(due, key=lambda replay: replay.result is None))  # what has ended needs no lane
        lanes: list[ReplayLane] = []
        try:
            while waiting and not (
                self.clock() >= made.deadline or made.stop_reason or made.is_full or self.breaker.is_tripped
            ):
                replay = waiting[0]
                if self.lanes.parallel == 1:
                    await self.replay(rows, replay, made, run)
                elif replay.result or await self.lanes.has_free([lane.task for lane in lanes], rows, made):
                    lanes.append(lane := ReplayLane(replay))
                    lane.task = asyncio.create_task(self.replay(rows, replay, made, run, lane))
                else:
                    break
                waiting.popleft()
            await self._end(lanes, rows, made)
        finally:
            for lane in lanes:
                if lane.is_in_pass:
                    lane.task.cancel()

    async def _end(self, lanes: Collection[ReplayLane], rows: ParkedRows, made: Pass) -> None:
        """Waits a little for the calls in flight. Those that take longer go on without the pass.

        What reads cells of its row is waited for: the store has time limits of its own.
        """
        while running := [lane for lane in lanes if lane.is_in_pass]:
            left_s = max(_LANE_MIN_S, made.deadline - self.clock())
            await asyncio.wait([lane.task for lane in running], timeout=left_s)
            for lane in running:
                if lane.call is not None and lane.is_in_pass:
                    self._detach(lane, lane.call, rows, made)
        for lane in lanes:
            if lane.left is None:
                lane.task.result()

    def _detach(self, lane: ReplayLane, call: Call, rows: ParkedRows, made: Pass) -> None:
        """Lets a call go on beyond its pass. Its record names the cell and the function that it is of."""
        replay, cell, name = lane.replay, call.cell, call.marked.name
        if cell.added_id != replay.record.added_id:
            replay = self._move_head(rows, replay, made, cell, name, "its call takes long")
        elif name != replay.record.function_name:
            replay.record = msgspec.structs.replace(replay.record, function_name=name, attempts=0)
        lane.left = replay
        self.lanes.leave(replay, lane.task, rows)

    async def replay(
        self, rows: ParkedRows, replay: Replay, made: Pass, run: Run, lane: ReplayLane | None = None
    ) -> None:
        """Calls a record's cell again, and then the cells of its row that wait behind it, in order.

        Without a lane the pass waits for each call to its end.
        """
        emit(Event.REPLAY_BEGINS)
        record = replay.record
        has_counted = replay.ordered is Order.DISCARD and replay.after < record.added_id
        if has_counted:
            made.count("skipped", counted(record), of=record.added_id)
            replay.after = record.added_id
        while True:
            until = rows.seen if rows.held.get(record.row_key) == record.added_id else record.added_id
            cells = await self._read_on(rows, replay, until, may_wait=not has_counted)
            if cells is None:
                return
            for cell in cells:
                is_behind = cell.added_id != record.added_id
                replay.is_erased |= cell.is_erased and not is_behind
                if is_behind and (
                    self.clock() > made.deadline or run.careful or made.stop_reason or self.breaker.is_tripped
                ):
                    self._move_head(rows, replay, made, cell)
                    return
                if not await self._call(rows, replay, made, Place(made, run, 0, record), cell, lane):
                    return
                replay.after, has_counted = cell.added_id, True
            if not cells and (until == rows.seen or rows.held.get(record.row_key) != record.added_id):
                return self._leave(rows, replay, made)

    async def _call(
        self, rows: ParkedRows, replay: Replay, made: Pass, place: Place, cell: StoredCell, lane: ReplayLane | None
    ) -> bool:
        """Calls the functions for one cell of a row. Returns whether the row goes on in this pass."""
        head = replay.record if cell.added_id == replay.record.added_id else None
        plan = self.cell_calls.plan(cell, made, place, replay if head else None)
        if lane is None:
            failed = await self.calls.drive(plan)
        else:
            failed = await self._drive(plan, lane, rows)
            if lane.left is not None:
                return False
        if failed is None:
            return True
        is_set_aside = self.cell_calls.set_aside(rows, made, cell, failed, head)
        if head is None:
            if is_set_aside:
                self._leave(rows, replay, made)
            else:  # the shard stops at this cell, and the checkpoint has passed it
                self._move_head(rows, replay, made, cell)
        return False

    async def _drive(self, plan: Plan[FailedCall | None], lane: ReplayLane, rows: ParkedRows) -> FailedCall | None:
        """Makes the calls of a plan. If the pass ends before one of them, that is the last one."""
        try:
            lane.call = next(plan)
            while True:
                error = await self.calls.make(lane.call)
                if lane.left is not None:
                    self.lanes.ended(lane.left, error, rows)
                    return None
                lane.call = plan.send(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            lane.call = None

    async def _read_on(
        self, rows: ParkedRows, replay: Replay, until: int, *, may_wait: bool
    ) -> Sequence[StoredCell] | None:
        """Returns the next cells of a row, or None if they can't be read now.

        Raises SchemalessError if something is counted that its record doesn't say: a kill would count it again.
        """
        row_key, columns = replay.record.row_key, self.cell_calls.program.triggers
        try:
            return await self.parked.of_row(rows.shard, row_key, columns, replay.after, until)
        except SchemalessError as error:
            if not may_wait:
                raise
            log.warning("a row waits for its cells", shard=rows.shard, why=str(error))
            replay.due_at = self.clock() + _STORAGE_PAUSE_S
            return None

    def _move_head(
        self, rows: ParkedRows, replay: Replay, made: Pass, cell: StoredCell, function: str | None = None, why: str = ""
    ) -> Replay:
        """Notes that the row goes on with another cell, so that a kill repeats no more than a pass."""
        self._leave(rows, replay, made)
        name = function or self.cell_calls.first_function(cell).name
        record = self.cell_calls.waiting_head(cell, name, why)
        made.put(record)
        return rows.wait(record, self.clock())

    def _leave(self, rows: ParkedRows, replay: Replay, made: Pass) -> None:
        """Removes a record that its row has passed. If its cell is parked alone, it stays for people."""
        record, marked = replay.record, self.cell_calls.function_of(replay.record)
        rows.remove(record)
        if replay.is_erased:
            made.delete(record, Ending.ERASED)
        elif record.cause is not Cause.WAITING and replay.ordered is None and marked and marked.park is ParkMode.CELL:
            made.release_row(record)
            rows.apart.add(record.added_id)
        else:
            made.delete(record, Ending.DISCARDED if replay.ordered is Order.DISCARD else Ending.FINISHED)
