"""Index queries on real servers: every operator, order, cursor and bound against what Python makes of the entries."""

from decimal import Decimal

import pytest

from api.index import search
from api.index.search import QueryTooSlow, find_entries, merged, parse_query, places_by_cluster
from schemaless.errors import Invalid
from schemaless.index.definition import parse_definition
from schemaless.index.entry import IndexEntry, entry_shard
from schemaless.index.transition import IndexWrite
from schemaless.index.values import FieldType, to_json
from schemaless.location import Location
from schemaless.storage import index_select, index_table
from tests.seed import seeded

pytestmark = pytest.mark.storage

DEFINITION = parse_definition(
    {
        "name": "queried",
        "shard_field": "owner",
        "fields": [
            {"name": "owner", "column": "BASE", "path": "owner", "type": "int"},
            {"name": "at", "column": "BASE", "path": "at", "type": "datetime"},
            {"name": "name", "column": "BASE", "path": "name", "type": "string", "length": 400},
            {"name": "raw", "column": "BASE", "path": "raw", "type": "bytes", "length": 8},
            {"name": "price", "column": "BASE", "path": "price", "type": "decimal"},
        ],
        "stored": [
            {"name": "flag", "column": "STATUS", "path": "flag", "type": "bool"},
            {"name": "ratio", "column": "STATUS", "path": "ratio", "type": "float"},
            {"name": "link", "column": "STATUS", "path": "link", "type": "uuid"},
        ],
    }
)
OWNERS = range(6)
LONG = "あ" * 350  # more than the 1,024 bytes that a server compares by default
NAMES = [
    "",
    "a",
    "a,b",
    "ab",
    "abc",
    "b",
    "B",
    "é",
    "ey",
    "\U0001f600",
    "\uffff",
    "a ",
    "%",
    "a_",
    LONG + "a",
    LONG + "b",
]
VALUES = {
    "at": [None, *(n * 86_400_000_000 + n for n in (-40_000, 0, 1, 2, 3, 4, 20_000))],
    "name": [None, *NAMES],
    "raw": [None, b"", b"\x00", b"\xff", b"\xff\xff", b"\xff\x01", b"\xfe", b"\xfe\xff", b"a"],
    "price": [None, *map(Decimal, ("0", "-1.5", "1.500000001", "2", "12345678901234567890123456789.123456789"))],
    "flag": [None, True, False],
    "ratio": [None, 0.0, -1.5, 0.1, 1e300],
    "link": [None, *(bytes([n]) * 16 for n in (0, 1, 255))],
}


@pytest.fixture(scope="module")
def rng():
    return seeded("index-queries")


@pytest.fixture(scope="module")
def datastore(make_datastore, storage):
    made = make_datastore(shards=4, partitions=1)
    for shard in range(made.shards):
        storage.master(made.home(shard)).run(index_table.create, made, shard, DEFINITION)
    return made


@pytest.fixture(scope="module")
def rows(datastore, storage, rng):
    """Entries of several owners, with many equal values and nulls: ((row key, element), values)."""
    found = []
    for number in range(240):
        values = (rng.choice(OWNERS), *(rng.choice(choices) for choices in VALUES.values()))
        found.append((((number // 3).to_bytes(16, "big"), number % 3), values))
    writes = [
        IndexWrite(
            entry_shard(DEFINITION, IndexEntry(values), datastore.shards),
            row_key,
            Location(1, 1),
            IndexEntry(values),
            element,
        )
        for (row_key, element), values in found
    ]
    for cluster, here in datastore.by_home(writes, lambda write: write.shard).items():
        storage.master(cluster).run(index_table.write, index_table.upserts(datastore, DEFINITION, here))
    return found


@pytest.fixture
def ask(datastore, storage, rows):
    def run(parameters, *bounds):
        query = parse_query(DEFINITION, datastore.shards, parameters)
        answers = {
            cluster: storage.master(cluster).run(find_entries, datastore, DEFINITION, query, places, *bounds)
            for cluster, places in places_by_cluster(datastore, DEFINITION, query).items()
        }
        return merged(DEFINITION, query, [answer.page for answer in answers.values()]), answers

    return run


def text(name, value):
    return (
        str(to_json(DEFINITION.field(name).type, value)).lower()
        if isinstance(value, bool)
        else str(to_json(DEFINITION.field(name).type, value))
    )


def comparisons(rng):
    """Random comparisons as (parameters, a function of an entry's values by name)."""
    chosen = []
    for name in rng.sample(list(VALUES), rng.choice((0, 1, 1, 2))):
        one, two, three = (rng.choice(VALUES[name][1:]) for _ in range(3))
        kind = DEFINITION.field(name).type
        simple = {
            "ne": lambda v, one=one: v != one,
            "lt": lambda v, one=one: v < one,
            "lte": lambda v, one=one: v <= one,
            "gt": lambda v, one=one: v > one,
            "gte": lambda v, one=one: v >= one,
        }
        op = rng.choice(["", *simple, "in", "between", "isnull", "notnull", "prefix"])
        if op in simple:
            parameters, holds = [(f"{name}.{op}", text(name, one))], simple[op]
        elif op == "in":
            parameters = [(name, text(name, each)) for each in (one, two, three)]
            holds = lambda v, values=(one, two, three): v in values  # noqa: E731
        elif op == "between" and "," not in text(name, one) + text(name, two):
            parameters = [(f"{name}.between", f"{text(name, one)},{text(name, two)}")]
            holds = lambda v, one=one, two=two: one <= v <= two  # noqa: E731
        elif op in ("isnull", "notnull"):
            parameters = [(f"{name}.isnull", str(op == "isnull").lower())]
            holds = None if op == "isnull" else lambda v: True
        elif op == "prefix" and kind in (FieldType.STRING, FieldType.BYTES):
            parameters, holds = [(f"{name}.prefix", text(name, one))], lambda v, one=one: v[: len(one)] == one
        else:
            parameters, holds = [(name, text(name, one))], lambda v, one=one: v == one
        chosen.append((name, parameters, holds))
    return chosen


def expected(rows, owners, chosen, order, *, descending):
    """What the query must answer, computed from all entries."""
    names = [field.name for field in DEFINITION.fields]
    at = names.index(order)

    def matches(values):
        if values[0] not in owners:
            return False
        by_name = dict(zip(names, values, strict=True))
        return all(
            by_name[name] is None if holds is None else by_name[name] is not None and holds(by_name[name])
            for name, _, holds in chosen
        )

    def key(found):
        row, values = found
        return [(value is not None, value if value is not None else 0) for value in values[at:5]], row

    return sorted((found for found in rows if matches(found[1])), key=key, reverse=descending)


def test_every_query_answers_what_python_makes_of_the_entries(ask, rows, rng):
    """Operators, several owners, orders in both directions, and pages of any size: each entry once, in order."""
    for _ in range(150):
        owners = rng.sample(list(OWNERS), rng.choice((1, 1, 2, 5)))
        chosen = comparisons(rng)
        order = rng.choice([field.name for field in DEFINITION.keyed])
        descending = rng.random() < 0.5
        parameters = [("owner", str(owner)) for owner in owners]
        parameters += [pair for _, pairs, _ in chosen for pair in pairs]
        parameters += [("order", order), ("desc", str(descending).lower())]
        wanted = expected(rows, owners, chosen, order, descending=descending)
        limit = rng.choice((1 if len(wanted) < 12 else 7, 13, 1000))
        seen, cursor = [], []
        while True:
            page, _ = ask([*parameters, ("limit", str(limit)), *cursor])
            assert len(page.entries) <= limit
            seen += [((found.row_key, found.element), found.entry.values) for found in page.entries]
            if page.cursor is None:
                break
            cursor = [("cursor", page.cursor)]
        assert seen == wanted, parameters


def test_a_page_ends_by_its_bytes_and_goes_on_behind(ask, rows):
    """Whatever the limit, a node returns few bytes more than the bound, and at least one entry."""
    for owners in (["1"], ["1", "2", "3"]):
        parameters = [*(("owner", owner) for owner in owners), ("order", "name")]
        seen, cursor, pages = [], [], 0
        while True:
            page, _ = ask([*parameters, ("limit", "1000"), *cursor], False, 500)
            pages += 1
            assert len(page.entries) <= 8 * len(owners)
            seen += [((found.row_key, found.element), found.entry.values) for found in page.entries]
            if page.cursor is None:
                break
            cursor = [("cursor", page.cursor)]
        assert seen == expected(rows, list(map(int, owners)), [], "name", descending=False)
        assert pages > 4


def test_an_explained_query_says_what_it_read(ask, rows):
    """The SQL, the key that it uses, how many rows were read, and how long that took."""
    _, answers = ask([("owner", "1"), ("limit", "3"), ("explain", "true")])
    (answer,) = answers.values()
    execution = answer.execution
    assert execution.sql.startswith("SELECT")
    assert "SLEEP" not in execution.sql
    assert execution.plan[0]["table"]
    assert 1 <= execution.rows_read < 3 * len(rows)
    assert 0 < execution.seconds < 60


def test_a_query_in_the_order_of_the_key_reads_about_its_limit(ask, rows):
    """Keyed fields by equality, order by the next one: the server ends at the limit and sorts nothing."""
    at = next(values[1] for _, values in rows if values[0] == 1 and values[1])
    for parameters in ([("order", "at")], [("at", text("at", at)), ("order", "name"), ("desc", "true")]):
        _, answers = ask([("owner", "1"), *parameters, ("limit", "2"), ("explain", "true")])
        (answer,) = answers.values()
        assert "filesort" not in str(answer.execution.plan[0]["extra"]).lower()


def test_a_server_gives_a_slow_query_up(storage, datastore):
    """Both servers know the limit in the statement. The caller is told, and no node counts as away."""
    node = storage.master(datastore.clusters[0])
    tables = "information_schema.columns"
    slow = (
        f"{index_select._LIMITED} COUNT(*) FROM {tables} a, {tables} b, {tables} c WHERE a.table_name <> b.column_name"
    )
    query = parse_query(DEFINITION, datastore.shards, [("owner", "1")])

    def operation():
        work = find_entries(datastore, DEFINITION, query, query.places)
        next(work)
        try:
            yield slow
        except Exception as error:
            work.throw(error)

    with pytest.raises(QueryTooSlow) as gave_up:
        node.run(operation)
    assert gave_up.value.retryable


def test_damaged_entries_are_left_out_and_named(make_datastore, storage, monkeypatch):
    """A text that is no text, a bool that is neither, a time of the year 0. Pages that have nothing else don't end."""
    made = make_datastore(shards=1, partitions=1)
    node = storage.master(made.home(0))
    node.run(index_table.create, made, 0, DEFINITION)
    entries = {bytes([n]) * 16: IndexEntry((1, n, f"n{n}", None, None, True, None, None)) for n in range(8)}
    writes = [IndexWrite(0, row_key, Location(1, 1), entry) for row_key, entry in entries.items()]
    node.run(index_table.write, index_table.upserts(made, DEFINITION, writes))
    damages = {0: "name = x'ff'", 1: "name = x'6ee9'", 2: "flag = 7", 5: "at = '0000-05-01'"}
    for n, damage in damages.items():
        table = index_table.table(made, 0, DEFINITION)
        node.run(index_table.write, f"UPDATE {table} SET {damage} WHERE row_key = x'{(bytes([n]) * 16).hex()}'")
    shown, named, cursor = [], set(), None
    while cursor is not None or not shown:
        query = parse_query(
            DEFINITION, 1, [("owner", "1"), ("limit", "1"), *([("cursor", cursor)] if cursor is not None else [])]
        )
        answer = node.run(find_entries, made, DEFINITION, query, query.places)
        page = merged(DEFINITION, query, [answer.page])
        assert page.entries or page.cursor is None
        shown += [(found.row_key, found.entry) for found in page.entries]
        named |= set(answer.page.damaged)
        cursor = page.cursor
    assert shown == [(bytes([n]) * 16, entries[bytes([n]) * 16]) for n in (3, 4, 6, 7)]
    assert named == {bytes([n]) * 16 for n in damages}
    monkeypatch.setattr(search, "DAMAGED_MAX", 3)
    answer = node.run(find_entries, made, DEFINITION, parse_query(DEFINITION, 1, [("owner", "1")]), [(0, 1)])
    assert set(answer.page.damaged) == named


def field(name, kind="string", **more):
    return {"name": name, "column": "BASE", "path": name, "type": kind, **more}


WIDE = [field("owner", "int"), *(field(f"k{n}", length=60) for n in range(12)), field("end", "bytes", length=138)]
STORED = [*(field(f"s{n}", length=70) for n in range(47)), field("last", "bytes", length=56)]


@pytest.mark.parametrize("keyed", [WIDE, [field("owner", length=763)]], ids=["many fields", "one field"])
def test_the_largest_definition_that_is_accepted_fits_the_servers(make_datastore, storage, keyed):
    """Its table is made, takes entries that fill every field, and answers with them. One byte more is refused."""

    def parsed(keyed, stored):
        return parse_definition({"name": "largest", "shard_field": "owner", "fields": keyed, "stored": stored})

    def longer(fields):
        return [*fields[:-1], fields[-1] | {"length": fields[-1]["length"] + 1}]

    for too_large in ((longer(keyed), STORED), (keyed, longer(STORED))):
        with pytest.raises(Invalid):
            parsed(*too_large)
    definition = parsed(keyed, STORED)
    made = make_datastore(shards=1, partitions=1)
    node = storage.master(made.home(0))
    node.run(index_table.create, made, 0, definition)
    fullest = {
        FieldType.INT: lambda _: 2**63 - 1,
        FieldType.STRING: "\U0001f600".__mul__,
        FieldType.BYTES: b"\xff".__mul__,
    }
    full = IndexEntry(tuple(fullest[each.type](each.length) for each in definition.fields))
    writes = [IndexWrite(0, bytes([n]) * 16, Location(1, 1), full) for n in range(3)]
    for _ in range(2):
        node.run(index_table.write, index_table.upserts(made, definition, writes))
        writes = [IndexWrite(0, bytes([n]) * 16, Location(1, 2), full) for n in range(3)]
    query = parse_query(definition, 1, [("owner", str(full.values[0]))])
    page = node.run(find_entries, made, definition, query, query.places).page
    assert [(found.row_key[0], found.entry) for found in page.entries] == [(n, full) for n in range(3)]
