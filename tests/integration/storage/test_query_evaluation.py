"""Queries evaluated in memory find what the servers find: one table of many rows, and many random queries."""

import random
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.index.entry_reader import page_of
from schemaless.index.definition import parse_definition
from schemaless.index.entry import IndexEntry, entry_shard
from schemaless.index.transition import IndexWrite
from schemaless.index.values import FieldType
from schemaless.location import Location
from schemaless.storage import index_select, index_table
from schemaless.storage.index_select import PREFIX_TYPES, EntryCursor, Operator, Selection, Term
from schemaless.storage.index_table import FoundEntry

pytestmark = pytest.mark.storage

DEFINITION = parse_definition(
    {
        "name": "evaluated",
        "shard_field": "owner",
        "fields": [
            {"name": "owner", "column": "BASE", "path": "owner", "type": "int"},
            {"name": "name", "column": "BASE", "path": "name", "type": "string", "length": 40},
            {"name": "price", "column": "BASE", "path": "price", "type": "decimal"},
            {"name": "raw", "column": "BASE", "path": "raw", "type": "bytes", "length": 8},
            {"name": "at", "column": "BASE", "path": "at", "type": "datetime"},
            {"name": "ratio", "column": "BASE", "path": "ratio", "type": "float"},
            {"name": "flag", "column": "BASE", "path": "flag", "type": "bool"},
        ],
        "stored": [
            {"name": "link", "column": "STATUS", "path": "link", "type": "uuid"},
            {"name": "count", "column": "STATUS", "path": "count", "type": "int"},
        ],
    }
)
OWNERS = (0, 1, -(2**63), 2**63 - 1)
VALUES = {
    "name": ["", "a", "a ", "A", "ab", "ab\x00", "abc", "b", "é", "e\u0301", "ey", "z", "\uffff", "\U0001f600", "%"],
    "price": list(map(Decimal, ("0", "-1.5", "1.5", "1.500000001", "1E+3", "12345678901234567890123456789.123456789"))),
    "raw": [b"", b"\x00", b"\x00\x00", b"\xff", b"\xff\xff", b"\xff\x01", b"\xfe\xff", b"a", b"A"],
    "at": [-(10**15), -1, 0, 1, 999_999, 10**15 + 123_456],
    "ratio": [
        DEFINITION.field("ratio").convert(value)
        for value in (0.0, -0.0, 0.1, 0.1 + 0.2, 0.3, -1.5, 1e300, 5e-324, 1e22, float(2**53))
    ],
    "flag": [True, False],
    "link": [bytes([n]) * 16 for n in (0, 1, 128, 255)],
    "count": [0, -1, 1, 2**63 - 1, -(2**63)],
}
ROWS = 60
ELEMENTS = 4
SEARCHED = [field for field in DEFINITION.fields if field.name in VALUES]
NAMES = [field.name for field in DEFINITION.fields]


@pytest.fixture(scope="module")
def datastore(make_datastore, storage):
    made = make_datastore(shards=1, partitions=1)
    storage.master(made.home(0)).run(index_table.create, made, 0, DEFINITION)
    return made


@pytest.fixture(scope="module")
def entries(datastore, storage):
    """Four elements a row, with many equal values and nulls."""
    rng = random.Random(11)
    found = [
        FoundEntry(
            row.to_bytes(16, "big"),
            IndexEntry((rng.choice(OWNERS), *(rng.choice([None, *choices]) for choices in VALUES.values()))),
            element,
        )
        for row in range(ROWS)
        for element in range(ELEMENTS)
    ]
    writes = [
        IndexWrite(entry_shard(DEFINITION, one.entry, 1), one.row_key, Location(1, 1), one.entry, one.element)
        for one in found
    ]
    storage.master(datastore.home(0)).run(index_table.write, index_table.upserts(datastore, DEFINITION, writes))
    return found


@st.composite
def terms(draw):
    field = draw(st.sampled_from(SEARCHED))
    values = st.sampled_from(VALUES[field.name])
    op = draw(st.sampled_from([op for op in Operator if op is not Operator.PREFIX or field.type in PREFIX_TYPES]))
    count = {Operator.IN: draw(st.integers(1, 4)), Operator.BETWEEN: 2}.get(op, 1)
    if op is Operator.ISNULL:
        return Term(field, op, (draw(st.booleans()),))
    return Term(field, op, tuple(draw(values) for _ in range(count)))


@st.composite
def selections(draw):
    """Ordered by any keyed field, both ways, from the beginning or behind any entry, one that isn't there too."""
    order = DEFINITION.keyed[draw(st.integers(0, len(DEFINITION.keyed) - 1)) :]
    after = draw(
        st.none()
        | st.builds(
            lambda values, row, element: EntryCursor(values, row.to_bytes(16, "big"), element),
            st.tuples(
                *(st.sampled_from(OWNERS if field.name == "owner" else [None, *VALUES[field.name]]) for field in order)
            ),
            st.integers(0, ROWS),
            st.integers(0, ELEMENTS),
        )
    )
    found = draw(st.lists(terms(), max_size=2))
    return Selection(found, order, draw(st.booleans()), draw(st.sampled_from([1, 2, 7, 30, 1000])), after)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    selection=selections(),
    owners=st.lists(st.sampled_from(OWNERS), min_size=1, max_size=3, unique=True),
    excluded=st.lists(st.integers(0, ROWS + 3).map(lambda n: n.to_bytes(16, "big")), max_size=20, unique=True),
)
def test_a_query_in_memory_finds_what_servers_find(datastore, storage, entries, selection, owners, excluded):
    """Comparisons, nulls, strings, decimals, bytes, floats, orders, cursors and limits, without the excluded rows."""
    node = storage.master(datastore.home(0))
    places = [(0, owner) for owner in owners]
    select = index_select.select(datastore, DEFINITION, places, selection, 1 << 30, excluded)

    def run():
        (result,) = yield select
        return index_select.node_page(DEFINITION, selection, result.rows)

    wanted = page_of(
        DEFINITION, owners, selection, [one for one in entries if one.row_key not in excluded], bytes_max=1 << 30
    )
    found = node.run(run)
    assert found.entries == wanted.entries
    assert found.more >= wanted.more


def test_a_table_gives_back_what_it_was_given(datastore, storage, entries):
    """Otherwise an entry would look different as soon as the index has it."""
    shown = storage.master(datastore.home(0)).run(
        index_table.live_entries, datastore, 0, DEFINITION, index_table.BEFORE_ALL, 1000
    )
    assert [repr(_normal(one)) for one in shown] == [repr(_normal(one)) for one in entries]


def _normal(one):
    """A decimal may have another exponent: its text in an answer is the same."""
    kinds = [field.type for field in DEFINITION.fields]
    values = [
        value.normalize() if kind is FieldType.DECIMAL and value is not None else value
        for kind, value in zip(kinds, one.entry.values, strict=True)
    ]
    return one.row_key, one.element, values
