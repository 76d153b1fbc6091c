"""What a partition's log keeps of the columns that it publishes."""

import msgspec

from schemaless.bus import partition_log
from schemaless.names import COLUMN_HEADER, ERASE_COLUMN, KIND_CELL, KIND_ERASED, KIND_HEADER
from tests.topic_harness import stored_cell


def test_the_headers_of_a_thousand_columns_are_kept():
    """Callers choose the names, so an application with a column for each customer must not fill the memory (I14)."""
    headers_of = partition_log._cell_headers
    headers_of.cache_clear()
    for number in range(5000):
        assert (COLUMN_HEADER, f"C{number}".encode()) in headers_of(f"C{number}", KIND_CELL)
    assert headers_of.cache_info().currsize == 1000


def test_a_cell_that_was_erased_before_it_is_published_has_a_kind_of_its_own():
    """Readers that don't know the kind pass over it. The entry of the erasure is an ordinary cell (I19)."""
    cell = stored_cell(0, 4, column=ERASE_COLUMN)
    assert (KIND_HEADER, KIND_CELL) in partition_log._headers_of(cell)
    stub = msgspec.structs.replace(cell, body=b"", cause="billing/bill@1:1:1")
    headers = dict(partition_log._headers_of(stub))
    assert (headers[KIND_HEADER], headers[COLUMN_HEADER]) == (KIND_ERASED, b"$erase")
