"""Rescue: writes buffered cells again that their home doesn't show, and records why the home refuses some (I6).

It deletes no buffer row: one whose cell met another body at home moves to the conflicts. Any number of processes may
rescue the same rows, because the second put of a cell changes nothing (I1).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from cleaner.cursor import ALL_SIZES, BufferCursor, Horizon, PageSize
from cleaner.pair import ClusterPair, Errors, PassName, Swept, by_datastore, in_parts
from schemaless.config import CleanerSettings
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.storage import buffer_table, entity_table, refusal_table, shard_head
from schemaless.storage.buffer_table import Buffered, Sizes
from schemaless.storage.shard_head import ServerHistory
from schemaless.topology import Datastore

log = structlog.get_logger()

SMALL_BYTES_MAX = 64 << 10
_CHUNK_BYTES_MAX = 4 << 20
_CHUNKS_AT_ONCE = 2  # while the home stores one, the secondary reads the other
_TURNS_MAX = 10  # of a step, so that a stop doesn't wait for a large backlog
_WALK_EVERY_S = 60.0  # what was seen at home is believed for so long
_REFUSED_AGAIN_S = 10.0


class Walk:
    """A cursor that begins again from the oldest row: at once if rows were left undone, else after a minute."""

    def __init__(self, cursor: BufferCursor, clock: Callable[[], float]) -> None:
        self.cursor = cursor
        self._clock = clock
        self._again_in_s = _WALK_EVERY_S
        self._due_at: float | None = None
        """None while it is under way."""

    @property
    def under_way(self) -> bool:
        return self._due_at is None

    def begin_if_due(self) -> None:
        if self._due_at is not None and self._clock() >= self._due_at:
            self.begin()

    def begin(self) -> None:
        self.cursor.after = 0
        self._again_in_s = _WALK_EVERY_S
        self._due_at = None

    def end(self) -> None:
        self._due_at = self._clock() + self._again_in_s

    def again_in(self, seconds: float) -> None:
        """Begins again so many seconds after this walk, or from now on if there is none."""
        self._again_in_s = min(self._again_in_s, seconds)
        if self._due_at is not None:
            self._due_at = min(self._due_at, self._clock() + seconds)


class Rescue:
    """Looks up at home what one secondary holds for it.

    Three cursors take turns. `fresh` follows the newest rows and looks at each once. Two walks go over all older ones,
    one over small cells and one over large ones. What a cursor has seen at home is known until the walk passes again.
    If the home's history changed, the walks begin again: a restored home may have lost what it showed (I13).
    """

    def __init__(
        self, pair: ClusterPair, settings: CleanerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        def cursor(sizes: Sizes) -> BufferCursor:
            return BufferCursor(PageSize(settings.batch_rows_max, settings.batch_bytes_max), sizes)

        self._pair = pair
        self._horizon = Horizon(settings.rescue_grace_s, clock)
        self._fresh = cursor(ALL_SIZES)
        self._fresh_from_newest = True
        small = Walk(cursor(Sizes(most_bytes=SMALL_BYTES_MAX)), clock)
        large = Walk(cursor(Sizes(least_bytes=SMALL_BYTES_MAX + 1)), clock)
        self._walks = (small, large)
        self._turns = deque([self._fresh, small.cursor, large.cursor])
        self._history: ServerHistory | None = None

    @property
    def name(self) -> PassName:
        return self._pair.pass_name("rescue")

    async def step(self) -> Swept:
        """Makes one pass over the rows that are old enough. Raises StorageUnavailable if the secondary is unreachable.

        It ends when the home is unreachable, which then costs one time-out and not one for each page.
        """
        horizon = await self._horizon.look(self._pair)
        if not await self._home_answers(horizon):
            return Swept()
        if self._fresh_from_newest:
            self._fresh.after, self._fresh_from_newest = self._horizon.newest, False
        for walk in self._walks:
            walk.begin_if_due()
        swept = Swept()
        worked = True
        turns = 0
        while worked and turns < _TURNS_MAX:
            worked = False
            turns += 1
            for cursor in tuple(self._turns):
                self._turns.rotate(-1)  # before it can fail: the next pass begins with another one
                before = cursor.after
                rows = await self._next_rows(cursor, horizon)
                worked = worked or bool(rows) or cursor.after > before
                if rows:
                    page = await self._rescue_page(cursor, rows)
                    if page is None:
                        return swept
                    swept += page
        return swept

    async def _home_answers(self, horizon: int) -> bool:
        """Compares the home's history with what it was. If it is unreachable, what is there when it is back is left to
        the walks, and the fresh cursor begins at the newest row.
        """
        try:
            history = await self._pair.run(self._pair.master, shard_head.server_history)
        except SchemalessError as error:
            if horizon > self._fresh.after or self._fresh_from_newest:
                log.info("cells wait for their home", home=self._pair.home, error=str(error))
            self._fresh_from_newest = True
            for walk in self._walks:
                walk.again_in(0.0)
            return False
        if self._history is not None and not history.continues(self._history):
            log.warning("the home's history changed: what waits for it is looked up again", home=self._pair.home)
            for walk in self._walks:
                walk.begin()
        self._history = history
        return True

    async def _next_rows(self, cursor: BufferCursor, horizon: int) -> list[Buffered]:
        if cursor is self._fresh:
            return await cursor.page(self._pair, horizon)
        walk = next(walk for walk in self._walks if walk.cursor is cursor)
        if not walk.under_way:
            return []
        until = min(self._fresh.after, horizon)
        rows = await cursor.page(self._pair, until)
        if not rows and cursor.after >= until and self._fresh.after <= horizon:
            walk.end()
        return rows

    async def _rescue_page(self, cursor: BufferCursor, rows: Sequence[Buffered]) -> Swept | None:
        """Returns None after a time-out. The next pass takes fewer rows then, and begins with another cursor."""
        try:
            swept = await self._rescue(rows)
        except StorageUnavailable as error:
            log.info("cells wait for their home", home=self._pair.home, rows=len(rows), error=str(error))
            if cursor.failed(rows):
                await self._note({rows[0].buffer_id: error})
            return None
        cursor.moved_past(rows)
        return swept

    async def _rescue(self, rows: Sequence[Buffered]) -> Swept:
        pair = self._pair
        at_home, errors = await pair.digests(pair.master, rows)
        missing = [row for row in rows if row.buffer_id in at_home and at_home[row.buffer_id] is None]
        for name, group in by_datastore(missing).items():
            put = partial(self._put, await pair.catalogue.datastore(name))
            parts = list(chunks(group, bytes_max=_CHUNK_BYTES_MAX, size_bytes=lambda row: row.size_bytes))
            for together in chunks(parts, count_max=_CHUNKS_AT_ONCE):
                for failed in await all_or_first_error(in_parts(part, put) for part in together):
                    errors |= failed
        # The master's word is enough for a conflict: a cell never changes.
        differing = [row for row in rows if at_home.get(row.buffer_id) not in (None, row.digest)]
        _, conflicts = await pair.compare([pair.master], differing)
        await self._note_errors(rows, errors)
        rewritten = sum(row.buffer_id not in errors for row in missing)
        return Swept(rewritten=rewritten, conflicts=conflicts, refused=len(errors))

    async def _put(self, datastore: Datastore, rows: Sequence[Buffered]) -> None:
        """Puts cells at home. A later pass finds another body that arrived there meanwhile."""
        buffered = await self._pair.run(self._pair.secondary, buffer_table.cells, rows)
        cells = [cell for cell in buffered if cell is not None]
        if cells:
            believed = max(time.time() * 1e6, await self._pair.run(self._pair.secondary, shard_head.clock))
            latest = int(believed + shard_head.CLOCK_AHEAD_MAX_S * 1e6)
            await self._pair.write(self._pair.master, entity_table.put_cells, datastore, cells, latest)

    async def _note_errors(self, rows: Sequence[Buffered], errors: Errors) -> None:
        if errors:
            await self._note(errors)
        taken = [row.buffer_id for row in rows if row.was_refused and row.buffer_id not in errors]
        if taken:
            await self._pair.run(self._pair.secondary, refusal_table.clear, taken)

    async def _note(self, errors: Errors) -> None:
        """Records why the home refuses cells, which are tried again soon."""
        error = next(iter(errors.values()))
        log.warning("the home refuses buffered cells", home=self._pair.home, cells=len(errors), error=str(error))
        reasons = {buffer_id: str(error) for buffer_id, error in errors.items()}
        await self._pair.run(self._pair.secondary, refusal_table.note, reasons)
        for walk in self._walks:
            walk.again_in(_REFUSED_AGAIN_S)
