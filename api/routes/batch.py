"""/batch: up to a thousand cells in one call. Items count in order, and each succeeds or fails by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from api.answer import Answer, good_answer
from api.batch_items import ITEMS_MAX, WantedCell, in_chunks, parse_gets, parse_puts
from api.call import Call, home_of
from api.cell_view import all_views
from api.negotiation import NDJSON
from api.parameters import READ_FROM
from api.put_answer import item_view
from api.reader import Served, served_together
from api.route import Route
from schemaless.cell import Cell, CellKey, StoredCell
from schemaless.errors import TooLarge
from schemaless.storage import entity_table
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore, Role

READ_CHUNK_KEYS = 100  # of a megabyte at most: bounds what is held before the answer's own bound is noticed
Found = dict[int, StoredCell | None]


async def batch_put(call: Call) -> Answer:
    """Puts cells; a result for each, in order. An item that is wrong fails alone."""
    datastore = await call.datastore()
    call.query()
    form = call.request_format(batch=True)
    items = parse_puts(await call.payload(call.services.settings.batch_bytes_max), form)
    cells = [item for item in items if isinstance(item, Cell)]
    put = iter(await call.services.writer.put(datastore, cells) if cells else [])
    results = [item_view(next(put) if isinstance(item, Cell) else item) for item in items]
    answer_form = call.answer_format(batch=True)
    return good_answer(answer_form, results if answer_form is NDJSON else {"results": results})


async def batch_get(call: Call) -> Answer:
    """The cells under the given keys, in order, null where there is none. A key without ref_key: the newest."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    form = call.request_format(batch=True)
    wanted = parse_gets(await call.payload(call.services.settings.batch_bytes_max), form)
    by_cluster: dict[str, list[int]] = {}
    for position, key in enumerate(wanted):
        by_cluster.setdefault(home_of(datastore, key.row_key)[1], []).append(position)
    parts = await asyncio.gather(
        *(_read_cluster(call, datastore, cluster, positions, wanted, wish) for cluster, positions in by_cluster.items())
    )
    found = {position: cell for cells, _ in parts for position, cell in cells.items()}
    answer_form = call.answer_format(batch=True)
    bytes_max = call.services.settings.answer_bytes_max
    views = all_views((found[position] for position in range(len(wanted))), answer_form, bytes_max)
    served = served_together([part for _, part in parts])
    return good_answer(answer_form, views if answer_form is NDJSON else {"cells": views}, *served.headers)


async def _read_cluster(
    call: Call, datastore: Datastore, cluster: str, positions: list[int], wanted: list[WantedCell], wish: Role | None
) -> tuple[Found, Served]:
    found: Found = {}
    parts: list[Served] = []
    size = 0
    for chunk in in_chunks(positions, READ_CHUNK_KEYS):
        keys = [wanted[position] for position in chunk]
        cells, served = await call.services.reader.read(cluster, partial(_get_or_newest, datastore, keys), wish)
        found.update(zip(chunk, cells, strict=True))
        parts.append(served)
        size += sum(len(cell.body) for cell in cells if cell is not None)
        if size > call.services.settings.answer_bytes_max:
            raise TooLarge("the answer would be too large: ask for fewer keys at once")
    return found, served_together(parts)


def _get_or_newest(datastore: Datastore, keys: Sequence[WantedCell]) -> Operation[list[StoredCell | None]]:
    exact: dict[int, tuple[int, CellKey]] = {}
    newest = {}
    for position, key in enumerate(keys):
        shard = home_of(datastore, key.row_key)[0]
        if key.ref_key is None:
            newest[position] = (shard, key.row_key, key.column_name)
        else:
            exact[position] = (shard, CellKey(key.row_key, key.column_name, key.ref_key))
    found: Found = {}
    if exact:
        found.update(zip(exact, (yield from entity_table.get(datastore, list(exact.values()))), strict=True))
    if newest:
        found.update(zip(newest, (yield from entity_table.newest(datastore, list(newest.values()))), strict=True))
    return [found[position] for position in range(len(keys))]


def _list_of(member: str, item: dict[str, Any]) -> dict[str, Any]:
    """Schema of a payload that is one list."""
    items = {"type": "array", "minItems": 1, "maxItems": ITEMS_MAX, "items": item}
    return {"type": "object", "required": [member], "properties": {member: items}}


_KEY = {
    "row_key": {"type": "string", "format": "uuid"},
    "column_name": {"type": "string"},
    "ref_key": {"type": "integer", "format": "int64"},
}
_KEYS = _list_of("keys", {"type": "object", "required": ["row_key", "column_name"], "properties": _KEY})
_CELLS = _list_of(
    "cells", {"type": "object", "required": [*_KEY, "body"], "properties": {**_KEY, "body": {"type": "object"}}}
)

ROUTES = (
    Route("POST", "/batch/put", batch_put, payload=_CELLS, batch=True),
    Route("POST", "/batch/get", batch_get, (READ_FROM,), payload=_KEYS, batch=True),
)
