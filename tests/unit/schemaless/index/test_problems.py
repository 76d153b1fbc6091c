"""Problems: what doesn't fit is named with its reason, once for each field, and only where a cell has something."""

import json

import pytest

from schemaless.index.definition import ELEMENTS_MAX, parse_definition
from schemaless.index.entry import SHOWN_CHARACTERS_MAX, Misfit, misfits_of, with_column

DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [
            {"name": "owner", "column": "BASE", "path": "owner.name", "type": "string", "length": 4},
            {"name": "born", "column": "BASE", "path": "born", "type": "datetime"},
        ],
        "stored": [{"name": "size", "column": "STATUS", "path": "size", "type": "int"}],
    }
)
LINES = parse_definition(
    {
        "name": "by_sku",
        "shard_field": "sku",
        "fields": [
            {"name": "sku", "column": "BASE", "path": "lines[].sku", "type": "int"},
            {"name": "count", "column": "BASE", "path": "lines[].count", "type": "int"},
        ],
    }
)


def found_in(definition, column, body):
    values = with_column(definition, [None] * len(definition.fields), column, body)
    return misfits_of(definition, column, values, body)


@pytest.mark.parametrize(
    ("column", "body"),
    [
        ("BASE", {"owner": {"name": "ann"}, "born": "2026-01-01T00:00:00Z"}),
        ("BASE", {}),
        ("BASE", {"owner": None, "born": None}),
        ("BASE", {"owner": "a name that the path goes through"}),
        ("STATUS", {"size": 0, "born": "not this column's"}),
    ],
)
def test_what_fits_or_is_missing_is_no_problem(column, body):
    """A null and a path that leads nowhere are missing values."""
    assert found_in(DEFINITION, column, body) == ()


@pytest.mark.parametrize(
    ("column", "body", "misfits"),
    [
        (
            "BASE",
            {"owner": {"name": "annie"}, "born": "yesterday"},
            [
                Misfit("owner", "has 5 code points, the field keeps 4", '"annie"'),
                Misfit(
                    "born",
                    "is no datetime: it takes RFC 3339 with a zone, such as 2026-01-31T08:00:00Z",
                    '"yesterday"',
                ),
            ],
        ),
        ("BASE", {"owner": {"name": 3}}, [Misfit("owner", "is no string: it takes text", "3")]),
        ("BASE", {"owner": {"name": {"first": "ann"}}}, [Misfit("owner", "is no string: it takes text", "{…}")]),
        (
            "STATUS",
            {"size": True},
            [Misfit("size", "is no int: it takes digits without quotes, at most 64 bits with the sign", "true")],
        ),
        (
            "STATUS",
            {"size": "12"},
            [Misfit("size", "is no int: it takes digits without quotes, at most 64 bits with the sign", '"12"')],
        ),
    ],
)
def test_each_field_says_what_it_met_and_why(column, body, misfits):
    assert list(found_in(DEFINITION, column, body)) == misfits


def test_a_long_value_is_cut():
    (misfit,) = found_in(DEFINITION, "BASE", {"owner": {"name": "x" * 10**6}})
    assert misfit.value == '"' + "x" * SHOWN_CHARACTERS_MAX + "…"


def test_elements_are_counted_and_the_first_is_shown():
    """An element without the member, or with null, is missing."""
    lines = [{"sku": 1}, {"sku": "a", "count": 1}, {}, {"sku": None}, {"sku": "b"}]
    (misfit,) = found_in(LINES, "BASE", {"lines": lines})
    assert (misfit.field, misfit.values, misfit.element, misfit.value) == ("sku", 2, 1, '"a"')


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"sku": 1}] * (ELEMENTS_MAX + 1), f"has {ELEMENTS_MAX + 1} elements, and an index takes {ELEMENTS_MAX}"),
        ({"sku": 1}, "is no array"),
    ],
)
def test_an_array_that_is_none_or_too_long_is_a_problem_of_each_field(lines, reason):
    assert [(misfit.field, misfit.reason) for misfit in found_in(LINES, "BASE", {"lines": lines})] == [
        ("sku", reason),
        ("count", reason),
    ]


@pytest.mark.parametrize("lines", [None, [], [{"sku": 1, "count": 2}], [{"sku": 1, "count": 2}] * ELEMENTS_MAX])
def test_an_array_that_fits_is_no_problem(lines):
    assert found_in(LINES, "BASE", {"lines": lines}) == ()


@pytest.mark.parametrize("found", [0.5, -(2**63), 2**64 - 1, 'é"\\', [], {}, [1]])
def test_what_is_shown_is_json_or_its_beginning(found):
    (misfit,) = found_in(DEFINITION, "BASE", {"born": found})
    assert misfit.value in (json.dumps(found, ensure_ascii=False), "[…]")
