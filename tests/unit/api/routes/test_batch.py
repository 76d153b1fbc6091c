"""The items of a batch, parsed without servers."""

import gc
import weakref

import pytest

from api.http.content import JSON, MSGPACK, NDJSON
from api.routes.cells import parse_puts
from schemaless.cell import Cell
from schemaless.errors import TooLarge

CELL = {"row_key": "6c9e5b1e-7f5a-4a8f-9c58-0d7b52d1f001", "column_name": "BASE", "ref_key": 1, "body": {}}
DEEP = {"a": 1}
for _ in range(70):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize("form", [JSON, MSGPACK], ids=lambda form: form.media_type)
@pytest.mark.parametrize(
    "wrong",
    [
        {"body": {"a": [[]] * 50_001}},
        {"body": DEEP},
        {"body": 7},
        {"row_key": "none"},
        {"ref_key": "1"},
        {"foreign": 1},
    ],
    ids=["containers", "depth", "no object", "row key", "ref key", "member"],
)
async def test_the_error_of_an_item_holds_no_payload(form, wrong):
    """It would be in a cycle with its frames, and those of 16 MiB each fill a process before a collection (I14)."""
    payload = form.encode({"cells": [{**CELL, **wrong}, CELL]})
    gc.disable()
    try:
        error, _ = await parse_puts(payload, form)
        assert isinstance(error, Exception)
        kept = weakref.ref(error)
        del error, _
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", [JSON, MSGPACK, NDJSON], ids=["json", "msgpack", "ndjson"])
async def test_the_bound_of_a_body_binds_items(form):
    """SCHEMALESS_API_BODY_BYTES_MAX is one bound for a put, a POST and the items of a batch."""
    cells = [{**CELL, "body": {"a": "x" * size}} for size in (80, 120)]
    payload = form.encode(cells if form is NDJSON else {"cells": cells})
    small, large = await parse_puts(payload, form, body_bytes_max=100)
    assert isinstance(small, Cell)
    assert isinstance(large, TooLarge)
    assert "at most 100 bytes" in str(large)
