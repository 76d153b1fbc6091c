"""Problem documents (RFC 9457) as errors of our tree. Foreign answers, of a proxy say, become errors too (I15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemaless.client.call import Answer
from schemaless.errors import (
    Conflict,
    Invalid,
    LocationGone,
    Malformed,
    Misconfigured,
    NotBuilt,
    NotFound,
    NotReady,
    SchemalessError,
    TooLarge,
    Unavailable,
)

Problem = Mapping[str, Any]

_BY_STATUS: dict[int, type[SchemalessError]] = {
    400: Malformed,
    401: Misconfigured,
    403: Misconfigured,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    415: Malformed,
    422: Malformed,
    501: NotBuilt,
}


def error_of(answer: Answer) -> SchemalessError:
    """The error that an answer which is no success stands for."""
    return error_of_problem(problem_of(answer), answer.status)


def error_of_problem(problem: Problem, status: int | None = None) -> SchemalessError:
    """Also for the problem of one item of a batch, which carries its own status."""
    status = problem.get("status", status or 500)
    detail = str(problem.get("detail") or problem.get("title") or f"status {status}")
    if status == 422 and "field" in problem:
        return Invalid(str(problem["field"]), _without_field(detail, str(problem["field"])))
    if status == 409:
        return _conflict(problem, detail)
    return _BY_STATUS.get(status, Unavailable)(detail)


def problem_of(answer: Answer) -> Problem:
    """The members of a problem document; of anything else its first words."""
    try:
        return answer.members()
    except Unavailable:
        text = answer.content[:200].decode(errors="replace")
        return {"status": answer.status, "detail": f"status {answer.status}: {text}"}


def is_retryable(answer: Answer) -> bool:
    """What the problem says; yes when it says nothing."""
    return bool(problem_of(answer).get("retryable", True))


def _conflict(problem: Problem, detail: str) -> SchemalessError:
    if "resume_at" in problem:
        return LocationGone(
            detail,
            head=_int(problem, "head"),
            resume_at=_int(problem, "resume_at"),
            generation=_int(problem, "generation"),
        )
    return NotReady(detail) if problem.get("retryable") else Conflict(detail)


def _int(problem: Problem, name: str) -> int:
    """Of an added_id, or of a location {"generation", "added_id"}."""
    value = problem.get(name, 0)
    if isinstance(value, Mapping):
        value = value.get("added_id", 0)
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        return 0


def _without_field(detail: str, field: str) -> str:
    return detail.removeprefix(f"{field}: ")
