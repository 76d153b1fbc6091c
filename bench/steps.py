"""The longest steps of one request of 16 MiB: what the event loop does between two turns of other requests (I14)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from api.http.content import JSON, MSGPACK, Format
from api.routes.cells import split_puts
from bench.figures import Figure, Values, at_most
from schemaless.codec import BODY_BYTES_MAX, decode_body

STEP_MS_MAX = 50.0
_BATCH_BYTES = 16 << 20
_ROUNDS = 5
_KEY = {"row_key": "6c9e5b1e-7f5a-4a8f-9c58-0d7b52d1f001", "column_name": "BASE", "ref_key": 1}
_MEMBERS: dict[str, Any] = {
    "empty arrays": [],
    "objects": {"a": "", "b": "", "c": "", "d": ""},
    "floats": 1e9,
    "texts of brackets": "[",
    "texts of letters": "\u0440",  # in MessagePack they look like arrays and objects
}


def measure() -> list[Figure]:
    """Returns the CPU time of the longest step of each kind, for bodies that cost much."""
    rows = []
    gc.collect()
    gc.freeze()  # as the API does when it starts: collections would look at all that this program has loaded
    for name, member in _MEMBERS.items():
        for form in (JSON, MSGPACK):
            body = _body(member, form)
            stored = form.parse_body(body)
            value = decode_body(stored)
            steps: dict[str, Callable[[], object]] = {
                "split a batch": partial(split_puts, _batch(body, form), form),
                "count a piece of a body": lambda form=form, body=body: next(iter(form.count_first(body)), None),  # type: ignore[misc]
                "parse a body": partial(form.parse_body, body),
                "show a cell": partial(form.encode_one, value),
                "read a stored body": partial(decode_body, stored),
            }
            longest = max(((_milliseconds(step), what) for what, step in steps.items()), key=lambda one: one[0].median)
            what = f"{name} as {form.media_type}: {longest[1]}"
            rows.append(Figure(what, "ms", longest[0], at_most(STEP_MS_MAX)))
    return rows


def _body(member: Any, form: Format) -> bytes:
    """Returns the largest body of such members, with as many containers as one may have."""
    count = (BODY_BYTES_MAX - 64) // (len(form.encode_one([member, member])) - len(form.encode_one([member])))
    if isinstance(member, list | dict):
        count = min(count, 49_000)
    return form.encode_one({"a": [member] * count})


def _batch(body: bytes, form: Format) -> bytes:
    item = form.encode_one({**_KEY, "body": msgspec.Raw(body)})
    return form.encode_one({"cells": [msgspec.Raw(item)] * min(1000, (_BATCH_BYTES - 64) // (len(item) + 1))})


def _milliseconds(step: Callable[[], object]) -> Values:
    found = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        step()
        found.append((time.process_time() - began) * 1000)
    return Values(tuple(found))
