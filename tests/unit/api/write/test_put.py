"""The writer's pure parts: how a conflict in the buffer is judged."""

import pytest

from api.write.put import _judged
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey, StoredCell
from schemaless.codec import encode_body
from schemaless.storage.buffer_table import BufferRow


def row(body: bytes, ref_key: int = 1) -> BufferRow:
    return BufferRow(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(ref_key)), body, 3, "a", 1)


def stored(body: bytes) -> StoredCell:
    return StoredCell(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1), 3, 1, 42, 99, body)


@pytest.mark.parametrize(
    ("home", "status", "copies"),
    [
        (None, PutStatus.CONFLICT, 0),
        ({"a": 1, "b": 2}, PutStatus.ALREADY_STORED, 1),
        ({"a": 2, "b": 1}, PutStatus.CONFLICT, 0),
    ],
)
def test_a_conflict_in_the_buffer_is_what_the_home_says(home, status, copies):
    """I1: the same body at home is a success; nothing at home means that the buffered one came first."""
    outcome = _judged(row(encode_body({"b": 2, "a": 1})), home and stored(encode_body(home)))
    assert (outcome.status, outcome.copies) == (status, copies)
    assert (outcome.placed and outcome.placed.added_id) == (home and 42)
