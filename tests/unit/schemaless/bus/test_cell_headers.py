"""What a partition's log keeps of the columns that it publishes."""

from schemaless.bus import partition_log
from schemaless.names import COLUMN_HEADER


def test_the_headers_of_a_thousand_columns_are_kept():
    """Callers choose the names, so an application with a column for each customer must not fill the memory (I14)."""
    headers_of = partition_log._cell_headers
    headers_of.cache_clear()
    for number in range(5000):
        assert (COLUMN_HEADER, f"C{number}".encode()) in headers_of(f"C{number}")
    assert headers_of.cache_info().currsize == 1000
