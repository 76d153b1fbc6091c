"""/shards: the log of each shard, and how far it has come."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import msgspec

from api.answer import Answer, good_answer
from api.batch_items import decode
from api.call import Call, parse_shard
from api.cell_view import cell_view, views_within
from api.log_reader import After, Page, Since, Wanted, read_page
from api.negotiation import JSON, Format
from api.parameters import COLUMNS, LIMIT, LIMIT_MAX, READ_FROM, Parameter, parse_flag
from api.problems import problem_of
from api.reader import Served, served_together
from api.route import Route
from schemaless.cell import parse_time
from schemaless.errors import Invalid, NotBuilt, SchemalessError, TooLarge
from schemaless.location import parse_location
from schemaless.storage import shard_head
from schemaless.topology import Datastore, Role

LOCATIONS_MAX = 1000
PAYLOAD_BYTES_MAX = 1 << 20
SHARDS_AT_ONCE = 4


def _after(text: str, field: str) -> After:
    return After(*parse_location(text, field))


def _since(text: str, field: str) -> Since:
    return Since(parse_time(text, field))


BEGINNING = After(None, 0)
AFTER: Parameter[After | None] = Parameter("after", _after, None, "ADDED_ID or GENERATION:ADDED_ID; default: 0.")
SINCE: Parameter[Since | None] = Parameter("since", _since, None, "RFC 3339 time, instead of `after`.")
FOLLOW: Parameter[bool] = Parameter("follow", parse_flag, False, "Not built yet.")
PAGE_PARAMETERS = (AFTER, SINCE, LIMIT, COLUMNS, FOLLOW, READ_FROM)


async def list_shards(call: Call) -> Answer:
    """Every shard with its home, generation and head."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    clusters = sorted(set(datastore.placement))
    parts = await asyncio.gather(
        *(call.services.reader.read(cluster, partial(shard_head.heads, datastore.name), wish) for cluster in clusters)
    )
    found = sorted(
        ((head, served.cluster) for heads, served in parts for head in heads), key=lambda pair: pair[0].shard
    )
    shards = [
        {"shard": head.shard, "cluster": cluster, "generation": head.generation, "head": head.added_id}
        for head, cluster in found
    ]
    served = served_together([served for _, served in parts])
    return good_answer(call.answer_format(), {"shards": shards}, *served.headers)


async def get_shard_cells(call: Call) -> Answer:
    """Cells of a shard after a location, in added_id order; `next` is the `after` of the next page."""
    datastore = await call.datastore()
    shard = parse_shard(datastore, call.path["shard"])
    query = call.query(*PAGE_PARAMETERS)
    if FOLLOW.of(query) or b"text/event-stream" in call.header(b"accept"):
        raise NotBuilt("following a shard over HTTP")
    after, since = AFTER.of(query), SINCE.of(query)
    if after is not None and since is not None:
        raise Invalid("since", "is given together with after: one of them")
    wanted = Wanted(after or since or BEGINNING, LIMIT.of(query), COLUMNS.of(query))
    form = call.answer_format()
    view, served = await _page(call, datastore, shard, wanted, READ_FROM.of(query), form)
    return good_answer(form, view, *served.headers)


async def post_shards_cells(call: Call) -> Answer:
    """Pages of several shards at once, each after its own location."""
    datastore = await call.datastore()
    wish = READ_FROM.of(call.query(READ_FROM))
    wanted = _parse_pages(await call.payload(PAYLOAD_BYTES_MAX), call.request_format())
    form = call.answer_format()
    reading = _Pages(call, datastore, wish, form)
    shards = list(wanted)
    random.shuffle(shards)  # an answer that is full leaves some for the next call: not always the same ones
    limiter = asyncio.Semaphore(SHARDS_AT_ONCE)
    await asyncio.gather(*(reading.add(text, wanted[text], limiter) for text in shards))
    views = {text: reading.views[text] for text in wanted}
    return good_answer(form, {"shards": views}, *served_together(reading.served).headers)


class _Pages:
    """Gathers pages until the answer is full; the shards left over get an empty page at their own location."""

    def __init__(self, call: Call, datastore: Datastore, wish: Role | None, form: Format) -> None:
        self._call = call
        self._datastore = datastore
        self._wish = wish
        self._form = form
        self._bytes_left = call.services.settings.answer_bytes_max
        self.views: dict[str, Any] = {}
        self.served: list[Served] = []

    async def add(self, text: str, wanted: Wanted, limiter: asyncio.Semaphore) -> None:
        async with limiter:
            try:
                self.views[text] = await self._view(text, wanted)
            except SchemalessError as error:  # one cluster that is away doesn't hide the others
                self.views[text] = {"problem": problem_of(error)}

    async def _view(self, text: str, wanted: Wanted) -> dict[str, Any]:
        shard = parse_shard(self._datastore, text)
        limited = wanted if self._bytes_left > 0 else msgspec.structs.replace(wanted, limit=0)
        view, served = await _page(self._call, self._datastore, shard, limited, self._wish, self._form)
        self._bytes_left -= sum(len(bytes(cell)) for cell in view["cells"])
        self.served.append(served)
        return view


async def _page(
    call: Call, datastore: Datastore, shard: int, wanted: Wanted, wish: Role | None, form: Format
) -> tuple[dict[str, Any], Served]:
    settings = call.services.settings
    page, served = await call.services.reader.read(
        datastore.home(shard),
        lambda: read_page(
            datastore, shard, wanted, examined_max=settings.log_examined_max, bytes_max=settings.answer_bytes_max
        ),
        wish,
    )
    views = views_within(map(cell_view, page.cells), form, settings.answer_bytes_max)
    return _page_view(page.cut(len(views)), views), served


def _page_view(page: Page, views: list[msgspec.Raw]) -> dict[str, Any]:
    return {
        "cells": views,
        "next": {"generation": page.next.generation, "added_id": page.next.added_id},
        "head": page.head,
        "pending": page.pending,
    }


class _Locations(msgspec.Struct, forbid_unknown_fields=True):
    locations: dict[str, Any]
    limit: int = 100
    columns: tuple[str, ...] = ()


def _parse_pages(payload: bytes, form: Format) -> dict[str, Wanted]:
    asked = decode(payload, form.decoder(_Locations), "locations")
    if not 1 <= asked.limit <= LIMIT_MAX:
        raise Invalid("limit", f"must be an integer from 1 to {LIMIT_MAX}")
    if not asked.locations:
        raise Invalid("locations", "needs at least one shard")
    if len(asked.locations) > LOCATIONS_MAX:
        raise TooLarge(f"at most {LOCATIONS_MAX} shards are read at once")
    columns = COLUMNS.parse(",".join(asked.columns), "columns") if asked.columns else ()
    return {
        shard: Wanted(_parse_start(start, f"locations.{shard}"), asked.limit, columns)
        for shard, start in asked.locations.items()
    }


def _parse_start(start: Any, field: str) -> After | Since:
    """1000, "1000", "1:1000" or {"since": "2026-01-31T00:00:00Z"}."""
    if isinstance(start, dict) and set(start) == {"since"}:
        return _since(start["since"], field)
    if isinstance(start, int) and not isinstance(start, bool):
        return _after(str(start), field)
    return _after(start, field)


_LOCATIONS = JSON.parse(
    b"""{"type": "object", "required": ["locations"], "properties": {
    "locations": {"type": "object", "additionalProperties": {}, "example": {"0": 1000, "7": "1:1000"}},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "columns": {"type": "array", "items": {"type": "string"}}}}"""
)

ROUTES = (
    Route("GET", "/shards", list_shards, (READ_FROM,)),
    Route("GET", "/shards/{shard}/cells", get_shard_cells, PAGE_PARAMETERS),
    Route("POST", "/shards/cells", post_shards_cells, (READ_FROM,), payload=_LOCATIONS),
)
