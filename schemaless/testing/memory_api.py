"""MemoryApi: the cells and logs of one datastore over HTTP, in memory: a transport for `Client` and `AsyncClient`.

It answers what programs ask of cells and logs, and erases, as docs/http.md has it. Other paths are 501.
tests/contract/ holds it and the real API to one suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import httpx
import msgspec

from schemaless.cell import (
    REF_KEY_MAX,
    CellKey,
    ColumnName,
    Placed,
    PutStatus,
    RefKey,
    RowKey,
    StoredCell,
    created_at_text,
    erasure_id,
    parse_cause,
    parse_column_name,
    parse_int,
    parse_ref_key,
    parse_row_key,
    parse_time,
    row_key_text,
)
from schemaless.client.exchange import MSGPACK
from schemaless.codec import cell_view, encode_body, same_body
from schemaless.contract.erasures import EraseRequest, target_of
from schemaless.errors import (
    CellErased,
    CellMissing,
    Conflict,
    Invalid,
    InvalidRequest,
    KeyErased,
    LocationGone,
    Malformed,
    NotBuilt,
    NotFound,
    SchemalessError,
    TooLarge,
    Unavailable,
)
from schemaless.location import ADDED_ID_MAX, generation_at, shard_location_text
from schemaless.names import ERASE_COLUMN
from schemaless.position import (
    BEGINNING_DIGEST,
    Position,
    cell_digest,
    digest_text,
    insertion_digest,
    parse_position,
    verify_position,
)
from schemaless.shapes import shape
from schemaless.sharding import shard_of
from schemaless.storage.entity_table import ShardCell
from schemaless.testing.memory_program import MemoryProgram

COPIES = 2
ITEMS_MAX = 1000
_BYTES_MAX = 64 << 20
_STATUS = {PutStatus.STORED: 201, PutStatus.ALREADY_STORED: 200}
_PROBLEMS: Sequence[tuple[type[SchemalessError], int, str]] = (
    (CellErased, 410, "cell-erased"),
    (KeyErased, 409, "key-erased"),
    (CellMissing, 404, "cell-missing"),
    (NotFound, 404, "not-found"),
    (Conflict, 409, "conflict"),
    (LocationGone, 409, "location-gone"),
    (Invalid, 422, "invalid"),
    (TooLarge, 413, "too-large"),
    (Malformed, 400, "malformed"),
    (InvalidRequest, 422, "invalid"),
    (NotBuilt, 501, "not-built"),
    (SchemalessError, 503, "unavailable"),
)

Answer = tuple[int, dict[str, Any], dict[str, str]]


class MemoryApi(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """The API over what a program's store holds. While that is away, every answer is 503."""

    def __init__(self, program: MemoryProgram) -> None:
        self._program = program
        self._datastore = program.datastore
        self._table = program.table
        self._erasures = count(1)
        self._replays: dict[tuple[RowKey, ColumnName, str], tuple[StoredCell, int]] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._respond(request, request.read())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._respond(request, await request.aread())

    def _respond(self, request: httpx.Request, content: bytes) -> httpx.Response:
        try:
            with self._program.lock:
                if self._program.is_away:
                    raise Unavailable("the store is away")
                status, document, headers = self._answer(request, content)
        except SchemalessError as error:
            document, headers = _problem(error), {}
            status = document["status"]
        headers = {"content-type": MSGPACK, "schemaless-served-by": "master", **headers}
        return httpx.Response(status, headers=headers, content=msgspec.msgpack.encode(document))

    def _answer(self, request: httpx.Request, content: bytes) -> Answer:
        version, datastore, *path = request.url.path.strip("/").split("/")
        if (version, datastore) != ("v1", self._datastore.name):
            raise NotFound(f"there is no datastore {datastore}")
        if path[0] == "cells":
            return self._answer_cells(request, path[1:], content)
        params = request.url.params
        match request.method, *path:
            case "POST", "batch", "put":
                return 200, {"results": [self._item(item, _cause(request)) for item in _items(content, "cells")]}, {}
            case "POST", "batch", "get":
                found = [self._cell(key) for key in _items(content, "keys")]
                return 200, {"cells": [cell and cell_view(cell) for cell in found]}, {}
            case ("POST", "erase"):
                return self._erase(msgspec.msgpack.decode(content, type=shape(EraseRequest)))
            case "GET", "shards", shard, "cells":
                start = {"since": params["since"]} if "since" in params else params.get("after", 0)
                columns = tuple(filter(None, params.get("columns", "").split(",")))
                return 200, self._page(shard, start, int(params.get("limit", 100)), columns), {}
            case "POST", "shards", "cells":
                asked = msgspec.msgpack.decode(content)
                pages = {n: self._page_or_problem(n, at, asked["limit"]) for n, at in asked["locations"].items()}
                return 200, {"shards": pages}, {}
        raise _not_answered(request)

    def _answer_cells(self, request: httpx.Request, path: Sequence[str], content: bytes) -> Answer:
        row_key = parse_row_key(path[0])
        if len(path) == 1 and request.method == "GET":
            return self._row(row_key)
        column = parse_column_name(path[1])
        match request.method, *path[2:]:
            case "PUT", ref_key:
                return self._put(CellKey(row_key, column, parse_ref_key(ref_key)), _body(content), _cause(request))
            case ("POST",):
                return self._post(row_key, column, _body(content), request)
            case "GET", "versions":
                return self._versions(row_key, column, request.url.params)
            case "GET", *ref_key:
                name = {"row_key": path[0], "column_name": column, "ref_key": ref_key[0] if ref_key else None}
                if (found := self._cell(name)) is None:
                    raise CellMissing(f"there is no cell {'/'.join(path)}")
                if found.erased is not None:
                    raise CellErased(f"{found.key} was erased", found.erased.erasure_id, found.erased.at)
                return 200, cell_view(found), {}
        raise _not_answered(request)

    # Puts

    def _put(self, key: CellKey, body: bytes, cause: str | None) -> Answer:
        (placed,) = self._table.put_cells([ShardCell(key, body, self._shard(key.row_key), cause=cause)])
        if placed.erased is not None:
            raise KeyErased(f"{key} was erased", placed.erased.erasure_id, placed.erased.at)
        if placed.status is PutStatus.CONFLICT:
            raise Conflict(f"another body is stored under {key}")
        return _STATUS[placed.status], _put_view(key, placed), {}

    def _post(self, row_key: RowKey, column: ColumnName, body: bytes, request: httpx.Request) -> Answer:
        idempotency_key = request.headers.get("idempotency-key")
        known = self._replays.get((row_key, column, idempotency_key or ""))
        if known is not None:
            cell, status = known
            (now,) = self._table.get([(cell.shard, cell.key)])
            if now is not None and now.erased is not None:
                raise KeyErased(f"{cell.key} was erased", now.erased.erasure_id, now.erased.at)
            if not same_body(body, cell.body):
                raise Invalid("Idempotency-Key", "was used with another body")
            placed = Placed(PutStatus.STORED, cell.shard, cell.generation, cell.added_id, cell.created_at)
            return status, _put_view(cell.key, placed), {"idempotency-replayed": "true"}
        shard, bounds = self._shard(row_key), (0, REF_KEY_MAX)
        highest = self._table.versions(shard, (row_key, column), bounds, True, 1, _BYTES_MAX).cells
        key = CellKey(row_key, column, RefKey(highest[0].ref_key + 1 if highest else 1))
        answer = self._put(key, body, _cause(request))
        if idempotency_key:
            (stored,) = self._table.get([(shard, key)])
            assert stored is not None
            self._replays[row_key, column, idempotency_key] = stored, answer[0]
        return answer

    def _item(self, item: Mapping[str, Any], cause: str | None) -> dict[str, Any]:
        try:
            key = CellKey(
                parse_row_key(item["row_key"]),
                parse_column_name(item["column_name"]),
                parse_ref_key(item["ref_key"]),
            )
            return self._put(key, encode_body(item.get("body")), cause)[1]
        except SchemalessError as error:
            return {"status": "conflict" if isinstance(error, Conflict) else "error", "problem": _problem(error)}

    def _erase(self, wanted: EraseRequest) -> Answer:
        target = target_of(wanted)
        shard, cells = self._shard(target.row_key), dict[ColumnName, list[RefKey]]()
        for cell in self._table.read_after(shard, 0, ADDED_ID_MAX):
            is_meant = target.column_name in (None, cell.column_name) and target.ref_key in (None, cell.ref_key)
            if cell.row_key == target.row_key and is_meant and not cell.is_erased and cell.column_name != ERASE_COLUMN:
                cells.setdefault(cell.column_name, []).append(cell.ref_key)
        if not cells:
            raise NotFound(f"there is nothing to erase of {target}")
        erasure = None
        if not wanted.dry_run:
            number = next(self._erasures)
            self._table.erase(shard, target.row_key, cells, number)
            erasure = erasure_id(number)
        matched = sum(map(len, cells.values()))
        return 200 if wanted.dry_run else 202, {"erasure": erasure, "matched": matched, "job": erasure}, {}

    def _shard(self, row_key: RowKey) -> int:
        return shard_of(row_key, self._datastore.shards)

    # Reads

    def _cell(self, name: Mapping[str, Any]) -> StoredCell | None:
        row_key, column = parse_row_key(name["row_key"]), parse_column_name(name["column_name"])
        if name.get("ref_key") is None:
            (found,) = self._table.newest([(self._shard(row_key), row_key, column)])
        else:
            (found,) = self._table.get(
                [(self._shard(row_key), CellKey(row_key, column, parse_ref_key(name["ref_key"])))]
            )
        return found

    def _row(self, row_key: RowKey) -> Answer:
        cells = self._table.row(self._shard(row_key), row_key, _BYTES_MAX)
        if not cells:
            raise CellMissing(f"row {row_key_text(row_key)} has no cell")
        return 200, {"row_key": row_key_text(row_key), "cells": {c.column_name: cell_view(c) for c in cells}}, {}

    def _versions(self, row_key: RowKey, column: ColumnName, params: Mapping[str, str]) -> Answer:
        bounds = parse_ref_key(params.get("from", "0")), parse_ref_key(params.get("to", str(REF_KEY_MAX)))
        descending, limit = params.get("order", "asc") == "desc", int(params.get("limit", 100))
        page = self._table.versions(self._shard(row_key), (row_key, column), bounds, descending, limit, _BYTES_MAX)
        return 200, {"cells": [cell_view(cell) for cell in page.cells], "next": page.following}, {}

    # Logs

    def _page_or_problem(self, shard: str, start: object, limit: int) -> dict[str, Any]:
        try:
            return self._page(shard, start, limit)
        except SchemalessError as error:
            return {"problem": _problem(error)}

    def _page(self, shard_text: str, start: object, limit: int, columns: Sequence[str] = ()) -> dict[str, Any]:
        try:
            shard = parse_int(shard_text, "shard", 0, self._datastore.shards - 1)
        except Invalid:
            raise NotFound(f"there is no shard {shard_text!r}") from None
        head, starts = self._table.history(shard)
        if isinstance(start, Mapping):
            after = self._table.first_since(shard, parse_time(start["since"]), head.added_id) - 1
        elif start == "end":
            after = head.added_id
        else:
            generation, after, digest = parse_position(str(start))
            at = self._table.read_after(shard, after - 1, 1) if after else []
            found = BEGINNING_DIGEST if not after else cell_digest(at[0]) if at else None
            generation = generation_at(min(after, head.added_id), starts) if generation is None else generation
            verify_position(Position(shard, generation, after, digest=digest), found, starts, head.location)
        cells = self._table.read_after(shard, after, limit, columns)
        examined = cells[-1].added_id if len(cells) == limit else head.added_id
        (last,) = self._table.read_after(shard, examined - 1, 1) if examined else [None]
        place = {
            "generation": head.generation if last is None else last.generation,
            "added_id": examined,
            "digest": digest_text(BEGINNING_DIGEST if last is None else cell_digest(last)),
        }
        return {
            "cells": [cell_view(cell) for cell in cells],
            "next": place,
            "head": head.added_id,
            "generation": head.generation,
            "pending": head.added_id - examined,
        }


def _not_answered(request: httpx.Request) -> NotBuilt:
    return NotBuilt(f"{request.method} {request.url.path} isn't answered in memory")


def _cause(request: httpx.Request) -> str | None:
    given = request.headers.get("schemaless-cause")
    return parse_cause(given, "Schemaless-Cause") if given else None


def _body(content: bytes) -> bytes:
    return encode_body(msgspec.msgpack.decode(content))


def _items(content: bytes, member: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = msgspec.msgpack.decode(content)[member]
    if not 1 <= len(items) <= ITEMS_MAX:
        raise Invalid(member, f"must have 1 to {ITEMS_MAX} items")
    return items


def _put_view(key: CellKey, placed: Placed) -> dict[str, Any]:
    digest = insertion_digest(
        placed.generation, placed.added_id, placed.created_at, key.row_key, key.column_name, key.ref_key
    )
    return {
        "status": placed.status.value,
        "row_key": row_key_text(key.row_key),
        "column_name": key.column_name,
        "ref_key": key.ref_key,
        "shard": placed.shard,
        "generation": placed.generation,
        "added_id": placed.added_id,
        "created_at": created_at_text(placed.created_at),
        "location": shard_location_text(placed.shard, placed.generation, placed.added_id),
        "digest": digest_text(digest),
        "copies": COPIES,
    }


def _problem(error: SchemalessError) -> dict[str, Any]:
    """Returns the problem document of an error."""
    status, kind = next((status, name) for found, status, name in _PROBLEMS if isinstance(error, found))
    document = {
        "type": f"urn:schemaless:problem:{kind}",
        "title": kind,
        "status": status,
        "detail": str(error),
        "retryable": error.retryable,
    }
    if isinstance(error, Invalid):
        document["field"] = error.field
    if isinstance(error, CellErased | KeyErased):
        by = {"erasure": error.erasure, "erased_at": created_at_text(error.erased_at)}
        document |= by if isinstance(error, CellErased) else {"erased": by}
    if isinstance(error, LocationGone):
        document |= {"head": error.head, "resume_at": error.resume_at, "generation": error.generation}
    return document
