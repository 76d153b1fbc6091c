"""Terms of `schemaless index query` become those of the Python client. An index is shown once, with its versions."""

import pytest

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
