"""Queries of an index: HTTP parameters in, entries out. All of it is pure but the operation, which one node runs.

The shard field by equality says which shard holds the entries. With `after`, a put's location, the same node first
shows how far its entries go: the index's checkpoint of that source shard. So an answer includes that put, or says that
it can't yet.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from api.http.parameters import LIMIT_DEFAULT, WAIT_DEFAULT_S, parse_flag, parse_limit, parse_wait
from schemaless.cell import ColumnName, RowKey, parse_column_name, row_key_text
from schemaless.errors import Invalid, NotBuilt, Unavailable
from schemaless.index.definition import Field, IndexDefinition
from schemaless.index.entry import IndexEntry, entry_fields, entry_shard
from schemaless.index.values import Op, Value, from_json, from_text, to_json
from schemaless.location import Location, ShardLocation, parse_shard_location
from schemaless.names import index_consumer
from schemaless.storage import checkpoint_table, index_table
from schemaless.storage.index_table import EntryCursor, FoundEntry, Selection, Term
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

TERMS_MAX = 32
_CURSOR_CHARACTERS_MAX = 8192


class Behind(Unavailable):
    """The entries of the node don't include the location yet."""

    hint = "ask again: the index has not reached that location on the node that answers"


class IndexQuery(msgspec.Struct, frozen=True):
    """A parsed query. `fields` names what to show, all if empty. `include` names columns whose cells are added."""

    shard: int
    selection: Selection
    fields: frozenset[str] = frozenset()
    include: tuple[ColumnName, ...] = ()
    after: ShardLocation | None = None
    wait_s: float = WAIT_DEFAULT_S


class EntryPage(msgspec.Struct, frozen=True):
    """One page of entries. `cursor` is None when there are no more.

    `reached` is the index's checkpoint in the shard of `after`, None without `after`.
    """

    entries: Sequence[FoundEntry]
    cursor: str | None
    reached: Location | None = None


def parse_query(definition: IndexDefinition, shards: int, parameters: Iterable[tuple[str, str]]) -> IndexQuery:
    """Parses all parameters but `read_from`. Raises Invalid, which names the parameter, or NotBuilt."""
    options: dict[str, str] = {}
    terms: list[Term] = []
    for name, text in parameters:
        if name in _OPTIONS:
            if name in options:
                raise Invalid(name, "is given twice")
            options[name] = text
        elif name != "read_from":
            terms.append(_term(definition, name, text))
    if len(terms) > TERMS_MAX:
        raise Invalid("query", f"at most {TERMS_MAX} comparisons")
    selection = _selection(definition, terms, options)
    return IndexQuery(
        shard=_shard(definition, terms, shards),
        selection=selection,
        fields=frozenset(definition.field(name).name for name in _names(options.get("fields"))),
        include=tuple(parse_column_name(name, "include") for name in _names(options.get("include"))),
        after=_after(options.get("after"), shards),
        wait_s=parse_wait(options["wait"], "wait") if "wait" in options else WAIT_DEFAULT_S,
    )


def find_entries(datastore: Datastore, definition: IndexDefinition, query: IndexQuery) -> Operation[EntryPage]:
    """Finds entries on any node of the cluster that is home to `query.shard`. Raises Behind."""
    select = index_table.select(datastore, query.shard, definition, query.selection)
    location: Location | None = None
    if query.after is None:
        (result,) = yield select
    else:
        # The checkpoint is read first: entries that arrive in between do no harm.
        reached, result = yield ";".join(
            [
                checkpoint_table.reached(datastore.name, index_consumer(definition.name), query.after.shard),
                select,
            ]
        )
        location = Location(*reached.rows[0]) if reached.rows else None
        if location is None or location < query.after.location:
            raise Behind(
                f"index {definition.name} has reached {location} in shard {query.after.shard}, not"
                f" {query.after.location}"
            )
    entries = index_table.found(definition, result.rows)
    return EntryPage(entries, _cursor(definition, query.selection, entries), location)


def entry_view(definition: IndexDefinition, query: IndexQuery, found: FoundEntry) -> dict[str, Any]:
    """Returns an entry as an answer shows it, without `cells`."""
    fields = entry_fields(definition, found.entry)
    shown = {name: value for name, value in fields.items() if not query.fields or name in query.fields}
    return {"row_key": row_key_text(found.row_key), "fields": shown}


_OPTIONS = frozenset({"order", "desc", "limit", "cursor", "fields", "include", "verify", "after", "wait"})


def _term(definition: IndexDefinition, name: str, text: str) -> Term:
    field_name, dot, operator = name.partition(".")
    field = definition.field(field_name)
    if operator == "eq" or operator not in ({*Op} if dot else {""}):
        raise Invalid(name, "comparisons are FIELD, FIELD.ne, FIELD.lt, FIELD.lte, FIELD.gt and FIELD.gte")
    return Term(field, Op(operator or "eq"), from_text(field.type, field.length, text, name))


def _shard(definition: IndexDefinition, terms: Iterable[Term], shards: int) -> int:
    wanted = {term.value for term in terms if term.field == definition.shard_field and term.op is Op.EQ}
    if len(wanted) != 1:
        raise Invalid(definition.shard_field.name, "the shard field must be given, by equality and with one value")
    return entry_shard(definition, IndexEntry((wanted.pop(),)), shards)


def _selection(definition: IndexDefinition, terms: Sequence[Term], options: Mapping[str, str]) -> Selection:
    if _is_set(options, "verify"):
        raise NotBuilt("verify: entries are not compared with cells yet")
    order = definition.keyed[min(1, len(definition.keyed) - 1)]
    if "order" in options:
        order = definition.field(options["order"])
        if order not in definition.keyed:
            raise Invalid(
                "order", f"must be one of {', '.join(field.name for field in definition.keyed)}: they are keyed"
            )
    descending = _is_set(options, "desc")
    limit = parse_limit(options["limit"], "limit") if "limit" in options else LIMIT_DEFAULT
    after = _read_cursor(order, options["cursor"], descending=descending) if "cursor" in options else None
    return Selection(terms, order, descending, limit, after)


def _is_set(options: Mapping[str, str], name: str) -> bool:
    return name in options and parse_flag(options[name], name)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _after(text: str | None, shards: int) -> ShardLocation | None:
    if text is None:
        return None
    location = parse_shard_location(text)
    if location.shard >= shards:
        raise Invalid("after", f"there is no shard {location.shard}")
    return location


def _cursor(definition: IndexDefinition, selection: Selection, entries: Sequence[FoundEntry]) -> str | None:
    """Returns the cursor of the next page. It names the last entry by its value and row key, so it is stable."""
    if len(entries) < selection.limit:
        return None
    last = entries[-1]
    value = last.entry.values[definition.fields.index(selection.order)]
    named = [selection.order.name, selection.descending, to_json(selection.order.type, value), last.row_key.hex()]
    return base64.urlsafe_b64encode(json.dumps(named).encode()).decode().rstrip("=")


def _read_cursor(order: Field, text: str, *, descending: bool) -> EntryCursor:
    try:
        if len(text) > _CURSOR_CHARACTERS_MAX:
            raise ValueError("too long")
        named = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        field, was_descending, shown, row_key = named
        raw = bytes.fromhex(row_key)
        if isinstance(shown, str):
            shown.encode()  # JSON can name half of a code point, which no field has
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise Invalid("cursor", "is not a cursor of this API") from None
    if field != order.name or was_descending is not descending:
        raise Invalid("cursor", "belongs to another order")
    value: Value | None = None if shown is None else from_json(order.type, order.length, shown)
    if len(raw) != 16 or (shown is not None and value is None):
        raise Invalid("cursor", "is not a cursor of this API")
    return EntryCursor(value, RowKey(raw))
