"""verify=true: an entry is shown only if the newest cells of its row make the same entry (FriendFeed's filter)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from api.http.steps import Steps
from schemaless.cell import ColumnName, RowKey, StoredCell
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.errors import TooLarge
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import entries_for
from schemaless.storage.index_table import FoundEntry

Newest = Mapping[tuple[RowKey, ColumnName], StoredCell | None]


async def current_entries(
    definition: IndexDefinition, entries: Sequence[FoundEntry], newest: Newest, bytes_max: int
) -> list[FoundEntry]:
    """Returns the entries that the newest cells of their rows make, in order. The others are stale or gone.

    Raises TooLarge for bodies that inflate to more than `bytes_max` in all.
    """
    steps = Steps()
    left = bytes_max
    current = []
    for found in entries:
        bodies: dict[ColumnName, Body] = {}
        for column in definition.columns:
            cell = newest[found.row_key, column]
            if cell is not None:
                packed = inflate_body(cell.body)
                left -= len(packed)
                if left < 0:
                    raise TooLarge("verify reads too many bytes of cells: ask for fewer entries at once")
                bodies[column] = decode_packed(packed)
                await steps.after(len(packed))
        made = entries_for(definition, bodies)
        if found.element < len(made) and made[found.element] == found.entry:
            current.append(found)
    return current
