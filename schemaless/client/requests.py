"""Requests: what to send for each call of a client, and how to read the response. Pure (no I/O).

Every function is a flow (schemaless/client/exchange.py). Arguments that are known to be wrong are refused before
anything is sent. The server judges everything else. Paths and shapes: docs/http.md.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, TypedDict
from urllib.parse import quote

import msgspec
from msgspec import UNSET, UnsetType

from schemaless.cell import parse_cause, parse_column_name, parse_ref_key, row_key_of, row_key_text
from schemaless.client.answers import EntriesPage, LogPage, MissingCell, PutAnswer, ReadCell, VersionsPage, column_of
from schemaless.client.exchange import (
    MSGPACK,
    ClientRequest,
    ClientResponse,
    Flow,
    error_of_problem,
    is_cell_missing,
    problem_of,
)
from schemaless.client.json_body import encode_json_body
from schemaless.errors import Invalid, SchemalessError, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.location import Location, ShardLocation
from schemaless.position import Position

Key = uuid.UUID | str
Body = Mapping[str, Any]
ReadFrom = Literal["master", "minion"] | None
LogLocation = int | str | Location | Position | datetime | None
"""An added_id, GENERATION:ADDED_ID[:DIGEST], a Location, a Position, a time (cells created at or after it), "end" (the
head at that moment), or None for the beginning.
"""
CellName = tuple[Key, str] | tuple[Key, str, int]
"""Row key and column, with a ref_key for one cell, without it for the newest."""


class VersionsOptions(TypedDict, total=False):
    """Options of `get_versions`. `from_` and `to` are the lowest and the highest ref_key, both included."""

    from_: int
    to: int
    order: Literal["asc", "desc"]
    limit: int
    read_from: ReadFrom


class LogOptions(TypedDict, total=False):
    """Options of a page of the log. `columns` selects cells."""

    columns: Sequence[str]
    read_from: ReadFrom


class BuildLimits(TypedDict, total=False):
    """What bounds a build of an index, named as the settings of the indexer. None: the setting counts."""

    build_lag_cells_max: int | None
    build_commit_max_s: float | None
    build_busy_share: float | None


class CheckOptions(TypedDict, total=False):
    """What a check of an index compares: all, some `shards`, the row keys `from_` to `to`, or the rows `row_keys`.

    `rows_per_s` bounds how fast, 0: not at all. Without `minions` only masters are compared.
    """

    shards: Sequence[int] | None
    row_keys: Sequence[Key] | None
    from_: Key | None
    to: Key | None
    rows_per_s: int | None
    minions: bool


INDEX_OPTIONS = frozenset(
    {"order", "desc", "limit", "cursor", "fields", "include", "verify", "explain", "after", "wait", "read_from"}
)
"""Terms of an index query that are no fields. A field of such a name can't be queried, over HTTP neither."""
INDEX_OPERATORS = frozenset({"ne", "lt", "lte", "gt", "gte", "in", "between", "prefix", "isnull"})

_CONTENT = {"content-type": MSGPACK}
_encoder = msgspec.msgpack.Encoder()


class Requests:
    """The requests of one datastore. Cells that it puts have the `cause`."""

    def __init__(self, datastore: str, cause: str | None = None) -> None:
        if not datastore.replace("_", "").isalnum():  # it becomes part of a path
            raise Invalid("datastore", "must match [a-z][a-z0-9_]{0,31}")
        self.base = f"/v1/{datastore}"
        self.put_headers = _CONTENT if cause is None else _CONTENT | {"schemaless-cause": parse_cause(cause)}

    def caused_by(self, cause: str) -> Requests:
        return Requests(self.base.removeprefix("/v1/"), cause)

    def put_cell(self, row_key: Key, column: str, ref_key: int, body: Body) -> Flow[PutAnswer]:
        path = f"{self._column_path(row_key, column)}/{parse_ref_key(ref_key)}"
        response = yield ClientRequest("PUT", path, headers=self.put_headers, content=encode_json_body(body))
        return _put_answer(response)

    def put(self, row_key: Key, column: str | ReadCell, body: Body, idempotency_key: str | None) -> Flow[PutAnswer]:
        """Puts the next version. A missing key is made here, so that a second attempt can't write a second version."""
        repeated = str(uuid.uuid4()) if idempotency_key is None else parse_idempotency_key(idempotency_key)
        headers = self.put_headers | {"idempotency-key": repeated}
        path = self._column_path(row_key, column_of(column))
        response = yield ClientRequest("POST", path, headers=headers, content=encode_json_body(body))
        return _put_answer(response)

    def get_cell(self, row_key: Key, column: str, ref_key: int, read_from: ReadFrom) -> Flow[ReadCell]:
        path = f"{self._column_path(row_key, column)}/{parse_ref_key(ref_key)}"
        response = yield ClientRequest("GET", path, _params(read_from=read_from))
        return _found_or_missing(column, response)

    def get_cell_latest(self, row_key: Key, column: str, read_from: ReadFrom) -> Flow[ReadCell]:
        response = yield ClientRequest("GET", self._column_path(row_key, column), _params(read_from=read_from))
        return _found_or_missing(column, response)

    def get_row(self, row_key: Key, read_from: ReadFrom) -> Flow[dict[str, FoundCell]]:
        path = f"{self.base}/cells/{row_key_text(row_key_of(row_key))}"
        response = yield ClientRequest("GET", path, _params(read_from=read_from))
        return {} if _is_missing_cell(response) else response.good().read(_Row).cells

    def get_versions(self, row_key: Key, column: str, options: VersionsOptions) -> Flow[VersionsPage]:
        response = yield ClientRequest("GET", f"{self._column_path(row_key, column)}/versions", _params(**options))
        return VersionsPage([]) if _is_missing_cell(response) else response.good().read(VersionsPage)

    def get_cells(self, names: Sequence[CellName], read_from: ReadFrom) -> Flow[list[ReadCell]]:
        keys: list[dict[str, Any]] = []
        for row_key, column, *ref_key in names:
            row = row_key_text(row_key_of(row_key))
            key = {"row_key": row, "column_name": parse_column_name(column)}
            keys.append(key | {"ref_key": parse_ref_key(ref_key[0])} if ref_key else key)
        params = _params(read_from=read_from)
        response = yield ClientRequest("POST", f"{self.base}/batch/get", params, _CONTENT, encode({"keys": keys}))
        cells = response.good().read(_Cells).cells
        if len(cells) != len(names):
            raise Unavailable(f"{len(names)} cells were asked for and {len(cells)} cells came back")
        hint = None
        if response.headers.get("schemaless-served-by") == "minion":
            where = response.headers.get("schemaless-cluster", "")
            hint = f"a minion answered (cluster {where}): the cell may wait in a buffer, or not be replicated yet"
        return [cell or MissingCell(name[1], hint) for name, cell in zip(names, cells, strict=True)]

    def get_cells_for_shard(self, shard: int, location: LogLocation, limit: int, options: LogOptions) -> Flow[LogPage]:
        if isinstance(location, datetime):
            start = {"since": time_text(location, "since")}
        else:
            start = {} if location is None else {"after": str(location)}
        params = _params(**start, limit=limit, **options)
        response = yield ClientRequest("GET", f"{self.base}/shards/{int(shard)}/cells", params)
        return msgspec.structs.replace(response.good().read(LogPage), shard=shard)

    def get_cells_for_shards(
        self, locations: Mapping[int, LogLocation], limit: int, read_from: ReadFrom
    ) -> Flow[dict[int, LogPage | SchemalessError]]:
        """Reads a page of each shard. A shard that can't be read has an error in place of its page."""
        wanted = {str(shard): location_member(location) for shard, location in locations.items()}
        content = encode({"locations": wanted, "limit": limit})
        params = _params(read_from=read_from)
        response = yield ClientRequest("POST", f"{self.base}/shards/cells", params, _CONTENT, content)
        pages: dict[int, LogPage | SchemalessError] = {}
        for shard, page in response.good().read(_Shards).shards.items():
            problem = page.get("problem")
            if problem is None:
                pages[int(shard)] = msgspec.convert({**page, "shard": int(shard)}, LogPage)
            else:
                pages[int(shard)] = error_of_problem(problem)
        return pages

    def get_json(self, path: str, params: Mapping[str, Any] | None = None) -> Flow[dict[str, Any]]:
        """Reads what the datastore shows as one document, such as /shards, /status, /conflicts or /indexes."""
        response = yield ClientRequest("GET", f"{self.base}{path}", _params(**(params or {})))
        return response.good().read(dict[str, Any])

    def explain(self, where: Key | ShardLocation, limit: int, read_from: ReadFrom) -> Flow[dict[str, Any]]:
        """Reads the explanation of a row, named by its key or by the location of one of its cells."""
        text = str(where)
        named = {"location": text} if ":" in text else {"row_key": row_key_text(row_key_of(text))}
        return (yield from self.get_json("/explain", {**named, "limit": limit, "read_from": read_from}))

    def list_indexes(self) -> Flow[list[dict[str, Any]]]:
        found: list[dict[str, Any]] = (yield from self.get_json("/indexes"))["indexes"]
        return found

    def define_index(
        self, name: str, definition: Mapping[str, Any], *, change: bool, hold: bool, keep: str | None
    ) -> Flow[dict[str, Any]]:
        params = _params(change=change or None, hold=hold or None, keep=keep)
        response = yield ClientRequest("PUT", self._index_path(name), params, _CONTENT, encode(definition))
        return response.good().read(dict[str, Any])

    def get_index(self, name: str) -> Flow[dict[str, Any]]:
        return (yield from self.get_json(self._index_path(name).removeprefix(self.base)))

    def index_problems(
        self, name: str, version: int | None, limit: int | None, cursor: str | None
    ) -> Flow[dict[str, Any]]:
        path = f"{self._index_path(name)}/problems".removeprefix(self.base)
        return (yield from self.get_json(path, {"version": version, "limit": limit, "cursor": cursor}))

    def drop_index(self, name: str, version: int | None) -> Flow[dict[str, Any]]:
        response = yield ClientRequest("DELETE", self._index_path(name), _params(version=version))
        return response.good().read(dict[str, Any])

    def order_index(
        self, name: str, order: str, version: int | None = None, details: Mapping[str, Any] | None = None
    ) -> Flow[dict[str, Any]]:
        """Orders `pause`, `resume`, `throttle`, `switch`, `verify` or `repair` of an index, or of one version."""
        content = b"" if details is None else encode(details)
        path = f"{self._index_path(name)}/{order}"
        response = yield ClientRequest("POST", path, _params(version=version), _CONTENT, content)
        return response.good().read(dict[str, Any])

    def throttle_index(
        self, name: str, version: int | None, cells_per_s: int | UnsetType | None, limits: BuildLimits
    ) -> Flow[dict[str, Any]]:
        given = {} if cells_per_s is UNSET else {"cells_per_s": cells_per_s}
        return (yield from self.order_index(name, "throttle", version, {**given, **limits}))

    def check_index(
        self, name: str, order: Literal["verify", "repair"], version: int | None, options: CheckOptions
    ) -> Flow[dict[str, Any]]:
        """Orders a check of an index. The answer names its job."""
        wanted: dict[str, Any] = {name.rstrip("_"): value for name, value in options.items() if value is not None}
        for member in ("from", "to"):
            if member in wanted:
                wanted[member] = row_key_text(row_key_of(wanted[member]))
        if "row_keys" in wanted:
            wanted["row_keys"] = [row_key_text(row_key_of(row_key)) for row_key in wanted["row_keys"]]
        return (yield from self.order_index(name, order, version, wanted))

    def order_program(self, name: str, order: str, details: Mapping[str, Any]) -> Flow[dict[str, Any]]:
        """Orders something for a trigger program, such as `pause` or `parked/retry`."""
        path = f"{self.base}/triggers/{quote(name, safe='')}/{order}"
        response = yield ClientRequest("POST", path, headers=_CONTENT, content=encode(details))
        return response.good().read(dict[str, Any])

    def query_index(self, name: str, terms: Mapping[str, Any]) -> Flow[EntriesPage]:
        """Queries an index by fields, with or without an operator, and INDEX_OPTIONS. Raises Invalid.

        `trip_created_at__gte=moment` becomes the parameter `trip_created_at.gte=TIME`.
        """
        response = yield ClientRequest("GET", f"{self._index_path(name)}/entries", _query_params(terms))
        return response.good().read(EntriesPage)

    def _column_path(self, row_key: Key, column: str) -> str:
        return f"{self.base}/cells/{row_key_text(row_key_of(row_key))}/{parse_column_name(column)}"

    def _index_path(self, name: str) -> str:
        if not name.replace("_", "").isalnum():  # it becomes part of a path
            raise Invalid("name", "an index name has letters, digits and underscores")
        return f"{self.base}/indexes/{name}"


class _Row(msgspec.Struct, frozen=True):
    cells: dict[str, FoundCell]


class _Cells(msgspec.Struct, frozen=True):
    cells: list[FoundCell | None]


class _Shards(msgspec.Struct, frozen=True):
    shards: dict[str, dict[str, Any]]


def encode(value: Any) -> bytes:
    """Encodes what isn't a cell's body as MessagePack. Raises Invalid."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid("body", f"can't be sent: {error}") from error


def parse_idempotency_key(key: str) -> str:
    """Raises Invalid for a key that a header can't hold."""
    if not isinstance(key, str) or not (1 <= len(key) <= 200 and key.isascii() and key.isprintable()):
        raise Invalid("idempotency_key", "must be 1 to 200 visible characters of ASCII")
    return key


def time_text(moment: datetime, field: str) -> str:
    """Returns a time as RFC 3339. Raises Invalid for a time without a zone."""
    if moment.tzinfo is None:
        raise Invalid(field, "needs a time zone")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def location_member(location: LogLocation) -> Any:
    """Returns a location as a JSON document has it."""
    if isinstance(location, datetime):
        return {"since": time_text(location, "since")}
    return 0 if location is None else location if isinstance(location, int) else str(location)


def _params(**values: Any) -> dict[str, str]:
    """Returns query parameters by name. `from_` is HTTP's `from`, which Python reserves."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return ",".join(value) if isinstance(value, list | tuple) else str(value)

    return {name.rstrip("_"): text(value) for name, value in values.items() if value is not None}


def _query_params(terms: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Returns the parameters of an index query. Raises Invalid.

    The values of `__in` become the same parameter several times, and those of `__between` two comparisons: then they
    may have commas.
    """
    params: dict[str, str | list[str]] = {}
    for term, value in terms.items():
        if value is not None:
            for parameter, text in _params_of_term(term, value):
                if parameter in params:
                    raise Invalid(term, f"compares what another term compares, too: {parameter} is given twice")
                params[parameter] = text
    return params


def _params_of_term(term: str, value: Any) -> Iterator[tuple[str, str | list[str]]]:
    field, separator, operator = term.rpartition("__")
    if not separator or operator not in INDEX_OPERATORS:
        yield term, _query_text(term, value)
    elif operator == "in":
        texts = [_query_text(term, each) for each in _several(term, value)]
        if not texts:
            raise Invalid(term, "has no value, so nothing can match: leave the query out")
        yield field, texts
    elif operator == "between":
        bounds = _several(term, value)
        if len(bounds) != 2:
            raise Invalid(term, "takes two values: (lowest, highest)")
        yield f"{field}.gte", _query_text(term, bounds[0])
        yield f"{field}.lte", _query_text(term, bounds[1])
    else:
        yield f"{field}.{operator}", _query_text(term, value)


def _several(term: str, value: Any) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise Invalid(term, "takes several values: give a list")
    return list(value)


def _query_text(term: str, value: Any) -> str:
    """Returns the value of a query's term as text. Raises Invalid for a value of another type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return time_text(value, term)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if term in INDEX_OPTIONS and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, str | int | float | Decimal | uuid.UUID | ShardLocation):
        return str(value)
    raise Invalid(term, f"a query can't compare with {type(value).__name__}")


def _put_answer(response: ClientResponse) -> PutAnswer:
    put = response.good().read(PutAnswer)
    replayed = response.headers.get("idempotency-replayed") == "true"
    return msgspec.structs.replace(put, replayed=True) if replayed else put


def _found_or_missing(column: str, response: ClientResponse) -> ReadCell:
    if not _is_missing_cell(response):
        return response.good().read(FoundCell)
    hint = problem_of(response).get("hint")
    return MissingCell(column, hint if isinstance(hint, str) else None)


def _is_missing_cell(response: ClientResponse) -> bool:
    return response.status == 404 and is_cell_missing(problem_of(response))
