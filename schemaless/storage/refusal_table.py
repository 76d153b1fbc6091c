"""The refusal table: buffered cells that their home refuses, with the error and since when. On the secondary.

The cleaner writes a row when the home refuses a cell, and deletes it when the home has taken the cell. One whose buffer
row is gone counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import commas, sql

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


def note(reasons: Mapping[int, str]) -> Operation[None]:
    """Records by buffer_id why the home refuses cells, at least one. Since when is kept from the first time."""
    rows = [
        sql("(%s, %s, UTC_TIMESTAMP(6))", buffer_id, reason[:_REASON_CHARACTERS_MAX])
        for buffer_id, reason in reasons.items()
    ]
    yield (
        f"INSERT INTO schemaless.refusal (buffer_id, reason, refused_since) VALUES {commas(rows)}"
        " ON DUPLICATE KEY UPDATE reason = VALUES(reason)"
    )


def clear(buffer_ids: Collection[int]) -> Operation[None]:
    """Forgets the refusals of cells, at least one, that their home has taken."""
    yield f"DELETE FROM schemaless.refusal WHERE buffer_id IN ({commas([str(number) for number in buffer_ids])})"


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
        sql(
            "SELECT datastore, home, COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN(refused_since), UTC_TIMESTAMP(6)),"
            " SUBSTRING_INDEX(GROUP_CONCAT(reason ORDER BY refused_since SEPARATOR '\\n'), '\\n', 1)"
            " FROM (SELECT buffer_id, reason, refused_since FROM schemaless.refusal"
            " WHERE refused_since <= UTC_TIMESTAMP(6) - INTERVAL %s SECOND ORDER BY buffer_id LIMIT %s) AS oldest"
            " JOIN schemaless.buffer USING (buffer_id) GROUP BY datastore, home",
            REFUSED_FOR_S,
            COUNTED_CELLS_MAX,
        )
    )
    return {(datastore, home): Refused(count, age_us / 1e6, reason) for datastore, home, count, age_us, reason in rows}
