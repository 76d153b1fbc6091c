"""Index definitions: what is accepted, and how what is wrong is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import Invalid, Malformed
from schemaless.index.definition import (
    ELEMENTS_MAX,
    dump_definition,
    load_definition,
    parse_definition,
    parse_index_name,
)
from schemaless.index.entry import IndexEntry, entries_for, entry_fields, entry_shard
from schemaless.index.values import FieldType
from schemaless.sharding import shard_of_text
from schemaless.where import parse_where

CONTRACT = """
name: driver_partner_index
shard_field: driver_partner_uuid
fields:                       # keyed, in this order, after the shard field
  - {name: driver_partner_uuid, column: BASE, path: driver_partner_uuid, type: uuid}
  - {name: trip_created_at, column: BASE, path: times.created, type: datetime}
  - {name: is_completed, column: STATUS, path: is_completed, type: bool}
stored:                       # carried along, not keyed
  - {name: fare, column: BASE, path: fare.amount, type: float}
where: [{field: is_completed, op: eq, value: true}]     # optional
"""
DRIVER = "6BA7B810-9DAD-11D1-80B4-00C04FD430C8"


def field(**changes):
    return {"name": "tail", "column": "BASE", "path": "tail", "type": "string", **changes}


def document(*, fields=None, **changes):
    return {"name": "by_tail", "shard_field": "tail", "fields": fields or [field()], **changes}


def test_the_contracts_example_is_read():
    """The definition of the contract parses into its fields, stored fields and conditions."""
    definition = load_definition(CONTRACT)
    assert definition.name == "driver_partner_index"
    assert definition.shard_field.type is FieldType.UUID
    assert [f.name for f in definition.fields] == ["driver_partner_uuid", "trip_created_at", "is_completed", "fare"]
    assert definition.keyed[1].path == ("times", "created")
    assert definition.columns == {"BASE", "STATUS"}
    assert definition.where == parse_where("is_completed == true")
    assert definition.document()["where"] == [{"field": "is_completed", "op": "eq", "value": True}]


def test_a_definition_survives_being_kept():
    """YAML, the kept JSON and the canonical document are one definition."""
    definition = load_definition(CONTRACT)
    assert load_definition(dump_definition(definition)) == definition
    assert parse_definition(definition.document()) == definition
    assert json.loads(dump_definition(definition)) == definition.document()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([], "definition"),
        (document(extra=1), "definition.extra"),
        ({"name": "x", "fields": []}, "definition.shard_field"),
        (document(name="By_tail"), "name"),
        (document(name="a" * 49), "name"),
        (document(shard_field="other"), "shard_field"),
        (document(fields=[field(name="a"), field(name="tail")]), "shard_field"),
        (document(fields=[field(type="float")]), "shard_field"),
        (document(fields=[field(type="text")]), "fields[0].type"),
        (document(fields=[field(name="order")], shard_field="order"), "fields[0].name"),
        (document(fields=[field(path="a..b")]), "fields[0].path"),
        (document(fields=[field(path=7)]), "fields[0].path"),
        (document(fields=[field(column="1BASE")]), "fields[0].column"),
        (document(fields=[field(length=0)]), "fields[0].length"),
        (document(fields=[field(type="int", length=8)]), "fields[0].length"),
        (document(fields=[field(extra=1)]), "fields[0].extra"),
        (document(fields=[{"name": "tail"}]), "fields[0].column"),
        (document(fields=[field(), field()]), "fields"),
        (document(fields=[field(), field(name="b", length=768)]), "fields"),
        (document(stored=[field()]), "fields"),
        (document(stored=[field(name=f"s{n}", length=768) for n in range(6)]), "stored"),
        (document(where=[{"field": "none", "op": "eq", "value": 1}]), "none"),
        (document(where=[{"field": "tail", "op": "like", "value": "N"}]), "where[0].op"),
        (document(where=[{"field": "tail", "op": "eq", "value": 1}]), "where"),
        (document(where={}), "where"),
        (document(where="tail = 'N'"), "where"),
        (document(where="tail.x == 'N'"), "tail.x"),
        (document(where="other is null"), "other"),
        (document(where="tail == 5"), "where"),
        (document(where="tail in ('" + "', '".join("äöü" * 5 for _ in range(40)) + "')"), "where"),
    ],
)
def test_what_is_wrong_is_named(wrong, named):
    """Every mistake raises Invalid with the member that it is in."""
    with pytest.raises(Invalid) as raised:
        parse_definition(wrong)
    assert raised.value.field == named


def lines(*paths, **changes):
    fields = [field(name="tail" if n == 0 else f"f{n}", path=path, length=16) for n, path in enumerate(paths)]
    return document(fields=fields, **changes)


@pytest.mark.parametrize("path", ["tags[]", "lines[].sku", "order.lines[].price.sku"])
def test_a_path_into_an_array_is_kept_as_it_is(path):
    """`[]` stands behind the array's name, wherever that is in the path."""
    definition = parse_definition(lines(path, "other"))
    assert definition.document()["fields"][0]["path"] == path
    assert load_definition(dump_definition(definition)) == definition
    assert definition.array_positions == [0]


@pytest.mark.parametrize(
    ("wrong", "named", "why"),
    [
        (lines("a[].b[]"), "fields[0].path", "elements of one array"),
        (lines("[]"), "fields[0].path", "behind the name"),
        (lines("a[]b"), "fields[0].path", "behind the name"),
        (lines("a[0]"), "fields[0].path", "behind the name"),
        (lines("a[].x", "b[].x"), "fields", "BASE: a[] and BASE: b[]"),
        (lines("a.b[]", "a[]"), "fields", "several arrays"),
        (lines("a[]", stored=[field(name=f"s{n}") for n in range(3)]), "fields", "with [] the limit is 3072"),
    ],
)
def test_arrays_that_an_index_can_t_have_are_refused(wrong, named, why):
    """Two arrays would make every pair of their elements an entry."""
    with pytest.raises(Invalid) as raised:
        parse_definition(wrong)
    assert raised.value.field == named
    assert why in raised.value.why


def test_each_element_has_an_entry():
    """Values outside the array are the same in each. An element without a shard field has none, but its number."""
    definition = parse_definition(lines("lines[].sku", "lines[].price", "buyer"))
    body = {"buyer": "B", "lines": [{"sku": "a", "price": "1"}, {"price": "2"}, 7, {"sku": "b"}]}
    assert entries_for(definition, {"BASE": body}) == [
        IndexEntry(("a", "1", "B")),
        None,
        None,
        IndexEntry(("b", None, "B")),
    ]


@pytest.mark.parametrize("found", [None, [], {}, "ab", [1] * (ELEMENTS_MAX + 1)])
def test_an_array_without_elements_is_a_missing_field(found):
    """Also one that is too long. The row is in the index all the same, if its shard field is no part of the array."""
    definition = parse_definition(lines("buyer", "tags[]"))
    assert entries_for(definition, {"BASE": {"buyer": "B", "tags": found}}) == [IndexEntry(("B", None))]
    assert entries_for(parse_definition(lines("tags[]", "buyer")), {"BASE": {"buyer": "B", "tags": found}}) == [None]


TYPED = [
    field(),
    field(name="at", path="at", type="datetime"),
    field(name="price", path="price", type="decimal"),
    field(name="raw", path="raw", type="bytes"),
    field(name="n", path="n", type="int"),
]


@pytest.mark.parametrize(
    ("where", "kept", "bodies"),
    [
        ([], None, [({}, True)]),
        (
            [{"field": "n", "op": "gte", "value": 3}, {"field": "price", "op": "lt", "value": "1.5"}],
            [{"field": "n", "op": "gte", "value": 3}, {"field": "price", "op": "lt", "value": "1.5"}],
            [({"n": 3, "price": "1.4"}, True), ({"n": 3, "price": 1.5}, False), ({"n": 3}, False)],
        ),
        ("n == 3", [{"field": "n", "op": "eq", "value": 3}], [({"n": 3}, True), ({"n": "3"}, False)]),
        (
            "at >= '2026-01-01T01:00:00+01:00' or raw == 'AA==' or n is null",
            'at >= "2026-01-01T00:00:00.000000Z" or raw == "AA==" or n is null',
            [
                ({"at": "2026-01-01T00:00:00Z", "n": 1}, True),
                ({"at": "2025-12-31T23:59:59Z", "n": 1}, False),
                ({"raw": "AA==", "n": 1}, True),
                ({"n": "no integer"}, True),
            ],
        ),
        ("not (n in (1, 2))", "not n in (1, 2)", [({"n": 3}, True), ({"n": 2}, False), ({}, False)]),
    ],
)
def test_where_is_a_list_or_text_over_fields(where, kept, bodies):
    """Literals have the types of their fields, a null or a value that doesn't fit makes a comparison unknown."""
    definition = parse_definition(document(fields=TYPED, where=where))
    assert definition.document().get("where") == kept
    assert load_definition(dump_definition(definition)) == definition
    for body, is_in in bodies:
        (entry,) = entries_for(definition, {"BASE": {"tail": "N1", **body}})
        assert (entry is not None) is is_in, body


def test_where_is_asked_of_each_element():
    """The elements for which it doesn't hold have no entry."""
    definition = parse_definition(lines("lines[].sku", "lines[].price", where="f1 is not null and tail != 'b'"))
    found = [{"sku": "a", "price": "1"}, {"sku": "a"}, {"sku": "b", "price": "1"}]
    assert entries_for(definition, {"BASE": {"lines": found}}) == [IndexEntry(("a", "1")), None, None]


@pytest.mark.parametrize("text", ["{", "a: [", "\x00", "&a [*a]", "a: 2026-13-45", "a: 0b_", "a: " + "9" * 5000])
def test_text_that_is_no_yaml_is_malformed(text):
    """Neither YAML nor JSON, or nothing that can be a definition."""
    with pytest.raises((Malformed, Invalid)):
        load_definition(text)


@given(st.text(max_size=60))
def test_names_are_names_of_tables(name):
    """Whatever is accepted as a name can stand in a table's name."""
    try:
        assert parse_index_name(name).isascii()
    except Invalid:
        return
    assert len(name) <= 48
    assert name[0].isalpha()


def test_an_entry_is_taken_from_several_columns():
    """Values come by their paths, typed; the entry's shard is the hash of the shard field's text."""
    definition = load_definition(CONTRACT)
    base = {"driver_partner_uuid": DRIVER, "times": {"created": "2026-01-31T01:02:03+01:00"}, "fare": {"amount": 12}}
    (entry,) = entries_for(definition, {"BASE": base, "STATUS": {"is_completed": True}})
    assert entry is not None
    assert entry_fields(definition, entry) == {
        "driver_partner_uuid": DRIVER.lower(),
        "trip_created_at": "2026-01-31T00:02:03.000000Z",
        "is_completed": True,
        "fare": 12.0,
    }
    assert entry_shard(definition, entry, 64) == shard_of_text(DRIVER.lower(), 64)


@pytest.mark.parametrize(
    "newest",
    [
        {},
        {"STATUS": {"is_completed": True}},
        {"BASE": {"driver_partner_uuid": None}, "STATUS": {"is_completed": True}},
        {"BASE": {"driver_partner_uuid": "nobody"}, "STATUS": {"is_completed": True}},
        {"BASE": {"driver_partner_uuid": DRIVER}},
        {"BASE": {"driver_partner_uuid": DRIVER}, "STATUS": {"is_completed": False}},
        {"BASE": {"driver_partner_uuid": DRIVER}, "STATUS": {"is_completed": "true"}},
    ],
)
def test_a_row_without_shard_field_or_outside_where_has_no_entry(newest):
    """No entry: the shard field has no value of its type, or `where` doesn't hold, which a null never does."""
    assert entries_for(load_definition(CONTRACT), newest) == [None]


def test_other_fields_may_be_null():
    """A value that is missing, behind something that is no object, or of another type is null."""
    definition = parse_definition(
        document(fields=[field(), field(name="n", path="a.b", type="int"), field(name="m", path="tail.x", type="int")])
    )
    assert entries_for(definition, {"BASE": {"tail": "N1", "a": {"b": 1.0}}}) == [IndexEntry(("N1", None, None))]
