"""The files of the page: what a reviewer would look for in each of them."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "api" / "ui" / "files"
FILES = sorted(FOLDER.iterdir())
LINES_MAX = 1987
LINE_CHARACTERS_MAX = 120
PARSES_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function"
    r"|setHTML|javascript:|srcdoc|setTimeout\(\s*[\"'`]"
)
"""Ways in which text of the data could become elements or code."""


def test_the_page_keeps_its_budget():
    """Its lines only fall, as those of packages do. The last growth: erased cells."""
    assert sum(path.read_text().count("\n") for path in FILES) <= LINES_MAX


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_of_the_data_is_ever_parsed(path):
    """No file makes elements or code of text, names another host, or has a line that is too long."""
    text = path.read_text()
    assert PARSES_TEXT.findall(text) == []
    assert [url for url in re.findall(r"https?://[^\"'\s]+", text) if url != "http://www.w3.org/2000/svg"] == []
    assert [line for line in text.splitlines() if len(line) > LINE_CHARACTERS_MAX] == []
