"""The conflict table: buffered cells that met another body at home (I6). Rows are written by buffer_table.py, in the
transaction that deletes the buffer row, and stay until a person has dealt with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.cell import CellKey
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import where
from schemaless.storage.table import Table


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


_TABLE = "schemaless.conflict"
_SIZE = "LENGTH(stored_body) + LENGTH(buffered_body)"
_ENTRIES = Table(_TABLE, ConflictEntry, size_bytes=_SIZE)
_CONFLICTS = Table(_TABLE, CellConflict, key=Table("", CellKey))


def newest(datastore: str, below: int, limit: int) -> Operation[list[ConflictEntry]]:
    """Returns conflicts of a datastore that this server recorded, with an id lower than `below`, newest first."""
    below_it = f"AND conflict_id < {below} ORDER BY conflict_id DESC LIMIT {limit}"
    return (yield from _ENTRIES.rows(f"{where(datastore=datastore)} {below_it}"))


def get(conflict_ids: Sequence[int]) -> Operation[dict[int, CellConflict]]:
    """Returns conflicts by id, at least one, without those that this server doesn't show. The caller bounds them."""
    return (yield from _CONFLICTS.by("conflict_id", where(conflict_id=conflict_ids) + " ORDER BY conflict_id"))


def count(datastore: str) -> Operation[int]:
    """Returns how many conflicts of a datastore this server recorded."""
    ((total,),) = yield from query(f"SELECT COUNT(*) FROM {_TABLE} {where(datastore=datastore)}")
    return int(total)


class ConflictDigest(msgspec.Struct, frozen=True, gc=False):
    """A conflict as servers compare it. `digest` is of its cell and both bodies, and `size_bytes` is theirs."""

    conflict_id: int
    datastore: str
    size_bytes: int
    digest: bytes


_DIGEST = "UNHEX(SHA2(CONCAT(row_key, column_name, ref_key, UNHEX(SHA2(stored_body, 256)), buffered_body), 256))"
_DIGESTS = Table(_TABLE, ConflictDigest, size_bytes=_SIZE, digest=_DIGEST)


def digests(after: int, limit: int) -> Operation[list[ConflictDigest]]:
    """Returns conflicts of all datastores with an id above `after`, ascending."""
    return (yield from _DIGESTS.rows(f"WHERE conflict_id > {after} ORDER BY conflict_id LIMIT {limit}"))


def lacking(found: Sequence[ConflictDigest]) -> Operation[list[ConflictDigest]]:
    """Returns the conflicts of another server, at least one, that this one doesn't have under the same id."""
    here = yield from _DIGESTS.rows(where(conflict_id=[one.conflict_id for one in found]))
    return [one for one in found if one not in here]
