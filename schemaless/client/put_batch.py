"""Batch puts: many cells as requests within the server's limits, with retries for items that failed for now.

The server answers every item by itself. An item that may succeed later is sent again in a bounded number of rounds, so
every result is final. Items keep their order in a batch: a repeated key then gets the same result as alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from schemaless.cell import PutStatus, parse_column_name, parse_ref_key, row_key_of, row_key_text
from schemaless.client.answers import PutAnswer, PutFailure, PutResult
from schemaless.client.exchange import ClientRequest, Flow, error_of_problem
from schemaless.client.json_body import encode_json_body
from schemaless.client.requests import Key, Requests, encode
from schemaless.errors import SchemalessError, TooLarge, Unavailable
from schemaless.runtime.batching import chunks

ITEMS_MAX = 1000
BYTES_MAX = 15 << 20  # the server takes 16 MiB, and the frame around the items needs a little
ROUNDS_MAX = 6
ROUND_PAUSE_S = 0.25

_FRAME = b"\x81\xa5cells\xdd"  # MessagePack: a map of one, "cells", an array with a length of four bytes


class NewCell(NamedTuple):
    """A cell to be written. A plain tuple with the same values is accepted, too."""

    row_key: Key
    column_name: str
    ref_key: int
    body: Mapping[str, Any]


class _Item(msgspec.Struct, frozen=True):
    """One result of the server: a put's answer, or a problem."""

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


def put_cells(
    requests: Requests, cells: Iterable[NewCell | tuple[Key, str, int, Mapping[str, Any]]]
) -> Flow[list[PutResult]]:
    """Puts cells, and returns results in their order. Raises when a whole request failed, whose results are unknown."""
    results: list[PutResult | None] = []
    wanted: list[NewCell] = []
    items: list[bytes] = []
    for cell in cells:
        new = NewCell(*cell)
        try:
            item = _item(new)
        except SchemalessError as error:  # its own result: the other cells are put
            results.append(PutFailure("error", error))
        else:
            results.append(None)
            wanted.append(new)
            items.append(item)
    found: list[PutResult] = []
    for part in chunks(items, count_max=ITEMS_MAX, bytes_max=BYTES_MAX, size_bytes=len):
        found += yield from _put_items(requests, wanted[len(found) : len(found) + len(part)], part)
    of_sent = iter(found)
    return [next(of_sent) if result is None else result for result in results]


def _item(cell: NewCell) -> bytes:
    """Raises Invalid or TooLarge for a cell that can't be sent."""
    item = encode(
        {
            "row_key": row_key_text(row_key_of(cell.row_key)),
            "column_name": parse_column_name(cell.column_name),
            "ref_key": parse_ref_key(cell.ref_key),
            "body": msgspec.Raw(encode_json_body(cell.body)),
        }
    )
    if len(item) > BYTES_MAX:  # alone it would be a request that is refused as a whole
        raise TooLarge(f"a cell of {len(item)} bytes is more than a request may have, which is {BYTES_MAX}")
    return item


def _put_items(requests: Requests, cells: Sequence[NewCell], items: Sequence[bytes]) -> Flow[list[PutResult]]:
    """Puts the items of one request, in rounds."""
    results: dict[int, PutResult] = {}
    left = list(range(len(items)))
    for number in range(ROUNDS_MAX):
        content = _FRAME + len(left).to_bytes(4, "big") + b"".join(items[index] for index in left)
        response = yield ClientRequest(
            "POST",
            f"{requests.base}/batch/put",
            headers=requests.put_headers,
            content=content,
            delay_s=number * ROUND_PAUSE_S,
        )
        found = response.good().read(_Results).results
        if len(found) != len(left):
            raise Unavailable(f"{len(left)} cells were sent and {len(found)} results came back")
        again = []
        for index, item in zip(left, found, strict=True):
            results[index] = result = _result(cells[index], item)
            if isinstance(result, PutFailure) and result.error.retryable:
                again.append(index)
        left = again
        if not left:
            break
    return [results[index] for index in range(len(items))]


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
