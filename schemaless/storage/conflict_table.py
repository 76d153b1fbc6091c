"""The conflict table: buffered cells that met another body at home (I6). Rows are written by buffer_table.py, in the
transaction that deletes the buffer row, and stay until a person has dealt with them.
"""

from __future__ import annotations

import msgspec

from schemaless.cell import CellKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import sql


class CellConflict(msgspec.Struct, frozen=True, gc=False):
    """`stored_body` is the cell's at home, and `buffered_body` was buffered, both in stored form. `detected_at` is in
    microseconds since the epoch, UTC.
    """

    key: CellKey
    stored_body: bytes
    buffered_body: bytes
    detected_at: int


def newest(datastore: str, limit: int) -> Operation[list[CellConflict]]:
    """Returns the last conflicts of a datastore that this server recorded, newest first."""
    rows = yield from query(
        sql(
            "SELECT row_key, column_name, ref_key, stored_body, buffered_body,"
            f" {MICROSECONDS.format('detected_at')} FROM schemaless.conflict"
            " WHERE datastore = %s ORDER BY conflict_id DESC LIMIT %s",
            datastore,
            limit,
        )
    )
    return [
        CellConflict(CellKey(row_key, column_name, ref_key), stored, buffered, detected_at)
        for row_key, column_name, ref_key, stored, buffered, detected_at in rows
    ]


def count(datastore: str) -> Operation[int]:
    """Returns how many conflicts of a datastore this server recorded."""
    ((total,),) = yield from query(sql("SELECT COUNT(*) FROM schemaless.conflict WHERE datastore = %s", datastore))
    return int(total)
