"""ClusterPair: the rows that one secondary holds for one home, and the questions about them that both passes ask."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from schemaless.cell import CellKey
from schemaless.codec import same_body
from schemaless.errors import (
    ClockAhead,
    NodeRefuses,
    NotDurable,
    SchemalessError,
    ShardsLocked,
    ShardsMoved,
    StaleTopology,
    StorageUnavailable,
)
from schemaless.ops.datastores import Catalogue
from schemaless.storage import buffer_table, entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.buffer_table import Buffered, Sizes
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

log = structlog.get_logger()

NODE_TIMEOUT_S = 1.5  # for one query, so that a hung node doesn't hold up the rows of others

T = TypeVar("T")


PassName = tuple[str, str, str]
"""The secondary, the home, and confirmation or rescue."""


class Swept(msgspec.Struct, frozen=True):
    """What one pass did. `refused`: cells that the home didn't take, although it answers."""

    confirmed: int = 0
    rewritten: int = 0
    conflicts: int = 0
    refused: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(*(left + right for left, right in zip(_numbers(self), _numbers(other), strict=True)))

    @property
    def changed(self) -> bool:
        return bool(self.confirmed or self.rewritten or self.conflicts)


class ClusterPair:
    """A secondary and a home. They are the same for rows of a shard that moved to where they lie."""

    def __init__(
        self, storage: AsyncStorage, catalogue: Catalogue, secondary: str, home: str, arrivals: Counter[tuple[str, str]]
    ) -> None:
        """`arrivals` counts the rows of each pair that named an earlier home before. All pairs share it."""
        self._storage = storage
        self._arrivals = arrivals
        self._cluster = secondary
        self.home = home
        self.secondary = storage.master(secondary)
        self.master = storage.master(home)
        self.catalogue = catalogue

    @property
    def minions(self) -> Sequence[AsyncNode]:
        return self._storage.minions(self.home)

    @property
    def epoch(self) -> int:
        """The home's, as far as this process knows. What it is shown later is proven under it or a later one."""
        return self._storage.epoch(self.home)

    @property
    def arrived(self) -> int:
        """How many rows were corrected to this home. Their ids may be lower than what was looked at."""
        return self._arrivals[self._cluster, self.home]

    async def own(self, rows: Sequence[Buffered]) -> list[Buffered]:
        """Returns the rows whose home is this one. Those of shards that moved are corrected: another pair has them."""
        moved: dict[str, list[Buffered]] = {}
        for row in rows:
            move = self._storage.placements.get(row.datastore, {}).get(row.shard)
            if move is not None and move.home != self.home:
                moved.setdefault(move.home, []).append(row)
        for home, late in moved.items():
            await self.run(self.secondary, buffer_table.correct_home, late, home)
            self._arrivals[self._cluster, home] += len(late)
        corrected = {row.buffer_id for late in moved.values() for row in late}
        return [row for row in rows if row.buffer_id not in corrected]

    def pass_name(self, kind: str) -> PassName:
        """Returns the name of a pass over these rows, for metrics and logs."""
        return self._cluster, self.home, kind

    async def run(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        return await node.run(operation, *args, timeout_s=NODE_TIMEOUT_S)

    async def write(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Does the same for what must be durable. Raises NotDurable for a master that may lose it."""
        return await node.run(operation, *args, timeout_s=NODE_TIMEOUT_S, traffic=Traffic.WRITE)

    async def digests(self, node: AsyncNode, rows: Sequence[Buffered]) -> tuple[Digests, Errors]:
        """Returns by buffer_id the digest of each cell as `node` shows it, None for one that isn't there, and the
        errors of those that it can't look up. Raises StorageUnavailable.
        """
        found: Digests = {}
        errors: Errors = {}

        async def look_up(datastore: Datastore, part: Sequence[Buffered]) -> None:
            shown = await self.run(
                node, proven, entity_table.digests, datastore, [(row.shard, row.key) for row in part]
            )
            found.update(zip((row.buffer_id for row in part), shown, strict=True))

        for name, group in by_datastore(rows).items():
            try:
                datastore = await self.catalogue.datastore(name)
            except StorageUnavailable:
                raise
            except SchemalessError as error:
                errors |= {row.buffer_id: error for row in group}
            else:
                errors |= await in_parts(group, partial(look_up, datastore))
        return found, errors

    async def compare(
        self, nodes: Sequence[AsyncNode], rows: Sequence[Buffered], epoch: int
    ) -> tuple[list[Buffered], int]:
        """Compares as values what differs as bytes, and records the conflicts. `nodes` show what is stored, under this
        epoch of the home or a later one.

        Returns the rows with an equal body, or whose key is erased, and the number of conflicts. Bodies are read one
        row at a time, so that memory stays bounded. Differences are rare.
        """
        equal: list[Buffered] = []
        conflicts = 0
        for row in rows:
            try:
                (buffered,) = await self.run(self.secondary, buffer_table.cells, [row])
                stored = await self._stored_body(nodes, row)
                if stored and buffered and not same_body(stored, buffered.body):
                    stored = await self._stored_body([self.master], row)  # a minion that lags shows an erased body
                if stored is None or buffered is None:
                    continue
                if not stored or same_body(stored, buffered.body):  # of an erased cell no copy is kept
                    equal.append(row)
                    continue
            except SchemalessError as error:  # the other rows go on, and a later pass finds this one again
                log.info("a buffer row can't be compared now", key=str(row.key), error=str(error))
                continue
            log.warning("a buffered cell met another body at home", datastore=row.datastore, key=str(row.key))
            conflicts += await self.run(self.secondary, buffer_table.record_conflict, row, stored, self.home, epoch)
        return equal, conflicts

    async def _stored_body(self, nodes: Sequence[AsyncNode], row: Buffered) -> bytes | None:
        """Returns what the first of the nodes that answers has under the key of a row, empty for an erased cell."""
        datastore = await self.catalogue.datastore(row.datastore)
        keys = [(row.shard, row.key)]
        ((stored,), _) = await first_answer(
            nodes, lambda node: self.run(node, proven, entity_table.get, datastore, keys)
        )
        return None if stored is None else stored.body


Digests = dict[int, bytes | None]
Errors = dict[int, SchemalessError]


_OF_THE_SERVER = (NotDurable, ClockAhead)
"""Refusals of all that is put there: halves would have every body read a dozen times, in vain."""


async def in_parts(
    rows: Sequence[Buffered], work: Callable[[Sequence[Buffered]], Awaitable[None]]
) -> dict[int, SchemalessError]:
    """Does `work` on all rows together. If it fails, on each half, down to the single rows at which it fails.

    Returns their errors by buffer_id, so one row that can't be done holds up no other. Raises StorageUnavailable:
    halves of a server that is away are away, too.
    """
    try:
        await work(rows)
    except SchemalessError as error:
        locked = error.shards if isinstance(error, ShardsLocked | ShardsMoved) else frozenset()
        free = [row for row in rows if row.shard not in locked]
        if len(free) < len(rows):  # the others wait for that lock no second time, and live here
            held: Errors = {row.buffer_id: error for row in rows if row.shard in locked}
            return held | (await in_parts(free, work) if free else {})
        away = isinstance(error, StorageUnavailable) and not isinstance(error, NodeRefuses)
        if away or isinstance(error, StaleTopology):  # of a minion: another one may have the present master's history
            raise
        if len(rows) == 1 or isinstance(error, _OF_THE_SERVER):
            return {row.buffer_id: error for row in rows}
        middle = len(rows) // 2
        return await in_parts(rows[:middle], work) | await in_parts(rows[middle:], work)
    return {}


Keys = Sequence[tuple[int, CellKey]]


def proven(read: Callable[[Datastore, Keys], Operation[T]], datastore: Datastore, keys: Keys) -> Operation[T]:
    """Reads from a server of the present home. Raises StaleTopology for one that doesn't follow its history: a former
    master, or a minion that doesn't have the opening of the present one yet.
    """
    yield from shard_head.verify_home(datastore.name, {shard for shard, _ in keys})
    return (yield from read(datastore, keys))


def by_datastore(rows: Sequence[Buffered]) -> dict[str, list[Buffered]]:
    groups: dict[str, list[Buffered]] = {}
    for row in rows:
        groups.setdefault(row.datastore, []).append(row)
    return groups


def _numbers(swept: Swept) -> tuple[int, ...]:
    return swept.confirmed, swept.rewritten, swept.conflicts, swept.refused


# BufferCursor: where a pass is among the buffer rows of one pair, and how much it takes at once (I14).
#
# A pass has several cursors, which take turns, so neither old rows nor large ones hold up others. Time and servers are
# the caller's.

ALL_SIZES = Sizes()
_STRETCH_MAX = 1 << 63


class PageSize:
    """The bounds of a page. A time-out quarters them, down to one row, and each page that went well doubles them."""

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self.rows = rows_max
        self.bytes = bytes_max

    def shrink(self) -> None:
        self.rows = max(1, self.rows // 4)
        self.bytes = max(1, self.bytes // 4)

    def grow(self) -> None:
        self.rows = min(self._rows_max, self.rows * 2)
        self.bytes = min(self._bytes_max, self.bytes * 2)


class BufferCursor:
    """Goes over the rows of a home whose sizes are within `sizes`, page by page. All up to `after` was seen."""

    def __init__(self, page_size: PageSize, sizes: Sizes = ALL_SIZES) -> None:
        self.after = 0
        self.page_size = page_size
        self._sizes = sizes
        self._stretch = _STRETCH_MAX

    async def page(self, pair: ClusterPair, until: int) -> list[Buffered]:
        """Returns the next rows up to `until`. The cursor stays: `moved_past` or `failed` moves it.

        Without rows it has moved on to `until`, or less far: the server looks at all rows in between, of any size, and
        millions take longer than a time-out. After one, raised as StorageUnavailable, it looks at fewer. Rows of
        another home are passed, too.
        """
        if self.after >= until:
            return []
        until = min(until, self.after + self._stretch)
        try:
            rows = await pair.run(pair.secondary, self._page, pair.home, until)
        except StorageUnavailable:
            self.page_size.shrink()
            self._stretch = max(1, (until - self.after) // 4)
            raise
        if not rows:
            self.after = until
        self._stretch = min(_STRETCH_MAX, self._stretch + self._stretch // 8 + 1)  # slowly: a time-out costs most
        own = await pair.own(rows)
        if rows and not own:
            self.after = rows[-1].buffer_id
        return own

    def moved_past(self, rows: Sequence[Buffered]) -> None:
        """Goes on after a page that went well."""
        self.after = rows[-1].buffer_id
        self.page_size.grow()

    def failed(self, rows: Sequence[Buffered]) -> bool:
        """Takes less next time. Returns True for a page of one row: it is passed, so that it holds up no other."""
        self.page_size.shrink()
        if len(rows) > 1:
            return False
        self.after = rows[-1].buffer_id
        return True

    def _page(self, home: str, until: int) -> Operation[list[Buffered]]:
        size = self.page_size
        return buffer_table.page(home, self.after, until, self._sizes, rows_max=size.rows, bytes_max=size.bytes)


class Horizon:
    """The highest buffer_id of `grace_s` ago. Rows up to it are old enough, whatever a server's clock says.

    `newest` is the highest one at the last look.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._newest: deque[tuple[float, int]] = deque()
        self._old_enough = 0
        self.newest = 0

    async def look(self, pair: ClusterPair) -> int:
        """Asks for the newest row, and returns the id up to which rows are old enough by now."""
        self.newest = await pair.run(pair.secondary, buffer_table.newest_id, pair.home)
        now = self._clock()
        self._newest.append((now, self.newest))
        while self._newest and self._newest[0][0] <= now - self._grace_s:
            self._old_enough = max(self._old_enough, self._newest.popleft()[1])
        return self._old_enough
