"""The entries of a span of rows are bounded in memory, and whole, however many shards there are (I14)."""

from schemaless.cell import RowKey
from schemaless.index.comparison import LAST_ROW
from schemaless.index.definition import parse_definition
from schemaless.storage.index_table import SHARDS_AT_ONCE, live_in_span
from schemaless.storage.operation import Result
from schemaless.topology import Datastore

DEFINITION = parse_definition(
    {
        "name": "large",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
        "stored": [{"name": "text", "column": "BASE", "path": "text", "type": "bytes", "length": 768}],
    }
)
SHARDS = 1024
ROWS = 32  # of each shard
TEXT = b"x" * 768


def row_key(n):
    return RowKey(n.to_bytes(16, "big"))


def test_a_span_ends_where_its_entries_are_enough_bytes():
    """Each shard has an entry of every row. So many of them don't fit that the span is cut, at the end of a row."""
    datastore = Datastore("d", SHARDS, 1, ("a",))
    bytes_max = 10 << 20
    work = live_in_span(datastore, DEFINITION, range(SHARDS), (RowKey(b""), LAST_ROW), ROWS + 1, bytes_max)
    script, read = next(work), 0
    try:
        while True:
            assert script.count("SELECT") <= SHARDS_AT_ONCE
            last = bytes.fromhex(script.split("row_key <= x'")[1][:32])
            keys = [row_key(n) for n in range(1, ROWS + 1) if row_key(n) <= last]
            results = [Result([(key, 0, 1, TEXT) for key in keys]) for _ in range(script.count("SELECT"))]
            read = max(read, sum(len(result.rows) for result in results))
            script = work.send(results)
    except StopIteration as done:
        found, last = done.value
    assert sum(len(TEXT) for _ in found) <= bytes_max
    assert read * len(TEXT) <= SHARDS_AT_ONCE * ROWS * len(TEXT)
    assert row_key(1) <= last < row_key(ROWS)
    whole = {row_key(n) for n in range(1, ROWS + 1) if row_key(n) <= last}
    assert {place.row_key for place in found} == whole
    assert len(found) == SHARDS * len(whole)
