"""The conflict table: buffered cells that met another body at home (I6). Rows are written by buffer_table.py, in the
transaction that deletes the buffer row, and stay until a person has dealt with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import CellKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import commas, sql


class ConflictEntry(msgspec.Struct, frozen=True, gc=False):
    """A conflict without its bodies. `size_bytes` is that of both in stored form, and `detected_at` is in microseconds
    since the epoch, UTC.
    """

    conflict_id: int
    detected_at: int
    size_bytes: int


class CellConflict(msgspec.Struct, frozen=True, gc=False):
    """`stored_body` is the cell's at home, and `buffered_body` was buffered, both in stored form."""

    key: CellKey
    stored_body: bytes
    buffered_body: bytes
    detected_at: int


def newest(datastore: str, below: int, limit: int) -> Operation[list[ConflictEntry]]:
    """Returns conflicts of a datastore that this server recorded, with an id lower than `below`, newest first."""
    rows = yield from query(
        sql(
            f"SELECT conflict_id, {MICROSECONDS.format('detected_at')}, LENGTH(stored_body) + LENGTH(buffered_body)"
            " FROM schemaless.conflict WHERE datastore = %s AND conflict_id < %s ORDER BY conflict_id DESC LIMIT %s",
            datastore,
            below,
            limit,
        )
    )
    return [ConflictEntry(*row) for row in rows]


def get(conflict_ids: Sequence[int]) -> Operation[dict[int, CellConflict]]:
    """Returns conflicts by id, at least one, without those that this server doesn't show. The caller bounds them."""
    rows = yield from query(
        "SELECT conflict_id, row_key, column_name, ref_key, stored_body, buffered_body,"
        f" {MICROSECONDS.format('detected_at')} FROM schemaless.conflict"
        f" WHERE conflict_id IN ({commas([str(number) for number in conflict_ids])}) ORDER BY conflict_id"
    )
    return {
        number: CellConflict(CellKey(row_key, column_name, ref_key), stored, buffered, detected_at)
        for number, row_key, column_name, ref_key, stored, buffered, detected_at in rows
    }


def count(datastore: str) -> Operation[int]:
    """Returns how many conflicts of a datastore this server recorded."""
    ((total,),) = yield from query(sql("SELECT COUNT(*) FROM schemaless.conflict WHERE datastore = %s", datastore))
    return int(total)
