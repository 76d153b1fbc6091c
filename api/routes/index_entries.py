"""/indexes/{name}/entries: queries of an index. Their language is in api/index/search.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api.http.asgi import Route
from api.http.content import Format
from api.http.request import Request
from api.http.response import RESPONSE_BYTES_MAX, Response, all_views, document_response, ok_response, problem_of
from api.index.search import (
    PARAMETERS_MAX,
    IndexQuery,
    ManyDamaged,
    current_entries,
    cursor_version,
    entry_view,
    merged,
    parse_query,
    places_by_cluster,
    unreadable_cells,
)
from api.read.reader import Served, WantedCell, read_many, served_together
from api.routes.indexes import progress_view
from schemaless.access import Scope
from schemaless.cell import ColumnName, RowKey, StoredCell, row_key_text
from schemaless.contract.indexes import EntriesView
from schemaless.contract.parameters import FLAG, LIMIT, READ_FROM, TEXT, WAIT_MAX_S, Parameter, parse_pairs
from schemaless.errors import (
    Corrupt,
    Invalid,
    NotFound,
    NotReady,
    SchemalessError,
    StateConflict,
    TableMissing,
)
from schemaless.index.versions import NamedIndex
from schemaless.storage.index_definition_table import DefinedIndex, RunState
from schemaless.storage.index_select import PAGE_BYTES_MAX, page_bytes
from schemaless.storage.index_table import FoundEntry
from schemaless.topology import Datastore, Role

CELLS_MAX = 5000  # rows times columns that are included or verified
Cells = Mapping[tuple[RowKey, ColumnName], StoredCell | None]


async def get_entries(request: Request) -> Response:
    """Entries of an index by FIELD=v, FIELD.gte=v and so on. The shard field by equality is required.

    Comparisons are ne, lt, lte, gt, gte, in, between, prefix and isnull. Every answer says in `freshness` how far the
    index is behind. With `after`, a put's location, the answer includes that put.
    """
    datastore = await request.datastore()
    pairs = parse_pairs(request.raw_query, PARAMETERS_MAX) if request.raw_query else []
    name, cursor = request.path["name"], dict(pairs).get("cursor")
    catalogue = request.state.index_catalogue
    named = await catalogue.find(datastore, name)
    index = named.answering if cursor is None else _version_of(named, cursor)
    if index is None:  # the process that gave the cursor may have seen a switch before this one
        catalogue.forget(datastore, name)
        index = _version_of(await catalogue.find(datastore, name), cursor or "")
    if index is None:
        raise Invalid("cursor", "belongs to a version of the index that is gone: begin again without it")
    if not index.is_complete:
        error = _why_not_answering(index)
        progress = await progress_view(request.state, datastore, index)
        return document_response({**problem_of(error), **({} if progress is None else {"progress": progress})})
    try:
        return await _answer(request, datastore, index, pairs)
    except TableMissing as error:
        catalogue.forget(datastore, name)
        newest = (await catalogue.find(datastore, name)).answering
        if newest.number == index.number and newest.is_complete:
            raise
        if not newest.is_complete:
            raise _why_not_answering(newest) from error
        if cursor is not None:
            raise Invalid("cursor", "belongs to a version of the index that is gone: begin again without it") from None
        return await _answer(request, datastore, newest, pairs)


def _version_of(named: NamedIndex, cursor: str) -> DefinedIndex | None:
    """Returns the version that a cursor continues, None when it is gone. Raises Invalid for what is no cursor."""
    index = named.version(cursor_version(cursor))
    return index if index is not None and index.is_present else None


async def _answer(
    request: Request, datastore: Datastore, index: DefinedIndex, pairs: Sequence[tuple[str, str]]
) -> Response:
    query = parse_query(index.definition, datastore.shards, pairs)
    try:
        return await _Answer(request, datastore, index, query, READ_FROM.of(dict(pairs))).response()
    except ManyDamaged as error:
        request.state.index_repairs.add(datastore, index.definition, error.row_keys)
        raise


def _why_not_answering(index: DefinedIndex) -> SchemalessError:
    """Returns the error of a query of an index that was never complete, or that is dropped."""
    if not index.is_present:
        return NotFound(f"index {index.name} was dropped, and is being deleted")
    resume = f"`schemaless index resume {index.name}`"
    if index.order.run_state is RunState.FAILED:
        what_to_do = f"correct what the message names, then {resume}, or drop the index"
        return StateConflict(f"index {index.name} has failed: {index.order.reason}", hint=what_to_do)
    hint = f"`schemaless index wait {index.name}` waits until it is complete, and the response says how far it is"
    if index.order.run_state is RunState.PAUSED:
        hint = f"it isn't complete before it is resumed: {resume}"
    return NotReady(f"index {index.name} is {index.state}, and not complete", hint=hint)


class _Answer:
    """One query on its way to an answer."""

    def __init__(
        self, request: Request, datastore: Datastore, index: DefinedIndex, query: IndexQuery, read_from: Role | None
    ) -> None:
        self._request = request
        self._state = request.state
        self._datastore = datastore
        self._index = index
        self._definition = index.definition
        self._consumer = index.definition.consumer
        self._query = query
        self._read_from = read_from

    async def response(self) -> Response:
        """Raises Behind, QueryTooSlow, LocationGone for an `after` that is superseded, TooLarge or Unavailable."""
        query, definition = self._query, self._definition
        form = self._request.response_format()
        places = places_by_cluster(self._datastore, definition, query)
        parts = len(places) + (query.after is not None)
        await self._request.read.reserve(min(parts * PAGE_BYTES_MAX, page_bytes(definition, query.selection)))
        await self._state.index_freshness.refresh(self._datastore, self._consumer, places)
        found = await self._state.entry_reader.find(self._datastore, self._index, query, self._read_from)
        answers, overlay = found.answers, found.overlay
        served = served_together([*(each for _, each in answers.values()), *found.overlay_served])
        pages = [answer.page for answer, _ in answers.values()]
        page = merged(definition, query, pages if overlay is None else [*pages, overlay.page])
        shown = entries = page.entries
        document: dict[str, Any] = {"entries": [], "cursor": page.cursor, "version": self._index.number}
        unreadable = {} if overlay is None else dict(overlay.unreadable)
        columns = query.include + tuple(sorted(definition.columns - set(query.include))) * query.verify
        if columns and shown:
            cells, cells_served = await self._cells(shown, columns)
            if overlay is not None:
                cells = overlay.with_newest(cells)
            served = served_together([served, cells_served])
            try:
                shown, document["entries"] = await self._with_cells(entries, cells, form)
            except Corrupt:
                entries = await self._readable(entries, cells, unreadable)
                shown, document["entries"] = await self._with_cells(entries, cells, form)
        else:
            document["entries"] = [entry_view(definition, query, entry) for entry in shown]
        document |= {"unreadable": list(unreadable.values())} if unreadable else {}
        wrong = list(dict.fromkeys(row_key for each in pages for row_key in each.damaged))
        if wrong:
            document["damaged"] = [row_key_text(row_key) for row_key in wrong]
        if query.verify:
            document["dropped"] = len(entries) - len(shown)
            kept = {(each.row_key, each.element) for each in shown}
            wrong += [each.row_key for each in entries if (each.row_key, each.element) not in kept]
        if wrong:
            self._state.index_repairs.add(self._datastore, definition, wrong)
        freshness = self._state.index_freshness.of(
            self._datastore,
            self._consumer,
            {cluster: (served, answer.added_ids_sum) for cluster, (answer, served) in answers.items()},
            found.read_at,
        )
        document["freshness"] = freshness.document()
        if overlay is not None:
            document["overlay"] = {"cells": overlay.cells}
        if found.waited_s is not None:
            document["waited"] = round(found.waited_s, 3)
        if query.explain:
            document["explain"] = [
                {"cluster": cluster, "served_by": str(served.role), **msgspec.structs.asdict(answer.execution)}
                for cluster, (answer, served) in answers.items()
                if answer.execution is not None
            ]
        return ok_response(form, document, *served.headers)

    async def _cells(self, entries: Sequence[FoundEntry], columns: Sequence[ColumnName]) -> tuple[Cells, Served]:
        """Reads the newest cells of the rows, all clusters in parallel."""
        rows = dict.fromkeys(found.row_key for found in entries)
        wanted = [WantedCell(row_key, column, None) for row_key in rows for column in columns]
        if len(wanted) > CELLS_MAX:
            raise Invalid(
                "limit", f"{len(rows)} rows times {len(columns)} columns to include or verify are more than {CELLS_MAX}"
            )
        cells, served = await self._request.read.read(
            RESPONSE_BYTES_MAX,
            lambda within: read_many(self._state.reader, self._datastore, wanted, self._read_from, within),
            cells=len(wanted),
        )
        return {(one.row_key, one.column_name): cell for one, cell in zip(wanted, cells, strict=True)}, served

    async def _readable(
        self, entries: Sequence[FoundEntry], cells: Cells, unreadable: dict[tuple[RowKey, ColumnName], dict[str, Any]]
    ) -> list[FoundEntry]:
        """Returns the entries of rows whose cells can all be decoded. Adds the other cells to `unreadable`."""
        unreadable |= await unreadable_cells(cells.values(), RESPONSE_BYTES_MAX)
        lost = {row_key for row_key, _ in unreadable}
        return [entry for entry in entries if entry.row_key not in lost]

    async def _with_cells(
        self, entries: Sequence[FoundEntry], cells: Cells, form: Format
    ) -> tuple[Sequence[FoundEntry], list[dict[str, Any]]]:
        """Returns the entries that are shown, and how, with the cells that were asked for, null for an empty column.

        Raises Corrupt if one of the cells can't be decoded.
        """
        include = self._query.include
        if self._query.verify:
            entries = await current_entries(self._definition, entries, cells, RESPONSE_BYTES_MAX)
        included = (cells[found.row_key, column] for found in entries for column in include)
        views = iter(await all_views(included, form, RESPONSE_BYTES_MAX, self._request.read))
        shown = []
        for found in entries:
            view = entry_view(self._definition, self._query, found)
            if include:
                view["cells"] = {column: next(views) for column in include}
            shown.append(view)
        return entries, shown


def _option(name: str, description: str, schema: Mapping[str, Any] = TEXT) -> Parameter[str]:
    """Documents an option, which api/index/search.py parses by the index's definition."""
    return Parameter(name, lambda text, field: text, "", description, schema)


_OPTIONS = (
    _option("order", "The keyed field that entries are ordered by; default: the second one."),
    _option("desc", "true: from the highest down.", FLAG),
    LIMIT,
    _option("cursor", "Of the page before: where this one begins."),
    _option("fields", "Names of fields with commas; default: all."),
    _option("include", "Columns with commas whose newest cells each entry brings."),
    _option(
        "verify", "true: only entries that the newest cells of their rows make; `dropped` counts the others.", FLAG
    ),
    _option("explain", "true: also the SQL, the rows that were read, and the time.", FLAG),
    _option("after", "A put's location: the answer includes it, or is a 503. A superseded one is a 409."),
    _option(
        "wait", "Seconds that `after` may take, default 5.", {"type": "number", "minimum": 0, "maximum": WAIT_MAX_S}
    ),
)

ROUTES = (
    Route(
        "GET",
        "/indexes/{name}/entries",
        get_entries,
        Scope.READ,
        (READ_FROM, *_OPTIONS),
        answers={200: EntriesView},
        problems=(409, 413),
    ),
)
