"""Index tables on real servers: the guard (I11), every type, and queries against a model of them."""

import base64
import random
import uuid

import pytest

from api.index.search import find_entries, merged, parse_query, places_by_cluster
from schemaless.errors import Invalid
from schemaless.index.definition import parse_definition
from schemaless.index.entry import IndexEntry, entries_for, entry_fields, entry_shard
from schemaless.index.transition import IndexWrite
from schemaless.location import Location
from schemaless.storage import index_table

pytestmark = pytest.mark.storage

DEFINITION = parse_definition(
    {
        "name": "by_city",
        "shard_field": "city",
        "fields": [
            {"name": "city", "column": "BASE", "path": "city", "type": "string", "length": 20},
            {"name": "at", "column": "BASE", "path": "at", "type": "datetime"},
            {"name": "number", "column": "BASE", "path": "number", "type": "int"},
        ],
        "stored": [
            {"name": kind, "column": "BASE", "path": kind, "type": kind}
            for kind in ("uuid", "float", "decimal", "bool", "bytes")
        ],
    }
)


@pytest.fixture(scope="module")
def datastore(make_datastore, storage):
    made = make_datastore(shards=2, partitions=1)
    for shard in range(made.shards):
        for _ in range(2):  # making a table twice is harmless
            storage.master(made.home(shard)).run(index_table.create, made, shard, DEFINITION)
    return made


@pytest.fixture
def index(datastore, storage):
    return Index(datastore, storage)


class Index:
    def __init__(self, datastore, storage):
        self.datastore, self.storage = datastore, storage
        self.city = uuid.uuid4().hex[:12]
        self.shard = entry_shard(DEFINITION, IndexEntry((self.city,)), datastore.shards)
        self.node = storage.master(datastore.home(self.shard))

    def entry(self, **fields):
        return entries_for(DEFINITION, {"BASE": {"city": self.city, **fields}})[0]

    def write(self, *writes):
        script = index_table.upserts(self.datastore, DEFINITION, writes)

        def operation():
            yield script

        self.node.run(operation)

    def put(self, row_key, version, entry):
        self.write(IndexWrite(self.shard, row_key, Location(*version), entry))

    def query(self, *parameters):
        return self.ask([("city", self.city), *parameters])

    def ask(self, parameters):
        query = parse_query(DEFINITION, self.datastore.shards, parameters)
        pages = []
        for cluster, places in places_by_cluster(self.datastore, DEFINITION, query).items():
            found = self.storage.master(cluster).run(find_entries, self.datastore, DEFINITION, query, places)
            pages.append(found.page)
        return merged(DEFINITION, query, pages)

    def numbers(self, *parameters):
        return [found.entry.values[2] for found in self.query(*parameters).entries]


def test_an_older_version_changes_nothing(index):
    """Late upserts and tombstones are refused, whatever their order; a greater version or generation wins."""
    row = uuid.uuid4().bytes
    for version, number, left in [
        ((1, 5), 5, [5]),
        ((1, 3), 3, [5]),
        ((1, 4), None, [5]),
        ((1, 5), 9, [5]),
        ((1, 7), 7, [7]),
        ((1, 8), None, []),
        ((1, 7), 7, []),
        ((2, 2), 22, [22]),
        ((1, 99), 99, [22]),
        ((2, 3), None, []),
    ]:
        index.put(row, version, None if number is None else index.entry(number=number))
        assert index.numbers() == left, version


def test_a_tombstone_that_comes_first_holds_its_place(index):
    """The entry that it removes may come later: it stays away."""
    row = uuid.uuid4().bytes
    index.put(row, (1, 9), None)
    index.put(row, (1, 8), index.entry(number=8))
    assert index.numbers() == []


def test_each_element_has_a_guard_of_its_own(index):
    """A late write of one element says nothing about another of the row."""
    row = uuid.uuid4().bytes
    for version, element, number in [
        ((1, 5), 0, 5),
        ((1, 3), 1, 31),
        ((1, 6), 1, None),
        ((1, 4), 0, 4),
        ((1, 4), 1, 4),
    ]:
        entry = None if number is None else index.entry(number=number)
        index.write(IndexWrite(index.shard, row, Location(*version), entry, element))
    assert index.numbers() == [5]


def test_a_page_of_tombstones_looks_at_few_rows(index):
    """However few of them are tombstones: each is met once, and the end of the table is known."""
    row_keys = sorted(uuid.uuid4().bytes for _ in range(30))
    for n, row_key in enumerate(row_keys):
        index.put(row_key, (1, n + 1), None if n % 10 == 9 else index.entry(number=n))
    met, after, pages = [], index_table.BEFORE_ALL, 0
    while after is not None:
        page = index.node.run(index_table.tombstones, index.datastore, DEFINITION, index.shard, after, 7)
        met += [row_key for (row_key, _), _ in page.rows]
        assert len(page.rows) <= 7
        after, pages = page.last, pages + 1
    assert [row_key for row_key in met if row_key in row_keys] == row_keys[9::10]
    assert len(met) == len(set(met))
    assert pages >= len(row_keys) // 7
    assert (
        index.node.run(index_table.tombstones, index.datastore, DEFINITION, index.shard, (b"\xff" * 16, 0), 7).last
        is None
    )


def widest(keyed_types, stored_count, length):
    """A definition at the limits of what a definition may be."""
    keyed = [{"name": f"k{n}", "column": "BASE", "path": f"k{n}", **kind} for n, kind in enumerate(keyed_types)]
    stored = [
        {"name": f"s{n}", "column": "BASE", "path": f"s{n}", "type": "string", "length": length}
        for n in range(stored_count)
    ]
    return {"name": "widest", "shard_field": "k0", "fields": keyed, "stored": stored}


@pytest.mark.parametrize(
    ("keyed_types", "stored_count", "length"),
    [
        ([{"type": "string", "length": 763}], 17, 190),
        ([{"type": "string", "length": 50}, *[{"type": "decimal"}] * 13], 48, 80),
        ([{"type": "string", "length": 53}, *[{"type": "bytes", "length": 215}] * 13], 48, 67),
    ],
)
def test_what_a_definition_may_be_the_servers_can_hold(make_datastore, storage, keyed_types, stored_count, length):
    """At the limits of keys, columns and rows the tables are made, and hold the longest values. Beyond is a 422."""
    definition = parse_definition(widest(keyed_types, stored_count, length))
    with pytest.raises(Invalid, match="lower a length"):
        parse_definition(widest([*keyed_types[:-1], {"type": "string", "length": 768}], stored_count, length))
    with pytest.raises(Invalid, match=r"lower a length|at most"):
        parse_definition(widest(keyed_types, stored_count + 1, length))
    made = make_datastore(shards=1, partitions=1)
    node = storage.master(made.home(0))
    node.run(index_table.create, made, 0, definition)
    longest = {"string": lambda n: "\U0001f600" * n, "decimal": lambda n: "-" + "9" * 29 + "." + "9" * 9}
    body = {
        field.name: longest.get(str(field.type), lambda n: base64.b64encode(b"x" * n).decode())(field.length)
        for field in definition.fields
    }
    (entry,) = entries_for(definition, {"BASE": body})
    script = index_table.upserts(made, definition, [IndexWrite(0, bytes(16), Location(1, 1), entry)])
    node.run(index_table.write, script)
    (found,) = node.run(index_table.live_entries, made, 0, definition, index_table.BEFORE_ALL, 10)
    assert found.entry == entry


def test_values_of_every_type_come_back_as_they_were(index):
    """What a query shows is what the cell says, nulls too."""
    bodies = [
        {
            "at": "9999-12-31T23:59:59.000001Z",
            "number": -(2**63),
            "uuid": "00000000-0000-0000-0000-0000000000ff",
            "float": 0.1,
            "decimal": "-12345678901234567890123456789.123456789",
            "bool": False,
            "bytes": "AAECAw==",
        },
        {"float": 1.7976931348623157e308, "decimal": "0", "bool": True, "bytes": "", "number": 2**63 - 1},
        {},
    ]
    entries = {uuid.uuid4().bytes: index.entry(**body) for body in bodies}
    for row, entry in entries.items():
        index.put(row, (1, 1), entry)
    assert {found.row_key: found.entry for found in index.query().entries} == entries
    shown = entry_fields(DEFINITION, next(iter(entries.values())))
    assert shown == {"city": index.city, **bodies[0]}


def test_strings_are_compared_as_they_are(index):
    """Neither case nor trailing blanks nor accents make two values one."""
    for city in (index.city.upper() + "x", index.city + " ", "é" + index.city[1:]):
        (entry,) = entries_for(DEFINITION, {"BASE": {"city": city, "number": 1}})
        index.put(uuid.uuid4().bytes, (1, 1), entry)
    assert index.numbers() == []


@pytest.fixture
def many(index):
    """Entries with many equal values and nulls in the field that pages are ordered by."""
    rng = random.Random(5)
    values = [None if rng.random() < 0.2 else rng.randrange(12) for _ in range(120)]
    rows = {uuid.uuid4().bytes: value for value in values}
    index.write(
        *[IndexWrite(index.shard, row, Location(1, 1), index.entry(number=n)) for row, n in sorted(rows.items())]
    )
    return rows


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("limit", [1, 7, 120, 200])
def test_pages_show_every_entry_once_in_order(index, many, limit, descending):
    """Through equal values and nulls, up and down, however short the pages."""
    parameters = [("order", "number"), ("limit", str(limit)), ("desc", str(descending).lower())]
    seen, cursor = [], []
    while True:
        page = index.query(*parameters, *cursor)
        seen += [(found.entry.values[2], found.row_key) for found in page.entries]
        if page.cursor is None:
            break
        cursor = [("cursor", page.cursor)]
    wanted = sorted(
        ((number, row) for row, number in many.items()),
        key=lambda pair: (pair[0] is not None, pair[0] or 0, pair[1]),
        reverse=descending,
    )
    assert seen == wanted


@pytest.mark.parametrize(
    ("parameter", "holds"),
    [
        (("number", "3"), lambda n: n == 3),
        (("number.ne", "3"), lambda n: n != 3),
        (("number.lt", "3"), lambda n: n < 3),
        (("number.lte", "3"), lambda n: n <= 3),
        (("number.gt", "3"), lambda n: n > 3),
        (("number.gte", "3"), lambda n: n >= 3),
    ],
)
def test_comparisons_are_those_of_the_model(index, many, parameter, holds):
    """Each comparison gives the entries for which it holds; none holds for a null."""
    wanted = sorted(n for n in many.values() if n is not None and holds(n))
    assert sorted(index.numbers(parameter, ("limit", "1000"))) == wanted


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ([], "city"),
        ([("city.gte", "x")], "city"),
        ([("city", "x"), ("city", "y")], "order"),
        ([("city", "x"), ("nothing", "1")], "nothing"),
        ([("city", "x"), ("number", "one")], "number"),
        ([("city", "x"), ("number.like", "1")], "number.like"),
        ([("city", "x"), ("limit", "0")], "limit"),
        ([("city", "x"), ("limit", "1001")], "limit"),
        ([("city", "x"), ("limit", "1"), ("limit", "1")], "limit"),
        ([("city", "x"), ("order", "none")], "order"),
        ([("city", "x"), ("desc", "maybe")], "desc"),
        ([("city", "x"), ("cursor", "!")], "cursor"),
        ([("city", "x"), ("fields", "none")], "fields"),
        ([("city", "x"), ("include", "1")], "include"),
        ([("city", "x"), ("after", "1:1")], "after"),
        ([("city", "x"), ("after", "2:1:1")], "after"),
        ([("city", "x"), ("wait", "31")], "wait"),
    ],
)
def test_a_query_that_is_wrong_names_the_parameter(parameters, named):
    """Nothing is guessed."""
    with pytest.raises(Invalid) as raised:
        parse_query(DEFINITION, 2, parameters)
    assert raised.value.field == named


def test_a_cursor_of_another_order_is_refused(index, many):
    """Going on in another order would skip and repeat entries."""
    cursor = index.query(("order", "number"), ("limit", "5")).cursor
    for changed in ([("order", "at")], [("order", "number"), ("desc", "true")]):
        with pytest.raises(Invalid):
            index.query(("cursor", cursor), *changed)
