"""BufferSweep: confirms the rows that one secondary holds for one home, and writes missing cells again (I6).

A row goes when a minion of the home showed its cell with the same body. A minion, not the master: what only the master
holds is lost with it. Where the home has no minion, rows stay. Any number of sweeps may run over the same rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import structlog

from schemaless.batching import chunks
from schemaless.codec import same_body
from schemaless.config import CleanerSettings
from schemaless.errors import Misconfigured, NodeRefuses, NotFound, StorageUnavailable
from schemaless.ops.datastores import Catalogue
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.buffer_table import Buffered
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

log = structlog.get_logger()

T = TypeVar("T")

_CHUNK_BYTES_MAX = 4 << 20
_KNOWN_MAX = 500_000  # ids of rows that are known to stand at home: about 50 MB


class Swept(msgspec.Struct, frozen=True):
    """What one pass did. `waiting`: rows that it looked at and left, because no minion showed their cells yet."""

    confirmed: int = 0
    rewritten: int = 0
    conflicts: int = 0
    waiting: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(*(left + right for left, right in zip(_numbers(self), _numbers(other), strict=True)))


class BufferSweep:
    """Sweeps the rows that one secondary holds for one home."""

    def __init__(
        self, storage: AsyncStorage, catalogue: Catalogue, settings: CleanerSettings, secondary: str, home: str
    ) -> None:
        self._secondary = storage.master(secondary)
        self._master = storage.master(home)
        self._minions = deque(storage.minions(home))
        self._home = home
        self._catalogue = catalogue
        self._settings = settings
        self._at_home: set[int] = set()

    async def step(self) -> Swept:
        """Makes one pass over all rows that are old enough: confirms, then rescues what no minion showed.

        Raises StorageUnavailable when the secondary is unreachable.
        """
        swept, all_confirmed = await self.confirm()
        if all_confirmed:
            self._at_home.clear()
            return swept
        return swept + await self.rescue()

    async def confirm(self) -> tuple[Swept, bool]:
        """Deletes the rows whose cells a minion shows with the same body, and records conflicts (I6).

        Returns also whether that was all of them. It ends at a page of which the minion shows no cell: a minion shows a
        prefix of what its master committed, so it shows no later cell either.
        """
        swept, all_confirmed = Swept(), True
        after: int | None = 0
        while after is not None:
            rows, after = await self._page(after)
            if not rows:
                break
            shown = await self._shown_by_a_minion(rows)
            if shown is None:
                return swept, False
            same = [row for row in rows if shown.get(row.buffer_id) == row.digest]
            confirmed = await self._delete(same)
            differing = [row for row in rows if shown.get(row.buffer_id) not in (None, row.digest)]
            equal, conflicts = await self._compare(list(self._minions), differing)
            confirmed += await self._delete(equal)
            swept += Swept(confirmed=confirmed, conflicts=conflicts)
            if confirmed + conflicts < len(rows):
                all_confirmed = False
            if shown and all(digest is None for digest in shown.values()):
                break
        return swept, all_confirmed

    async def rescue(self) -> Swept:
        """Looks at home for the cells of the rows that are left, and puts the missing ones there. Deletes no row: a row
        whose cell met another body at home moves to the conflicts (I6).

        It ends when the home is unreachable, which then costs one time-out and not one for each page.
        """
        known, self._at_home = self._at_home, set()
        swept = Swept()
        after: int | None = 0
        while after is not None:
            rows, after = await self._page(after)
            swept += Swept(waiting=len(rows))
            self._remember(row.buffer_id for row in rows if row.buffer_id in known)
            old = [row for row in rows if row.buffer_id not in known and row.age_s >= self._settings.rescue_grace_s]
            try:
                swept += await self._rescue_page(old) if old else Swept()
            except StorageUnavailable as error:
                log.info("cells wait for their home", home=self._home, rows=len(old), error=str(error))
                self._remember(known)
                break
        return swept

    async def _page(self, after: int) -> tuple[list[Buffered], int | None]:
        """Returns rows, and the id after which the next page begins, or None when there is no next page."""
        rows_max = self._settings.batch_rows_max
        rows = await self._run(
            self._secondary, buffer_table.oldest, self._home, after, rows_max, self._settings.grace_s
        )
        return rows, rows[-1].buffer_id if len(rows) == rows_max else None

    async def _shown_by_a_minion(self, rows: Sequence[Buffered]) -> dict[int, bytes | None] | None:
        """Returns the digest of each cell by buffer_id, as one minion shows it, or None when no minion answers."""
        self._minions.rotate(-1)
        try:
            shown, _ = await first_answer(
                list(self._minions), lambda minion: self._digests(minion, rows), on_failure=_log_unreachable
            )
        except StorageUnavailable:
            return None
        return shown

    async def _rescue_page(self, rows: Sequence[Buffered]) -> Swept:
        at_home = await self._digests(self._master, rows)
        missing = [row for row in rows if row.buffer_id in at_home and at_home[row.buffer_id] is None]
        rewritten = 0
        for name, group in _by_datastore(missing).items():
            datastore = await self._catalogue.datastore(name)
            for chunk in chunks(group, bytes_max=_CHUNK_BYTES_MAX, size_bytes=lambda row: row.size_bytes):
                rewritten += await self._put(datastore, chunk)
        # The master's word is enough for a conflict: a cell never changes.
        differing = [row for row in rows if at_home.get(row.buffer_id) not in (None, row.digest)]
        _, conflicts = await self._compare([self._master], differing)
        self._remember(row.buffer_id for row in rows if at_home.get(row.buffer_id) is not None)
        return Swept(rewritten=rewritten, conflicts=conflicts)

    async def _put(self, datastore: Datastore, rows: Sequence[Buffered]) -> int:
        """Puts cells at home. The next pass finds another body that arrived there meanwhile."""
        bodies = await self._run(self._secondary, buffer_table.bodies, rows)
        cells = [
            ShardCell(row.key, body, row.shard) for row, body in zip(rows, bodies, strict=True) if body is not None
        ]
        if cells:
            await self._run(self._master, entity_table.put_cells, datastore, cells)
        return len(cells)

    async def _compare(self, nodes: Sequence[AsyncNode], rows: Sequence[Buffered]) -> tuple[list[Buffered], int]:
        """Compares as values what differs as bytes, and records the conflicts. `nodes` show what is stored.

        Returns the rows with an equal body, and the number of conflicts. Bodies are read one row at a time, so that
        memory stays bounded. Differences are rare.
        """
        equal: list[Buffered] = []
        conflicts = 0
        for row in rows:
            try:
                stored, buffered = await self._both_bodies(nodes, row)
            except StorageUnavailable as error:  # the other rows go on, and a later pass finds this one again
                log.info("a buffer row can't be compared now", key=str(row.key), error=str(error))
                continue
            if stored is None or buffered is None:
                continue
            if same_body(stored, buffered):
                equal.append(row)
            else:
                log.warning("a buffered cell met another body at home", datastore=row.datastore, key=str(row.key))
                conflicts += await self._run(self._secondary, buffer_table.record_conflict, row, stored)
        return equal, conflicts

    async def _both_bodies(self, nodes: Sequence[AsyncNode], row: Buffered) -> tuple[bytes | None, bytes | None]:
        """Returns the stored and the buffered body of a row, None for one that isn't there."""
        datastore = await self._catalogue.datastore(row.datastore)
        keys = [(row.shard, row.key)]
        (buffered,) = await self._run(self._secondary, buffer_table.bodies, [row])
        ((stored,), _) = await first_answer(nodes, lambda node: self._run(node, entity_table.get, datastore, keys))
        return (None if stored is None else stored.body), buffered

    async def _delete(self, rows: Sequence[Buffered]) -> int:
        """Deletes rows whose cell a minion showed with the same body. A row whose claim was taken over stays."""
        return await self._run(self._secondary, buffer_table.delete_confirmed, rows) if rows else 0

    async def _digests(self, node: AsyncNode, rows: Sequence[Buffered]) -> dict[int, bytes | None]:
        """Returns digests by buffer_id, without rows of a datastore that is not known yet."""
        digests: dict[int, bytes | None] = {}
        for name, group in _by_datastore(rows).items():
            keys = [(row.shard, row.key) for row in group]
            try:
                datastore = await self._catalogue.datastore(name)
                found = await self._run(node, entity_table.digests, datastore, keys)
            except (NotFound, Misconfigured, NodeRefuses) as error:
                log.warning("buffer rows can't be looked up", node=node.node.name, rows=len(group), error=str(error))
            else:
                digests.update(zip((row.buffer_id for row in group), found, strict=True))
        return digests

    async def _run(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        return await node.run(operation, *args, timeout_s=self._settings.node_timeout_s)

    def _remember(self, buffer_ids: Iterable[int]) -> None:
        if len(self._at_home) < _KNOWN_MAX:
            self._at_home.update(buffer_ids)


def _log_unreachable(node: AsyncNode, error: StorageUnavailable) -> None:
    log.info("a node does not answer the cleaner", node=node.node.name, error=str(error))


def _by_datastore(rows: Sequence[Buffered]) -> dict[str, list[Buffered]]:
    groups: dict[str, list[Buffered]] = {}
    for row in rows:
        groups.setdefault(row.datastore, []).append(row)
    return groups


def _numbers(swept: Swept) -> tuple[int, ...]:
    return swept.confirmed, swept.rewritten, swept.conflicts, swept.waiting
