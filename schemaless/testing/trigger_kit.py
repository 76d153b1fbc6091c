"""TriggerKit: runs a trigger program in memory, step by step, for tests of its functions (docs/testing-triggers.md).

The engine is the real one: attempts, parking, order, breaker and effects are those of a worker. Time is a clock that
the test moves. A worker can be killed at every point, and the next one takes over.
"""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.client.answers import PutAnswer
from schemaless.client.async_client import AsyncClient
from schemaless.client.attempts import Limits
from schemaless.client.client import Client
from schemaless.config import ConsumerSettings
from schemaless.consume.delivery import Delivery
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram, load_program, program_of
from schemaless.names import ERASE_COLUMN
from schemaless.position import BEGINNING_DIGEST, Position
from schemaless.sharding import shard_of
from schemaless.storage.checkpoint_table import NO_COUNTS, CellCounts
from schemaless.storage.parked_table import Cause, Ending, Order, ParkedCell
from schemaless.testing.memory_api import MemoryApi
from schemaless.testing.memory_program import (
    MemoryCheckpoints,
    MemoryEntityTable,
    MemoryHomeLog,
    MemoryParkedStore,
    MemoryProgram,
)
from schemaless.topology import Datastore
from schemaless.triggers.context import Context, ContextServices, require_effects
from schemaless.triggers.decorator import Takes, Trigger
from schemaless.triggers.effects import Ledger
from schemaless.triggers.lazy_work import is_waited_for, require_done, waited_for
from schemaless.triggers.verdicts import Retry

# MemoryWorker: a worker of a trigger program in memory. A real delivery and a real handler, and a clock of its own.
#
# Belongs to one event loop. Nothing of it waits in real time, except for functions that do.

BATCH_CELLS_MAX = 8
_CALL_S = 0.2
_LATE_CALL_S = 1.0


def memory_settings(**settings: object) -> ConsumerSettings:
    """Returns the settings of a worker that needs no servers. Those that aren't given are the defaults."""
    return ConsumerSettings(topology=Path("unused"), kafka="unused", **settings)  # type: ignore[arg-type]


class MemoryWorker:
    """The worker of one number, which has all shards. `now` is its clock in seconds."""

    record_within_s = TriggerHandler.record_within_s
    pause_max_s = 0.25

    def __init__(
        self,
        program: MemoryProgram,
        functions: TriggerProgram,
        number: int,
        settings: ConsumerSettings,
        *,
        now: float,
        checkpoints: MemoryCheckpoints | None = None,
        services: ContextServices | None = None,
    ) -> None:
        self.program = program
        self.number = number
        self.now = now
        parked = MemoryParkedStore(program)
        self.handler = TriggerHandler(
            functions, program.datastore, settings, parked, self._clock, lambda: int(self.now * 1e6), services
        )
        self.handler.record_within_s = self.record_within_s
        self.delivery = Delivery(
            self.handler,
            checkpoints or MemoryCheckpoints(program, number),
            MemoryHomeLog(program),
            batch_cells_max=BATCH_CELLS_MAX,
            clock=self._clock,
        )
        self._given_time = set(asyncio.all_tasks())  # those of the test aren't calls
        program.present.add(number)
        program.now = max(program.now, now)
        self.look()
        self.delivery.gain(program.checkpoints)

    def look(self) -> None:
        """Looks at the heads, and for what people ordered."""
        self.delivery.look(self.program.heads())
        self.handler.order(self.program.due())

    async def pass_by(self, seconds: float, steps: int = 40) -> None:
        """Works for so many seconds of its clock, in at most so many steps before each look."""
        end = self.now + seconds
        while True:  # the clock moves with each round
            self.look()
            pause_s = 0.05
            for _ in range(steps):
                pause_s = await self.delivery.step()
                await asyncio.sleep(0)
                if calls := self.delivery.calls:
                    await asyncio.wait(calls, timeout=_CALL_S)
                    pause_s = 0.0
                elif pause_s > 0.0:
                    break
            if self.now >= end:
                return
            # Calls that no pass waits for get real time, once each. Their threads may just be slow to start, while
            # this clock runs through seconds in no time.
            late = asyncio.all_tasks() - {asyncio.current_task()} - self._given_time
            if late:
                self._given_time |= late
                await asyncio.wait(late, timeout=_LATE_CALL_S)
            self.now += max(0.01, min(pause_s, self.pause_max_s, end - self.now))
            self.program.now = max(self.program.now, self.now)

    async def kill(self) -> None:
        """Ends it without a word, with all other tasks of the event loop. Its number stays present."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _clock(self) -> float:
        return self.now


_BEGINS_AT_S = 1_767_225_600.0  # 2026-01-01
_ROUND_S = 0.03
_ROUNDS_MAX = 1_000
HELD_S = 1.0
_STEPS_MAX = 100_000
_HOSTS = ("http://memory",)
_LIMITS = Limits(attempts_max=1)


@dataclass(frozen=True, slots=True)
class SetAside:
    """A cell that is parked, or that waits for its next attempt: then its cause is `waiting`.

    `location` is SHARD:GENERATION:ADDED_ID.
    """

    row_key: uuid.UUID
    column_name: str
    ref_key: int
    location: str
    function: str
    cause: str
    error: str
    attempts: int
    holds_row: bool


class _PromptWorker(MemoryWorker):
    """A worker that stores its checkpoints soon, so that a delivery needs no time."""

    record_within_s = 0.001
    pause_max_s = 1.0


class TriggerKit:
    """A datastore in memory, and a program over it. Close it, or use it in a `with`.

    `program` is a module, its dotted name, or functions that are marked with @trigger. `settings` are those of
    docs/settings.md, without their prefix: `attempts_max=3`.
    """

    def __init__(
        self,
        program: ModuleType | str | Sequence[Callable[..., Any]],
        *,
        datastore: str = "mezzanine",
        shards: int = 1,
        **settings: object,
    ) -> None:
        self._functions = _program_of(program)
        self._settings = memory_settings(**settings)
        self._now = _BEGINS_AT_S
        self._worker: MemoryWorker | None = None
        self._life: WorkerLife | None = None
        self._workers = 0
        named = Datastore(datastore, shards, 1, ("memory",))
        self._store = MemoryProgram(
            self._functions.consumer, named, MemoryEntityTable(named, clock_us=lambda: int(self.now * 1e6))
        )
        self._api = MemoryApi(self._store)
        self._failures: list[tuple[str | None, Exception]] = []
        self._held: set[uuid.UUID] = set()
        self._kill_at: int | None = None
        self._in_call = threading.local()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="trigger kit", daemon=True)
        self._thread.start()
        self.calls: list[SeenCall] = []
        """The calls that ended, in their order."""
        self.points: list[str] = []
        """The points that workers reached since the start, or since `kill_at`."""
        self.kills = 0
        self.client = Client(_HOSTS, datastore=datastore, transport=self._api, limits=_LIMITS)
        """The test's own client of the datastore."""

    # Time and cells

    @property
    def now(self) -> float:
        """The clock, in seconds since the epoch."""
        return self._now if self._worker is None else self._worker.now

    def put(
        self, row_key: uuid.UUID | str, column: str, body: Mapping[str, Any], ref_key: int | None = None
    ) -> PutAnswer:
        """Writes a cell, by default the next version."""
        if ref_key is None:
            return self.client.put(row_key, column, body)
        return self.client.put_cell(row_key, column, ref_key, body)

    def erase(self, row_key: uuid.UUID, column: str | None = None, ref_key: int | None = None) -> None:
        """Erases the bodies of a row, of one of its columns, or of one cell, as an administrator does."""
        key, cells = RowKey(row_key.bytes), dict[ColumnName, list[RefKey]]()
        shard = shard_of(key, self._store.datastore.shards)
        with self._store.lock:
            for cell in self._store.table.read_after(shard, 0, _STEPS_MAX):
                is_meant = column in (None, cell.column_name) and ref_key in (None, cell.ref_key)
                if cell.row_key == key and is_meant and not cell.is_erased and cell.column_name != ERASE_COLUMN:
                    cells.setdefault(cell.column_name, []).append(cell.ref_key)
            self._store.table.erase(shard, key, cells)

    @property
    def store_is_away(self) -> bool:
        """While it is True, the store answers nobody: neither functions, nor the worker, nor `client`."""
        return self._store.is_away

    @store_is_away.setter
    def store_is_away(self, is_away: bool) -> None:
        self._store.is_away = is_away

    # Deliveries

    def deliver(self) -> None:
        """Lets a worker call everything that is due, and store its checkpoints. Starts one if there is none.

        The clock moves by less than a tenth of a second, unless calls write cells for further calls.
        """
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Lets the worker work for so many seconds of the clock, with all attempts that are due meanwhile."""
        self._run(self._work(seconds))

    def redeliver(self) -> None:
        """Delivers every cell again from the beginning, as after a seek. Parked cells come again, too."""
        self.deliver()
        self._run(self._seek_to_the_beginning())
        self.deliver()

    def deliver_shuffled(self, seed: int) -> None:
        """Delivers with the rows in a random order. Each row's cells stay in theirs."""
        waiting = {
            uuid.UUID(bytes=cell.row_key) for shard in self._store.checkpoints for cell in self._new_cells(shard)
        }
        rows = sorted(waiting - self._held)
        random.Random(seed).shuffle(rows)
        self._held.update(rows)
        self.deliver()
        for row_key in rows:
            self.release(row_key)
            self.advance(HELD_S)

    def hold(self, row_key: uuid.UUID) -> None:
        """Makes a row wait, as if its function raised Retry, while other rows go on."""
        self._held.add(row_key)

    def release(self, row_key: uuid.UUID) -> None:
        """Lets a row go on within a second of the clock."""
        self._held.discard(row_key)

    # Faults

    def fail_next(self, error: Exception, *, times: int = 1, function: str | None = None) -> None:
        """Makes the next calls raise an error in place of the function, or those of one function."""
        self._failures += [(function, error)] * times

    def kill_at(self, point: int) -> None:
        """Kills the worker at the point of this number, counted from 0 from now on. `points` lists them from now on."""
        self.points.clear()
        self._kill_at = point
        if self._life is not None:
            self._life.kill_at = point

    def kill(self) -> None:
        """Kills the worker. In a function, say in a fake of what it calls, nothing after this is run."""
        if self._life is not None:
            self._life.is_over = True
        if getattr(self._in_call, "now", False) or threading.current_thread() is self._thread:
            raise Killed("by the test")
        self._run(self._bury())

    # What became of cells

    @property
    def counts(self) -> CellCounts:
        """What became of the cells, as the checkpoints have it."""
        return sum([row.counts for row in self._store.checkpoints.values()], NO_COUNTS)

    @property
    def tripped(self) -> str | None:
        """Why the breaker is open, or None."""
        return None if self._worker is None else self._worker.handler.tripped

    @property
    def stopped(self) -> dict[int, str]:
        """The shards that a function stopped, with the reasons."""
        return {shard: row.stopped for shard, row in self._store.checkpoints.items() if row.stopped is not None}

    def parked(self) -> list[SetAside]:
        """Returns the parked cells, in the order of their shard. What waits behind one in its row isn't listed."""
        return [_set_aside(record) for record in self._store.records() if record.cause is not Cause.WAITING]

    def waiting(self) -> list[SetAside]:
        """Returns the cells whose next attempt is due later."""
        return [_set_aside(record) for record in self._store.records() if record.cause is Cause.WAITING]

    def retry(self, cells: Iterable[SetAside] | None = None) -> None:
        """Orders that parked cells are called again, by default all. The next delivery does it."""
        self._order(cells, Order.RETRY)

    def discard(self, cells: Iterable[SetAside] | None = None) -> None:
        """Orders that parked cells are never called again, by default all. The next delivery lets their rows go on."""
        self._order(cells, Order.DISCARD)

    def close(self) -> None:
        """Ends the worker."""
        if self._life is not None:
            self._life.is_over = True
        self._run(self._bury())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.client.close()

    def __enter__(self) -> TriggerKit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the thread of the event loop

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _work(self, seconds: float) -> None:
        worker = self._worker or self._start()
        with suppress(Killed):
            await worker.pass_by(seconds, _STEPS_MAX)
            for _ in range(_ROUNDS_MAX):
                before = self._state()
                await worker.pass_by(_ROUND_S, _STEPS_MAX)
                if self._state() == before:
                    break
        if self._life is not None and self._life.is_over:
            await self._bury()

    def _state(self) -> tuple[object, ...]:
        """Returns what differs after a round in which something happened."""
        rows = self._store.checkpoints.values()
        return len(self.points), len(self.calls), [row.version for row in rows], self._store.heads()

    def _start(self) -> MemoryWorker:
        self._workers += 1
        life = self._life = WorkerLife(self.points)
        life.kill_at = self._kill_at
        name, transport = self._store.datastore.name, WatchedTransport(self._api, life)
        services = ContextServices(name, Ledger(lambda: self.now))
        services.client = Client(_HOSTS, datastore=name, transport=transport, limits=_LIMITS)
        services.async_client = AsyncClient(_HOSTS, datastore=name, transport=transport, limits=_LIMITS)
        functions = watched(self._functions, life, self._before_call, self.calls)
        checkpoints = MemoryCheckpoints(self._store, self._workers, life.reach)
        self._worker = _PromptWorker(
            self._store, functions, self._workers, self._settings,
            now=self._now, checkpoints=checkpoints, services=services,
        )  # fmt: skip
        return self._worker

    async def _bury(self) -> None:
        if self._worker is not None:
            self._now, self._kill_at = self._worker.now, None
            await self._worker.kill()
            self._worker = self._life = None
            self.kills += 1

    async def _seek_to_the_beginning(self) -> None:
        for shard in self._store.checkpoints if self._worker is not None else ():
            assert self._worker is not None
            script = MemoryParkedStore(self._store).delete_from(shard, 1, Ending.SOUGHT)
            await self._worker.delivery.seek(Position(shard, 1, 0, digest=BEGINNING_DIGEST), script)

    # In the threads of functions

    def _before_call(self, call: SeenCall) -> None:
        self._in_call.now = True
        if call.row_key in self._held:
            raise RowHeld(HELD_S)
        for n, (function, error) in enumerate(self._failures):
            if function in (None, call.function):
                del self._failures[n]
                raise error

    def _new_cells(self, shard: int) -> Sequence[StoredCell]:
        after = self._store.checkpoints[shard].position.added_id
        with self._store.lock:
            return self._store.table.read_after(shard, after, _STEPS_MAX)

    def _order(self, cells: Iterable[SetAside] | None, order: Order) -> None:
        wanted = {cell.location for cell in (self.parked() if cells is None else cells)}
        for record in self._store.records():
            if _set_aside(record).location in wanted:
                self._store.order(record, order)


def _program_of(program: ModuleType | str | Sequence[Callable[..., Any]]) -> TriggerProgram:
    if isinstance(program, ModuleType):
        return load_program(program.__name__)
    if isinstance(program, str):
        return load_program(program)
    return program_of("program", {str(n): function for n, function in enumerate(program)})


def _set_aside(record: ParkedCell) -> SetAside:
    return SetAside(
        uuid.UUID(bytes=record.row_key), record.column_name, record.ref_key,
        f"{record.shard}:{record.generation}:{record.added_id}", record.function_name, record.cause.value,
        record.error, record.attempts, record.holds_row,
    )  # fmt: skip


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Says nothing of tasks that a kill ended."""
    if not isinstance(context.get("exception"), Killed):
        loop.default_exception_handler(context)


# What a test sees of a worker, and does to it: points that it reaches, calls that it makes, and where it is killed.


class Killed(BaseException):  # like the kill, it passes what functions catch
    """The worker is killed. Functions that it runs end here."""


class RowHeld(Retry):
    """The test holds the row, so this is no call of the function."""


class WorkerLife:
    """One worker from its start to its end. `points` are those that it reached. Threads may share it."""

    def __init__(self, points: list[str]) -> None:
        self.points = points
        self.kill_at: int | None = None
        self.is_over = False
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """Notes a point. Raises Killed where the worker is killed, and ever after."""
        with self._lock:
            if self.is_over:
                raise Killed(point)
            self.points.append(point)
            if self.kill_at is not None and len(self.points) > self.kill_at:
                self.is_over = True
                raise Killed(point)


class WatchedTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """The API as the functions of one worker see it. Each request has a point before it and one after it."""

    def __init__(self, api: MemoryApi, life: WorkerLife) -> None:
        self._api = api
        self._life = life

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._life.reach(f"before {_name(request)}")
        response = self._api.handle_request(request)
        self._life.reach(f"after {_name(request)}")
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._life.reach(f"before {_name(request)}")
        response = await self._api.handle_async_request(request)
        self._life.reach(f"after {_name(request)}")
        return response


def _name(request: httpx.Request) -> str:
    """Returns `GET STATUS`, or `POST batch/put`."""
    parts = request.url.path.strip("/").split("/")[2:]
    return f"{request.method} {parts[2] if parts[0] == 'cells' and len(parts) > 2 else '/'.join(parts)}"


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of a function. `error` is what it raised, and `attempt` counts from 1."""

    function: str
    row_key: uuid.UUID
    column_name: str
    ref_key: int
    attempt: int
    error: BaseException | None = None


BeforeCall = Callable[[SeenCall], None]
"""May raise in place of the call."""


@dataclass(frozen=True, slots=True)
class _WatchedTrigger(Trigger):
    """A trigger whose function gets the stored cell and the context, whatever the user's takes."""

    def arguments(self, cell: StoredCell, context: Context) -> tuple[Any, ...]:
        return cell, context


def watched(program: TriggerProgram, life: WorkerLife, before: BeforeCall, calls: list[SeenCall]) -> TriggerProgram:
    """Returns a program whose calls are noted, and whose functions have a point before them and one after them."""

    def watch(marked: Trigger) -> Trigger:
        def begin(cell: StoredCell, context: Context) -> SeenCall:
            life.reach(f"before {marked.name}")
            row_key = uuid.UUID(bytes=cell.row_key)
            return SeenCall(marked.name, row_key, cell.column_name, cell.ref_key, context.attempt)

        def end(seen: SeenCall, error: BaseException | None) -> None:
            if not isinstance(error, RowHeld | Killed):
                calls.append(replace(seen, error=error))
            life.reach(f"after {marked.name}")

        def call(cell: StoredCell, context: Context) -> Any:
            seen = begin(cell, context)
            try:
                before(seen)
                arguments = marked.arguments(cell, context)
                result = marked.function(*arguments)
                if is_waited_for(result):
                    return wait_for(seen, result, arguments)
                require_done(result)
            except BaseException as error:
                end(seen, error)
                raise
            end(seen, None)
            return result

        async def wait_for(seen: SeenCall, result: Any, arguments: tuple[Any, ...]) -> None:
            try:
                require_done(await waited_for(result))
                require_effects(arguments)
            except BaseException as error:
                end(seen, error)
                raise
            end(seen, None)

        return _WatchedTrigger(
            marked.name, marked.column, call, Takes.CELL_AND_CONTEXT, marked.is_async, marked.retry, marked.park,
            marked.max_age_s, marked.where, marked.parallel, marked.erased_from,
        )  # fmt: skip

    return TriggerProgram(
        program.name, {column: [watch(m) for m in found] for column, found in program.triggers.items()}, program.version
    )
