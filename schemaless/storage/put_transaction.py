"""What puts write to one master: cells whose home it is, and second copies of cells whose home is elsewhere (I5).

Both kinds go into one transaction, so a master that is home and secondary at once commits half as often.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemaless.cell import Placed
from schemaless.errors import DuplicateKey
from schemaless.storage import append, buffer_table, entity_table
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore


def put_copies(
    datastore: Datastore, cluster: str, rows: Sequence[BufferRow]
) -> Operation[list[Placed | BufferOutcome]]:
    """For each row, in order: its place in the entity table when `cluster` is its home, else what the buffer said.

    Usually one transaction. Where a key stands in the way it is one for each kind, with the same outcome.
    """
    at_home = [row for row in rows if row.home == cluster]
    others = [row for row in rows if row.home != cluster]
    placed, outcomes = yield from _put(datastore, at_home, others)
    places, answers = iter(placed), iter(outcomes)
    return [next(places) if row.home == cluster else next(answers) for row in rows]


def _put(
    datastore: Datastore, at_home: Sequence[BufferRow], others: Sequence[BufferRow]
) -> Operation[tuple[Sequence[Placed], Sequence[BufferOutcome]]]:
    if at_home and others:
        try:
            placed = yield from append.insert_new(datastore, at_home, [buffer_table.insertion_of(datastore, others)])
        except DuplicateKey:
            pass
        else:
            return placed, [BufferOutcome.INSERTED] * len(others)
    outcomes = (yield from buffer_table.insert(datastore, others)) if others else []
    placed = (yield from entity_table.put_cells(datastore, at_home)) if at_home else []
    return placed, outcomes
