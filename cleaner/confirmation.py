"""Confirmation: deletes the buffer rows whose cells a minion of the home shows (I6).

A minion, not the master: what only the master holds is lost with it. Where the home has no minion, rows stay. Any
number of processes may confirm the same rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from cleaner.cursor import BufferCursor, Horizon, PageSize
from cleaner.pair import ClusterPair, Digests, Errors, PassName, Swept
from schemaless.config import CleanerSettings
from schemaless.errors import StorageUnavailable
from schemaless.storage import buffer_table
from schemaless.storage.asyncmy_driver import AsyncNode
from schemaless.storage.buffer_table import Buffered
from schemaless.storage.failover import first_answer

log = structlog.get_logger()

_TURNS_MAX = 10  # of a step, so that a stop doesn't wait for a large backlog


class Confirmation:
    """Looks up on minions what one secondary holds for one home.

    Three cursors take turns. `fresh` follows the newest rows and looks at each once. `oldest` goes over those that no
    minion showed then. A minion shows a prefix of its master's commits, so `oldest` ends at a page of which it shows
    nothing. If that is its first page, those rows wait for something else than replication, or the minion lags. So
    `beyond` looks at one more page, another one in each pass, and goes on where the minion shows something.
    """

    def __init__(
        self, pair: ClusterPair, settings: CleanerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pair = pair
        self._minions = deque(pair.minions)
        self._horizon = Horizon(settings.grace_s, clock)
        size = (settings.batch_rows_max, settings.batch_bytes_max)
        self._fresh = BufferCursor(PageSize(*size))
        self._fresh_from_newest = True
        self._oldest = BufferCursor(PageSize(*size))
        self._beyond = BufferCursor(PageSize(*size))

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
                shown = await self._shown(cursor, rows) if rows else {}
                if shown is None:
                    self._fresh_from_newest = True  # what waits until then is backlog
                    return swept
                swept += await self._confirm(rows, shown)
                shows_some = any(digest is not None for digest in shown.values())
                # Without rows it may have passed a stretch of ids that are gone: the oldest rows come behind it.
                moving[cursor] = cursor.after > before and (not rows or shows_some or cursor is self._fresh)
                if cursor is self._oldest and turn == 0 and rows and not shows_some:
                    self._look_beyond(until)
                    moving[self._beyond] = True
            if not any(moving.values()):
                break
        self._oldest.after = 0
        return swept

    def _look_beyond(self, until: int) -> None:
        if self._beyond.after >= until:
            self._beyond.after = 0
        self._beyond.after = max(self._beyond.after, self._oldest.after)

    async def _shown(self, cursor: BufferCursor, rows: Sequence[Buffered]) -> Digests | None:
        """Returns the digests by buffer_id as one minion shows them, or None when no minion answers."""
        self._minions.rotate(-1)
        try:
            (shown, errors), node = await first_answer(
                list(self._minions), lambda minion: self._pair.digests(minion, rows), on_failure=_log_unreachable
            )
        except StorageUnavailable:
            cursor.failed(rows)
            return None
        cursor.moved_past(rows)
        _log_errors(node, errors)
        return shown

    async def _confirm(self, rows: Sequence[Buffered], shown: Digests) -> Swept:
        """Deletes the rows whose cells were shown with the same body, and records conflicts. A row whose claim was
        taken over stays.
        """
        same = [row for row in rows if shown.get(row.buffer_id) == row.digest]
        differing = [row for row in rows if shown.get(row.buffer_id) not in (None, row.digest)]
        equal, conflicts = await self._pair.compare(list(self._minions), differing)
        same += equal
        if not same:
            return Swept(conflicts=conflicts)
        confirmed = await self._pair.run(self._pair.secondary, buffer_table.delete_confirmed, same)
        return Swept(confirmed=confirmed, conflicts=conflicts)


def _log_unreachable(node: AsyncNode, error: StorageUnavailable) -> None:
    log.info("a node does not answer the cleaner", node=node.node.name, error=str(error))


def _log_errors(node: AsyncNode, errors: Errors) -> None:
    if errors:
        error = next(iter(errors.values()))
        log.warning("buffer rows can't be looked up", node=node.node.name, rows=len(errors), error=str(error))
