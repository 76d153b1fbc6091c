"""The handler of trigger programs: it calls a program's functions for each row's cells in order (I12).

A failed call holds its row until the next attempt, and every other row continues. After the last attempt the cell is
parked. Its record is stored in the transaction that moves the checkpoint past it. Later cells of the row wait behind
it. They aren't stored again, because the entity table has them.

A call of the handler is a pass over one shard. It carries out orders, calls what is due again, and then the cells of
its run. So replayed and live cells of a row never overtake each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.config import ConsumerSettings
from schemaless.consume.breaker import PROBE_MAX_S, Breaker
from schemaless.consume.cell_calls import CellCalls, Place
from schemaless.consume.lanes import PASS_S, Lanes
from schemaless.consume.parked_rows import ParkedRows, Pass, cancel, counted
from schemaless.consume.parked_store import ParkedStore
from schemaless.consume.ports import Death, Effect, HungCall, Outcome, Predecessor, Run, ShardCheckpoint
from schemaless.consume.replays import Replays
from schemaless.consume.run_calls import RunCalls
from schemaless.consume.trigger_calls import TriggerCalls
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.quantity import quantity
from schemaless.storage.parked_history_table import Ending
from schemaless.storage.parked_table import Cause, ParkedCell
from schemaless.storage.worker_table import FAILING_MAX, FailingCell, OldestCall
from schemaless.topology import Datastore
from schemaless.triggers.context import Context, ContextServices

log = structlog.get_logger()

_WAITING_MAX = 10_000  # rows of a shard that wait for their next attempt. With more, the shard waits
_FULL_PAUSE_S = 0.25
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
        self._had_since: dict[int, int] = {}  # microseconds, also of shards that were begun anew
        self._listeners: list[Callable[[Iterable[int]], None]] = []

    # What delivery asks for

    async def handle(self, runs: Sequence[Run]) -> Effect:
        return Effect([await self._pass(run) for run in runs])

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
        return cell.column_name in self._program.triggers

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
        return made.outcome(1, due_in_s=rows.due_in_s(self._clock()))

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
        erred = sum(replay.record.attempts > 0 for replay in waiting)
        return len(waiting), erred, [self._cell_calls.failing(replay) for replay in first]

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
        hung = msgspec.structs.replace(record, error=text, kills=kills, begun=False)
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
        failed = [r for r in rows.replays.values() if r.task is None and r.record.cause is Cause.WAITING]
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
                for replay in list(others.replays.values()):  # a pass of another shard may add some in its thread
                    replay.due_at = min(replay.due_at, self._clock())
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
