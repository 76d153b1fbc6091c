"""Problem documents: every error of the tree has a status."""

import json

import pytest
from structlog.testing import capture_logs

from api.http import response
from api.http.response import kind_of, problem_of
from schemaless import errors
from schemaless.errors import Invalid, LocationGone, SchemalessError


def tree(kind=SchemalessError):
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(found for child in children for found in tree(child))]


def made(kind):
    if kind is Invalid:
        return Invalid("limit", "must be an integer")
    if kind is LocationGone:
        return LocationGone("past the head", head=7, resume_at=5, generation=2)
    if kind is errors.Outvoted:
        return errors.Outvoted("a higher ballot was promised", 7)
    if kind in (errors.CellErased, errors.KeyErased):
        return kind("its body was erased", "00c0ffee00c0ffee", 1_000_000)
    return kind("why")


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_problem(kind):
    """With the members of RFC 9457, whether to try again, and a status that fits it."""
    problem = problem_of(made(kind))
    assert problem.keys() >= {"type", "title", "status", "detail", "retryable"}
    assert problem["retryable"] is kind.retryable
    assert 400 <= problem["status"] <= 599
    if problem["status"] == 503:
        assert kind.retryable or kind in {errors.Fenced, errors.Outvoted, errors.NotRepeatable}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.Malformed, 400),
        (errors.NotFound, 404),
        (errors.CellMissing, 404),
        (errors.Conflict, 409),
        (errors.KeyErased, 409),
        (errors.CellErased, 410),
        (errors.LocationGone, 409),
        (errors.NotReady, 409),
        (errors.TooLarge, 413),
        (errors.UnsupportedMedia, 415),
        (errors.Invalid, 422),
        (errors.NotBuilt, 501),
        (errors.StorageUnavailable, 503),
        (errors.Busy, 503),
        (errors.Corrupt, 500),
    ],
)
def test_statuses_are_the_contract_s(kind, status):
    """One table, by class; a subclass has its parent's unless it has its own."""
    assert kind_of(made(kind)).status == status


def test_members_tell_what_to_do():
    """Which field is wrong; where to go on."""
    assert problem_of(made(Invalid))["field"] == "limit"
    gone = problem_of(made(LocationGone))
    assert (gone["head"], gone["resume_at"], gone["generation"]) == (7, 5, 2)


OF_SERVERS = [
    errors.StorageUnavailable,
    errors.BusUnavailable,
    errors.Overloaded,
    errors.Busy,
    errors.Misconfigured,
    errors.BusRefuses,
    errors.Corrupt,
    errors.DuplicateKey,
    errors.NeedsLockedHeads,
]


@pytest.mark.parametrize("kind", OF_SERVERS)
def test_details_name_no_server(kind):
    """What a driver said is in the log. A caller is told only what kind of trouble it is."""
    response._logged_at.clear()
    with capture_logs() as logged:
        shown = [problem_of(kind("a1: (1146, 'no table')")) for _ in range(3)]
    assert "a1" not in json.dumps(shown)
    assert "message names" not in shown[0]["hint"]
    assert [line["error"] for line in logged] == ["a1: (1146, 'no table')"]


def test_a_process_that_has_too_much_to_do_says_so():
    """It isn't a server's fault, and another process may have time. The detail may name a server, the hint doesn't."""
    shown = problem_of(errors.Overloaded("a1: no connection for reads was free"))
    assert shown["detail"] == shown["title"]
    assert "to another process" in shown["hint"]


def test_an_erased_cell_says_by_what_and_when():
    """A read has it as members of the problem, a put as `erased`: its own place stands beside it."""
    by = {"erasure": "00c0ffee00c0ffee", "erased_at": "1970-01-01T00:00:01.000000Z"}
    assert problem_of(made(errors.CellErased)).items() >= by.items()
    assert problem_of(made(errors.KeyErased))["erased"] == by
