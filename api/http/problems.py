"""Problem: what an error looks like outside (RFC 9457). Owns the one table from error class to HTTP status."""

from __future__ import annotations

from typing import Any

import msgspec

from schemaless.errors import (
    Busy,
    CellMissing,
    Conflict,
    Fenced,
    Invalid,
    InvalidRequest,
    LocationGone,
    Malformed,
    NotBuilt,
    NotFound,
    NotReady,
    SchemalessError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)

RETRY_AFTER_S = 1
TYPE_PREFIX = "urn:schemaless:problem:"


class ProblemKind(msgspec.Struct, frozen=True):
    """How a class of errors is shown; `name` completes the problem's `type`."""

    status: int
    name: str
    title: str


KINDS: dict[type[BaseException], ProblemKind] = {
    Malformed: ProblemKind(400, "malformed", "The payload can't be parsed"),
    Invalid: ProblemKind(422, "invalid", "A part of the request is wrong"),
    TooLarge: ProblemKind(413, "too-large", "The request is too large"),
    UnsupportedMedia: ProblemKind(415, "unsupported-media-type", "The media type is not known here"),
    InvalidRequest: ProblemKind(400, "invalid-request", "The request is wrong"),
    CellMissing: ProblemKind(404, "cell-missing", "There is no such cell"),
    NotFound: ProblemKind(404, "not-found", "There is nothing of that name"),
    Conflict: ProblemKind(409, "conflict", "Another body stands under that key"),
    LocationGone: ProblemKind(409, "location-gone", "The location can't be read from"),
    NotReady: ProblemKind(409, "not-ready", "It is not ready to answer yet"),
    NotBuilt: ProblemKind(501, "not-built", "In the contract, not built yet"),
    Unavailable: ProblemKind(503, "unavailable", "Something needed is away"),
    Busy: ProblemKind(503, "busy", "The database gave way to other work"),
    Fenced: ProblemKind(503, "fenced", "Another process has taken over"),
    SchemalessError: ProblemKind(500, "internal", "The server is at fault"),
}


def kind_of(error: SchemalessError) -> ProblemKind:
    """The kind of the nearest class in the tree."""
    return next(KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)


def problem_of(error: SchemalessError) -> dict[str, Any]:
    """The members of an error's problem document."""
    kind = kind_of(error)
    document = problem(kind, str(error), retryable=error.retryable)
    if error.hint:
        document["hint"] = error.hint
    return document | _members(error)


def problem(kind: ProblemKind, detail: str, *, retryable: bool = False) -> dict[str, Any]:
    return {
        "type": TYPE_PREFIX + kind.name,
        "title": kind.title,
        "status": kind.status,
        "detail": detail or kind.title,
        "retryable": retryable,
    }


def _members(error: SchemalessError) -> dict[str, Any]:
    if isinstance(error, Invalid):
        return {"field": error.field}
    if isinstance(error, LocationGone):
        return {"head": error.head, "resume_at": error.resume_at, "generation": error.generation}
    return {}
