"""Rows of cold tables: what is written is what is read."""

from enum import StrEnum

import msgspec
import pytest

from schemaless.storage.operation import Result
from schemaless.storage.sql import NOW, where
from schemaless.storage.table import Table


class Colour(StrEnum):
    RED = "red"


class Place(msgspec.Struct, frozen=True):
    x: int
    y: int


class Thing(msgspec.Struct, frozen=True):
    name: str
    colour: Colour | None
    is_new: bool
    tags: tuple[str, ...]
    place: Place
    made_at: int | None = None
    size: int = 0


THINGS = Table("things", Thing, place=Table("", Place, y="why"), size="LENGTH(body)")
THING = Thing("n", Colour.RED, True, ("a", "b"), Place(1, 2), made_at=3)


def test_a_field_says_how_its_column_is_read():
    """A time as microseconds, a struct as columns, and what is computed as its expression."""
    made_at = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', made_at)"
    assert THINGS.select == f"name,colour,is_new,tags,x,why,{made_at},LENGTH(body)"
    operation = THINGS.by("owner", "WHERE owner > %s", 7)
    assert next(operation) == f"SELECT owner,{THINGS.select} FROM things WHERE owner > 7"
    with pytest.raises(StopIteration) as stop:
        operation.send([Result([(8, "n", "red", 1, '["a","b"]', 1, 2, 3, 0)])])
    assert stop.value.value == {8: THING}


@pytest.mark.parametrize("wrong", [{1: "blue"}, {3: "no JSON"}, {3: "7"}])
def test_values_that_are_no_row(wrong):
    values = ["n", None, 0, "[]", 1, 2, None, 0]
    assert THINGS.decode(values).made_at is None
    with pytest.raises(ValueError, match=r"."):
        THINGS.decode([wrong.get(place, value) for place, value in enumerate(values)])


def test_a_row_is_written_as_it_is_read():
    """Columns that the struct lacks are given beside it, and go before its own."""
    name, colour, tags = (f"_utf8mb4 x'{text.encode().hex()}'" for text in ("n", "red", '["a","b"]'))
    row = f"{name},{colour},1,{tags},1,2,'1970-01-01 00:00:00.000003',5"
    assert (
        THINGS.insert([THING, THING], "REPLACE", owner=5)
        == f"REPLACE INTO things (name,colour,is_new,tags,x,why,made_at,owner) VALUES ({row}),({row})"
    )
    assert "UTC_TIMESTAMP(6)" in THINGS.insert([THING], made_at=NOW)


def test_the_newest_row_stays():
    """MySQL assigns from left to right, so the column that the conditions read comes last."""

    class Pause(msgspec.Struct):
        paused: bool
        changed_at: int

    script = Table("pauses", Pause).newest(Pause(True, 0), owner=5)
    newer = "VALUES(changed_at) > changed_at"
    assert script.endswith(
        f"UPDATE paused = IF({newer}, VALUES(paused), paused),changed_at = GREATEST(changed_at, VALUES(changed_at))"
    )


def test_one_value_or_several():
    assert where(n=1, shard=[2, 3]) == "WHERE n = 1 AND shard IN (2,3)"
