"""ClusterPair: the rows that one secondary holds for one home, and the questions about them that both passes ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from schemaless.codec import same_body
from schemaless.config import CleanerSettings
from schemaless.errors import ClockAhead, HeadsLocked, NodeRefuses, NotDurable, SchemalessError, StorageUnavailable
from schemaless.ops.datastores import Catalogue
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.buffer_table import Buffered
from schemaless.storage.failover import first_answer
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

log = structlog.get_logger()

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
    """A secondary and a home, with the time-out of every question."""

    def __init__(
        self, storage: AsyncStorage, catalogue: Catalogue, settings: CleanerSettings, secondary: str, home: str
    ) -> None:
        self.home = home
        self.secondary = storage.master(secondary)
        self.master = storage.master(home)
        self.minions = storage.minions(home)
        self.catalogue = catalogue
        self._timeout_s = settings.node_timeout_s

    def pass_name(self, kind: str) -> PassName:
        """Returns the name of a pass over these rows, for metrics and logs."""
        return self.secondary.node.cluster, self.home, kind

    async def run(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        return await node.run(operation, *args, timeout_s=self._timeout_s)

    async def write(self, node: AsyncNode, operation: Callable[[*Args], Operation[T]], *args: *Args) -> T:
        """Does the same for what must be durable. Raises NotDurable for a master that may lose it."""
        return await node.run(operation, *args, timeout_s=self._timeout_s, traffic=Traffic.WRITE)

    async def digests(self, node: AsyncNode, rows: Sequence[Buffered]) -> tuple[Digests, Errors]:
        """Returns by buffer_id the digest of each cell as `node` shows it, None for one that isn't there, and the
        errors of those that it can't look up. Raises StorageUnavailable.
        """
        found: Digests = {}
        errors: Errors = {}

        async def look_up(datastore: Datastore, part: Sequence[Buffered]) -> None:
            shown = await self.run(node, entity_table.digests, datastore, [(row.shard, row.key) for row in part])
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

    async def compare(self, nodes: Sequence[AsyncNode], rows: Sequence[Buffered]) -> tuple[list[Buffered], int]:
        """Compares as values what differs as bytes, and records the conflicts. `nodes` show what is stored.

        Returns the rows with an equal body, and the number of conflicts. Bodies are read one row at a time, so that
        memory stays bounded. Differences are rare.
        """
        equal: list[Buffered] = []
        conflicts = 0
        for row in rows:
            try:
                stored, buffered = await self._both_bodies(nodes, row)
                if stored is None or buffered is None:
                    continue
                if same_body(stored, buffered):
                    equal.append(row)
                    continue
            except SchemalessError as error:  # the other rows go on, and a later pass finds this one again
                log.info("a buffer row can't be compared now", key=str(row.key), error=str(error))
                continue
            log.warning("a buffered cell met another body at home", datastore=row.datastore, key=str(row.key))
            conflicts += await self.run(self.secondary, buffer_table.record_conflict, row, stored)
        return equal, conflicts

    async def _both_bodies(self, nodes: Sequence[AsyncNode], row: Buffered) -> tuple[bytes | None, bytes | None]:
        """Returns the stored and the buffered body of a row, None for one that isn't there."""
        datastore = await self.catalogue.datastore(row.datastore)
        keys = [(row.shard, row.key)]
        (buffered,) = await self.run(self.secondary, buffer_table.cells, [row])
        ((stored,), _) = await first_answer(nodes, lambda node: self.run(node, entity_table.get, datastore, keys))
        return (None if stored is None else stored.body), (None if buffered is None else buffered.body)


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
        locked = error.shards if isinstance(error, HeadsLocked) else frozenset()
        free = [row for row in rows if row.shard not in locked]
        if len(free) < len(rows):  # the others wait for that lock no second time
            held: Errors = {row.buffer_id: error for row in rows if row.shard in locked}
            return held | (await in_parts(free, work) if free else {})
        if isinstance(error, StorageUnavailable) and not isinstance(error, NodeRefuses):
            raise
        if len(rows) == 1 or isinstance(error, _OF_THE_SERVER):
            return {row.buffer_id: error for row in rows}
        middle = len(rows) // 2
        return await in_parts(rows[:middle], work) | await in_parts(rows[middle:], work)
    return {}


def by_datastore(rows: Sequence[Buffered]) -> dict[str, list[Buffered]]:
    groups: dict[str, list[Buffered]] = {}
    for row in rows:
        groups.setdefault(row.datastore, []).append(row)
    return groups


def _numbers(swept: Swept) -> tuple[int, ...]:
    return swept.confirmed, swept.rewritten, swept.conflicts, swept.refused
