"""Cells in responses: the JSON shape of a cell, and lists of cells within a bound of bytes (I14)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from api.http.budget import Steps
from api.http.content import Format
from schemaless.cell import StoredCell
from schemaless.codec import cell_view
from schemaless.errors import TooLarge


async def views_within(documents: Iterable[dict[str, Any]], form: Format, bytes_max: int) -> list[msgspec.Raw]:
    """Encodes the first documents, as many as fit, but at least one: bodies are larger than they are stored."""
    views: list[msgspec.Raw] = []
    size = 0
    steps = Steps()
    for document in documents:
        encoded = form.encode_one(document)
        size += len(encoded)
        if views and size > bytes_max:
            break
        views.append(msgspec.Raw(encoded))
        await steps.after(len(encoded))
    return views


async def all_views(cells: Iterable[StoredCell | None], form: Format, bytes_max: int) -> list[msgspec.Raw | None]:
    """Encodes all cells, None for a missing one. Raises TooLarge when they don't fit into one response."""
    views: list[msgspec.Raw | None] = []
    size = 0
    steps = Steps()
    for cell in cells:
        encoded = b"" if cell is None else form.encode_one(cell_view(cell))
        size += len(encoded)
        if size > bytes_max:
            raise TooLarge(f"the response would have more than {bytes_max} bytes: ask for less at once")
        views.append(msgspec.Raw(encoded) if encoded else None)
        await steps.after(len(encoded))
    return views
