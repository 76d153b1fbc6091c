"""Cleaner: sweeps every secondary's buffer rows for every home, and deletes old Idempotency-Keys and refusals."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from cleaner.metrics import CleanerMetrics
from cleaner.pair import (
    ALL_SIZES,
    BufferCursor,
    ClusterPair,
    Digests,
    Errors,
    Horizon,
    PageSize,
    PassName,
    Swept,
    by_datastore,
    in_parts,
)
from schemaless.errors import SchemalessError, ShardsMoved, StorageUnavailable
from schemaless.ops import erasures
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.batching import all_or_first_error, chunks
from schemaless.runtime.lifecycle import pause
from schemaless.storage import buffer_table, entity_table, erasure_table, post_version, refusal_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import Buffered, Sizes
from schemaless.storage.failover import answers_of_all, first_answer
from schemaless.storage.shard_head import ServerHistory
from schemaless.topology import Datastore

log = structlog.get_logger()

PASS_PAUSE_S = 0.2  # the shortest pause after a pass
GRACE_S = 1.0  # age at which a buffer row is looked up: a younger one is hardly on a minion yet
RESCUE_GRACE_S = 2.0  # age at which a missing cell is written again: a younger row is likely still on its way
BATCH_ROWS_MAX = 1000  # that are looked up together
BATCH_BYTES_MAX = 16 << 20  # of their bodies. The home hashes as many. A time-out lowers it for a while
_PAUSE_GROWTH_MAX = 5  # a pass that changed nothing doubles the pause, up to so many times PASS_PAUSE_S
_TIDY_PAUSE_S = 60.0
_NEW_CLUSTERS_S = 1.0
_ERASURES_PAUSE_S = 0.5
_TIDY_ROWS_MAX = 1000


class Cleaner:
    """Sweeps all pairs of clusters. Pairs don't wait for one another, and neither do a pair's two passes."""

    def __init__(self, storage: AsyncStorage, metrics: CleanerMetrics | None = None) -> None:
        self._metrics = metrics or CleanerMetrics()
        self._storage = storage
        self._catalogue = Catalogue(storage)
        self._passes: dict[tuple[str, str], tuple[Confirmation, Rescue]] = {}
        self._arrivals: Counter[tuple[str, str]] = Counter()

    def _new_passes(self) -> list[tuple[Confirmation, Rescue]]:
        """Adds the passes of pairs of clusters that are new, and returns them.

        Only rows of shards that moved lie on their own home.
        """
        storage = self._storage
        clusters = [name for name in sorted(storage.topology.clusters) if not storage.is_joining(name)]
        new: dict[tuple[str, str], tuple[Confirmation, Rescue]] = {}
        have_moved = any(storage.placements.values())
        for secondary, home in itertools.product(clusters, repeat=2):
            if (secondary, home) not in self._passes and (secondary != home or have_moved):
                pair = ClusterPair(storage, self._catalogue, secondary, home, self._arrivals)
                new[secondary, home] = Confirmation(pair), Rescue(pair)
        self._passes |= new
        return list(new.values())

    async def step(self) -> Swept:
        """Makes one complete pass over the buffers of all secondaries that can be reached: confirms, then rescues."""

        async def both(confirmation: Confirmation, rescue: Rescue) -> Swept:
            return await self._swept(confirmation) + await self._swept(rescue)

        self._new_passes()
        return sum(await asyncio.gather(*(both(*passes) for passes in self._passes.values())), Swept())

    async def tidy(self) -> int:
        """Deletes a bounded number of old Idempotency-Keys and of refusals without a buffer row, on each master that
        can be reached. Returns how many.
        """
        deletions = {
            f"{cluster} {delete.__name__}": self._storage.master(cluster).run(delete, _TIDY_ROWS_MAX)
            for cluster in self._storage.topology.clusters
            for delete in (post_version.delete_old_answers, refusal_table.delete_orphans)
        }
        return sum((await answers_of_all(deletions, tolerated=SchemalessError)).found.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Makes each pass of each pair in a loop of its own, so that a hung home delays only its own rows."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_tidy(stop))
            tasks.create_task(self._keep_erasing(stop))
            while not stop.is_set():
                for passes in self._new_passes():
                    for one in passes:
                        tasks.create_task(self._keep_swept(one, stop))
                await pause(stop, _NEW_CLUSTERS_S)

    async def _keep_swept(self, one: Confirmation | Rescue, stop: asyncio.Event) -> None:
        pause_s = PASS_PAUSE_S
        while not stop.is_set():
            began = time.monotonic()
            swept = await self._swept(one)
            pause_s = pause_after(swept, time.monotonic() - began, pause_s, PASS_PAUSE_S)
            await pause(stop, pause_s)

    async def _keep_tidy(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            deleted = await self.tidy()
            await pause(stop, PASS_PAUSE_S if deleted else _TIDY_PAUSE_S)

    async def _keep_erasing(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await erasures.step(self._storage, self._catalogue)
            except SchemalessError as error:
                log.warning("erasures can't be carried out now", why=str(error))
            await pause(stop, _ERASURES_PAUSE_S)

    async def _swept(self, one: Confirmation | Rescue) -> Swept:
        began = time.monotonic()
        try:
            swept = await one.step()
        except SchemalessError as error:  # of one pass of one pair: the others go on
            self._metrics.failed(one.name, type(error).__name__)
            log.warning("a buffer can't be swept now", secondary=one.name[0], home=one.name[1], why=str(error))
            return Swept()
        self._metrics.swept(one.name, swept, time.monotonic() - began)
        return swept


def pause_after(swept: Swept, took_s: float, before_s: float, shortest_s: float) -> float:
    """Returns the pause in seconds after a pass that took `took_s`, when the pause before it was `before_s`.

    It is as long as the pass took, so that a busy machine makes few large ones, and longer while nothing changes. A
    pass that wrote cells at home, which only a backlog needs, is followed by the next one soon.
    """
    if swept.rewritten:
        return shortest_s
    longest_s = shortest_s * _PAUSE_GROWTH_MAX
    pause_s = shortest_s if swept.changed else min(before_s * 2, longest_s)
    return max(pause_s, min(took_s, longest_s))


# Confirmation: deletes the buffer rows whose cells a minion of the home shows (I6).
#
# A minion, not the master: what only the master holds is lost with it. Where the home has no minion, rows stay. Any
# number of processes may confirm the same rows.

_TURNS_MAX = 10  # of a step, so that a stop doesn't wait for a large backlog


class Confirmation:
    """Looks up on minions what one secondary holds for one home.

    Three cursors take turns. `fresh` follows the newest rows and looks at each once. `oldest` goes over those that no
    minion showed then. A minion shows a prefix of its master's commits, so `oldest` ends at a page of which it shows
    nothing. If that is its first page, those rows wait for something else than replication, or the minion lags. So
    `beyond` looks at one more page, another one in each pass, and goes on where the minion shows something.
    """

    def __init__(self, pair: ClusterPair, clock: Callable[[], float] = time.monotonic) -> None:
        self._pair = pair
        self._turns = itertools.count()
        self._horizon = Horizon(GRACE_S, clock)
        self._fresh = BufferCursor(PageSize(BATCH_ROWS_MAX, BATCH_BYTES_MAX))
        self._fresh_from_newest = True
        self._oldest = BufferCursor(PageSize(BATCH_ROWS_MAX, BATCH_BYTES_MAX))
        self._beyond = BufferCursor(PageSize(BATCH_ROWS_MAX, BATCH_BYTES_MAX))

    @property
    def name(self) -> PassName:
        return self._pair.pass_name("confirmation")

    async def step(self) -> Swept:
        """Makes one pass over the rows that are old enough. Raises StorageUnavailable if the secondary is unreachable.

        It ends when no minion answers, which then costs one time-out for each and not one for each page.
        """
        horizon = await self._horizon.look(self._pair)
        if self._fresh_from_newest:
            self._fresh.after, self._fresh_from_newest = self._horizon.newest, False
        until = min(self._fresh.after, horizon)
        swept = Swept()
        moving = {self._fresh: True, self._oldest: True, self._beyond: False}
        for turn in range(_TURNS_MAX):
            for cursor, is_moving in moving.items():
                end = horizon if cursor is self._fresh else until
                before = cursor.after
                rows = await cursor.page(self._pair, end) if is_moving else []
                epoch = self._pair.epoch  # of before the look: a minion that is promoted without may lack the cell
                shown = await self._shown(cursor, rows) if rows else {}
                if shown is None:
                    self._fresh_from_newest = True  # what waits until then is backlog
                    return swept
                swept += await self._confirm(rows, shown, epoch)
                shows_some = any(digest is not None for digest in shown.values())
                # Without rows it may have passed a stretch of ids that are gone: the oldest rows come behind it.
                moving[cursor] = cursor.after > before and (not rows or shows_some or cursor is self._fresh)
                if cursor is self._oldest and turn == 0 and rows and not shows_some:
                    if self._beyond.after >= until:
                        self._beyond.after = 0
                    self._beyond.after = max(self._beyond.after, self._oldest.after)
                    moving[self._beyond] = True
            if not any(moving.values()):
                break
        self._oldest.after = 0
        return swept

    async def _shown(self, cursor: BufferCursor, rows: Sequence[Buffered]) -> Digests | None:
        """Returns the digests by buffer_id as one minion shows them, or None when no minion answers."""
        minions = self._pair.minions
        first = next(self._turns) % max(1, len(minions))
        try:
            (shown, errors), node = await first_answer(
                [*minions[first:], *minions[:first]],
                lambda minion: self._pair.digests(minion, rows),
                on_failure=_log_unreachable,
            )
        except StorageUnavailable:
            cursor.failed(rows)
            return None
        cursor.moved_past(rows)
        if errors:
            error = next(iter(errors.values()))
            log.warning("buffer rows can't be looked up", node=node.node.name, rows=len(errors), error=str(error))
        return shown

    async def _confirm(self, rows: Sequence[Buffered], shown: Digests, epoch: int) -> Swept:
        """Deletes the rows whose cells were shown with the same body, and records conflicts. A row whose claim was
        taken over stays.
        """
        same = [row for row in rows if shown.get(row.buffer_id) == row.digest]
        differing = [row for row in rows if shown.get(row.buffer_id) not in (None, row.digest)]
        equal, conflicts = await self._pair.compare(self._pair.minions, differing, epoch)
        same += equal
        if not same:
            return Swept(conflicts=conflicts)
        pair = self._pair
        confirmed = await pair.run(pair.secondary, buffer_table.delete_confirmed, same, pair.home, epoch)
        return Swept(confirmed=confirmed, conflicts=conflicts)


def _log_unreachable(node: AsyncNode, error: StorageUnavailable) -> None:
    log.info("a node does not answer the cleaner", node=node.node.name, error=str(error))


# Rescue: writes buffered cells again that their home doesn't show, and records why the home refuses some (I6).
#
# It deletes no buffer row: one whose cell met another body at home moves to the conflicts. Any number of processes may
# rescue the same rows, because the second put of a cell changes nothing (I1).

SMALL_BYTES_MAX = 64 << 10
_CHUNK_BYTES_MAX = 4 << 20
_CHUNKS_AT_ONCE = 2  # while the home stores one, the secondary reads the other
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
    If the home's history changed, the walks begin again: a restored home may have lost what it showed (I13). So they do
    when rows arrived that named another home.
    """

    def __init__(self, pair: ClusterPair, clock: Callable[[], float] = time.monotonic) -> None:
        def cursor(sizes: Sizes) -> BufferCursor:
            return BufferCursor(PageSize(BATCH_ROWS_MAX, BATCH_BYTES_MAX), sizes)

        self._pair = pair
        self._horizon = Horizon(RESCUE_GRACE_S, clock)
        self._fresh = cursor(ALL_SIZES)
        self._fresh_from_newest = True
        small = Walk(cursor(Sizes(most_bytes=SMALL_BYTES_MAX)), clock)
        large = Walk(cursor(Sizes(least_bytes=SMALL_BYTES_MAX + 1)), clock)
        self._walks = (small, large)
        self._turns = deque([self._fresh, small.cursor, large.cursor])
        self._history: ServerHistory | None = None
        self._arrived = 0

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
        if self._pair.arrived != self._arrived:
            self._arrived = self._pair.arrived
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
                await self._note(rows, {rows[0].buffer_id: error})
            return None
        cursor.moved_past(rows)
        return swept

    async def _rescue(self, rows: Sequence[Buffered]) -> Swept:
        pair = self._pair
        epoch = pair.epoch
        at_home, errors = await pair.digests(pair.master, rows)
        missing = [row for row in rows if row.buffer_id in at_home and at_home[row.buffer_id] is None]
        missing = await self._unerased(missing)
        for name, group in by_datastore(missing).items():
            put = partial(self._put, await pair.catalogue.datastore(name))
            parts = list(chunks(group, bytes_max=_CHUNK_BYTES_MAX, size_bytes=lambda row: row.size_bytes))
            for together in chunks(parts, count_max=_CHUNKS_AT_ONCE):
                for failed in await all_or_first_error(in_parts(part, put) for part in together):
                    errors |= failed
        # The master's word is enough for a conflict: a cell never changes.
        differing = [row for row in rows if at_home.get(row.buffer_id) not in (None, row.digest)]
        _, conflicts = await pair.compare([pair.master], differing, epoch)
        # Of a shard that moves: the home refuses nothing, and the process learns where it lives in a moment.
        refused = {number: error for number, error in errors.items() if not isinstance(error, ShardsMoved)}
        if len(refused) < len(errors):
            for walk in self._walks:
                walk.again_in(0.0)
        if refused:
            await self._note(rows, refused)
        taken = [row.buffer_id for row in rows if row.was_refused and row.buffer_id not in errors]
        if taken:
            await pair.run(pair.secondary, refusal_table.clear, taken)
        rewritten = sum(row.buffer_id not in errors for row in missing)
        return Swept(rewritten=rewritten, conflicts=conflicts, refused=len(refused))

    async def _unerased(self, rows: Sequence[Buffered]) -> list[Buffered]:
        """Returns the rows that no erasure means. Others don't come home: the erasure removes them (I19).

        The secondary knows by its own clock which rows came later. It may not know of an erasure yet.
        """
        pair, meant = self._pair, set[int]()
        for name, group in by_datastore(rows).items():
            keys = [(row.key, row.buffered_at) for row in group]
            at_home = await pair.run(pair.master, erasure_table.covering, name, keys)
            here = await pair.run(pair.secondary, erasure_table.covering, name, keys)
            numbers = {erasure.erasure for erasure in at_home if erasure is not None}
            known = await pair.run(pair.secondary, erasure_table.of_numbers, numbers) if numbers else []
            heard = {erasure.erasure for erasure in known}
            for row, own, other in zip(group, here, at_home, strict=True):
                if own is not None or (other is not None and other.erasure not in heard):
                    meant.add(row.buffer_id)
            if late := {erasure.erasure for erasure in here if erasure is not None}:
                await pair.run(pair.secondary, erasure_table.reopen, late)  # they came after the search
        return [row for row in rows if row.buffer_id not in meant]

    async def _put(self, datastore: Datastore, rows: Sequence[Buffered]) -> None:
        """Puts cells at home. A later pass finds another body that arrived there meanwhile."""
        buffered = await self._pair.run(self._pair.secondary, buffer_table.cells, rows)
        cells = [cell for cell in buffered if cell is not None]
        if cells:
            believed = max(time.time() * 1e6, await self._pair.run(self._pair.secondary, shard_head.clock))
            latest = int(believed + shard_head.CLOCK_AHEAD_MAX_S * 1e6)
            await self._pair.write(self._pair.master, entity_table.put_cells, datastore, cells, latest)

    async def _note(self, rows: Sequence[Buffered], errors: Errors) -> None:
        """Records why the home refuses cells, which are tried again soon."""
        error = next(iter(errors.values()))
        log.warning("the home refuses buffered cells", home=self._pair.home, cells=len(errors), error=str(error))
        reasons: dict[str, list[Buffered]] = {}
        for row in rows:
            if row.buffer_id in errors:
                reasons.setdefault(str(errors[row.buffer_id]), []).append(row)
        await self._pair.run(self._pair.secondary, refusal_table.note, reasons)
        for walk in self._walks:
            walk.again_in(_REFUSED_AGAIN_S)
