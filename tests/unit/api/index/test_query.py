"""Parameters of an index query: what isn't one is a 422 that names it, and never an error of ours."""

import base64
import json
import uuid

import pytest

from api.index.search import parse_query
from schemaless.errors import Invalid
from schemaless.index.definition import parse_definition

DRIVER = "11111111-2222-4333-8444-555555555555"
DEFINITION = parse_definition(
    {
        "name": "trips",
        "shard_field": "driver",
        "fields": [
            {"name": "driver", "column": "BASE", "path": "driver", "type": "uuid"},
            {"name": "name", "column": "BASE", "path": "name", "type": "string"},
            {"name": "fare", "column": "BASE", "path": "fare", "type": "decimal"},
        ],
        "stored": [{"name": "note", "column": "BASE", "path": "note", "type": "float"}],
    }
)


def parsed(*parameters):
    return parse_query(DEFINITION, 4, [("driver", DRIVER), *parameters])


def cursor(*named, version=1):
    return base64.urlsafe_b64encode(json.dumps([version, *named]).encode()).decode().rstrip("=")


THIS = parsed().digest
OTHER_DRIVER = DRIVER.replace("1", "3")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("limit", "0000010000000"),
        ("limit", "000000001" + "1" * 5000),
        ("limit", "1001"),
        ("cursor", cursor(THIS, ["\ud800", None], "00" * 16, 0)),
        ("cursor", cursor(THIS, ["a", None], "00", 0)),
        ("cursor", cursor(THIS, ["a"], "00" * 16, 0)),
        ("cursor", cursor(THIS, [1, None], "00" * 16, 0)),
        ("cursor", cursor(THIS, "ab", "00" * 16, 0)),
        ("cursor", cursor(5, ["a", None], "00" * 16, 0)),
        ("cursor", cursor(THIS)),
        ("cursor", cursor(THIS, ["a", None], "00" * 16, 0, version="1")),
        ("cursor", cursor(THIS, ["a", None], "00" * 16)),
        ("cursor", cursor(THIS, ["a", None], "00" * 16, -1)),
        ("cursor", cursor(THIS, ["a", None], "00" * 16, "0")),
        ("cursor", cursor(THIS, ["a", None], "00" * 16, 10**30)),
        ("cursor", "\u00e9"),
        ("cursor", "A" * 100_000),
        ("wait", "1_0"),
        ("order", "note"),
        ("name.", "a"),
        ("fare", "1_0"),
        ("note.lt", "1_0"),
    ],
)
def test_a_wrong_parameter_is_named(name, text):
    """Found by fuzzing: some of these were a 500, others were taken."""
    with pytest.raises(Invalid) as refused:
        parsed((name, text))
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("parameters", "field", "why"),
    [
        ([("driver.gte", DRIVER)], "driver", "driver=VALUE"),
        ([("driver", DRIVER), ("driver.in", DRIVER)], "driver", "not both"),
        ([("driver", DRIVER), ("driver", OTHER_DRIVER)], "order", "name a keyed field"),
        ([("driver", DRIVER), ("colour", "red")], "colour", "it has driver, name, fare, note"),
        ([("driver", DRIVER), ("name.like", "a")], "name.like", "name.prefix"),
        (
            [("driver", DRIVER), ("name.eq", "a"), ("name.eq", "b"), ("name.ne", "a"), ("name.ne", "b")],
            "name.ne",
            "twice",
        ),
        ([("driver", DRIVER), ("fare.prefix", "1")], "fare.prefix", "fare.between"),
        ([("driver", DRIVER), ("fare", "much")], "fare", "29 digits"),
        ([("driver", DRIVER), ("fare.like", "1")], "fare.like", "fare.in, fare.between, fare.isnull"),
        ([("driver", DRIVER), ("fields", "fare,colour")], "fields", "'colour' is no field of the index"),
        ([("driver", DRIVER), ("order", "colour")], "order", "'colour' is no field of the index"),
        ([("driver", "nobody")], "driver", "hyphenated"),
        ([("driver", DRIVER), ("name", "n" * 256)], "name", "has 256 code points, the field keeps 255"),
        ([("driver", DRIVER), ("name.between", "a")], "name.between", "LOW,HIGH"),
        ([("driver", DRIVER), ("name.between", "a,b,c")], "name.between", "name.gte"),
        ([("driver", DRIVER), ("name.isnull", "perhaps")], "name.isnull", "true or false"),
        ([("driver", DRIVER), ("fare.in", ",".join(map(str, range(101))))], "fare.in", "100 are allowed"),
        ([("driver", DRIVER), *((f"name.{op}", "a") for op in ("ne", "lt")), *[("limit", "5")] * 2], "limit", "twice"),
    ],
)
def test_an_error_says_what_to_do(parameters, field, why):
    """It names the parameter, what is wrong with it, and the way out."""
    with pytest.raises(Invalid) as refused:
        parse_query(DEFINITION, 4, parameters)
    assert refused.value.field == field
    assert why in refused.value.why


def test_an_order_is_a_keyed_field():
    """Any other would sort all entries of the shard field's value. Ties are ordered by the keyed fields behind it."""
    assert [field.name for field in parsed().selection.order] == ["name", "fare"]
    assert [field.name for field in parsed(("order", "fare")).selection.order] == ["fare"]


def test_values_with_commas_are_given_by_repeating_the_parameter():
    """`.in` is the short form for others."""
    (repeated,) = parsed(("name", "a,b"), ("name", "c")).selection.terms
    assert repeated.values == ("a,b", "c")
    (short,) = parsed(("name.in", "a,b")).selection.terms
    assert short.values == ("a", "b")


def test_several_values_of_the_shard_field_are_bounded_by_what_servers_read():
    """A hundred values with a thousand entries each would be a hundred thousand for one page."""
    many = [("driver", str(uuid.UUID(int=n))) for n in range(100)]
    query = parse_query(DEFINITION, 4, [*many, ("order", "name")])
    assert len(query.places) == 100
    assert {shard for shard, _ in query.places} == {0, 1, 2, 3}
    with pytest.raises(Invalid, match="at most 100 with 100 values"):
        parse_query(DEFINITION, 4, [*many, ("order", "name"), ("limit", "101")])
    with pytest.raises(Invalid, match="100 are allowed"):
        parse_query(DEFINITION, 4, [*many, ("driver", DRIVER), ("order", "name")])


@pytest.mark.parametrize(
    "changed",
    [
        [("driver", OTHER_DRIVER)],
        [("driver", DRIVER), ("name", "a")],
        [("driver", DRIVER), ("order", "fare")],
        [("driver", DRIVER), ("desc", "true")],
    ],
)
def test_a_cursor_of_another_query_is_refused(changed):
    """Going on with it would skip entries and show others twice. The size of a page is no part of a query."""
    page = cursor(THIS, ["a", None], "00" * 16, 0)
    assert parsed(("cursor", page), ("limit", "7"), ("verify", "true")).selection.after.values == ("a", None)
    with pytest.raises(Invalid, match="begin again"):
        parse_query(DEFINITION, 4, [*changed, ("cursor", page)])
