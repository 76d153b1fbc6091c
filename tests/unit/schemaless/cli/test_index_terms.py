"""Terms of `schemaless index query` become those of the Python client. An index is shown once, with its versions."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from schemaless import Client
from schemaless.__main__ import app
from schemaless.cli import targets
from schemaless.cli.indexes import _parse_terms, _print_index
from schemaless.errors import Invalid


def test_terms_are_named_as_python_names_them():
    """A term that is given several times has several values, and so have `.in` and `.between`."""
    terms = ["city=a,b", "city=c", "at.gte=1", "fare.between=1,2", "kind.in=x,y", "gone.isnull=true", "order=at"]
    assert _parse_terms(terms) == {
        "city__in": ["a,b", "c"],
        "at__gte": "1",
        "fare__between": ["1", "2"],
        "kind__in": ["x", "y"],
        "gone__isnull": "true",
        "order": "at",
    }


def test_a_term_without_a_value_is_refused():
    """It is named."""
    with pytest.raises(Invalid, match="FIELD=VALUE"):
        _parse_terms(["city"])


@pytest.mark.parametrize("term", ["at.gte=1", "kind.in=x"])
def test_a_comparison_that_is_given_twice_is_refused(term):
    """Only equality takes several values: the first comparison must not vanish without a word."""
    with pytest.raises(Invalid, match="twice"):
        _parse_terms([term, term])


def test_an_index_whose_only_version_is_deleted_is_shown_once(capsys):
    """A version that goes beside the one that answers has a line of its own."""
    going = {"number": 1, "role": "deleting", "state": "deleting", "what_to_do": "bring b back"}
    _print_index(
        {"name": "by_city", "number": 1, "state": "deleting", "what_to_do": "bring b back", "versions": [going]}
    )
    assert capsys.readouterr().out.splitlines() == ["by_city deleting", "  bring b back"]
    answers = {"number": 2, "role": "answers", "state": "active"}
    _print_index({"name": "by_city", "number": 2, "state": "active", "versions": [going, answers]})
    assert capsys.readouterr().out.splitlines() == [
        "by_city active: version 2",
        "  deleting deleting: version 1",
        "    bring b back",
    ]


ROW, OTHER = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11", "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a12"
CELL = {
    "row_key": ROW,
    "column_name": "BASE",
    "ref_key": 3,
    "body": {"city": "x"},
    "shard": 7,
    "generation": 1,
    "added_id": 42,
    "created_at": "2026-01-31T00:00:00.000001Z",
}
UNREADABLE = {"row_key": OTHER, "column_name": "STATUS", "ref_key": 9, "reason": "a stored body can't be decoded"}
FRESHNESS = {"behind_cells": 0, "behind_seconds": 0.0, "complete_until": "2026-01-31T00:00:00.000001Z"}
PAGE = {
    "entries": [{"row_key": ROW, "fields": {"city": "x"}, "cells": {"BASE": CELL, "STATUS": None}, "element": 2}],
    "cursor": "more",
    "version": 3,
    "freshness": FRESHNESS,
}


@pytest.fixture
def query(monkeypatch):
    """Runs `schemaless index query` on an API that answers a page, and gives what it printed."""

    def run(page, *arguments):
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=page))
        client = Client(["http://api"], datastore="mezzanine", transport=transport)
        monkeypatch.setattr(targets, "open_client", lambda hosts, name: client)
        done = CliRunner().invoke(app, ["index", "query", "by_city", "city=x", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    return run


LEFT_OUT = {
    "dropped": 4,
    "damaged": [OTHER],
    "unreadable": [UNREADABLE],
    "overlay": {"cells": 5},
    "waited": 1.5,
    "explain": [{"cluster": "a", "sql": "SELECT 1", "rows_read": 1}],
}


@pytest.mark.parametrize("left_out", [{}, LEFT_OUT])
def test_json_of_a_query_has_what_the_api_says(query, left_out):
    """Nothing of an answer is lost: what is left out and why, the cells of `include`, the number of an element."""
    assert json.loads(query(PAGE | left_out, "--json")) == PAGE | left_out
    plain = PAGE | {"entries": [{"row_key": ROW, "fields": {"city": "x"}}], "cursor": None}
    assert json.loads(query(plain, "--json")) == plain


def test_the_table_of_a_query_names_what_is_left_out(query):
    """Each row with a damaged entry, and each cell that can't be decoded. Cells of `include` have columns."""
    shown = query(PAGE | LEFT_OUT)
    for column in ("element", "city", "BASE", "STATUS", '{"city":"x"}'):
        assert column in shown
    assert "4 entries left out" in shown
    assert f"row {OTHER} left out: an entry of it is damaged" in shown
    assert f"row {OTHER} left out: its cell STATUS 9 can't be read: a stored body can't be decoded" in shown
    assert "left out" not in query(PAGE)
    assert "left out: its cell" in query({**PAGE, "entries": [], "unreadable": [UNREADABLE]})
