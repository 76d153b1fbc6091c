"""What `index query` prints beside its entries."""

import pytest

from schemaless.cli.indexes import _print_page
from schemaless.client.answers import EntriesFreshness, EntriesPage


@pytest.mark.parametrize(
    ("freshness", "said"),
    [
        (EntriesFreshness(0, 0.0), ""),
        (EntriesFreshness(None, None), ""),
        (EntriesFreshness(1, None), "the index is 1 cell behind: what was written since isn't shown\n"),
        (EntriesFreshness(12, 3.5), "the index is 12 cells (3.5 s) behind: what was written since isn't shown\n"),
    ],
)
def test_an_index_that_is_behind_says_so_beside_its_entries(capsys, freshness, said):
    """On the other output, so that a program gets the entries alone."""
    _print_page(EntriesPage([], freshness=freshness))
    assert capsys.readouterr().err == said
