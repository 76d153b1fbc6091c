"""A query of an index on the nodes that hold its entries, and what their pages make together.

Each value of the shard field is in one shard. One node of each cluster answers for all shards that live there, in one
statement. With `after`, a put's location, the same node first shows how far its entries go: the index's checkpoint of
that source shard. What its page lacks is another module's work (api/index/entry_reader.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.http.budget import Steps
from schemaless.cell import ColumnName, RowKey, StoredCell, parse_column_name, row_key_text
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.contract.parameters import (
    COLUMNS_MAX,
    LIMIT_DEFAULT,
    WAIT_DEFAULT_S,
    parse_flag,
    parse_limit,
    parse_wait,
)
from schemaless.errors import Corrupt, Invalid, StatementTimeout, TooLarge, Unavailable
from schemaless.index.definition import ELEMENTS_MAX, Field, IndexDefinition, dump_definition
from schemaless.index.entry import IndexEntry, entries_for, entry_fields, entry_shard
from schemaless.index.values import Value, from_json, from_text, to_json
from schemaless.location import Location, ShardLocation, parse_shard_location
from schemaless.storage import checkpoint_table, index_select
from schemaless.storage.index_select import PREFIX_TYPES, EntryCursor, NodePage, Operator, Selection, Term
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.operation import Operation, Result
from schemaless.storage.sql import Script
from schemaless.topology import Datastore, Role

DAMAGED_MAX = 1000
"""How many rows with damaged entries one node leaves out of a page."""

Places = Sequence[tuple[int, Value]]
Newest = Mapping[tuple[RowKey, ColumnName], StoredCell | None]
"""The newest cells of rows."""


class Behind(Unavailable):
    """The entries of the node don't include the location yet."""

    hint = "ask again: the index has not reached that location on the node that answers"


class QueryTooSlow(Unavailable):
    """A server gave a query up."""

    hint = (
        "compare more of the keyed fields, in their order, and order by the first one that isn't given by equality:"
        " then the server reads few entries"
    )


class ManyDamaged(Unavailable):
    """More entries of a query are damaged than it leaves out. `row_keys` are those of the rows that it met."""

    def __init__(self, definition: IndexDefinition, role: Role, row_keys: Collection[RowKey]) -> None:
        hint = (
            "ask again: the rows that it met are being repaired."
            f" `schemaless index repair {definition.name}` writes all of them anew"
        )
        if role is Role.MINION:
            hint = (
                "ask the master (read_from=master): nothing repairs a minion, it is made anew."
                f" `schemaless index verify {definition.name}` names it"
            )
        super().__init__(f"more than {DAMAGED_MAX} rows of index {definition.name} are damaged on a {role}", hint=hint)
        self.row_keys = row_keys


class MinionsDiffer(Unavailable):
    """Every node that could answer is a minion whose entries differ from their cells."""

    def __init__(self, definition: IndexDefinition, cluster: str) -> None:
        super().__init__(
            f"the entries of index {definition.name} on the minions of cluster {cluster} differ from their cells",
            hint="ask the master (read_from=master), or again when it is back."
            f" `schemaless index verify {definition.name}` names the minions, which must be made anew",
        )


class Execution(msgspec.Struct, frozen=True):
    """How a node ran a query. `rows_read` counts rows of tables and keys."""

    sql: str
    plan: Sequence[Mapping[str, Any]]
    rows_read: int
    seconds: float


class NodeAnswer(msgspec.Struct, frozen=True):
    """What one node answers. `reached` is its checkpoint in the shard of `after`, None without `after`.

    `added_ids_sum` says how far the index is there. It is known where that was asked for.
    """

    page: NodePage
    reached: Location | None = None
    added_ids_sum: int | None = None
    execution: Execution | None = None


class EntryPage(msgspec.Struct, frozen=True):
    """One page of entries. `cursor` is None when there are no more."""

    entries: Sequence[FoundEntry]
    cursor: str | None


def places_by_cluster(datastore: Datastore, definition: IndexDefinition, query: IndexQuery) -> Mapping[str, Places]:
    return definition.placed(datastore).by_home(query.places, lambda place: place[0])


def find_entries(
    datastore: Datastore,
    definition: IndexDefinition,
    query: IndexQuery,
    places: Places,
    sums: bool = False,
    bytes_max: int = index_select.PAGE_BYTES_MAX,
    excluded: Sequence[RowKey] = (),
) -> Operation[NodeAnswer]:
    """Finds the entries of places that live on one cluster, on any node of it, without the excluded rows.

    A row with a damaged entry is left out, and named. So a page that is full of them doesn't look like the last one.
    It ends where more than DAMAGED_MAX are named, and is no answer then. Raises QueryTooSlow.
    """
    consumer, damaged = definition.consumer, list[RowKey]()

    def select_now() -> Script:
        return index_select.select(datastore, definition, places, query.selection, bytes_max, [*excluded, *damaged])

    select = select_now()
    # Checkpoints are read first: entries that arrive in between do no harm.
    before = []
    if query.after is not None:
        before.append(checkpoint_table.reached(datastore.name, consumer, query.after.shard))
    if sums:
        before.append(checkpoint_table.added_ids_sum(datastore.name, consumer))
    try:
        if query.explain:
            first, result, execution = yield from _explained(before, select)
        else:
            *first, result = yield ";".join([*before, select])
            execution = None
        page = index_select.node_page(definition, query.selection, result.rows)
        while page.damaged:
            damaged += page.damaged
            if len(damaged) > DAMAGED_MAX:
                break
            (result,) = yield select_now()
            page = index_select.node_page(definition, query.selection, result.rows)
    except StatementTimeout as error:
        raise QueryTooSlow(
            f"a server worked on the query for {index_select.STATEMENT_MS_MAX / 1000} s and gave it up"
        ) from error
    reached = None
    if query.after is not None:
        rows = first.pop(0).rows
        reached = Location(*rows[0]) if rows else None
    added_ids_sum = int(first.pop(0).rows[0][0]) if sums else None
    return NodeAnswer(msgspec.structs.replace(page, damaged=damaged), reached, added_ids_sum, execution)


def merged(definition: IndexDefinition, query: IndexQuery, pages: Sequence[NodePage]) -> EntryPage:
    """Returns one page in the order of the query.

    It ends at the last entry of a node that has more: what other nodes have behind that one may not come next.
    """
    key = index_select.order_key(definition, query.selection)
    descending = query.selection.descending
    entries = pages[0].entries
    if len(pages) > 1:
        entries = sorted((found for page in pages for found in page.entries), key=key, reverse=descending)
        ends = [key(page.entries[-1]) for page in pages if page.more and page.entries]
        if ends:
            end = max(ends) if descending else min(ends)
            entries = [found for found in entries if (key(found) >= end if descending else key(found) <= end)]
    shown = entries[: query.selection.limit]
    has_more = len(entries) > len(shown) or any(page.more for page in pages)
    cursor = None
    if shown and has_more:
        cursor = cursor_of(definition, query.selection, query.digest, shown[-1], query.after)
    return EntryPage(shown, cursor)


def entry_view(definition: IndexDefinition, query: IndexQuery, found: FoundEntry) -> dict[str, Any]:
    """Returns an entry as an answer shows it, without `cells`."""
    fields = entry_fields(definition, found.entry)
    if query.fields:
        fields = {name: value for name, value in fields.items() if name in query.fields}
    view: dict[str, Any] = {"row_key": row_key_text(found.row_key), "fields": fields}
    if definition.array_positions:
        view["element"] = found.element
    return view


async def current_entries(
    definition: IndexDefinition, entries: Sequence[FoundEntry], newest: Newest, bytes_max: int
) -> list[FoundEntry]:
    """Returns the entries that the newest cells of their rows make, in order: `verify` shows no others.

    Raises TooLarge for bodies that inflate to more than `bytes_max` in all, and Corrupt for one that can't be decoded.
    """
    steps = Steps()
    left = bytes_max
    current = []
    for found in entries:
        bodies: dict[ColumnName, Body] = {}
        for column in definition.columns:
            cell = newest[found.row_key, column]
            if cell is not None and not cell.is_erased:
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


def unreadable_view(cell: StoredCell, error: Corrupt) -> dict[str, Any]:
    """Shows a cell that can't be decoded, as an answer names it."""
    return {
        "row_key": row_key_text(cell.row_key),
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "reason": str(error),
    }


async def unreadable_cells(
    cells: Iterable[StoredCell | None], bytes_max: int
) -> dict[tuple[RowKey, ColumnName], dict[str, Any]]:
    """Returns the cells that can't be decoded, as an answer names them.

    Raises TooLarge for bodies that inflate to more than `bytes_max` in all.
    """
    steps, left = Steps(), bytes_max
    found = {}
    for cell in cells:
        if cell is None or cell.is_erased:
            continue
        try:
            packed = inflate_body(cell.body)
            decode_packed(packed)
        except Corrupt as error:
            found[cell.row_key, cell.column_name] = unreadable_view(cell, error)
            continue
        left -= len(packed)
        if left < 0:
            raise TooLarge("the query reads too many bytes of cells: ask for fewer entries at once")
        await steps.after(len(packed))
    return found


_COUNTERS = "SHOW SESSION STATUS LIKE 'Handler_read%'"
_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"


def _explained(before: Sequence[str], select: str) -> Operation[tuple[list[Result], Result, Execution]]:
    """Runs a query, and measures it. Reading the counters twice before it shows what that itself reads."""
    plan = f"EXPLAIN FORMAT=TRADITIONAL {index_select.without_limits(select)}"
    *first, shown, one, two, began, result, ended, three = yield ";".join(
        [*before, plan, _COUNTERS, _COUNTERS, _CLOCK, select, _CLOCK, _COUNTERS]
    )
    zero, start, end = (sum(int(count) for _, count in counters.rows) for counters in (one, two, three))
    # Two clocks are read between the second and the third look at the counters. They read no rows.
    rows_read = max(0, (end - start) - (start - zero))
    seconds = (ended.rows[0][0] - began.rows[0][0]) / 1e6
    lines = [dict(zip(_PLAN_COLUMNS, _plan_line(row), strict=True)) for row in shown.rows]
    return first, result, Execution(index_select.without_limits(select), lines, rows_read, seconds)


_PLAN_COLUMNS = ("table", "access", "key", "rows", "extra")


def _plan_line(row: Sequence[Any]) -> tuple[Any, ...]:
    """MySQL's EXPLAIN has two columns more than MariaDB's: partitions behind the table, and filtered before the end."""
    if len(row) > 10:
        return row[2], row[4], row[6], row[9], row[11]
    return row[2], row[3], row[5], row[8], row[9]


# Cursors of index queries: they name the last entry of a page by its values, row key and element, so they are stable.
#
# A cursor also has the digest of its query: with another query it would skip entries and show others twice. And it has
# the number of the version of the index that answered. It is continued from that version, also after a switch (A22).
# It carries the location of `after`, so that the next page includes that put, too.

_CHARACTERS_MAX = 24 << 10  # the most that the values of a key take as text, and room
_DIGEST_BYTES = 8


def query_digest(
    definition: IndexDefinition,
    shard_values: Iterable[Value],
    terms: Iterable[Term],
    order: Field,
    *,
    descending: bool,
) -> str:
    """Names what decides which entries a query has, and in which order. The size of a page is no part of it."""
    named = [
        dump_definition(definition),
        sorted(map(repr, shard_values)),
        sorted(repr((term.field.name, str(term.op), term.values)) for term in terms),
        order.name,
        descending,
    ]
    return hashlib.sha256(json.dumps(named).encode()).digest()[:_DIGEST_BYTES].hex()


def cursor_of(
    definition: IndexDefinition, selection: Selection, digest: str, last: FoundEntry, after: ShardLocation | None = None
) -> str:
    """Returns the cursor of the page that begins behind an entry."""
    values = [to_json(field.type, last.entry.values[definition.fields.index(field)]) for field in selection.order]
    parts = [definition.number, digest, values, last.row_key.hex(), last.element, *([str(after)] if after else [])]
    return base64.urlsafe_b64encode(msgspec.json.encode(parts)).decode().rstrip("=")


class _Cursor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    digest: str
    values: list[Any]
    row_key: str
    element: int
    after: str | None = None


def cursor_version(text: str) -> int:
    """Returns the number of the version of the index that a cursor continues. Raises Invalid."""
    return _decoded(text).version


def read_cursor(text: str, order: tuple[Field, ...], digest: str) -> tuple[EntryCursor, ShardLocation | None]:
    """Returns where the page begins, and the put that it includes. Raises Invalid, also for another query's cursor."""
    cursor = _decoded(text)
    raw = bytes.fromhex(cursor.row_key)
    if cursor.digest != digest:
        raise Invalid("cursor", "belongs to another query or index: begin again without it")
    if len(cursor.values) != len(order) or len(raw) != 16 or not 0 <= cursor.element < ELEMENTS_MAX:
        raise _no_cursor()
    after = None if cursor.after is None else parse_shard_location(cursor.after, "cursor")
    return EntryCursor(tuple(map(_value, order, cursor.values)), RowKey(raw), cursor.element), after


def _decoded(text: str) -> _Cursor:
    try:
        if len(text) > _CHARACTERS_MAX:
            raise ValueError("too long")
        named = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        cursor = msgspec.convert(named, _Cursor)
        bytes.fromhex(cursor.row_key)
        # JSON can name half of a code point, which no field has.
        json.dumps(cursor.values, ensure_ascii=False).encode()
    except (ValueError, TypeError, binascii.Error, RecursionError, msgspec.ValidationError):
        raise _no_cursor() from None
    return cursor


def _no_cursor() -> Invalid:
    return Invalid("cursor", "is not a cursor of this API: begin again without it")


def _value(field: Field, shown: object) -> Value | None:
    value = None if shown is None else from_json(field.type, field.length, shown)
    if shown is not None and value is None:
        raise _no_cursor()
    return value


# The language of index queries: HTTP parameters in, a parsed query out. Pure (no I/O).
#
#     FIELD=v                     equal. Given several times: equal to any of the values, each taken as it is
#     FIELD.in=a,b                the same for values without commas
#     FIELD.ne, lt, lte, gt, gte  comparisons
#     FIELD.between=a,b           from a to b, both included
#     FIELD.prefix=text           begins with it. For string and bytes
#     FIELD.isnull=true           has no value, or with false: has one
#
# The shard field by equality says which shards hold the entries. Everything else is an option.

TERMS_MAX = 32
VALUES_MAX = 100  # of one comparison
PLACES_ROWS_MAX = 10_000  # values of the shard field times limit: what servers read for one page
PARAMETERS_MAX = 256

OPTIONS = frozenset(
    {"order", "desc", "limit", "cursor", "fields", "include", "verify", "explain", "after", "wait", "read_from"}
)


class IndexQuery(msgspec.Struct, frozen=True):
    """A parsed query. `places` are the values of the shard field with their shards.

    `fields` names what to show, all if empty. `include` names columns whose cells are added.
    """

    places: tuple[tuple[int, Value], ...]
    selection: Selection
    digest: str
    fields: frozenset[str] = frozenset()
    include: tuple[ColumnName, ...] = ()
    verify: bool = False
    explain: bool = False
    after: ShardLocation | None = None
    wait_s: float = WAIT_DEFAULT_S


def parse_query(definition: IndexDefinition, shards: int, parameters: Iterable[tuple[str, str]]) -> IndexQuery:
    """Parses all parameters but `read_from`. Raises Invalid, which names the parameter and says what to do."""
    options: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    for name, text in parameters:
        if name not in OPTIONS:
            texts.setdefault(name, []).append(text)
        elif name in options:
            raise Invalid(name, "is given twice")
        else:
            options[name] = text
    terms = [_term(definition, name, found) for name, found in texts.items()]
    if len(terms) > TERMS_MAX:
        raise Invalid("query", f"has {len(terms)} comparisons: {TERMS_MAX} are allowed")
    found = [term.values for term in terms if _names_shard(definition, term)]
    name = definition.shard_field.name
    if not found:
        raise Invalid(name, f"is the shard field, so give its value: {name}=VALUE. Repeat it for several values")
    if len(found) > 1:
        raise Invalid(name, f"give {name} or {name}.in, not both")
    values = found[0]
    others = [term for term in terms if not _names_shard(definition, term)]
    selection, digest, of_cursor = _selection(definition, values, others, options)
    shown = _names(options.get("fields"))
    return IndexQuery(
        places=tuple((entry_shard(definition, IndexEntry((value,)), shards), value) for value in values),
        selection=selection,
        digest=digest,
        fields=frozenset(_named(definition, name, "fields").name for name in shown),
        include=_include(options.get("include")),
        verify=_is_set(options, "verify"),
        explain=_is_set(options, "explain"),
        after=_after(options, of_cursor, shards),
        wait_s=parse_wait(options["wait"], "wait") if "wait" in options else WAIT_DEFAULT_S,
    )


def _named(definition: IndexDefinition, name: str, option: str) -> Field:
    """Returns the field that an option names. Raises Invalid."""
    try:
        return definition.field(name)
    except Invalid as error:
        raise Invalid(option, f"{name!r} {error.why}") from None


def _term(definition: IndexDefinition, name: str, texts: Sequence[str]) -> Term:
    field_name, dot, operator = name.partition(".")
    field = definition.field(field_name)
    if dot and operator not in {*Operator}:
        others = {Operator.EQ} if field.type in PREFIX_TYPES else {Operator.EQ, Operator.PREFIX}
        known = ", ".join(f"{field_name}.{each}" for each in Operator if each not in others)
        raise Invalid(name, f"is no comparison: there are {field_name}, {known}")
    op = Operator(operator or Operator.EQ)
    if len(texts) > 1 and op is not Operator.EQ:
        raise Invalid(name, f"is given twice: only {field_name}, which means equal, takes several values")
    if op is Operator.ISNULL:
        return Term(field, op, (parse_flag(texts[0], name),))
    if op is Operator.PREFIX and field.type not in PREFIX_TYPES:
        raise Invalid(
            name, f"a prefix is for string and bytes, {field.name} is {field.type}: use {field.name}.between=LOW,HIGH"
        )
    if op in (Operator.IN, Operator.BETWEEN):
        texts = texts[0].split(",")
    if op is Operator.BETWEEN and len(texts) != 2:
        raise Invalid(name, f"takes LOW,HIGH: for values with commas use {field.name}.gte and {field.name}.lte")
    if len(texts) > VALUES_MAX:
        raise Invalid(name, f"has {len(texts)} values: {VALUES_MAX} are allowed, so ask several times")
    values = tuple(from_text(field.type, field.length, text, name) for text in texts)
    if op is Operator.EQ and len(values) > 1:
        op = Operator.IN
    return Term(field, op, tuple(dict.fromkeys(values)) if op is Operator.IN else values)


def _names_shard(definition: IndexDefinition, term: Term) -> bool:
    return term.field == definition.shard_field and term.op in (Operator.EQ, Operator.IN)


def _selection(
    definition: IndexDefinition, values: Sequence[Value], terms: Sequence[Term], options: Mapping[str, str]
) -> tuple[Selection, str, ShardLocation | None]:
    keyed = definition.keyed
    if "order" in options:
        asked = _named(definition, options["order"], "order")
        if asked not in keyed:
            raise Invalid("order", f"must be one of {', '.join(field.name for field in keyed)}: they are keyed")
    elif len(values) > 1:
        raise Invalid("order", f"is needed with several values of {definition.shard_field.name}: name a keyed field")
    else:
        asked = keyed[min(1, len(keyed) - 1)]
    descending = _is_set(options, "desc")
    limit = parse_limit(options["limit"], "limit") if "limit" in options else LIMIT_DEFAULT
    if len(values) * limit > PLACES_ROWS_MAX:
        most = PLACES_ROWS_MAX // len(values)
        raise Invalid("limit", f"may be at most {most} with {len(values)} values of {definition.shard_field.name}")
    order = keyed[keyed.index(asked) :]
    digest = query_digest(definition, values, terms, asked, descending=descending)
    begin, after = read_cursor(options["cursor"], order, digest) if "cursor" in options else (None, None)
    return Selection(terms, order, descending, limit, begin), digest, after


def _is_set(options: Mapping[str, str], name: str) -> bool:
    return name in options and parse_flag(options[name], name)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _include(text: str | None) -> tuple[ColumnName, ...]:
    columns = tuple(dict.fromkeys(parse_column_name(name, "include") for name in _names(text)))
    if len(columns) > COLUMNS_MAX:
        raise Invalid("include", f"names at most {COLUMNS_MAX} columns")
    return columns


def _after(options: Mapping[str, str], of_cursor: ShardLocation | None, shards: int) -> ShardLocation | None:
    """Returns the put that the answer includes: that of `after`, else that of the page before."""
    name = "after" if "after" in options else "cursor"
    location = parse_shard_location(options["after"]) if "after" in options else of_cursor
    if location is not None and location.shard >= shards:
        raise Invalid(name, f"there is no shard {location.shard}")
    return location
