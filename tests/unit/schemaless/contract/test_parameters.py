"""Query parameters: known ones once, everything else refused."""

import pytest

from schemaless.contract.parameters import (
    COLUMNS,
    LIMIT,
    READ_FROM,
    TO,
    check_wait,
    parse_pairs,
    parse_query,
    parse_wait,
)
from schemaless.errors import Invalid
from schemaless.topology import Role


def test_known_parameters_are_read():
    """Text becomes values; what isn't given has its default."""
    query = parse_query(b"limit=7&columns=BASE%2CSTATUS&read_from=minion", (LIMIT, COLUMNS, READ_FROM, TO))
    assert LIMIT.of(query) == 7
    assert COLUMNS.of(query) == ("BASE", "STATUS")
    assert READ_FROM.of(query) is Role.MINION
    assert TO.of(query) == 2**63 - 1
    assert parse_query(b"", (LIMIT,)) == {}


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"limits=1", "limits"),
        (b"limit=1&limit=1", "limit"),
        (b"limit", "query"),
        (b"&", "query"),
        (b"limit=%ff", "query"),
        (b"limit=\xc3", "query"),
        (b"&".join(b"p%d=1" % n for n in range(101)), "query"),
    ],
)
def test_anything_else_is_refused(raw, field):
    """Unknown, repeated, malformed, too many: never passed over."""
    with pytest.raises(Invalid) as refused:
        parse_query(raw, (LIMIT,))
    assert refused.value.field == field


@pytest.mark.parametrize("text", ["0", "1001", "-1", "1.0", "", " 1", "+1", "1e2", "٣", "9" * 30])
def test_a_limit_is_a_plain_number(text):
    """From 1 to 1000, in ASCII digits."""
    with pytest.raises(Invalid):
        LIMIT.of({"limit": text})


def test_blank_values_are_kept():
    """A parameter without a value is not a parameter that is missing."""
    assert parse_pairs(b"desc=&limit=1") == [("desc", ""), ("limit", "1")]


@pytest.mark.parametrize(
    ("value", "seconds"), [("0", 0), ("2.5", 2.5), ("30", 30), ("1e-05", 1e-5), (30, 30), (0.5, 0.5)]
)
def test_a_wait_is_seconds(value, seconds):
    """In a query as text, in a document as a number."""
    parse = parse_wait if isinstance(value, str) else check_wait
    assert parse(value, "wait") == seconds


@pytest.mark.parametrize("text", ["", "-1", "30.1", "nan", "inf", "soon", "1_0", "\u0661", " 1", "1" * 5000])
def test_any_other_wait_of_a_query_is_refused(text):
    """Negative, endless, or no number as other programs write them."""
    with pytest.raises(Invalid):
        parse_wait(text, "wait")


@pytest.mark.parametrize("value", ["1", -1, 30.1, float("nan"), float("inf"), 10**400, None, True, [1], {}])
def test_any_other_wait_of_a_document_is_refused(value):
    """A text is no number there."""
    with pytest.raises(Invalid):
        check_wait(value, "wait")
