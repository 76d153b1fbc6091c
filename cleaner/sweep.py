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
from schemaless.errors import Misconfigured, NotFound, StorageUnavailable
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
    """Of one (secondary, home)."""

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
        """One pass over all rows that are old enough; not beyond the point where neither a minion nor the home would
        say anything new. Raises StorageUnavailable when the secondary is away.
        """
        swept = Swept()
        known, self._at_home = self._at_home, set()
        confirming, rescuing = bool(self._minions), True
        after = 0
        while rows := await self._page(after):
            shown = await self._shown_by_a_minion(rows) if confirming else None
            # A minion shows a prefix of what its master committed: behind a page of unseen cells all is unseen.
            confirming = shown is not None and (not shown or any(digest is not None for digest in shown.values()))
            shown = shown or {}
            swept += await self._settle(rows, shown)
            unseen = [row for row in rows if shown.get(row.buffer_id) is None]
            swept += Swept(waiting=len(unseen))
            self._remember(row.buffer_id for row in unseen if row.buffer_id in known)
            if rescuing:
                rescued = await self._rescue([row for row in unseen if row.buffer_id not in known])
                swept += rescued or Swept()
                rescuing = rescued is not None
            after = rows[-1].buffer_id
            if not (confirming or rescuing):  # a home that is away must not cost a time-out for each page
                self._remember(known)
                break
            if len(rows) < self._settings.batch_rows_max:
                break
        return swept

    async def _page(self, after: int) -> list[Buffered]:
        settings = self._settings
        return await self._ask(
            self._secondary,
            buffer_table.oldest,
            self._home,
            after,
            settings.batch_rows_max,
            settings.grace_s,
        )

    async def _shown_by_a_minion(self, rows: Sequence[Buffered]) -> dict[int, bytes | None] | None:
        """Digest of each row's cell by buffer_id, as one minion shows it; None when none answers."""
        self._minions.rotate(-1)
        try:
            shown, _ = await first_answer(
                list(self._minions), lambda minion: self._digests(minion, rows), on_failure=_log_unreachable
            )
        except StorageUnavailable:
            return None
        return shown

    async def _settle(self, rows: Sequence[Buffered], shown: dict[int, bytes | None]) -> Swept:
        """Rows whose cells a minion showed: same body, the row goes; another one, the conflict is recorded."""
        same = [row for row in rows if shown.get(row.buffer_id) == row.digest]
        others = [row for row in rows if shown.get(row.buffer_id) not in (None, row.digest)]
        conflicts = 0
        for row in others:
            stored, buffered = await self._both_bodies(list(self._minions), row)
            if stored is None or buffered is None:
                continue
            if same_body(stored, buffered):
                same.append(row)
            else:
                conflicts += await self._record(row, stored)
        confirmed = await self._ask(self._secondary, buffer_table.delete_confirmed, same) if same else 0
        return Swept(confirmed=confirmed, conflicts=conflicts)

    async def _rescue(self, rows: Sequence[Buffered]) -> Swept | None:
        """Looks at home for cells that no minion shows; puts the missing ones there. None: home is away, they wait."""
        old = [row for row in rows if row.age_s >= self._settings.rescue_grace_s]
        if not old:
            return Swept()
        try:
            standing = await self._digests(self._master, old)
            missing = [row for row in old if row.buffer_id in standing and standing[row.buffer_id] is None]
            rewritten = 0
            for datastore, piece in await self._pieces(missing):
                rewritten += await self._put(datastore, piece)
            conflicts = await self._record_differing(old, standing)
        except StorageUnavailable as error:
            log.info("cells wait for their home", home=self._home, rows=len(old), error=str(error))
            return None
        self._remember(row.buffer_id for row in old if standing.get(row.buffer_id) is not None)
        return Swept(rewritten=rewritten, conflicts=conflicts)

    async def _put(self, datastore: Datastore, rows: Sequence[Buffered]) -> int:
        """Puts cells at home. Another body that came there meanwhile is found by the next pass."""
        bodies = await self._ask(self._secondary, buffer_table.bodies, rows)
        cells = [
            ShardCell(row.key, body, row.shard) for row, body in zip(rows, bodies, strict=True) if body is not None
        ]
        if cells:
            await self._ask(self._master, entity_table.put_cells, datastore, cells)
        return len(cells)

    async def _record_differing(self, rows: Sequence[Buffered], standing: dict[int, bytes | None]) -> int:
        """Cells that met another body at home. The master's word is enough for a conflict: the cell never changes."""
        recorded = 0
        for row in rows:
            if standing.get(row.buffer_id) not in (None, row.digest):
                stored, buffered = await self._both_bodies([self._master], row)
                if stored is not None and buffered is not None and not same_body(stored, buffered):
                    recorded += await self._record(row, stored)
        return recorded

    async def _record(self, row: Buffered, stored: bytes) -> bool:
        log.warning("a buffered cell met another body at home", datastore=row.datastore, key=str(row.key))
        return await self._ask(self._secondary, buffer_table.record_conflict, row, stored)

    async def _both_bodies(self, nodes: Iterable[AsyncNode], row: Buffered) -> tuple[bytes | None, bytes | None]:
        """(stored, buffered) of a row; one at a time, so that memory stays bounded. Differences are rare."""
        datastore = await self._catalogue.datastore(row.datastore)
        (buffered,) = await self._ask(self._secondary, buffer_table.bodies, [row])
        keys = [(row.shard, row.key)]
        try:
            ((stored,), _) = await first_answer(
                nodes, lambda node: self._ask(node, entity_table.get, datastore, keys), on_failure=_log_unreachable
            )
        except StorageUnavailable:
            return None, buffered
        return (stored.body if stored is not None else None), buffered

    async def _digests(self, node: AsyncNode, rows: Sequence[Buffered]) -> dict[int, bytes | None]:
        """By buffer_id; without the rows of a datastore that this node or the catalogue doesn't know (yet)."""
        digests: dict[int, bytes | None] = {}
        for name, group in _by_datastore(rows).items():
            keys = [(row.shard, row.key) for row in group]
            try:
                datastore = await self._catalogue.datastore(name)
                found = await self._ask(node, entity_table.digests, datastore, keys)
            except (NotFound, Misconfigured) as error:
                log.warning("buffer rows can't be looked up", node=node.node.name, rows=len(group), error=str(error))
            else:
                digests.update(zip((row.buffer_id for row in group), found, strict=True))
        return digests

    async def _pieces(self, rows: Sequence[Buffered]) -> list[tuple[Datastore, Sequence[Buffered]]]:
        """Rows of one datastore each, of bounded size."""
        return [
            (await self._catalogue.datastore(name), piece)
            for name, group in _by_datastore(rows).items()
            for piece in chunks(group, bytes_max=_CHUNK_BYTES_MAX, size_bytes=lambda row: row.size_bytes)
        ]

    async def _ask(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
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
