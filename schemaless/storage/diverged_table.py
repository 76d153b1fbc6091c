"""The diverged table: what a server had and its cluster's master never got, and what came of putting it again.

It is on the master of the server's cluster, and so on its minions. Rows are named by server and epoch: a server that
diverged again has a higher epoch. Nothing deletes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import sha256

import msgspec

from schemaless.cell import CellKey, Placed, PutStatus, RowKey
from schemaless.runtime.batching import chunks
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, Script, sql, where
from schemaless.storage.table import Table

_TABLE = "schemaless.diverged"


NO_BODY = sha256(b"").digest()
ERASED_OUTCOME = (
    "outcome = COALESCE(outcome, 'conflict'), home_generation = COALESCE(home_generation, 0),"
    " home_added_id = COALESCE(home_added_id, 0)"
)
"""What an UPDATE sets for a cell that was erased before it was put again: it met no cell anywhere."""

EMPTIED = "body = '', digest = UNHEX(SHA2(number, 256))"
"""A digest would tell a body that is one of few. Those of two bodies of one cell stay different."""


class DivergedKind(StrEnum):
    """The table that the server had the cell in. A conflict has the body that wasn't stored."""

    CELL = "cell"
    BUFFER = "buffer"
    CONFLICT = "conflict"


class DivergedCell(msgspec.Struct, frozen=True, gc=False):
    """A cell of a tail. `digest` is SHA-256 of its body. Generation and added_id are 0 for one that had no place."""

    kind: DivergedKind
    datastore: str
    shard: int
    key: CellKey
    body: bytes
    digest: bytes
    cause: str | None = None
    idempotency_key: str | None = None
    generation: int = 0
    added_id: int = 0

    @property
    def cell(self) -> ShardCell:
        return ShardCell(self.key, self.body, self.shard, cause=self.cause, idempotency_key=self.idempotency_key)


_CELLS = Table(_TABLE, DivergedCell, key=Table("", CellKey))


class DivergedRow(msgspec.Struct, frozen=True, gc=False):
    """A row without its body. `outcome` and the place at home are None until the cell was put again."""

    server: str
    epoch: int
    kind: DivergedKind
    shard: int
    column_name: str
    ref_key: int
    size_bytes: int
    generation: int
    added_id: int
    outcome: PutStatus | None
    home_generation: int | None
    home_added_id: int | None
    kept_at: int


_ROWS = Table(_TABLE, DivergedRow, size_bytes="LENGTH(body)")


def keep(server: str, epoch: int, cells: Sequence[DivergedCell]) -> Operation[None]:
    """Keeps cells, at least one, without those that are kept. The caller bounds them.

    One without a body was erased. It isn't put again.
    """
    yield _CELLS.insert(cells, "INSERT IGNORE", server=server, epoch=epoch, kept_at=NOW)
    if any(not cell.body for cell in cells):
        which = f"{where(server=server, epoch=epoch)} AND outcome IS NULL AND body = ''"
        yield f"UPDATE {_TABLE} SET {ERASED_OUTCOME} {which}"


def waiting(server: str, epoch: int, after: int, rows_max: int, bytes_max: int) -> Operation[dict[int, DivergedCell]]:
    """Returns cells without an outcome, by a number above `after`, ascending: as many as fit, but at least one."""
    rows = yield from query(
        f"SELECT number, LENGTH(body) FROM {_TABLE} {where(server=server, epoch=epoch)} AND outcome IS NULL"
        f" AND number > {after} ORDER BY number LIMIT {rows_max}"
    )
    fitting = next(chunks(rows, bytes_max=bytes_max, size_bytes=lambda row: int(row[1])), ())
    if not fitting:
        return {}
    return (yield from _CELLS.by("number", where(number=[number for number, _ in fitting]) + " ORDER BY number"))


def settle(placed: Mapping[int, Placed]) -> Operation[None]:
    """Writes what came of cells by number, at least one, where nothing is written yet."""
    yield ";".join(["BEGIN", *(_outcome(number, place) for number, place in placed.items()), "COMMIT"])


def settle_erased(number: int, placed: Placed) -> Operation[None]:
    """Writes that the key of a cell is erased at home, and removes its body."""
    emptied = f"UPDATE {_TABLE} SET {EMPTIED} {where(number=number)}"
    yield ";".join(["BEGIN", _outcome(number, placed), emptied, "COMMIT"])


def settle_conflict(number: int, placed: Placed, stored_body: bytes) -> Operation[None]:
    """Records a conflict with both bodies, in one transaction with the outcome, unless the outcome is written."""
    results = yield f"BEGIN; SELECT number FROM {_TABLE} {where(number=number)} AND outcome IS NULL FOR UPDATE"
    record = (
        "INSERT INTO schemaless.conflict (datastore, row_key, column_name, ref_key, stored_body, buffered_body,"
        " detected_at)"
        + sql(" SELECT datastore, row_key, column_name, ref_key, %s, body, %s", stored_body, NOW)
        + f" FROM {_TABLE} {where(number=number)}"
    )
    yield ";".join([*([record, _outcome(number, placed)] if results[-1].rows else []), "COMMIT"])


def counts(server: str, epoch: int) -> Operation[dict[PutStatus | None, int]]:
    """Returns how many cells have each outcome, under None those without one."""
    rows = yield from query(
        f"SELECT outcome, COUNT(*) FROM {_TABLE} {where(server=server, epoch=epoch)} GROUP BY outcome"
    )
    return {outcome and PutStatus(outcome): int(count) for outcome, count in rows}


def of_row(datastore: str, row_key: RowKey, limit: int) -> Operation[list[DivergedRow]]:
    """Returns what is kept of one row, in the order in which it was kept."""
    return (yield from _ROWS.rows(f"{where(datastore=datastore, row_key=row_key)} ORDER BY number LIMIT {limit}"))


def _outcome(number: int, placed: Placed) -> Script:
    outcome = sql(
        "outcome = %s, home_generation = %s, home_added_id = %s", placed.status, placed.generation, placed.added_id
    )
    return f"UPDATE {_TABLE} SET {outcome} {where(number=number)} AND outcome IS NULL"
