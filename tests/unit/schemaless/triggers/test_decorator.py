"""@trigger's policies: what each argument takes, and how a wrong one is refused before the first cell comes."""

from datetime import timedelta

import pytest

from schemaless import ParkMode, RetryPolicy, Where, trigger
from schemaless.errors import Invalid, Misconfigured
from schemaless.triggers.decorator import triggers_of
from schemaless.where import parse_where


def marked(**arguments):
    @trigger(column="BASE", **arguments)
    def bill_rider(row_key): ...

    (found,) = triggers_of({"bill_rider": bill_rider})
    return found


def test_a_function_that_says_nothing_has_no_policy_of_its_own():
    """The settings' values count for it, and its row waits behind a parked cell."""
    found = marked()
    assert (found.name, found.retry, found.park, found.max_age_s, found.where) == (
        "bill_rider", None, ParkMode.ROW, None, None,
    )  # fmt: skip


def test_every_policy_is_carried_by_the_mark():
    """The handler reads them there."""
    policy = RetryPolicy(attempts=2, retry_on=(TimeoutError,))
    found = marked(retry=policy, park="cell", max_age=timedelta(hours=1), name="billing", where="n > 3")
    assert (found.name, found.retry, found.park, found.max_age_s) == ("billing", policy, ParkMode.CELL, 3600.0)
    assert found.where == parse_where("n > 3")
    assert isinstance(found.where, Where)
    assert (marked().parallel, marked(parallel=8).parallel) == (None, 8)
    assert marked(max_age=5, where=found.where).where is found.where
    assert marked(where=[{"field": "n", "op": "gt", "value": 3}]).where == found.where


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"retry": 5}, "retry"),
        ({"retry": {"attempts": 5}}, "retry"),
        ({"park": "shard"}, "park"),
        ({"park": None}, "park"),
        ({"park": ["row"]}, "park"),
        ({"max_age": 0}, "max_age"),
        ({"max_age": -1.5}, "max_age"),
        ({"max_age": True}, "max_age"),
        ({"max_age": "1h"}, "max_age"),
        ({"max_age": float("inf")}, "max_age"),
        ({"max_age": float("nan")}, "max_age"),
        ({"max_age": timedelta(0)}, "max_age"),
        ({"parallel": 0}, "parallel"),
        ({"parallel": 1001}, "parallel"),
        ({"parallel": 2.0}, "parallel"),
        ({"parallel": True}, "parallel"),
        ({"parallel": "2"}, "parallel"),
        ({"name": ""}, "name"),
        ({"name": "bill-rider"}, "name"),
        ({"name": "n" * 101}, "name"),
        ({"name": 7}, "name"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, named):
    """When the function is marked, in a sentence that has the argument and what it may be."""
    with pytest.raises(Misconfigured, match=named):
        marked(**arguments)


def test_a_decorator_without_a_column_says_how_it_is_written():
    """`@trigger` and `@trigger()` ended in a TypeError about arguments that nobody had written."""
    for arguments in ([], [lambda row_key: None]):
        with pytest.raises(Misconfigured, match=r'@trigger\(column="BASE"\)'):
            trigger(*arguments)


@pytest.mark.parametrize("where", ["", "n >", 7, [], [{"field": "n"}]])
def test_a_wrong_condition_is_refused(where):
    """It names the argument, as every part of a request or a definition that is wrong."""
    with pytest.raises(Invalid) as caught:
        marked(where=where)
    assert caught.value.field.startswith("where")


def test_a_function_without_a_usable_name_needs_one():
    """A lambda has none, and names are part of ids, of keys and of tables."""
    with pytest.raises(Misconfigured, match="name="):
        trigger(column="BASE")(lambda row_key: None)
    trigger(column="BASE", name="given")(lambda row_key: None)
