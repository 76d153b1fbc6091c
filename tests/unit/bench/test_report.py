"""How the benchmark's report reads."""

from bench.figures import Comparison, Figure, Values, at_least, at_most
from bench.report import Section, heading, shortfalls, summary

SECTION = Section(
    "Writes",
    "One master.",
    [
        Comparison("puts", "puts/s", Values((5000.0, 4000.0, 4500.0)), Values((1000.0,) * 3), at_least(4)),
        Comparison("batches", "cells/s", Values((50.0,)), Values((100.0,)), at_least(0.6)),
        Figure("p99", "ms", Values((70.0,))),
        Figure("p50", "ms", Values((20.0,)), at_most(50)),
    ],
)


def test_a_row_shows_median_spread_ratio_floor_and_verdict():
    """Everything a reader needs to judge a figure stands in its row."""
    text = SECTION.text()
    assert "| puts | puts/s | 4,500 (4,000 to 5,000) | 1,000 (1,000 to 1,000) | 4.5 (4 to 5) | ≥ 4 | met |" in text
    assert "| p99 | ms | 70 |  |  | none |  |" in text
    assert "| p50 | ms | 20 |  |  | ≤ 50 ms | met |" in text


def test_every_row_has_as_many_cells_as_the_header():
    """Otherwise Markdown drops cells without a word."""
    tables = [line for line in SECTION.text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1


def test_shortfalls_are_named_in_the_summary():
    """A floor that was not met is said in words, not only in a cell of a table."""
    last = summary([SECTION])
    assert last.startswith("2 of 3 floors met.")
    assert "- NOT met: batches" in last
    assert shortfalls([SECTION]) == ["batches"]


def test_the_page_says_what_made_it():
    """Command and machine stand at the top."""
    top = heading("python -m bench --quick")
    assert "`python -m bench --quick`" in top
    assert "cores" in top
