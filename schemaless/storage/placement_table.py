"""placement: where shards live that were moved, or are about to be. On every cluster, and the highest number counts."""

from __future__ import annotations

from collections.abc import Sequence

from schemaless.storage import appointment_table
from schemaless.storage.operation import Operation
from schemaless.storage.sql import Script, where
from schemaless.storage.table import Table
from schemaless.topology import Appointment, Placement

TABLE = Table("schemaless.placement", Placement)

_NUMBERS_SUM: Script = f"SELECT COALESCE(SUM(number), 0) FROM {TABLE.name}"
Placements = dict[str, dict[int, Placement]]
"""By datastore and shard."""


def placements() -> Operation[Placements]:
    """Returns what this server knows."""
    return by_shard((yield from TABLE.rows()))


def of_shard(datastore: str, shard: int) -> Operation[list[Placement]]:
    return (yield from TABLE.rows(where(datastore=datastore, shard=shard)))


def look(numbers_sum: int = 0) -> Operation[tuple[list[Appointment], int, list[Placement]]]:
    """Returns what a process asks servers again and again: the appointments, the sum of the placements' numbers, and
    all placements if it isn't the one that was seen before. A number only grows, so no two changes cancel out.
    """
    appointed, ((now,),) = (result.rows for result in (yield f"{appointment_table.ALL};{_NUMBERS_SUM}"))
    placed = [] if now == numbers_sum else (yield from TABLE.rows())
    return list(map(appointment_table.TABLE.decode, appointed)), int(now), placed


def write(rows: Sequence[Placement]) -> Operation[None]:
    """Writes rows, at least one. Where a higher number is known, it stays."""
    names = [name for name, _, _ in TABLE.written if name not in ("datastore", "shard", "number")]
    taken = ",".join(f"{name} = IF({_NEWER}, VALUES({name}), {name})" for name in names)
    # Assigned from left to right: the condition reads the number, so that comes last.
    latest = "number = GREATEST(number, VALUES(number))"
    yield f"{TABLE.insert(rows)} ON DUPLICATE KEY UPDATE {taken},{latest}"


_NEWER: Script = "VALUES(number) > number"


def by_shard(rows: Sequence[Placement]) -> Placements:
    found: Placements = {}
    for row in rows:
        found.setdefault(row.datastore, {})[row.shard] = row
    return found


def learn(known: Placements, found: Sequence[Placement]) -> list[Placement]:
    """Takes over what counts of these rows, in place. Returns what is new. It never goes back."""
    new = []
    for row in found:
        mine = known.setdefault(row.datastore, {})
        if (before := mine.get(row.shard)) is None or before.number < row.number:
            mine[row.shard] = row
            new.append(row)
    return new
