"""The refusal table: buffered cells that their home refuses, with the error and since when. On the secondary.

The cleaner writes a row when the home refuses a cell, and deletes it when the home has taken the cell. One whose buffer
row is gone counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from schemaless.storage.buffer_table import Buffered, these
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import sql, where

REFUSED_FOR_S = 60
"""How long a home must have refused a cell until operators see it. A restart or a deadlock takes less."""
COUNTED_CELLS_MAX = 10_000
_REASON_CHARACTERS_MAX = 300


class Refused(msgspec.Struct, frozen=True):
    """Cells of a datastore that one home refuses. `reason` is the error of the one that it refuses longest.

    The oldest `COUNTED_CELLS_MAX` are counted: that many mean as many or more.
    """

    cells: int
    oldest_s: float
    reason: str


def note(reasons: Mapping[str, Sequence[Buffered]]) -> Operation[None]:
    """Records of rows, by reason, why the home refuses their cells. Since when is kept from the first time."""
    yield ";".join(
        "INSERT INTO schemaless.refusal (buffer_id, reason, refused_since)"
        + sql(" SELECT buffer_id, %s, UTC_TIMESTAMP(6) FROM schemaless.buffer ", reason[:_REASON_CHARACTERS_MAX])
        + f"{these(rows)} ON DUPLICATE KEY UPDATE reason = VALUES(reason)"
        for reason, rows in reasons.items()
    )


def clear(buffer_ids: Collection[int]) -> Operation[None]:
    """Forgets the refusals of cells, at least one, that their home has taken."""
    yield f"DELETE FROM schemaless.refusal {where(buffer_id=list(buffer_ids))}"


def delete_orphans(limit: int) -> Operation[int]:
    """Deletes refusals whose buffer rows are gone, and returns how many."""
    rows = yield from query(
        "SELECT buffer_id FROM schemaless.refusal LEFT JOIN schemaless.buffer USING (buffer_id)"
        f" WHERE buffer.buffer_id IS NULL LIMIT {limit}"
    )
    if rows:
        yield from clear([buffer_id for (buffer_id,) in rows])
    return len(rows)


def refused() -> Operation[dict[tuple[str, str], Refused]]:
    """Returns by (datastore, home) what a home has refused for `REFUSED_FOR_S` at least, of the rows buffered here."""
    rows = yield from query(
        "SELECT datastore, home, COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN(refused_since), UTC_TIMESTAMP(6)),"
        " SUBSTRING_INDEX(GROUP_CONCAT(reason ORDER BY refused_since SEPARATOR '\\n'), '\\n', 1)"
        " FROM (SELECT buffer_id, reason, refused_since FROM schemaless.refusal"
        f" WHERE refused_since <= UTC_TIMESTAMP(6) - INTERVAL {REFUSED_FOR_S} SECOND"
        f" ORDER BY buffer_id LIMIT {COUNTED_CELLS_MAX}) AS oldest"
        " JOIN schemaless.buffer USING (buffer_id) GROUP BY datastore, home"
    )
    return {(datastore, home): Refused(count, age_us / 1e6, reason) for datastore, home, count, age_us, reason in rows}
