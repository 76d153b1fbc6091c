"""Planted damage: entries of an index that the demo changes behind everybody's back, which are then found and repaired.

It does to a table what a person with an SQL client might do. It deletes an entry, changes one, and adds one of a row
that doesn't exist.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from schemaless.cell import RowKey
from schemaless.errors import NotReady
from schemaless.index.check import check_index, complete_definition
from schemaless.index.definition import IndexDefinition
from schemaless.index.inspection import IndexInspector
from schemaless.index.sweep import SweepSelection, one_row
from schemaless.storage import index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Topology

PLANTED = ("ghost", "missing", "stale")


@dataclass(frozen=True, slots=True)
class DamageReport:
    """The kinds of faults that verification named after the damage, how many were repaired, and left after that."""

    named: Sequence[str]
    repaired: int
    left: int


def damage_and_repair(topology: Topology, datastore: Datastore, index: str) -> DamageReport:
    """Plants one fault of each kind on a master, verifies and repairs their rows, and verifies them again.

    Raises StorageUnavailable when a master is unreachable, and NotReady while the index is built or has few entries.
    """

    async def run() -> DamageReport:
        async with AsyncStorage(topology, connections_max=2) as storage:
            definition = await complete_definition(storage, datastore, index)
            inspector = IndexInspector(storage, datastore, definition)

            async def check(selection: SweepSelection, *, repair: bool = False) -> tuple[list[str], int]:
                found = (await check_index(storage, inspector, [selection], repair=repair, minions=False)).masters
                return [fault["kind"] for fault in found.faults], found.counts.repaired

            planted = [one_row(datastore, row_key) for row_key in await _plant(storage, datastore, definition)]
            named = [kind for row in planted for kind in (await check(row))[0]]
            repaired = sum([(await check(row, repair=True))[1] for row in planted])
            left = sum([len((await check(row))[0]) for row in planted])
            return DamageReport(sorted(named), repaired, left)

    return asyncio.run(run())


async def _plant(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> list[RowKey]:
    """Damages the first shard that has entries. Returns the rows."""
    for shard in range(datastore.shards):
        master = storage.master(datastore.home(shard))
        if rows := await master.run(_damage, datastore, shard, definition):
            return rows
    raise NotReady(f"index {definition.name} has no shard with two entries")


def _damage(datastore: Datastore, shard: int, definition: IndexDefinition) -> Operation[list[RowKey]]:
    table = index_table.table(datastore, shard, definition)
    changed = f"`{definition.keyed[-1].name}`"
    (found,) = yield f"SELECT row_key FROM {table} WHERE live = 1 ORDER BY row_key LIMIT 2"
    if len(found.rows) < 2:
        return []
    missing, stale = (RowKey(row_key) for (row_key,) in found.rows)
    ghost = RowKey(uuid.uuid4().bytes)
    yield f"DELETE FROM {table} WHERE row_key = 0x{missing.hex()}"
    yield f"UPDATE {table} SET {changed} = '2000-01-01' WHERE row_key = 0x{stale.hex()}"
    columns = f"row_key, element, source_generation, source_added_id, live, `{definition.shard_field.name}`"
    yield f"INSERT INTO {table} ({columns}) VALUES (0x{ghost.hex()}, 0, 1, 1, 1, 'NOWHERE')"
    return [missing, stale, ghost]
