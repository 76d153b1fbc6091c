"""What is sent, and how an answer is read: flows driven by hand, no server."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from schemaless.cell import PutStatus
from schemaless.client.answers import LogPage, MissingCell, PutAnswer, PutFailure
from schemaless.client.exchange import MSGPACK, ClientRequest, ClientResponse, Flow, error_of, error_of_problem
from schemaless.client.requests import BYTES_MAX, ITEMS_MAX, ROUNDS_MAX, EntryPages, NewCell, Requests, put_cells
from schemaless.errors import (
    CellMissing,
    Conflict,
    Invalid,
    LocationGone,
    Malformed,
    NotBuilt,
    NotFound,
    NotReady,
    SchemalessError,
    StateConflict,
    TooLarge,
    Unavailable,
)
from schemaless.found_cell import FoundCell
from schemaless.location import Location
from schemaless.position import Position

ROW = uuid.UUID("5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11")
REQUESTS = Requests("mezzanine")
CELL = {
    "row_key": str(ROW),
    "column_name": "BASE",
    "ref_key": 1,
    "body": {"fare": {"amount": 12.5}, "shard": "of glass"},
    "shard": 7,
    "generation": 1,
    "added_id": 42,
    "created_at": "2026-01-31T00:00:00.000001Z",
}
PUT = {name: value for name, value in CELL.items() if name != "body"} | {
    "status": "stored",
    "copies": 2,
    "location": "7:1:42",
}


def ok(document: Any, status: int = 200, **headers: str) -> ClientResponse:
    return ClientResponse(status, {"content-type": MSGPACK, **headers}, msgspec.msgpack.encode(document))


def problem(status: int, kind: str = "x", **members: Any) -> ClientResponse:
    document = {"type": f"urn:schemaless:problem:{kind}", "status": status, "detail": "why", **members}
    return ClientResponse(status, {"content-type": "application/problem+json"}, msgspec.json.encode(document))


def drive(flow: Flow[Any], *answers: ClientResponse) -> tuple[list[ClientRequest], Any]:
    """The calls that a flow made, and what it returned."""
    calls = [next(flow)]
    for answer in answers:
        try:
            calls.append(flow.send(answer))
        except StopIteration as done:
            return calls, done.value
    raise AssertionError("the flow asks for more")


def drive_with(flow: Flow[Any], respond: Callable[[ClientRequest], ClientResponse]) -> tuple[list[ClientRequest], Any]:
    """The same with a server that answers for ever."""
    calls = [next(flow)]
    while True:
        try:
            calls.append(flow.send(respond(calls[-1])))
        except StopIteration as done:
            return calls, done.value


def test_a_put_names_its_cell_in_the_path_and_sends_messagepack():
    """PUT /cells/row/column/ref_key; the answer is read into values."""
    (call,), put = drive(REQUESTS.put_cell(str(ROW).upper(), "BASE", 1, {"a": 1.0}), ok(PUT, 201))
    assert (call.method, call.path) == ("PUT", f"/v1/mezzanine/cells/{ROW}/BASE/1")
    assert msgspec.msgpack.decode(call.content) == {"a": 1.0}
    assert put.status is PutStatus.STORED
    assert put.row_key == ROW
    assert put.created_at == datetime(2026, 1, 31, microsecond=1, tzinfo=UTC)


def test_a_buffered_put_has_no_location_yet():
    """A 202 is a success whose place is not known."""
    buffered = PUT | dict.fromkeys(("generation", "added_id", "created_at", "location")) | {"status": "buffered"}
    _, put = drive(REQUESTS.put_cell(ROW, "BASE", 1, {}), ok(buffered, 202))
    assert put.status is PutStatus.BUFFERED
    assert put.location is None


def test_every_next_version_carries_an_idempotency_key():
    """A POST without a key of the caller's gets a fresh one, so that its retries can't write twice."""
    (first,), put = drive(REQUESTS.put(ROW, "STATUS", {}, None), ok(PUT, 201, **{"idempotency-replayed": "true"}))
    (second,), _ = drive(REQUESTS.put(ROW, "STATUS", {}, None), ok(PUT, 201))
    (given,), _ = drive(REQUESTS.put(ROW, "STATUS", {}, "mine"), ok(PUT, 201))
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert given.headers["idempotency-key"] == "mine"
    assert put.replayed


@pytest.mark.parametrize("arguments", [("no uuid", "A", 1), (ROW, "a/b", 1), (ROW, "A", -1), (ROW, "A", 2**63)])
def test_a_key_that_can_not_be_is_refused_before_anything_is_sent(arguments: tuple[Any, str, int]):
    """Nothing of a bad key becomes part of a path."""
    with pytest.raises(Invalid):
        next(REQUESTS.put_cell(*arguments, {}))


@pytest.mark.parametrize("body", [{"n": 2**64}, {"o": object()}])
def test_a_body_that_can_not_be_sent_is_refused(body: dict[str, Any]):
    """What MessagePack can't say is told as our error."""
    with pytest.raises(Invalid):
        next(REQUESTS.put_cell(ROW, "A", 1, body))


def test_members_of_a_body_read_as_attributes():
    """A cell's own fields go first, absent members are None, and a cell is true."""
    _, cell = drive(REQUESTS.get_cell_latest(ROW, "BASE", None), ok(CELL))
    assert cell
    assert cell.fare["amount"] == 12.5
    assert (cell.shard, cell.body["shard"]) == (7, "of glass")
    assert cell.is_completed is None


def test_a_missing_cell_is_false_and_its_fields_are_none():
    """The code of a trigger asks a cell that isn't there without a special case."""
    for flow in (REQUESTS.get_cell(ROW, "A", 1, None), REQUESTS.get_cell_latest(ROW, "A", None)):
        _, cell = drive(flow, problem(404, "cell-missing"))
        assert not cell
        assert cell.is_completed is None
        assert cell.ref_key is None
    assert drive(REQUESTS.get_row(ROW, None), problem(404, "cell-missing"))[1] == {}


def test_a_cell_that_was_read_stands_for_its_column():
    """Found or missing, whichever call read it: `put` writes the next version of that column."""
    _, found = drive(REQUESTS.get_cell_latest(ROW, "BASE", None), ok(CELL))
    missing = [
        drive(REQUESTS.get_cell_latest(ROW, "BASE", None), problem(404, "cell-missing"))[1],
        drive(REQUESTS.get_cell(ROW, "BASE", 1, None), problem(404, "cell-missing"))[1],
        drive(REQUESTS.get_cells([(ROW, "BASE")], None), ok({"cells": [None]}))[1][0],
    ]
    for cell in (found, *missing):
        (call,), _ = drive(REQUESTS.put(ROW, cell, {}, None), ok(PUT, 201))
        assert (call.method, call.path) == ("POST", f"/v1/mezzanine/cells/{ROW}/BASE")
    with pytest.raises(Invalid, match="a cell that a client returned"):
        next(REQUESTS.put(ROW, MissingCell(), {}, None))


def test_an_unknown_datastore_is_an_error_and_not_an_empty_place():
    """Only the absence of the cell itself is an answer."""
    with pytest.raises(NotFound, match="why"):
        drive(REQUESTS.get_cell_latest(ROW, "A", None), problem(404, "not-found"))


def test_a_datastore_that_is_no_word_is_refused():
    """It becomes part of every path."""
    with pytest.raises(Invalid):
        Requests("../other")


def test_many_cells_are_read_in_order():
    """A name without ref_key asks for the newest; a null is a missing cell."""
    (call,), cells = drive(REQUESTS.get_cells([(ROW, "BASE", 1), (ROW, "A")], None), ok({"cells": [CELL, None]}))
    assert msgspec.msgpack.decode(call.content) == {
        "keys": [
            {"row_key": str(ROW), "column_name": "BASE", "ref_key": 1},
            {"row_key": str(ROW), "column_name": "A"},
        ]
    }
    assert [type(cell) for cell in cells] == [FoundCell, MissingCell]
    with pytest.raises(Unavailable, match="1 cells"):
        drive(REQUESTS.get_cells([(ROW, "BASE", 1), (ROW, "A")], None), ok({"cells": [CELL]}))


def test_a_cell_that_a_minion_lacks_among_many_says_that_it_may_exist():
    """Its master may be away, and a put may wait in a buffer."""
    served = {"schemaless-served-by": "minion", "schemaless-cluster": "a"}
    _, (cell,) = drive(REQUESTS.get_cells([(ROW, "A")], None), ok({"cells": [None]}, **served))
    assert "may wait in a buffer" in cell._hint
    _, (cell,) = drive(REQUESTS.get_cells([(ROW, "A")], None), ok({"cells": [None]}))
    assert cell._hint is None


def test_versions_ask_with_bounds():
    """`from_` is the query's `from`."""
    flow = REQUESTS.get_versions(ROW, "BASE", {"from_": 2, "to": 5, "order": "desc", "read_from": "minion"})
    (call,), page = drive(flow, ok({"cells": [CELL], "next": 1}))
    assert call.params == {"from": "2", "to": "5", "order": "desc", "read_from": "minion"}
    assert ([cell.ref_key for cell in page], page.next) == ([1], 1)


@pytest.mark.parametrize(
    ("location", "params"),
    [
        (None, {}),
        (1000, {"after": "1000"}),
        ("1:1000", {"after": "1:1000"}),
        (Location(2, 7), {"after": "2:7"}),
        (Position(7, 2, 7, offset=9, digest=255), {"after": "2:7:00000000000000ff"}),
        (datetime(2026, 1, 31, tzinfo=UTC), {"since": "2026-01-31T00:00:00.000000Z"}),
    ],
)
def test_a_log_is_read_after_any_kind_of_location(location: Any, params: dict[str, str]):
    """Added_id, text, Location or a time; the page says where to go on."""
    flow = REQUESTS.get_cells_for_shard(7, location, 10, {"columns": ["A", "B"]})
    log = {"cells": [CELL], "next": {"generation": 1, "added_id": 42, "digest": "00000000000000ff"}}
    (call,), page = drive(flow, ok(log | {"head": 50, "pending": 8, "generation": 2}))
    assert call.params == params | {"limit": "10", "columns": "A,B"}
    assert (page.location, page.pending, page.generation) == (Location(1, 42), 8, 2)
    assert page.position == Position(7, 1, 42, digest=255)


def test_a_time_without_a_zone_is_refused():
    """It would mean another moment on another machine."""
    with pytest.raises(Invalid, match="time zone"):
        next(REQUESTS.get_cells_for_shard(7, datetime(2026, 1, 31), 10, {}))


def test_of_several_shards_one_may_fail():
    """A shard that can't be read has its error in its place."""
    page = {"cells": [], "next": {"generation": 1, "added_id": 0}, "head": 0, "pending": 0}
    gone = {"problem": {"status": 409, "detail": "past the head", "head": 5, "resume_at": 5, "generation": 2}}
    flow = REQUESTS.get_cells_for_shards({0: None, 7: Position(7, 1, 9, digest=255)}, 10, None)
    (call,), pages = drive(flow, ok({"shards": {"0": page, "7": gone}}))
    assert msgspec.msgpack.decode(call.content) == {"locations": {"0": 0, "7": "1:9:00000000000000ff"}, "limit": 10}
    assert isinstance(pages[0], LogPage)
    assert isinstance(pages[7], LocationGone)
    assert (pages[7].resume_at, pages[7].generation) == (5, 2)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (problem(400), Malformed),
        (problem(404), NotFound),
        (problem(409), Conflict),
        (problem(409, retryable=True), NotReady),
        (problem(409, resume_at=3, head=9, generation=1), LocationGone),
        (problem(413), TooLarge),
        (problem(422, field="ref_key"), Invalid),
        (problem(501), NotBuilt),
        (problem(503), Unavailable),
        (ClientResponse(502, {"content-type": "text/html"}, b"<html>"), Unavailable),
        (ClientResponse(200, {"content-type": "text/html"}, b"<html>"), Unavailable),
    ],
)
def test_a_problem_becomes_the_error_that_it_stands_for(given: ClientResponse, kind: type[Exception]):
    """Every answer that is no success is one of our errors, a proxy's too."""
    with pytest.raises(kind) as raised:
        drive(REQUESTS.put_cell(ROW, "A", 1, {}), given)
    assert type(raised.value) is kind


def test_a_missing_cell_is_a_kind_of_not_found():
    """Whoever catches NotFound catches both."""
    assert issubclass(CellMissing, NotFound)


def item(status: str = "stored", **members: Any) -> dict[str, Any]:
    return {"status": status, "shard": 7, "copies": 2, **members}


def cells(count: int, body: dict[str, Any] | None = None) -> list[NewCell]:
    return [NewCell(ROW, "A", number, body or {"n": number}) for number in range(count)]


def sent(call: ClientRequest) -> list[int]:
    return [cell["ref_key"] for cell in msgspec.msgpack.decode(call.content)["cells"]]


def test_a_batch_gives_a_result_for_each_cell_in_order():
    """A conflict is final and false, and the others are not touched by it."""
    conflict = {"status": "conflict", "problem": {"status": 409, "detail": "other body"}}
    (call,), results = drive(put_cells(Requests("m"), cells(3)), ok({"results": [item(), conflict, item("buffered")]}))
    assert sent(call) == [0, 1, 2]
    assert [type(result) for result in results] == [PutAnswer, PutFailure, PutAnswer]
    assert [bool(result) for result in results] == [True, False, True]
    assert isinstance(results[1].error, Conflict)
    assert results[0].row_key == ROW


def test_items_that_may_succeed_later_are_sent_again_alone():
    """Only what failed for now goes into the next round, after a pause, and ends in its own place."""
    away = {"status": "error", "problem": {"status": 503, "detail": "away", "retryable": True}}
    wrong = {"status": "error", "problem": {"status": 422, "field": "body", "detail": "body: no"}}
    answers = [ok({"results": [away, item(), wrong]}), ok({"results": [item("already_stored")]})]
    (_, second), results = drive(put_cells(Requests("m"), cells(3)), *answers)
    assert sent(second) == [0]
    assert second.delay_s > 0
    assert results[0].status is PutStatus.ALREADY_STORED
    assert isinstance(results[2].error, Invalid)


def test_rounds_of_a_batch_are_bounded():
    """What never succeeds is told as an error in the end."""
    away = ok({"results": [{"status": "error", "problem": {"status": 503, "retryable": True}}]})
    calls, results = drive(put_cells(Requests("m"), cells(1)), *[away] * ROUNDS_MAX)
    assert len(calls) == ROUNDS_MAX
    assert isinstance(results[0].error, Unavailable)


def test_a_large_batch_is_split_by_number_and_by_bytes():
    """No request has more than the server takes, and the order stays."""

    def good(call: ClientRequest) -> ClientResponse:
        return ok({"results": [item()] * len(sent(call))})

    for batch, sizes in (
        (cells(ITEMS_MAX + 1), [ITEMS_MAX, 1]),
        (cells(20, {"text": "x" * (BYTES_MAX // 10)}), [9, 9, 2]),
    ):
        calls, results = drive_with(put_cells(Requests("m"), batch), good)
        assert [len(sent(call)) for call in calls] == sizes
        assert [number for call in calls for number in sent(call)] == [cell.ref_key for cell in batch]
        assert len(results) == len(batch)


def test_a_batch_answer_of_another_length_is_refused():
    """Results that can't be told apart are no results."""
    with pytest.raises(Unavailable, match="results"):
        drive(put_cells(Requests("m"), cells(2)), ok({"results": [item()]}))


def test_no_cells_make_no_request():
    """An empty batch is done."""
    with pytest.raises(StopIteration) as done:
        next(put_cells(Requests("m"), []))
    assert done.value.value == []


def test_an_index_is_queried_with_fields_operators_and_options():
    """`__gte` becomes `.gte`, values become their text forms, options pass as they are."""
    terms = {
        "driver_partner_uuid": ROW,
        "trip_created_at__gte": datetime(2026, 1, 31, tzinfo=UTC),
        "is_completed": True,
        "limit": 5,
        "include": ["BASE", "STATUS"],
        "cursor": None,
    }
    entry = {"row_key": str(ROW), "fields": {"fare": 1.5}}
    (call,), page = drive(Requests("m").query_index("by_driver", terms), ok({"entries": [entry], "cursor": "c"}))
    assert call.path == "/v1/m/indexes/by_driver/entries"
    assert call.params == {
        "driver_partner_uuid": str(ROW),
        "trip_created_at.gte": "2026-01-31T00:00:00.000000Z",
        "is_completed": "true",
        "limit": "5",
        "include": "BASE,STATUS",
    }
    assert (len(page), page.cursor, next(iter(page)).fare) == (1, "c", 1.5)


def test_operators_of_several_values_become_parameters_that_take_commas():
    """`__in` repeats the parameter, `__between` is two comparisons."""
    terms = {
        "city__in": ["a,b", "c"],
        "fare__between": (Decimal("0.5"), 2),
        "name__prefix": "x",
        "raw": b"\xff",
        "gone__isnull": True,
    }
    (call,), _ = drive(Requests("m").query_index("by_city", terms), ok({"entries": []}))
    assert call.params == {
        "city": ["a,b", "c"],
        "fare.gte": "0.5",
        "fare.lte": "2",
        "name.prefix": "x",
        "raw": "/w==",
        "gone.isnull": "true",
    }


@pytest.mark.parametrize(
    "terms",
    [
        {"city__in": []},
        {"city__in": "ab"},
        {"city__in": 5},
        {"city": "a", "city__in": ["b"]},
        {"fare__between": (1,)},
        {"fare__between": (1, 2), "fare__gte": 1},
    ],
)
def test_terms_that_would_change_a_query_s_meaning_are_refused(terms):
    """An empty list matches nothing: sent as no parameter it would match everything."""
    with pytest.raises(Invalid):
        next(Requests("m").query_index("by_city", terms))


def test_entries_are_walked_page_after_page():
    """Also over a page of which `verify` dropped all, up to the page without a cursor."""
    entries = [{"row_key": str(ROW), "fields": {"n": n}} for n in range(3)]
    pages = EntryPages(Requests("m"), "by_city", {"city": "a", "limit": 2})
    seen, cursors = [], []
    for page in (
        {"entries": entries[:2], "cursor": "1"},
        {"entries": [], "cursor": "2", "dropped": 2},
        {"entries": entries[2:], "cursor": None, "freshness": {"behind_cells": 4}},
    ):
        assert not pages.at_end
        (call,), _ = drive(pages.fetch(), ok(page))
        cursors.append(call.params.get("cursor"))
        while (entry := pages.take()) is not None:
            seen.append(entry.n)
    assert pages.at_end
    assert (seen, cursors) == ([0, 1, 2], [None, "1", "2"])
    assert pages.page.freshness.behind_cells == 4


def test_an_index_can_not_be_asked_with_what_has_no_text():
    """A list is no value of a field."""
    with pytest.raises(Invalid):
        next(Requests("m").query_index("by_driver", {"a": [1]}))


def test_every_put_of_a_client_with_a_cause_carries_it():
    """A15: single puts, next versions and batches. Reads don't, and the requests without a cause stay as they are."""
    caused = REQUESTS.caused_by("billing/bill_rider@7:1:1000")
    flows = [
        caused.put_cell(ROW, "BASE", 1, {}),
        caused.put(ROW, "BASE", {}, None),
        put_cells(caused, [NewCell(ROW, "BASE", 1, {})]),
    ]
    assert [next(flow).headers.get("schemaless-cause") for flow in flows] == ["billing/bill_rider@7:1:1000"] * 3
    assert "schemaless-cause" not in next(caused.get_cell(ROW, "BASE", 1, None)).headers
    assert "schemaless-cause" not in next(REQUESTS.put_cell(ROW, "BASE", 1, {})).headers
    with pytest.raises(Invalid, match="WRITER@SHARD"):
        REQUESTS.caused_by("billing")


def test_an_error_of_the_server_has_the_hint_of_the_one_who_raised_it():
    """A hint of the class would lie: a conflict of an index has nothing to do with ref_keys."""
    problem = {"status": 409, "detail": "index a exists with another definition", "hint": "do first what it says"}
    assert error_of_problem(problem).hint == "do first what it says"
    assert "ref_key" in error_of_problem({"status": 409, "detail": "another body"}).hint
    assert "ref_key" not in StateConflict("").hint
    gone = error_of_problem({"status": 409, "detail": "", "head": 5, "resume_at": 3, "generation": 2})
    assert gone.hint == "continue from resume_at, which is 3"


@pytest.mark.parametrize("name", [(ROW,), (ROW, "BASE", 1, {}), (), "BASE", ROW])
def test_a_name_of_a_cell_has_two_or_three_parts(name):
    """Another one is an error of ours that shows it, and nothing is sent."""
    with pytest.raises(Invalid, match="row_key, column, ref_key"):
        drive(REQUESTS.get_cells([name], None))
    with pytest.raises(Invalid, match="row_key, column_name, ref_key, body"):
        drive(put_cells(REQUESTS, [(ROW, "BASE", 1)]))


def test_a_batch_of_puts_returns_digests():
    """As a single put does: with it the log is read after the cell, and after no other."""
    item = {"status": "stored", "shard": 3, "copies": 2, "digest": "5f0c2a9d4be61378"}
    _, (put,) = drive(put_cells(REQUESTS, [(ROW, "BASE", 1, {})]), ok({"results": [item]}))
    assert put.digest == "5f0c2a9d4be61378"


@pytest.mark.parametrize("status", [500, 405, 431, 505, 503])
def test_a_problem_that_says_so_is_not_retried(status):
    """An error of the API that comes again each time is the cell's failure, and no outage."""
    assert type(error_of(problem(status, retryable=False))) is SchemalessError
    assert type(error_of(problem(status, retryable=True))) is Unavailable


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_an_unsuccessful_response_without_a_problem_document_is_an_outage(status):
    assert type(error_of(ClientResponse(status, {}, b"<html>"))) is Unavailable
