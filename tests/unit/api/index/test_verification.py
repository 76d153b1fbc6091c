"""verify=true: what the newest cells make of an entry, within a bound of inflated bytes."""

import pytest

from api.index.search import current_entries
from schemaless.cell import StoredCell
from schemaless.codec import encode_body
from schemaless.errors import TooLarge
from schemaless.index.definition import parse_definition
from schemaless.index.entry import IndexEntry
from schemaless.storage.index_table import FoundEntry

DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
        "stored": [{"name": "state", "column": "STATUS", "path": "state", "type": "string"}],
    }
)
ROW = bytes(16)


def newest(**bodies):
    return {
        (ROW, column): None if bodies.get(column) is None else cell(column, bodies[column])
        for column in ("BASE", "STATUS")
    }


def cell(column, body):
    return StoredCell(ROW, column, 1, 0, 1, 1, 0, encode_body(body))


@pytest.mark.parametrize(
    ("cells", "stays"),
    [
        (newest(BASE={"owner": 1}, STATUS={"state": "x"}), True),
        (newest(BASE={"owner": 2}, STATUS={"state": "x"}), False),
        (newest(BASE={"owner": 1}, STATUS={"state": "y"}), False),
        (newest(BASE={"owner": 1}), False),
        (newest(), False),
    ],
)
async def test_only_the_entry_that_the_newest_cells_make_stays(cells, stays):
    """Stale values are as wrong as an entry whose row has none."""
    found = FoundEntry(ROW, IndexEntry((1, "x")))
    assert await current_entries(DEFINITION, [found], cells, 1000) == [found] * stays


async def test_what_bodies_inflate_to_is_bounded():
    """A megabyte of one letter is a kilobyte as stored (I14)."""
    cells = newest(BASE={"owner": 1, "long": "a" * 1_000_000})
    with pytest.raises(TooLarge):
        await current_entries(DEFINITION, [FoundEntry(ROW, IndexEntry((1, None)))], cells, 999_999)
