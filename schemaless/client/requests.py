"""Requests: what to send for each thing a client can do, and how to read what comes back. Pure (no I/O).

Every function is a flow (schemaless/client/call.py). What can be known to be wrong here is refused before anything is
sent; everything else is the server's to judge. Paths and shapes: docs/http.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

import msgspec

from schemaless.cell import parse_column_name, parse_ref_key, row_key_of, row_key_text
from schemaless.client.answers import (
    MISSING,
    FoundCell,
    LogPage,
    MissingCell,
    PutAnswer,
    ReadCell,
    VersionsPage,
)
from schemaless.client.call import MSGPACK, Answer, Call, Flow
from schemaless.client.problems import error_of, error_of_problem, problem_of
from schemaless.errors import Invalid, SchemalessError
from schemaless.location import Location

Key = uuid.UUID | str
Body = Mapping[str, Any]
ReadFrom = Literal["master", "minion"] | None
LogLocation = int | str | Location | datetime | None
"""An added_id, GENERATION:ADDED_ID, a Location, a time (cells created at or after it), "end" (the head as it is then),
or None: the beginning.
"""
CellName = tuple[Key, str] | tuple[Key, str, int]
"""Row key, column, and a ref_key unless the newest cell is meant."""


class VersionsOptions(TypedDict, total=False):
    """`from_` and `to`: the lowest and the highest ref_key, included."""

    from_: int
    to: int
    order: Literal["asc", "desc"]
    limit: int
    read_from: ReadFrom


class LogOptions(TypedDict, total=False):
    """`columns`: only cells of these."""

    columns: Sequence[str]
    read_from: ReadFrom


_CONTENT = {"content-type": MSGPACK}
_encoder = msgspec.msgpack.Encoder()


class Requests:
    """Of one datastore."""

    def __init__(self, datastore: str) -> None:
        if not datastore.replace("_", "").isalnum():  # it becomes part of a path
            raise Invalid("datastore", "must match [a-z][a-z0-9_]{0,31}")
        self.base = f"/v1/{datastore}"

    def put_cell(self, row_key: Key, column: str, ref_key: int, body: Body) -> Flow[PutAnswer]:
        path = f"{self._column_path(row_key, column)}/{parse_ref_key(ref_key)}"
        answer = yield Call("PUT", path, headers=_CONTENT, content=encode(body))
        return _put_answer(answer)

    def put(self, row_key: Key, column: str, body: Body, idempotency_key: str | None) -> Flow[PutAnswer]:
        """Without a key of the caller's one is made here, so that a second attempt can't write a second version."""
        headers = _CONTENT | {"idempotency-key": idempotency_key or str(uuid.uuid4())}
        answer = yield Call("POST", self._column_path(row_key, column), headers=headers, content=encode(body))
        return _put_answer(answer)

    def get_cell(self, row_key: Key, column: str, ref_key: int, read_from: ReadFrom) -> Flow[ReadCell]:
        path = f"{self._column_path(row_key, column)}/{parse_ref_key(ref_key)}"
        answer = yield Call("GET", path, _params(read_from=read_from))
        return _read_cell(answer)

    def get_cell_latest(self, row_key: Key, column: str, read_from: ReadFrom) -> Flow[ReadCell]:
        answer = yield Call("GET", self._column_path(row_key, column), _params(read_from=read_from))
        return _read_cell(answer)

    def get_row(self, row_key: Key, read_from: ReadFrom) -> Flow[dict[str, FoundCell]]:
        answer = yield Call("GET", f"{self.base}/cells/{_row_text(row_key)}", _params(read_from=read_from))
        return {} if _is_missing_cell(answer) else _good(answer).read(_Row).cells

    def get_versions(self, row_key: Key, column: str, options: VersionsOptions) -> Flow[VersionsPage]:
        answer = yield Call("GET", f"{self._column_path(row_key, column)}/versions", _params(**options))
        return VersionsPage([]) if _is_missing_cell(answer) else _good(answer).read(VersionsPage)

    def get_cells(self, names: Sequence[CellName], read_from: ReadFrom) -> Flow[list[ReadCell]]:
        content = encode({"keys": [_cell_name(name) for name in names]})
        answer = yield Call("POST", f"{self.base}/batch/get", _params(read_from=read_from), _CONTENT, content)
        return [cell or MISSING for cell in _good(answer).read(_Cells).cells]

    def get_cells_for_shard(self, shard: int, location: LogLocation, limit: int, options: LogOptions) -> Flow[LogPage]:
        params = _params(**_location_param(location), limit=limit, **options)
        answer = yield Call("GET", f"{self.base}/shards/{int(shard)}/cells", params)
        return _good(answer).read(LogPage)

    def get_cells_for_shards(
        self, locations: Mapping[int, LogLocation], limit: int, read_from: ReadFrom
    ) -> Flow[dict[int, LogPage | SchemalessError]]:
        """A shard that can't be read has an error in its place."""
        wanted = {str(shard): location_member(location) for shard, location in locations.items()}
        content = encode({"locations": wanted, "limit": limit})
        answer = yield Call("POST", f"{self.base}/shards/cells", _params(read_from=read_from), _CONTENT, content)
        pages = _good(answer).read(_Shards).shards
        return {int(shard): _page_or_error(page) for shard, page in pages.items()}

    def get_json(self, path: str, params: Mapping[str, Any] | None = None) -> Flow[dict[str, Any]]:
        """Of whatever the datastore shows as one document: /shards, /status, /conflicts, /indexes."""
        answer = yield Call("GET", f"{self.base}{path}", _params(**(params or {})))
        return _good(answer).members()

    def put_json(self, path: str, document: Mapping[str, Any]) -> Flow[dict[str, Any]]:
        answer = yield Call("PUT", f"{self.base}{path}", headers=_CONTENT, content=encode(document))
        return _good(answer).members()

    def _column_path(self, row_key: Key, column: str) -> str:
        return f"{self.base}/cells/{_row_text(row_key)}/{parse_column_name(column)}"


class _Row(msgspec.Struct, frozen=True):
    cells: dict[str, FoundCell]


class _Cells(msgspec.Struct, frozen=True):
    cells: list[FoundCell | None]


class _Shards(msgspec.Struct, frozen=True):
    shards: dict[str, dict[str, Any]]


def encode(value: Any) -> bytes:
    """MessagePack, so that the server judges NaN and the like instead of this side changing it. Raises Invalid."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid("body", f"can't be sent: {error}") from error


def time_text(moment: datetime, field: str) -> str:
    """RFC 3339. Raises Invalid for a time without a zone."""
    if moment.tzinfo is None:
        raise Invalid(field, "needs a time zone")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _row_text(row_key: Key) -> str:
    return row_key_text(row_key_of(row_key))


def _cell_name(name: CellName) -> dict[str, Any]:
    row_key, column, *ref_key = name
    newest = {"row_key": _row_text(row_key), "column_name": parse_column_name(column)}
    return newest | {"ref_key": parse_ref_key(ref_key[0])} if ref_key else newest


def _params(**values: Any) -> dict[str, str]:
    """Query parameters by name; `from_` is HTTP's `from`, a word that Python keeps."""
    return {name.rstrip("_"): _param(value) for name, value in values.items() if value is not None}


def _param(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


def _location_param(location: LogLocation) -> dict[str, str]:
    if isinstance(location, datetime):
        return {"since": time_text(location, "since")}
    return {} if location is None else {"after": str(location)}


def location_member(location: LogLocation) -> Any:
    if isinstance(location, datetime):
        return {"since": time_text(location, "since")}
    return 0 if location is None else location if isinstance(location, int) else str(location)


def _good(answer: Answer) -> Answer:
    if not answer.ok:
        raise error_of(answer)
    return answer


def _put_answer(answer: Answer) -> PutAnswer:
    put = _good(answer).read(PutAnswer)
    replayed = answer.headers.get("idempotency-replayed") == "true"
    return msgspec.structs.replace(put, replayed=True) if replayed else put


def _read_cell(answer: Answer) -> FoundCell | MissingCell:
    return MISSING if _is_missing_cell(answer) else _good(answer).read(FoundCell)


def _is_missing_cell(answer: Answer) -> bool:
    """A 404 may also mean that there is no such datastore, which is a mistake and not an empty place."""
    return answer.status == 404 and str(problem_of(answer).get("type")).endswith("cell-missing")


def _page_or_error(page: Mapping[str, Any]) -> LogPage | SchemalessError:
    problem = page.get("problem")
    return error_of_problem(problem) if problem is not None else msgspec.convert(page, LogPage)
