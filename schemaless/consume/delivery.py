"""Delivery: every cell of a shard reaches a consumer, in order, at least once (I9, I10). It knows nothing of Kafka.

What the topic brings is taken while it proves dense: the next added_id of a shard is its checkpoint + 1. A lower one
is a duplicate. After anything else (a hole, a takeover of the shard, a call that must be repeated) the shard is
*behind*: it reads its log in MySQL from its checkpoint on until it has met the topic, and then takes from there.
So losslessness rests neither on Kafka's offsets nor on acknowledgements, and no shard waits for another.

No exception leaves this module: a failure puts its shards behind, and they are tried again later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog

from schemaless.cell import StoredCell, is_dense
from schemaless.consume.ports import Advance, CheckpointStore, Handler, Log, Outcome, Run
from schemaless.errors import Corrupt, SchemalessError
from schemaless.lifecycle import pause
from schemaless.location import Location, resume_location
from schemaless.storage.shard_head import Head

log = structlog.get_logger()

PATIENCE_S = 1.0
"""How long the topic waits for a slow consumer. Its shards then fall behind, and the topic continues for the others."""

_SHARDS_PER_STEP = 32
_PAGE_CELLS_MIN = 32
_PAGE_BYTES = 4 << 20
_FAILED_PAUSE_S = 0.1
_FAILED_PAUSE_MAX_S = 5.0


class DeliveryCounts(msgspec.Struct):
    """Counts since the start. `delivered` cells were finished. `holes` is how often the topic was not dense."""

    delivered: int = 0
    duplicates: int = 0
    holes: int = 0
    failures: int = 0


class ShardState:
    """What one consumer knows of one shard while it runs. A run begins right after `location` (I9).

    `location` None: it must be read. `live`: the shard takes from the topic. `busy`: the handler works on it.
    `running`: nothing has stopped it. `seen`: the log goes at least as far. `to_end`: the log must be read to its end
    before the topic is taken from, because the topic may have brought cells before we listened. `generation` is the
    highest that was met, `checked` the highest for which the location was verified.
    """

    __slots__ = (
        "busy", "checked", "failures", "generation", "live", "location",
        "old_head", "running", "seen", "served_at", "to_end", "wait_until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.location: Location | None = None
        self.live = self.busy = False
        self.running = self.to_end = True
        self.seen = self.old_head = self.generation = self.checked = self.failures = 0
        self.wait_until = self.served_at = 0.0

    def forget(self) -> None:
        """Makes the shard start over: it reads its checkpoint, then its log to the end."""
        self.location, self.live, self.to_end = None, False, True

    def meets(self, generation: int) -> bool:
        """Returns whether this generation is new. The location may be superseded then, so it is forgotten (I13)."""
        if generation <= self.checked:
            return False
        self.generation = max(self.generation, generation)
        self.forget()
        return True

    def go_live_if_met(self) -> None:
        """Takes from the topic from now on if the log was read as far as the topic, which was heard all the time."""
        if not self.to_end and self.location is not None and self.location.added_id >= self.seen:
            self.live = True


class Delivery:
    """Delivers some shards of one datastore to one consumer. Belongs to one event loop.

    `clock` counts seconds, as time.monotonic does.
    """

    def __init__(  # the last three have defaults
        self,
        shards: Iterable[int],
        handler: Handler,
        checkpoints: CheckpointStore,
        shard_log: Log,
        *,
        batch_cells_max: int = 1000,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = DeliveryCounts()
        self._shards = {shard: ShardState() for shard in shards}
        self._handler = handler
        self._checkpoints = checkpoints
        self._log = shard_log
        self._batch_cells_max = batch_cells_max
        self._patience_s = patience_s
        self._clock = clock
        self._page_cells = _PAGE_CELLS_MIN
        self._last_calls: dict[int, asyncio.Event] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False

    async def deliver(self, cells: Iterable[StoredCell]) -> None:
        """Takes the partition's next cells, in topic order. Returns when they are finished or their shards are behind.

        It may be called again meanwhile. That call waits for the earlier ones that share a shard with it.
        """
        by_shard: dict[int, list[StoredCell]] = {}
        for cell in cells:
            by_shard.setdefault(cell.shard, []).append(cell)
        async with self._after_earlier_calls(by_shard):
            if self._closing:
                return
            runs = [run for shard, found in by_shard.items() if (run := self._accept(shard, found)) is not None]
            await self._handle_patiently(runs)

    async def step(self) -> float:
        """Makes one pass over shards that are behind. Returns for how many seconds none will be due."""
        now = self._clock()
        behind = {n: state for n, state in self._shards.items() if state.running and not state.live and not state.busy}
        due = [] if self._closing else [shard for shard, state in behind.items() if now >= state.wait_until]
        if not due:
            return max(0.001, min((state.wait_until - now for state in behind.values()), default=PATIENCE_S))
        due.sort(key=lambda shard: behind[shard].served_at)
        if behind[due[0]].failures:  # it goes alone: it may be what fails the others
            due = due[:1]
        else:
            due = [shard for shard in due if not behind[shard].failures][:_SHARDS_PER_STEP]
        await self._guarded(due, self._catch_up(due))
        return 0.0

    async def run(self) -> None:
        """Lets shards catch up until it is cancelled, after `close`."""
        while True:
            self._wake.clear()
            pause_s = await self.step()
            if pause_s:
                await pause(self._wake, min(pause_s, PATIENCE_S))

    def notice(self, heads: Mapping[int, Head]) -> None:
        """Compares the shards with their heads. Call it now and then: it finds what the topic never brought.

        A shard that has not reached the head of the last call falls behind. A shard that stopped is read again,
        because an operator may have resumed it.
        """
        for shard, state in self._shards.items():
            if not state.running and not state.busy:
                state.running = True
                state.forget()
            head = heads.get(shard)
            if head is not None and state.location is not None and not state.busy:
                if state.meets(head.generation) or state.location.added_id < state.old_head:
                    self._fall_behind(state, head.added_id)
                state.old_head = head.added_id
        self._wake.set()

    async def close(self, timeout_s: float) -> None:
        """Takes nothing new and finishes what is in flight. What takes longer is cancelled, and comes again."""
        self._closing = True
        if self._work:
            await asyncio.wait(self._work, timeout=timeout_s)
        for task in self._work:
            task.cancel()

    def locations(self) -> dict[int, Location | None]:
        """Returns how far each shard is finished, None where that is not known at the moment."""
        return {shard: state.location for shard, state in self._shards.items()}

    @asynccontextmanager
    async def _after_earlier_calls(self, shards: Collection[int]) -> AsyncIterator[None]:
        """Is entered by one `deliver` after the other as far as they share a shard, in the order of their calls."""
        mine = asyncio.Event()
        earlier = [self._last_calls[shard] for shard in shards if shard in self._last_calls]
        self._last_calls.update(dict.fromkeys(shards, mine))
        try:
            for call in earlier:
                await call.wait()
            yield
        finally:
            mine.set()
            for shard in shards:
                if self._last_calls.get(shard) is mine:
                    del self._last_calls[shard]

    def _accept(self, shard: int, cells: Sequence[StoredCell]) -> Run | None:
        """Returns the run that these cells of the topic are, or None: nothing is new, or the shard is behind."""
        state = self._shards[shard]
        last = cells[-1]
        if not state.live or state.busy or state.location is None or state.meets(last.generation):
            self._fall_behind(state, last.added_id)
            return None
        after = state.location
        fresh = [cell for cell in cells if cell.added_id > after.added_id]
        self.counts.duplicates += len(cells) - len(fresh)
        if not is_dense(after, fresh):
            self.counts.holes += 1
            self._fall_behind(state, last.added_id)
            return None
        return Run(shard, after, fresh) if fresh else None

    def _fall_behind(self, state: ShardState, seen: int) -> None:
        state.live = False
        state.seen = max(state.seen, seen)
        self._wake.set()

    async def _catch_up(self, shards: Sequence[int]) -> None:
        """Reads and handles one page of each shard's log."""
        await self._locate([shard for shard in shards if self._shards[shard].location is None])
        positions = {}
        for shard in shards:
            state = self._shards[shard]
            state.served_at = self._clock()
            if state.running and state.location is not None:
                positions[shard] = state.location.added_id
        limit = max(1, min(self._page_cells, self._batch_cells_max // max(1, len(positions))))
        seen = {shard: self._shards[shard].seen for shard in positions}
        pages = await self._log.read_after(positions, limit)
        # Small bodies make larger pages, large ones smaller pages: memory stays bounded.
        if max((sum(len(cell.body) for cell in page) for page in pages.values()), default=0) > _PAGE_BYTES:
            self._page_cells = max(1, self._page_cells // 4)
        else:
            self._page_cells = min(self._batch_cells_max, self._page_cells * 2)
        runs = [self._run_of_page(shard, page, seen[shard], limit) for shard, page in pages.items()]
        await self._handle_patiently([run for run in runs if run is not None])

    async def _locate(self, shards: Sequence[int]) -> None:
        """Reads the checkpoints. A shard whose location was superseded goes back to where that happened (I13)."""
        if not shards:
            return
        for shard, checkpoint in (await self._checkpoints.read(shards)).items():
            state = self._shards[shard]
            location, met = checkpoint.location, max(state.generation, checkpoint.location.generation)
            if met > location.generation and checkpoint.running:
                location = resume_location(location, await self._log.generations(shard))
            if location != checkpoint.location:
                await self._checkpoints.move({shard: Advance(location)}, {})
            state.location, state.running, state.checked = location, checkpoint.running, met

    def _run_of_page(self, shard: int, page: Sequence[StoredCell], seen: int, limit: int) -> Run | None:
        """Returns the run that a page of the log is. `seen`: how far the log was known to go when it was read."""
        state = self._shards[shard]
        location = state.location
        if location is None or (page and state.meets(page[-1].generation)):
            return None
        if not is_dense(location, page):
            raise Corrupt(f"the log of shard {shard} is not dense after {location}")
        state.to_end = state.to_end and len(page) == limit
        if page:
            return Run(shard, location, page)
        state.failures = 0
        if seen > location.added_id:
            log.warning("the topic has records that the log does not have", shard=shard, after=str(location))
            state.seen = location.added_id
        state.go_live_if_met()
        return None

    async def _handle_patiently(self, runs: Sequence[Run]) -> None:
        """Lets the handler work on the runs. What takes longer than our patience continues by itself."""
        groups = [runs] if self._handler.together and runs else [[run] for run in runs]
        for run in runs:
            self._shards[run.shard].busy = True
        tasks = [asyncio.create_task(self._handle(group)) for group in groups]
        for task in tasks:
            self._work.add(task)
            task.add_done_callback(self._work.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience_s)

    async def _handle(self, runs: Sequence[Run]) -> None:
        shards = [run.shard for run in runs]
        try:
            await self._guarded(shards, self._advance(runs))
        finally:
            for state in (self._shards[shard] for shard in shards):
                state.busy = False
                if not state.live:
                    self._wake.set()

    async def _advance(self, runs: Sequence[Run]) -> None:
        """Makes the effect first, then moves the checkpoints (I10)."""
        effect = await self._handler.handle(runs)
        outcomes = list(zip(runs, effect.outcomes, strict=True))
        advances = {
            run.shard: Advance(_finished(run, outcome), outcome.stop_reason)
            for run, outcome in outcomes
            if outcome.finished or outcome.stop_reason is not None
        }
        if advances:
            await self._checkpoints.move(advances, effect.scripts)
        for run, outcome in outcomes:
            state = self._shards[run.shard]
            state.location = _finished(run, outcome)
            state.failures = 0
            state.running = outcome.stop_reason is None
            state.wait_until = self._clock() + outcome.retry_in_s
            self.counts.delivered += outcome.finished
            if outcome.finished < len(run.cells):
                self._fall_behind(state, run.cells[-1].added_id)
            else:
                state.go_live_if_met()

    async def _guarded(self, shards: Sequence[int], work: Awaitable[None]) -> None:
        """Awaits work on some shards. If it fails, their checkpoints are read again, after a pause that grows."""
        try:
            await work
        except Exception as error:
            self.counts.failures += 1
            states = [self._shards[shard] for shard in shards]
            failures = max(state.failures for state in states) + 1
            pause_s = min(_FAILED_PAUSE_MAX_S, _FAILED_PAUSE_S * 2 ** min(failures, 10))
            for state in states:
                state.forget()
                state.failures, state.wait_until = failures, self._clock() + pause_s
            consumer = self._checkpoints.consumer
            if isinstance(error, SchemalessError):
                log.warning("delivery waits", consumer=consumer, why=str(error), again_in_s=pause_s)
            else:
                log.error("delivery failed", consumer=consumer, again_in_s=pause_s, exc_info=error)


def _finished(run: Run, outcome: Outcome) -> Location:
    return run.cells[outcome.finished - 1].location if outcome.finished else run.after
