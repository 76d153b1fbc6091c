"""The page of the invariants says the truth about the tests: docs/invariants.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "invariants.md"
IDS = [*(f"I{number}" for number in range(1, 18)), "I19", "I20"]


def rows(heading: str) -> dict[str, str]:
    """Returns the rows of the table under a heading, by id."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (I\d+) \| (.*) \|$", section, re.MULTILINE)
    assert len(found) == len(dict(found)), "an id has two rows"
    return dict(found)


def test_every_promise_is_there_once_and_says_where_it_is_kept() -> None:
    """Each has a row with files that exist, or say that they are not built."""
    promises = rows("The promises, and the files that keep them")
    assert list(promises) == IDS
    not_built = {name for name, row in promises.items() if row.endswith("| not built")}
    assert not_built <= rows("What is not built yet").keys()
    for name in promises.keys() - not_built:
        kept_in = re.findall(r"`([\w/]+\.\w+)`", promises[name].rpartition("|")[2])
        assert kept_in, name
        assert [path for path in kept_in if not (ROOT / path).is_file()] == []


def test_each_test_that_is_named_for_a_promise_carries_its_id() -> None:
    """Whoever greps for an id finds what the page names; a promise without a test is one that isn't built."""
    tests = rows("The tests that carry their ids")
    wrong = [
        (name, path)
        for name, row in tests.items()
        for path in re.findall(r"`([^`]+)`", row)
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text())
    ]
    assert wrong == []
    assert set(IDS) - tests.keys() <= rows("What is not built yet").keys()
