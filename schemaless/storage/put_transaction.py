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
    datastore: Datastore, cluster: str, rows: Sequence[BufferRow], latest: int | None = None
) -> Operation[list[Placed | BufferOutcome]]:
    """Puts rows on the master of `cluster` and returns, for each in order, its place in the entity table where
    `cluster` is its home, or else its outcome in the buffer table.

    `latest` is the latest created_at that is believed (append.insert). Usually it is one transaction. When a key exists
    already it is one for each kind, with the same outcomes.
    """
    at_home = [row for row in rows if row.home == cluster]
    others = [row for row in rows if row.home != cluster]
    placed: Sequence[Placed] = ()
    buffered: Sequence[BufferOutcome] = ()
    together = bool(at_home and others) and len({row.shard for row in at_home}) <= append.SHARDS_MAX
    if together:
        try:
            copies = [buffer_table.insertion_of(datastore, others)]
            placed = yield from append.insert_new(datastore, at_home, copies, latest)
            buffered = [BufferOutcome.INSERTED] * len(others)
        except DuplicateKey:
            together = False
    if not together:
        buffered = (yield from buffer_table.insert(datastore, others)) if others else []
        placed = (yield from entity_table.put_cells(datastore, at_home, latest)) if at_home else []
    places, outcomes = iter(placed), iter(buffered)
    return [next(places) if row.home == cluster else next(outcomes) for row in rows]
