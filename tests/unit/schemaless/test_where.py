"""Where: what each form means, SQL's three-valued logic, and what is wrong with a text that doesn't parse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import Invalid
from schemaless.where import (
    DEPTH_MAX,
    NODES_MAX,
    TEXT_CHARACTERS_MAX,
    AllOf,
    AnyOf,
    Comparison,
    ComparisonSign,
    IsNull,
    Not,
    Where,
    parse_where,
)

BODY = {
    "status": "done",
    "n": 3,
    "price": 2.5,
    "paid": True,
    "driver": None,
    "fare": {"amount": 10, "tags": ["a"]},
    "odd name": 1,
    "and": 2,
    "größe": 4,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('status == "done"', True),
        ("status == 'done' and n == 3", True),
        ('status == "done" and fare.amount >= 10 or driver is null', True),
        ('status == "open" or n == 3 and paid == false', False),  # `and` binds closer
        ('(status == "done" or n == 4) and paid == true', True),
        ("n < 4", True), ("n <= 3", True), ("n > 3", False), ("n >= 3", True), ("n != 4", True), ("n != 3", False),
        ("n == 3.0", True), ("price > 2", True), ("n > -1e3", True), ("price == 25e-1", True),
        ("paid == true", True), ("paid != false", True), ("paid == 1", False), ("n == true", False),
        ("n in (1, 2, 3)", True), ("n in (1)", False), ("n not in (1, 2)", True),
        ("status in ('done', 3)", True), ("status not in ('open', 3)", False),  # one of the tests is unknown
        ("driver is null", True), ("driver is not null", False), ("missing is null", True), ("n is not null", True),
        ("fare.missing.deeper is null", True), ("status.deeper is null", True), ("fare.amount is not null", True),
        ("fare == 3", False), ("fare.tags == 'a'", False), ("fare is not null", True),
        ("`odd name` == 1", True), ("`and` == 2", True), ("größe == 4", True), ("fare.`amount` == 10", True),
        ('status == "d\\u006fne"', True), (r'status == "do\"ne"', False),
        ("not n == 4", True), ("not not n == 3", True), ("not (n == 3 or n == 4)", False),
        ("n==3and paid==true", None),
    ],
)  # fmt: skip
def test_what_a_text_means(text, holds):
    """Of one body, in every form of the language. None: it doesn't parse."""
    if holds is None:
        with pytest.raises(Invalid):
            parse_where(text)
    else:
        assert parse_where(text).holds(BODY) is holds


@pytest.mark.parametrize("test", ["a == 1", "a != 1", "a < 1", "a >= 1", "a in (1, 2)", "a not in (1, 2)"])
@pytest.mark.parametrize(
    "body", [{}, {"a": None}, {"a": "text"}, {"a": True}, {"a": [1]}, {"a": {}}, {"a": float("nan")}]
)
def test_an_unknown_test_holds_neither_way(test, body):
    """A missing member, null and another type are SQL's NULL: `not` makes nothing of them either."""
    assert not parse_where(test).holds(body)
    assert not parse_where(f"not ({test})").holds(body)
    assert parse_where(f"{test} or 1 in (1)".replace("1 in (1)", "b is null")).holds(body)
    assert not parse_where(f"{test} and b is null").holds(body)
    assert parse_where(f"not ({test} and b is not null)").holds(body)  # false whatever the unknown is


def test_text_is_never_compared_with_a_number():
    """It parses, and is false."""
    for sign in ("==", "!=", "<", "<=", ">", ">="):
        assert not parse_where(f"status {sign} 3").holds(BODY)
        assert not parse_where(f"n {sign} '3'").holds(BODY)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 1, "expected a path such as fare.amount"),
        ("   ", 4, "expected a path"),
        ("status", 7, "expected ==, !=, <, <=, >, >=, `in (…)`"),
        ("status ==", 10, "expected text in quotes, a number, true or false, found the end"),
        ("status = 3", 8, "== for equality"),
        ("status == done", 11, "expected text in quotes"),
        ("status == null", 11, "`is null` asks for null"),
        ('status == "done', 11, "expected a path, a literal"),
        (r'status == "\q"', 11, "the escapes of JSON"),
        ("n == 1e999", 6, "isn't so large"),
        ("n == 1x", 6, "expected a path, a literal"),
        ("3 < n", 1, "expected a path"),
        ("a.b. == 1", 4, "expected"),
        (".a == 1", 1, "expected"),
        ("`` == 1", 1, "expected"),
        ("(a == 1", 8, "expected `)`"),
        ("a == 1)", 7, "expected `and`, `or` or the end"),
        ("a == 1 b == 2", 8, "expected `and`, `or` or the end"),
        ("a == 1 AND b == 2", 8, "found 'AND'"),
        ("a in 1", 6, "expected `(`"),
        ("a in ()", 7, "expected text in quotes"),
        ("a in (1,)", 9, "expected text in quotes"),
        ("a not like 'x'", 7, "expected `in`"),
        ("a is 3", 6, "expected `null`"),
        ("and == 1", 1, "expected a path"),
        ("not", 4, "expected a path"),
        ("a == 1 and", 11, "expected a path"),
    ],
)
def test_a_text_that_does_not_parse_is_refused_at_its_position(text, position, expected):
    """The error says where, counted from 1, what was expected, and what is there."""
    with pytest.raises(Invalid) as caught:
        parse_where(text)
    assert caught.value.why.startswith(f"position {position}: ")
    assert expected in caught.value.why


def test_every_size_has_a_bound():
    """Characters, tests and operators, and depth (I14). What is at the bound parses."""
    tests = " and ".join(["a == 1"] * (NODES_MAX - 1))
    parse_where(tests)
    with pytest.raises(Invalid, match=str(NODES_MAX)):
        parse_where(tests + " and a == 1")
    with pytest.raises(Invalid, match=str(NODES_MAX)):
        parse_where(f"a in ({', '.join(['1'] * NODES_MAX)})")
    with pytest.raises(Invalid, match=str(NODES_MAX)):
        parse_where([{"field": "a", "op": "eq", "value": 1}] * (NODES_MAX + 1))
    for opening, closing in (("(", ")"), ("not ", "")):
        parse_where(opening * (DEPTH_MAX - 1) + "a == 1" + closing * (DEPTH_MAX - 1))
        with pytest.raises(Invalid, match="deeper"):
            parse_where(opening * DEPTH_MAX + "a == 1" + closing * DEPTH_MAX)
    parse_where(f"a == 1{' ' * (TEXT_CHARACTERS_MAX - 6)}")
    with pytest.raises(Invalid, match=str(TEXT_CHARACTERS_MAX)):
        parse_where(f"a == 1{' ' * (TEXT_CHARACTERS_MAX - 5)}")


def test_the_list_form_is_its_tests_joined_by_and():
    """So the contract's definitions stay valid."""
    listed = parse_where(
        [{"field": "status", "op": "eq", "value": "done"}, {"field": "fare.amount", "op": "gte", "value": 10}]
    )
    assert listed == parse_where('status == "done" and fare.amount >= 10')
    assert listed.names == {"status", "fare.amount"}
    assert parse_where([{"field": "n", "op": "ne", "value": True}]) == parse_where("n != true")


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (7, "where[0]"),
        ({"field": "a", "op": "eq"}, "where[0]"),
        ({"field": "a", "op": "eq", "value": 1, "more": 1}, "where[0]"),
        ({"field": "", "op": "eq", "value": 1}, "where[0].field"),
        ({"field": "a..b", "op": "eq", "value": 1}, "where[0].field"),
        ({"field": "a`b", "op": "eq", "value": 1}, "where[0].field"),
        ({"field": 7, "op": "eq", "value": 1}, "where[0].field"),
        ({"field": "a", "op": "==", "value": 1}, "where[0].op"),
        ({"field": "a", "op": [], "value": 1}, "where[0].op"),
        ({"field": "a", "op": "eq", "value": None}, "where[0].value"),
        ({"field": "a", "op": "eq", "value": [1]}, "where[0].value"),
        ({"field": "a", "op": "eq", "value": float("inf")}, "where[0].value"),
    ],
)
def test_a_wrong_item_of_the_list_form_is_named(item, field):
    """By its place and member."""
    with pytest.raises(Invalid) as caught:
        parse_where([item])
    assert caught.value.field == field


def test_indexes_replace_literals_by_values_of_their_types():
    """A literal is then compared as the field's value is, say bytes of a UUID."""
    where = parse_where("driver == 'ab' and not fare.amount > 1 or x is null").with_literals(
        lambda path, literal: literal.encode() if path == "driver" else literal
    )
    assert where.holds({"driver": b"ab", "fare": {"amount": 1}, "x": 1})
    assert not where.holds({"driver": "ab", "fare": {"amount": 1}, "x": 1})


# A naive evaluator, on the same expressions

NAMES = ["a", "b", "and", "odd name"]
LITERALS = st.one_of(
    st.sampled_from(["", "x", 'q"\\', "é\n"]),
    st.sampled_from([0, 1, -2, 2**70, 0.5, 1.0, -1e300]),
    st.booleans(),
)
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2).map(tuple)
LEAVES = st.builds(Comparison, PATHS, st.sampled_from(ComparisonSign), LITERALS) | st.builds(IsNull, PATHS)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: AllOf(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: AnyOf(tuple(parts))),
    ),
    max_leaves=6,
)
JSON = st.none() | LITERALS | st.just(float("nan")) | st.lists(st.integers(), max_size=1)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON))


def naive(found, body):
    """Returns True, False, or None for unknown."""
    if isinstance(found, Not):
        answer = naive(found.inner, body)
        return None if answer is None else not answer
    if isinstance(found, AllOf | AnyOf):
        answers = [naive(part, body) for part in found.parts]
        if isinstance(found, AllOf):
            return False if False in answers else None if None in answers else True
        return True if True in answers else None if None in answers else False
    value = body
    for part in found.path:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(found, IsNull):
        return value is None
    kinds = [("text", str), ("bool", bool), ("number", (int, float))]
    kind_of = lambda v: next((name for name, kind in kinds if isinstance(v, kind)), "other")  # noqa: E731
    if kind_of(value) != kind_of(found.literal) or value != value:  # noqa: PLR0124
        return None
    return {
        "eq": value == found.literal, "ne": value != found.literal, "lt": value < found.literal,
        "lte": value <= found.literal, "gt": value > found.literal, "gte": value >= found.literal,
    }[found.operator]  # fmt: skip


@given(EXPRESSIONS, BODIES)
def test_evaluation_is_that_of_a_naive_evaluator(expression, body):
    """Whatever expression over whatever body, and nothing raises."""
    assert Where(expression).holds(body) is (naive(expression, body) is True)


@given(EXPRESSIONS)
def test_the_text_of_a_condition_parses_to_the_same(expression):
    """So definitions and status can show it."""
    where = Where(expression)
    assert parse_where(str(where)) == where


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["a", "==", "1", "'x'", "and", "or", "not", "(", ")", "in", ",", "is", "null"])).map(
        " ".join
    )
)
def test_any_text_parses_or_is_refused(text):
    """With Invalid, and nothing else."""
    try:
        parse_where(text).holds(BODY)
    except Invalid as error:
        assert error.field == "where"  # noqa: PT017
