"""Requests: what to send for each call of a client, and how to read the response. Pure (no I/O).

Every function is a flow (schemaless/client/exchange.py). Arguments that are known to be wrong are refused before
anything is sent. The server judges everything else. Paths and shapes: docs/http.md.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict
from urllib.parse import quote

import msgspec

from schemaless.cell import PutStatus, parse_cause, parse_column_name, parse_ref_key, row_key_of, row_key_text
from schemaless.client.answers import (
    EntriesPage,
    Entry,
    LogPage,
    MissingCell,
    PutAnswer,
    PutFailure,
    PutResult,
    ReadCell,
    VersionsPage,
    column_of,
)
from schemaless.client.exchange import (
    MSGPACK,
    ClientRequest,
    ClientResponse,
    Flow,
    error_of_problem,
    is_cell_missing,
    problem_of,
)
from schemaless.contract.call import ApiCall
from schemaless.errors import Invalid, SchemalessError, TooLarge, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.location import Location, ShardLocation
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.shapes import shape

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
        for name in names:
            if not isinstance(name, tuple | list) or len(name) not in (2, 3):
                raise Invalid("names", f"has {name!r}: a cell is (row_key, column) or (row_key, column, ref_key)")
            row_key, column, *ref_key = name
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
                pages[int(shard)] = msgspec.convert({**page, "shard": int(shard)}, shape(LogPage))
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

    def call(self, call: ApiCall, payload: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Flow[dict[str, Any]]:
        """Makes a call of the contract. `named` are parts of its path, and of its query."""
        path = call.path.format(**{name: quote(str(named[name]), safe="") for name in call.path_parameters})
        params = _params(**{name: value for name, value in named.items() if name not in call.path_parameters})
        content = b"" if payload is None else encode(payload)
        waits = getattr(call.payload() if call.optional else None, "wait", 0)
        wait_s = float((payload or {}).get("wait", waits))
        response = yield ClientRequest(
            call.method, f"{self.base}{path}", params, _CONTENT, content, wait_s=wait_s, is_final=wait_s > 0
        )
        return response.good().read(dict[str, Any])

    def query_index(self, name: str, terms: Mapping[str, Any]) -> Flow[EntriesPage]:
        """Queries an index by fields, with or without an operator, and INDEX_OPTIONS. Raises Invalid.

        `trip_created_at__gte=moment` becomes the parameter `trip_created_at.gte=TIME`.
        """
        # The values of __in become the same parameter several times, and those of __between two comparisons: then
        # they may have commas.
        params: dict[str, str | list[str]] = {}
        for term, value in terms.items():
            if value is not None:
                for parameter, text in _params_of_term(term, value):
                    if parameter in params:
                        raise Invalid(term, f"compares what another term compares, too: {parameter} is given twice")
                    params[parameter] = text
        response = yield ClientRequest("GET", f"{self._index_path(name)}/entries", params)
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


def check_order(options: CheckOptions) -> dict[str, Any]:
    """Returns the payload of a check of an index. Raises Invalid."""
    wanted: dict[str, Any] = {name.rstrip("_"): value for name, value in options.items() if value is not None}
    for member in ("from", "to"):
        if member in wanted:
            wanted[member] = row_key_text(row_key_of(wanted[member]))
    if "row_keys" in wanted:
        wanted["row_keys"] = [row_key_text(row_key_of(row_key)) for row_key in wanted["row_keys"]]
    return wanted


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


# Batch puts: many cells as requests within the server's limits, with retries for items that failed for now.
#
# The server answers every item by itself. An item that may succeed later is sent again in a bounded number of rounds,
# so every result is final. Items keep their order in a batch: a repeated key then gets the same result as alone.

ITEMS_MAX = 1000
BYTES_MAX = 15 << 20  # the server takes 16 MiB, and the frame around the items needs a little
ROUNDS_MAX = 6
ROUND_PAUSE_S = 0.25

_FRAME = b"\x81\xa5cells\xdd"  # MessagePack: a map of one, "cells", an array with a length of four bytes


class NewCell(NamedTuple):
    """A cell to be written. A plain tuple with the same values is accepted, too."""

    row_key: Key
    column_name: str
    ref_key: int
    body: Mapping[str, Any]


class _Item(msgspec.Struct, frozen=True):
    """One result of the server: a put's answer, or a problem."""

    status: str
    shard: int = 0
    copies: int = 0
    generation: int | None = None
    added_id: int | None = None
    created_at: datetime | None = None
    location: str | None = None
    digest: str | None = None
    problem: dict[str, Any] | None = None


class _Results(msgspec.Struct, frozen=True):
    results: list[_Item]


def put_cells(
    requests: Requests, cells: Iterable[NewCell | tuple[Key, str, int, Mapping[str, Any]]]
) -> Flow[list[PutResult]]:
    """Puts cells, and returns results in their order. Raises when a whole request failed, whose results are unknown."""
    results: list[PutResult | None] = []
    wanted: list[NewCell] = []
    items: list[bytes] = []
    for cell in cells:
        if not isinstance(cell, tuple | list) or len(cell) != len(NewCell._fields):
            raise Invalid("cells", f"has {str(cell)[:200]!r}: a cell is ({', '.join(NewCell._fields)})")
        new = NewCell(*cell)
        try:
            item = encode(
                {
                    "row_key": row_key_text(row_key_of(new.row_key)),
                    "column_name": parse_column_name(new.column_name),
                    "ref_key": parse_ref_key(new.ref_key),
                    "body": msgspec.Raw(encode_json_body(new.body)),
                }
            )
            if len(item) > BYTES_MAX:  # alone it would be a request that is refused as a whole
                raise TooLarge(f"a cell of {len(item)} bytes is more than a request may have, which is {BYTES_MAX}")
        except SchemalessError as error:  # its own result: the other cells are put
            results.append(PutFailure("error", error))
        else:
            results.append(None)
            wanted.append(new)
            items.append(item)
    found: list[PutResult] = []
    for part in chunks(items, count_max=ITEMS_MAX, bytes_max=BYTES_MAX, size_bytes=len):
        found += yield from _put_items(requests, wanted[len(found) : len(found) + len(part)], part)
    of_sent = iter(found)
    return [next(of_sent) if result is None else result for result in results]


def _put_items(requests: Requests, cells: Sequence[NewCell], items: Sequence[bytes]) -> Flow[list[PutResult]]:
    """Puts the items of one request, in rounds."""
    results: dict[int, PutResult] = {}
    left = list(range(len(items)))
    for number in range(ROUNDS_MAX):
        content = _FRAME + len(left).to_bytes(4, "big") + b"".join(items[index] for index in left)
        response = yield ClientRequest(
            "POST",
            f"{requests.base}/batch/put",
            headers=requests.put_headers,
            content=content,
            delay_s=number * ROUND_PAUSE_S,
        )
        found = response.good().read(_Results).results
        if len(found) != len(left):
            raise Unavailable(f"{len(left)} cells were sent and {len(found)} results came back")
        again = []
        for index, item in zip(left, found, strict=True):
            results[index] = result = _result(cells[index], item)
            if isinstance(result, PutFailure) and result.error.retryable:
                again.append(index)
        left = again
        if not left:
            break
    return [results[index] for index in range(len(items))]


def _result(cell: NewCell, item: _Item) -> PutResult:
    if item.problem is not None:
        return PutFailure("conflict" if item.status == "conflict" else "error", error_of_problem(item.problem))
    return PutAnswer(
        row_key=uuid.UUID(bytes=row_key_of(cell.row_key)),
        column_name=cell.column_name,
        ref_key=cell.ref_key,
        status=PutStatus(item.status),
        shard=item.shard,
        copies=item.copies,
        generation=item.generation,
        added_id=item.added_id,
        created_at=item.created_at,
        location=item.location,
        digest=item.digest,
    )


# What a body may hold: the types of JSON, and datetimes with a time zone, which become RFC 3339 text.
#
# Everything else is refused by the name of its member, before anything is sent.

_PLAIN = frozenset({str, int, bool, type(None)})
_DEPTH_MAX = 64  # as the API has it
_encode = msgspec.msgpack.Encoder().encode
_MINUTE = timedelta(minutes=1)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def encode_json_body(body: Mapping[str, Any]) -> bytes:
    """Returns a body as MessagePack, its datetimes as text. Raises Invalid with the name of what JSON can't hold."""
    if not isinstance(body, Mapping):
        raise Invalid("body", f"must be a JSON object, and is a {_type_name(body)}")
    members = _json_value(body, "body", 0)
    try:
        return _encode(members)
    except (OverflowError, UnicodeEncodeError) as error:  # the encoder checks integers and texts, and names no member
        raise next(_faults(members, "body"), Invalid("body", f"can't be sent: {error}")) from error


def _json_value(value: Any, name: str, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise Invalid(name, f"is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, Mapping):
        members = {}
        for key, member in value.items():
            if type(key) is not str:
                raise Invalid(name, f"has the key {key!r} ({_type_name(key)}), and JSON has text as keys only")
            plain = type(member) in _PLAIN  # most members, and a call for each would cost ten times as much
            members[key] = member if plain else _json_value(member, f"{name}.{key}", depth + 1)
        return members
    if isinstance(value, list | tuple):
        return [
            item if type(item) in _PLAIN else _json_value(item, f"{name}[{n}]", depth + 1)
            for n, item in enumerate(value)
        ]
    return _json_scalar(value, name)


def _json_scalar(value: Any, name: str) -> Any:
    """Subclasses of JSON's types are refused, numpy's scalars among them, but for enums of texts and integers."""
    if type(value) is float:
        if math.isfinite(value):
            return value
        raise Invalid(name, f"is {value}, and JSON has no such number: leave the member out, or make it null")
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is None:
            raise Invalid(name, "is a datetime without a time zone: nobody could tell which moment it is")
        if offset % _MINUTE:  # RFC 3339 has offsets of whole minutes
            try:
                value = value.astimezone(UTC)
            except OverflowError as error:
                raise Invalid(name, "is a datetime that UTC can't hold: its year would be 0 or 10000") from error
        return value.isoformat().removesuffix("+00:00") + ("" if value.utcoffset() else "Z")
    if isinstance(value, Enum) and type(value.value) in _PLAIN and isinstance(value, str | int):
        return value.value
    if type(value) in _PLAIN:
        return value
    raise Invalid(name, f"is a {_type_name(value)}, which JSON doesn't have: make it text, a number or a list")


def _faults(value: Any, name: str) -> Iterator[Invalid]:
    if isinstance(value, dict):
        for key, member in value.items():
            if not _is_unicode(key):
                yield Invalid(name, f"has the key {key!r} with half a surrogate pair, which UTF-8 can't hold")
            yield from _faults(member, f"{name}.{key}")
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from _faults(item, f"{name}[{n}]")
    elif isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        yield Invalid(name, "is an integer beyond 64 bits: make it text")
    elif isinstance(value, str) and not _is_unicode(value):
        yield Invalid(name, "has half a surrogate pair, which UTF-8 can't hold")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# EntryPages: the pages of an index query as one run of entries. Pure (no I/O).


class EntryPages:
    """`limit` of the terms is the size of a page. `page` is the last one that was fetched."""

    def __init__(self, requests: Requests, name: str, terms: Mapping[str, Any]) -> None:
        self._requests = requests
        self._name = name
        self._terms = dict(terms)
        self._ready: deque[Entry] = deque()
        self.page: EntriesPage | None = None

    def take(self) -> Entry | None:
        """Returns the next entry that was fetched, or None."""
        return self._ready.popleft() if self._ready else None

    @property
    def at_end(self) -> bool:
        """Whether the last page was fetched."""
        return self.page is not None and self.page.cursor is None

    def fetch(self) -> Flow[None]:
        """Fetches the next page, without entries where `verify` dropped them. Raises what a query raises."""
        page = yield from self._requests.query_index(self._name, self._terms)
        self._terms["cursor"] = page.cursor
        self._ready.extend(page.entries)
        self.page = page
