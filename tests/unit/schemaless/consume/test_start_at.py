"""--from: what its values mean, and how a wrong one is refused."""

import pytest

from schemaless.consume.start_at import StartAfter, StartAt, StartSince, parse_start
from schemaless.errors import Invalid
from schemaless.location import Location


def test_the_forms_of_a_start():
    """An end of the log, a time, or a location for each of some shards."""
    assert parse_start([]) is parse_start(["beginning"]) is StartAt.BEGINNING
    assert parse_start(["end"]) is StartAt.END
    assert parse_start(["1970-01-01T00:00:01Z"]) == StartSince(1_000_000)
    assert parse_start(["0:1:7", "63:2:0"]) == StartAfter({0: Location(1, 7), 63: Location(2, 0)})


@pytest.mark.parametrize(
    "texts", [["ending"], ["2026-01-31"], ["2026-01-31T00:00:00"], ["1:7"], ["7"], ["0:1:7", "end"], ["end", "end"],
              ["0:1:7", "0:1:8"], [""]]
)  # fmt: skip
def test_a_start_that_is_none_is_refused(texts):
    """It names the option."""
    with pytest.raises(Invalid) as caught:
        parse_start(texts)
    assert caught.value.field == "--from"
