"""Parameters of an index query: what isn't one is a 422 that names it, and never an error of ours."""

import base64
import json

import pytest

from api.index.query import parse_query
from schemaless.errors import Invalid
from schemaless.index.definition import parse_definition

DRIVER = "11111111-2222-4333-8444-555555555555"
DEFINITION = parse_definition(
    {
        "name": "trips",
        "shard_field": "driver",
        "fields": [
            {"name": "driver", "column": "BASE", "path": "driver", "type": "uuid"},
            {"name": "name", "column": "BASE", "path": "name", "type": "string"},
            {"name": "fare", "column": "BASE", "path": "fare", "type": "decimal"},
        ],
        "stored": [{"name": "note", "column": "BASE", "path": "note", "type": "float"}],
    }
)


def cursor(*named):
    return base64.urlsafe_b64encode(json.dumps(named).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("limit", "0000010000000"),
        ("limit", "000000001" + "1" * 5000),
        ("limit", "1001"),
        ("cursor", cursor("name", False, "\ud800", "00" * 16)),
        ("cursor", cursor("name", False, "a", "00")),
        ("cursor", "\u00e9"),
        ("wait", "1_0"),
        ("order", "note"),
        ("name.", "a"),
        ("fare", "1_0"),
        ("note.lt", "1_0"),
    ],
)
def test_a_wrong_parameter_is_named(name, text):
    """Found by fuzzing: some of these were a 500, others were taken."""
    with pytest.raises(Invalid) as refused:
        parse_query(DEFINITION, 4, [("driver", DRIVER), (name, text)])
    assert refused.value.field == name


def test_an_order_is_a_keyed_field():
    """Any other would sort all entries of the shard field's value."""
    assert parse_query(DEFINITION, 4, [("driver", DRIVER), ("order", "fare")]).selection.order.name == "fare"
