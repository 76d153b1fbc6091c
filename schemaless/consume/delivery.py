"""Delivery: every cell of a shard reaches a consumer, in order, at least once (I9, I10). Knows nothing of Kafka.

What the topic brings is taken while it proves dense: the next added_id of a shard is its checkpoint + 1. A lower one
is a duplicate. Anything else, a hole, a shard just taken over, a call that must be tried again, and the shard is
*behind*: it reads its log in MySQL from its checkpoint on until it has met the topic, and then takes from there.
So losslessness rests neither on Kafka's offsets nor on acknowledgements, and no shard waits for another.

No exception leaves here: a failure puts the shards concerned behind, to be tried again later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog

from schemaless.cell import StoredCell
from schemaless.consume.ports import Advance, CheckpointStore, Handler, Log, Outcome, Run
from schemaless.consume.shard_state import ShardState, is_dense, resume_location
from schemaless.errors import Corrupt, SchemalessError
from schemaless.location import Location
from schemaless.storage.shard_head import Head

log = structlog.get_logger()

PATIENCE_S = 1.0
"""How long the topic waits for a slow consumer. Its shards then fall behind, and the topic goes on for the others."""

_SHARDS_PER_STEP = 32
_PAGE_CELLS_MIN = 32
_PAGE_BYTES = 4 << 20
_FAILED_PAUSE_S = 0.1
_FAILED_PAUSE_MAX_S = 5.0


class DeliveryCounts(msgspec.Struct):
    """Since the start. `delivered` cells were finished; `holes`: times when the topic was not dense."""

    delivered: int = 0
    duplicates: int = 0
    holes: int = 0
    failures: int = 0


class Delivery:
    """Some shards of one datastore to one consumer. Belongs to one event loop."""

    def __init__(
        self,
        shards: Iterable[int],
        handler: Handler,
        checkpoints: CheckpointStore,
        shard_log: Log,
        *,
        batch_cells_max: int = 1000,
    ) -> None:
        self.counts = DeliveryCounts()
        self._shards = {shard: ShardState() for shard in shards}
        self._handler = handler
        self._checkpoints = checkpoints
        self._log = shard_log
        self._batch_cells_max = batch_cells_max
        self._page_cells = _PAGE_CELLS_MIN
        self._turns: dict[int, asyncio.Event] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False

    async def deliver(self, cells: Iterable[StoredCell]) -> None:
        """The partition's next cells, in topic order. Returns when they are finished or their shards are behind.

        May be called again meanwhile: that call then waits for the earlier ones that share a shard with it.
        """
        by_shard: dict[int, list[StoredCell]] = {}
        for cell in cells:
            by_shard.setdefault(cell.shard, []).append(cell)
        async with self._turn_of(by_shard):
            if self._closing:
                return
            runs = [run for shard, found in by_shard.items() if (run := self._accept(shard, found)) is not None]
            await self._advance_patiently(runs)

    async def step(self) -> float:
        """One pass over shards that are behind. Returns for how many seconds none will be due."""
        now = time.monotonic()
        due = [] if self._closing else self._next_due(now)
        if due:
            await self._guarded(due, self._catch_up(due))
            return 0.0
        behind = [state for state in self._shards.values() if state.running and not state.live and not state.busy]
        return max(0.001, min((state.wait_until - now for state in behind), default=PATIENCE_S))

    async def run(self) -> None:
        """Until cancelled, after `close`."""
        while True:
            self._wake.clear()
            pause_s = await self.step()
            if pause_s:
                await _wait(self._wake, min(pause_s, PATIENCE_S))

    def notice(self, heads: Mapping[int, Head]) -> None:
        """To be called now and then with the heads: a shard that has not reached the last call's head falls behind.

        Shards that stopped are looked at again: somebody may have let them run.
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
        """Takes nothing new and finishes what is in hand; what takes longer is given up, and comes again elsewhere."""
        self._closing = True
        if self._work:
            await asyncio.wait(self._work, timeout=timeout_s)
        for task in self._work:
            task.cancel()

    def locations(self) -> dict[int, Location | None]:
        """Where each shard stands; None: not known at the moment."""
        return {shard: state.location for shard, state in self._shards.items()}

    @asynccontextmanager
    async def _turn_of(self, shards: Collection[int]) -> AsyncIterator[None]:
        """Entered by one `deliver` after the other as far as they share a shard, in the order of their calls."""
        mine = asyncio.Event()
        earlier = [self._turns[shard] for shard in shards if shard in self._turns]
        self._turns.update(dict.fromkeys(shards, mine))
        try:
            for turn in earlier:
                await turn.wait()
            yield
        finally:
            mine.set()
            for shard in shards:
                if self._turns.get(shard) is mine:
                    del self._turns[shard]

    def _accept(self, shard: int, cells: Sequence[StoredCell]) -> Run | None:
        """The run that these cells are; None: nothing new, or the shard is behind."""
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

    def _next_due(self, now: float) -> list[int]:
        """Those that waited longest. A shard that failed goes alone: it may be what fails the others."""
        due = [shard for shard, state in self._shards.items() if state.due(now)]
        due.sort(key=lambda shard: self._shards[shard].served_at)
        if due and self._shards[due[0]].failures:
            return due[:1]
        return [shard for shard in due if not self._shards[shard].failures][:_SHARDS_PER_STEP]

    async def _catch_up(self, shards: Sequence[int]) -> None:
        """One page of each shard's log."""
        await self._locate([shard for shard in shards if self._shards[shard].location is None])
        positions = {}
        for shard in shards:
            state = self._shards[shard]
            state.served_at = time.monotonic()
            if state.running and state.location is not None:
                positions[shard] = state.location.added_id
        limit = max(1, min(self._page_cells, self._batch_cells_max // max(1, len(positions))))
        seen = {shard: self._shards[shard].seen for shard in positions}
        pages = await self._log.read_after(positions, limit)
        self._fit_page(pages.values())
        runs = [self._turn(shard, page, seen[shard], ends=len(page) < limit) for shard, page in pages.items()]
        await self._advance_patiently([run for run in runs if run is not None])

    async def _locate(self, shards: Sequence[int]) -> None:
        """Reads where shards stand; one whose location was superseded goes back to where that happened (I13)."""
        if not shards:
            return
        for shard, standing in (await self._checkpoints.read(shards)).items():
            state = self._shards[shard]
            location, met = standing.location, max(state.generation, standing.location.generation)
            if met > location.generation and standing.running:
                location = resume_location(location, await self._log.generations(shard))
            if location != standing.location:
                await self._checkpoints.move({shard: Advance(location)}, {})
            state.location, state.running, state.checked = location, standing.running, met

    def _turn(self, shard: int, page: Sequence[StoredCell], seen: int, *, ends: bool) -> Run | None:
        """The run that a page of the log is. `seen`: what was known when it was read."""
        state = self._shards[shard]
        location = state.location
        if location is None or (page and state.meets(page[-1].generation)):
            return None
        if not is_dense(location, page):
            raise Corrupt(f"the log of shard {shard} is not dense after {location}")
        state.to_end = state.to_end and not ends
        if page:
            return Run(shard, location, page)
        state.failures = 0
        if seen > location.added_id:
            log.warning("the topic has records that the log has not", shard=shard, after=str(location))
            state.seen = location.added_id
        state.go_live_if_met()
        return None

    def _fit_page(self, pages: Iterable[Sequence[StoredCell]]) -> None:
        """Small bodies, larger pages; large bodies, smaller ones: memory stays bounded."""
        largest = max((sum(len(cell.body) for cell in page) for page in pages), default=0)
        if largest > _PAGE_BYTES:
            self._page_cells = max(1, self._page_cells // 4)
        else:
            self._page_cells = min(self._batch_cells_max, self._page_cells * 2)

    async def _advance_patiently(self, runs: Sequence[Run]) -> None:
        """Lets the handler work on the runs; what takes long goes on by itself."""
        groups = [runs] if self._handler.together and runs else [[run] for run in runs]
        for run in runs:
            self._shards[run.shard].busy = True
        tasks = [asyncio.create_task(self._advance(group)) for group in groups]
        for task in tasks:
            self._work.add(task)
            task.add_done_callback(self._work.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)

    async def _advance(self, runs: Sequence[Run]) -> None:
        shards = [run.shard for run in runs]
        try:
            await self._guarded(shards, self._handle(runs))
        finally:
            for state in (self._shards[shard] for shard in shards):
                state.busy = False
                if not state.live:
                    self._wake.set()

    async def _handle(self, runs: Sequence[Run]) -> None:
        """The effect first, then the checkpoints (I10)."""
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
            self._settle(self._shards[run.shard], run, outcome)

    def _settle(self, state: ShardState, run: Run, outcome: Outcome) -> None:
        state.location = _finished(run, outcome)
        state.failures = 0
        state.running = outcome.stop_reason is None
        state.wait_until = time.monotonic() + outcome.retry_in_s
        self.counts.delivered += outcome.finished
        if outcome.finished < len(run.cells):
            self._fall_behind(state, run.cells[-1].added_id)
        else:
            state.go_live_if_met()

    async def _guarded(self, shards: Sequence[int], work: Awaitable[None]) -> None:
        """Whatever fails: where the shards stand is read again, after a pause that grows."""
        try:
            await work
        except Exception as error:
            self.counts.failures += 1
            states = [self._shards[shard] for shard in shards]
            failures = max(state.failures for state in states) + 1
            pause_s = min(_FAILED_PAUSE_MAX_S, _FAILED_PAUSE_S * 2 ** min(failures, 10))
            for state in states:
                state.forget()
                state.failures, state.wait_until = failures, time.monotonic() + pause_s
            _tell(self._checkpoints.consumer, error, again_in_s=pause_s)


def _finished(run: Run, outcome: Outcome) -> Location:
    if not outcome.finished:
        return run.after
    return run.cells[outcome.finished - 1].location


def _tell(consumer: str, error: Exception, *, again_in_s: float) -> None:
    if isinstance(error, SchemalessError):
        log.warning("delivery waits", consumer=consumer, why=str(error), again_in_s=again_in_s)
    else:
        log.error("delivery failed", consumer=consumer, again_in_s=again_in_s, exc_info=error)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
