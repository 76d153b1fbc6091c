"""What a reader of a shard's event stream is told, and in which order (I13)."""

import json

import pytest

from api.follow.log_pages import ShardEvents, ShardLogPage, problem_event
from api.http.content import JSON
from schemaless.cell import StoredCell
from schemaless.codec import cell_view, encode_body
from schemaless.errors import LocationGone
from schemaless.location import GenerationStart, Location, generation_at
from schemaless.position import Position, cell_digest, parse_position

ONE = [GenerationStart(1, 1)]
PROMOTED = [GenerationStart(1, 1), GenerationStart(2, 11)]
TWICE = [*PROMOTED, GenerationStart(3, 8)]  # the second promotion lost more than the first one kept


EXAMINED = 255
"""The digest of the cell that was examined last."""


def cell(generation, added_id):
    return StoredCell(bytes(16), "BASE", 1, 0, generation, added_id, 0, encode_body({"line": "a\nb"}))


def page(cells, after, examined, starts, head=30):
    at_head = Location(generation_at(head, starts), head)
    return ShardLogPage(0, [cell(*where) for where in cells], after, examined, at_head, starts, EXAMINED)


def told(events, shown):
    """(kind, id) of what was told, each event well formed."""
    views = [JSON.encode_one(cell_view(stored)) for stored in shown.cells]
    text = events.of_page(shown, views).decode()
    assert text == "" or text.endswith("\n\n")
    return [read(event) for event in text.split("\n\n")[:-1]]


def read(event):
    fields = dict(line.split(": ", 1) for line in event.split("\n"))
    json.loads(fields["data"])
    return fields["event"], fields["id"]


def places(shown):
    """The events with ids as locations: without their digests."""
    return [(kind, str(Location(*parse_position(id)[:2]))) for kind, id in shown]


def test_cells_are_told_with_their_positions_as_ids():
    """One event each, on lines of its own whatever its body; the position is the last added_id examined."""
    events = ShardEvents(Position(0, 1, 4))
    digests = [cell_digest(cell(1, added_id)) for added_id in (5, 7)]
    assert told(events, page([(1, 5), (1, 7)], 4, 9, ONE)) == [
        ("cell", f"1:5:{digests[0]:016x}"),
        ("cell", f"1:7:{digests[1]:016x}"),
    ]
    assert events.position == Position(0, 1, 9, digest=EXAMINED)
    heartbeat = events.heartbeat().decode()
    assert "id: 1:9:00000000000000ff\n" in heartbeat
    assert json.loads(heartbeat.split("data: ")[1]) == {"generation": 1, "added_id": 9, "head": 30}
    assert told(events, page([], 9, 9, ONE)) == []


@pytest.mark.parametrize(
    ("position", "cells", "examined", "starts", "expected"),
    [
        (Location(1, 9), [(1, 10), (2, 11)], 11, PROMOTED, ["cell 1:10", "generation 2:10", "cell 2:11"]),
        (Location(1, 9), [(1, 10)], 10, PROMOTED, ["cell 1:10", "generation 2:10"]),
        (Location(1, 8), [(1, 9)], 9, PROMOTED, ["cell 1:9"]),
        (Location(1, 5), [(2, 15)], 15, PROMOTED, ["generation 2:10", "cell 2:15"]),
        (Location(1, 5), [], 20, PROMOTED, ["generation 2:10"]),
        (Location(2, 10), [(2, 11)], 11, PROMOTED, ["cell 2:11"]),
        (Location(2, 20), [(2, 21)], 21, PROMOTED, ["cell 2:21"]),
        (Location(1, 6), [(1, 7), (3, 8)], 12, TWICE, ["cell 1:7", "generation 3:7", "cell 3:8"]),
        (Location(2, 7), [], 7, TWICE, ["generation 3:7"]),
    ],
)
def test_a_generation_is_told_once_before_its_first_cell(position, cells, examined, starts, expected):
    """As soon as the reader has all before it; one that a later generation hides is never told."""
    events = ShardEvents(Position(0, position.generation, position.added_id))
    seen = [" ".join(event) for event in places(told(events, page(cells, position.added_id, examined, starts)))]
    assert seen == expected
    again = page([], examined, examined, starts)
    assert told(events, again) == []
    assert events.position == again.position


def test_a_generation_that_begins_after_the_last_cell_has_its_digest():
    """So a reader that resumes there is still compared with the log (I16). Elsewhere the cell before was not read."""
    events = ShardEvents(Position(0, 1, 9))
    (_, last), (_, begun) = told(events, page([(1, 10)], 9, 10, PROMOTED))
    assert (last[:5], begun[:5], last[5:]) == ("1:10:", "2:10:", begun[5:])
    events = ShardEvents(Position(0, 1, 5))
    assert told(events, page([(2, 15)], 5, 15, PROMOTED))[0] == ("generation", "2:10")


def test_a_problem_has_no_id():
    """So a reader that comes back names the last event before it."""
    gone = LocationGone("superseded", head=9, resume_at=7, generation=2)
    kind, data = problem_event(gone).decode().strip().split("\n")
    assert kind == "event: problem"
    shown = json.loads(data.removeprefix("data: "))
    assert (shown["status"], shown["resume_at"], shown["generation"]) == (409, 7, 2)
