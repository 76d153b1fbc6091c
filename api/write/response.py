"""The outcomes of puts as HTTP shows them: as the response to a request, and as an item of a batch."""

from __future__ import annotations

from typing import Any

from api.http.content import Format
from api.http.response import Response, document_response, ok_response, problem_of, problem_of_put
from api.write.outcome import PutOutcome, PutResult
from schemaless.cell import Placed, PutStatus, created_at_text, row_key_text
from schemaless.errors import Conflict, SchemalessError
from schemaless.location import shard_location_text
from schemaless.position import digest_text, insertion_digest

HTTP_STATUS = {PutStatus.STORED: 201, PutStatus.ALREADY_STORED: 200, PutStatus.BUFFERED: 202}
REPLAYED = (b"idempotency-replayed", b"true")


def put_answer(result: PutResult, form: Format) -> Response:
    """Returns 201, 200 or 202 with the cell's place, 409 for a conflict, or the problem of an error."""
    if isinstance(result, SchemalessError):
        return document_response(problem_of_put(result), *result.headers)
    if result.status is PutStatus.CONFLICT:
        return document_response(conflict_problem(result))
    headers = (REPLAYED,) if result.replayed else ()
    return ok_response(form, put_view(result), *headers, status=HTTP_STATUS[result.status])


def item_view(result: PutResult) -> dict[str, Any]:
    """Returns what `put_answer` shows, as an item of a batch."""
    if isinstance(result, SchemalessError):
        return {"status": "error", "problem": problem_of_put(result)}
    if result.status is PutStatus.CONFLICT:
        return {"status": "conflict", **_key_view(result), "problem": conflict_problem(result)}
    return put_view(result)


def put_view(outcome: PutOutcome) -> dict[str, Any]:
    """Returns the members of a put's answer. What is not known yet of a buffered cell is null."""
    return {
        "status": outcome.status,
        **_key_view(outcome),
        "shard": outcome.shard,
        **_place_view(outcome.placed),
        "digest": _digest(outcome),
        "copies": outcome.copies,
    }


def conflict_problem(outcome: PutOutcome) -> dict[str, Any]:
    """Returns the problem with the place of the cell that is stored, null while that one is only buffered."""
    where = "is stored" if outcome.placed else "is buffered"
    document = problem_of(Conflict(f"another body {where} under {outcome.key}"))
    return {**document, "shard": outcome.shard, **_place_view(outcome.placed)}


def _key_view(outcome: PutOutcome) -> dict[str, Any]:
    key = outcome.key
    return {"row_key": row_key_text(key.row_key), "column_name": key.column_name, "ref_key": key.ref_key}


def _digest(outcome: PutOutcome) -> str | None:
    """Returns the digest with which the log can be read after the cell, None while its place is not known (I16)."""
    key, placed = outcome.key, outcome.placed
    if placed is None:
        return None
    return digest_text(
        insertion_digest(
            placed.generation, placed.added_id, placed.created_at, key.row_key, key.column_name, key.ref_key
        )
    )


def _place_view(placed: Placed | None) -> dict[str, Any]:
    if placed is None:
        return {"generation": None, "added_id": None, "created_at": None, "location": None}
    return {
        "generation": placed.generation,
        "added_id": placed.added_id,
        "created_at": created_at_text(placed.created_at),
        "location": shard_location_text(placed.shard, placed.generation, placed.added_id),
    }
