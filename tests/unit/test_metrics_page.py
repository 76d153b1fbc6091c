"""docs/metrics.md has the metrics of the code, each with what it is."""

import re

from deploy.write_metrics_page import HEAD, PAGE, SECTIONS, metrics_of, written


def test_the_page_has_the_tables_of_the_code():
    """Run `.venv/bin/python deploy/write_metrics_page.py` if it hasn't."""
    page = PAGE.read_text()
    assert page == written(page)


def test_a_new_metric_gets_a_row_and_the_page_keeps_what_it_says_itself():
    page = PAGE.read_text()
    (first, what), *_ = metrics_of(SECTIONS["API"])
    assert f"| `{first}` | {what} |  |" in page
    without = page.replace(f"| `{first}` | {what} |  |\n", "")
    noted = re.sub(r"^(\| `schemaless_api_followers` .*\|)  \|$", r"\1 our own |", without, flags=re.MULTILINE)
    assert written(noted).replace(" our own |", "  |") == page
    assert written(noted).count(HEAD) == len(SECTIONS)
