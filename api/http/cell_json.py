"""Cells in responses: the JSON shape of a cell, and lists of cells within a bound of bytes (I14)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from api.http.budget import Held, Steps
from api.http.content import Format
from schemaless.cell import StoredCell
from schemaless.codec import BODY_BYTES_MAX, cell_view
from schemaless.errors import TooLarge, UnreadableCell

T = TypeVar("T")

_ITEM_BYTES_MAX = 2 * BODY_BYTES_MAX
"""About what one item may have when it is encoded: a conflict has two bodies."""
_BESIDE_BYTES_MAX = 64 << 10
"""About what a response has beside its items."""


async def views_within(
    items: Sequence[T], view: Callable[[T], dict[str, Any]], form: Format, bytes_max: int, held: Held | None = None
) -> list[msgspec.Raw]:
    """Encodes the first items, as many as fit, but at least one: bodies are larger than they are stored.

    It ends before an item that can't be read. `held` makes room as soon as they outgrow what it has. It is None where
    the caller has reserved enough. Raises UnreadableCell if the first item can't be read, and Unavailable.
    """
    views: list[msgspec.Raw] = []
    size = 0
    has_room = held is None
    steps = Steps()
    for item in items:
        try:
            encoded = form.encode_one(view(item))
        except UnreadableCell:
            if views:
                break
            raise
        if views and size + len(encoded) > bytes_max:
            break
        if held is not None and not has_room and not held.covers(size + len(encoded)):
            del encoded  # it would be held while this request waits for room
            await held.reserve(min(bytes_max, len(items) * _ITEM_BYTES_MAX) + _BESIDE_BYTES_MAX)
            has_room = True
            encoded = form.encode_one(view(item))
        size += len(encoded)
        views.append(msgspec.Raw(encoded))
        await steps.after(len(encoded))
    return views


async def all_views(
    cells: Iterable[StoredCell | None], form: Format, bytes_max: int, held: Held
) -> list[msgspec.Raw | None]:
    """Encodes all cells, None for a missing one. Raises TooLarge when they don't fit into one response, Unavailable
    when there is no room for it, and UnreadableCell.
    """
    found = list(cells)
    existing = [cell for cell in found if cell is not None]
    views = await views_within(existing, cell_view, form, bytes_max, held)
    if len(views) < len(existing):
        cell_view(existing[len(views)])  # it tells if this one can't be read
        raise TooLarge(f"the response would have more than {bytes_max} bytes: ask for less at once")
    following = iter(views)
    return [None if cell is None else next(following) for cell in found]
