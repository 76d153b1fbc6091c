"""The items of a batch, parsed without servers."""

import gc
import weakref

import pytest

from api.http.content import JSON, MSGPACK
from api.routes.batch import parse_puts

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
