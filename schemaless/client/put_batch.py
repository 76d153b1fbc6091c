"""Batch puts: many cells as requests within the server's limits, and another try for those items that failed for now.

The server answers every item by itself. An item that may succeed later is sent again, up to a bound on rounds, so the
results hold only what is final. Items keep their order in a batch: a repeated key then gives the same answer as alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from schemaless.batching import chunks
from schemaless.cell import PutStatus, row_key_of
from schemaless.client.answers import PutAnswer, PutFailure, PutResult
from schemaless.client.call import MSGPACK, Answer, Call, Flow
from schemaless.client.problems import error_of, error_of_problem
from schemaless.client.requests import Key, encode
from schemaless.errors import Unavailable

ITEMS_MAX = 1000
BYTES_MAX = 15 << 20  # the server takes 16 MiB; what frames the items needs a little
ROUNDS_MAX = 6
ROUND_PAUSE_S = 0.25

_HEADERS = {"content-type": MSGPACK}
_FRAME = b"\x81\xa5cells\xdd"  # MessagePack: a map of one, "cells", an array with a length of four bytes


class NewCell(NamedTuple):
    """A cell to be written; a plain tuple of the same does as well."""

    row_key: Key
    column_name: str
    ref_key: int
    body: Mapping[str, Any]


class _Item(msgspec.Struct, frozen=True):
    """One result as the server gives it: a put's answer, or a problem."""

    status: str
    shard: int = 0
    copies: int = 0
    generation: int | None = None
    added_id: int | None = None
    created_at: datetime | None = None
    location: str | None = None
    problem: dict[str, Any] | None = None


class _Results(msgspec.Struct, frozen=True):
    results: list[_Item]


def put_cells(base: str, cells: Iterable[NewCell | tuple[Key, str, int, Mapping[str, Any]]]) -> Flow[list[PutResult]]:
    """Results in the order of the cells. Raises when a whole request failed: then nothing is known of its cells."""
    wanted = [NewCell(*cell) for cell in cells]
    results: list[PutResult] = []
    encoded = [_encode_item(cell) for cell in wanted]
    for items in chunks(encoded, count_max=ITEMS_MAX, bytes_max=BYTES_MAX, size_bytes=len):
        cells_of_items = wanted[len(results) : len(results) + len(items)]
        results += yield from _put_items(base, cells_of_items, items)
    return results


def _put_items(base: str, cells: Sequence[NewCell], items: Sequence[bytes]) -> Flow[list[PutResult]]:
    """One request's worth, in rounds."""
    results: dict[int, PutResult] = {}
    left = list(range(len(items)))
    for number in range(ROUNDS_MAX):
        answer = yield _call(base, [items[index] for index in left], delay_s=number * ROUND_PAUSE_S)
        results |= {index: _result(cells[index], item) for index, item in zip(left, _items(answer, left), strict=True)}
        left = [index for index in left if _may_succeed_later(results[index])]
        if not left:
            break
    return [results[index] for index in range(len(items))]


def _call(base: str, items: Sequence[bytes], delay_s: float) -> Call:
    content = _FRAME + len(items).to_bytes(4, "big") + b"".join(items)
    return Call("POST", f"{base}/batch/put", headers=_HEADERS, content=content, delay_s=delay_s)


def _encode_item(cell: NewCell) -> bytes:
    return encode(
        {
            "row_key": str(cell.row_key),
            "column_name": cell.column_name,
            "ref_key": cell.ref_key,
            "body": cell.body,
        }
    )


def _items(answer: Answer, sent: Sequence[int]) -> list[_Item]:
    if not answer.ok:
        raise error_of(answer)
    items = answer.read(_Results).results
    if len(items) != len(sent):
        raise Unavailable(f"{len(sent)} cells were sent and {len(items)} results came back")
    return items


def _result(cell: NewCell, item: _Item) -> PutResult:
    if item.problem is not None:
        return PutFailure("conflict" if item.status == "conflict" else "error", error_of_problem(item.problem))
    return PutAnswer(
        row_key=uuid.UUID(bytes=row_key_of(cell.row_key)),
        column_name=cell.column_name,
        ref_key=cell.ref_key,
        status=PutStatus(item.status),
        shard=item.shard,
        copies=item.copies,
        generation=item.generation,
        added_id=item.added_id,
        created_at=item.created_at,
        location=item.location,
    )


def _may_succeed_later(result: PutResult) -> bool:
    return isinstance(result, PutFailure) and result.error.retryable
