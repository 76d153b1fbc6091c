"""The next version of a column: a cell whose ref_key the server gives (POST), in one transaction at home.

The shard's head is locked from the question for the highest ref_key to the commit, so no other put can take the same
one: a POST never loses a race. Not idempotent by itself: without an Idempotency-Key each run is a new version.
"""

from __future__ import annotations

import msgspec

from schemaless.cell import REF_KEY_MAX, Cell, CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey
from schemaless.codec import same_body
from schemaless.errors import Corrupt, Invalid
from schemaless.storage import append, entity_table, idempotency_table, shard_head
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Name, sql
from schemaless.topology import Datastore


class NewVersion(msgspec.Struct, frozen=True, gc=False):
    """What is to be appended to a column. `idempotency_key` None: each time anew."""

    shard: int
    row_key: RowKey
    column_name: ColumnName
    body: bytes
    idempotency_key: str | None = None


class NextVersion(msgspec.Struct, frozen=True, gc=False):
    """`replayed`: an earlier POST with the same Idempotency-Key wrote the cell."""

    cell: Cell
    placed: Placed
    replayed: bool


def put_next(datastore: Datastore, new: NewVersion) -> Operation[NextVersion]:
    """Raises Invalid for an Idempotency-Key that was used with another body, or when no higher ref_key is left."""
    heads, now = yield from shard_head.lock(datastore.name, [new.shard])
    first = yield from _first_answer(datastore, new)
    if first is not None:
        yield "ROLLBACK"
        return first
    key = CellKey(new.row_key, new.column_name, (yield from _next_ref_key(datastore, new)))
    cell = ShardCell(key, new.body, new.shard)
    also = []
    if new.idempotency_key is not None:
        also = [
            idempotency_table.insertion(datastore.name, new.row_key, new.column_name, new.idempotency_key, key.ref_key)
        ]
    (placed,) = yield from append.append(datastore, heads, now, [cell], also)
    return NextVersion(cell, placed, replayed=False)


def _first_answer(datastore: Datastore, new: NewVersion) -> Operation[NextVersion | None]:
    if new.idempotency_key is None:
        return None
    ref_key = yield from idempotency_table.find(datastore.name, new.row_key, new.column_name, new.idempotency_key)
    if ref_key is None:
        return None
    key = CellKey(new.row_key, new.column_name, ref_key)
    (found,) = yield from entity_table.get(datastore, [(new.shard, key)])
    if found is None:
        raise Corrupt(f"an Idempotency-Key names {key}, which is not there")
    if not same_body(found.body, new.body):
        raise Invalid("Idempotency-Key", "was used with another body")
    placed = Placed(PutStatus.STORED, new.shard, found.generation, found.added_id, found.created_at)
    return NextVersion(Cell(key, found.body), placed, replayed=True)


def _next_ref_key(datastore: Datastore, new: NewVersion) -> Operation[RefKey]:
    ((highest,),) = yield from query(
        sql(
            "SELECT MAX(ref_key) FROM %s.entity WHERE row_key = %s AND column_name = %s",
            Name(datastore.database(new.shard)),
            new.row_key,
            new.column_name.encode(),
        )
    )
    if highest == REF_KEY_MAX:
        raise Invalid("ref_key", "the column holds the highest one already")
    return RefKey(1 if highest is None else highest + 1)
