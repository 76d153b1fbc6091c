"""The language of index queries: HTTP parameters in, a parsed query out. Pure (no I/O).

    FIELD=v                     equal. Given several times: equal to any of the values, each taken as it is
    FIELD.in=a,b                the same for values without commas
    FIELD.ne, lt, lte, gt, gte  comparisons
    FIELD.between=a,b           from a to b, both included
    FIELD.prefix=text           begins with it. For string and bytes
    FIELD.isnull=true           has no value, or with false: has one

The shard field by equality says which shards hold the entries. Everything else is an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from api.http.parameters import (
    COLUMNS_MAX,
    LIMIT_DEFAULT,
    WAIT_DEFAULT_S,
    parse_flag,
    parse_limit,
    parse_wait,
)
from api.index.cursor import query_digest, read_cursor
from schemaless.cell import ColumnName, parse_column_name
from schemaless.errors import Invalid
from schemaless.index.definition import Field, IndexDefinition
from schemaless.index.entry import IndexEntry, entry_shard
from schemaless.index.values import Value, from_text
from schemaless.location import ShardLocation, parse_shard_location
from schemaless.storage.index_select import PREFIX_TYPES, Operator, Selection, Term

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
    values = _shard_values(definition, terms)
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
    return _term_of(field, op, name, texts)


def _term_of(field: Field, op: Operator, name: str, texts: Sequence[str]) -> Term:
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


def _shard_values(definition: IndexDefinition, terms: Sequence[Term]) -> tuple[Value, ...]:
    found = [term.values for term in terms if _names_shard(definition, term)]
    name = definition.shard_field.name
    if not found:
        raise Invalid(name, f"is the shard field, so give its value: {name}=VALUE. Repeat it for several values")
    if len(found) > 1:
        raise Invalid(name, f"give {name} or {name}.in, not both")
    return found[0]


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
