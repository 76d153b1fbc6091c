"""Route: one call of the contract: method, path under /v1/{datastore}, handler, and what its documentation says."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import msgspec

from api.http.content import JSON, MSGPACK, NDJSON
from api.http.parameters import Parameter
from api.http.request import Handler

_PROBLEM_MEMBERS = {
    "type": "string",
    "title": "string",
    "status": "integer",
    "detail": "string",
    "retryable": "boolean",
}
_PROBLEM = {
    "description": "A problem (RFC 9457)",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": list(_PROBLEM_MEMBERS),
                "properties": {name: {"type": kind} for name, kind in _PROBLEM_MEMBERS.items()},
            }
        }
    },
}
_PART = re.compile(r"{(\w+)(?::path)?}")


class Route(msgspec.Struct, frozen=True):
    """`payload` is a JSON schema of what the call takes; `batch` says that it takes NDJSON too; `answers` lists the
    statuses that are no problem documents; `media` the types of an answer that may have others than JSON's.
    """

    method: str
    path: str
    handler: Handler
    parameters: tuple[Parameter[Any], ...] = ()
    payload: dict[str, Any] | None = None
    batch: bool = False
    answers: tuple[int, ...] = (200,)
    headers: tuple[Parameter[Any], ...] = ()
    media: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Also its label in the metrics."""
        return getattr(self.handler, "__name__", self.path)

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or self.name).strip()

    def openapi(self, full_path: str) -> dict[str, Any]:
        """What FastAPI can't know of a handler that takes bytes and gives bytes."""
        parts = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PART.findall(full_path)
        ]
        query = [parameter.openapi() for parameter in self.parameters]
        document: dict[str, Any] = {"parameters": parts + query + [header.openapi("header") for header in self.headers]}
        document["responses"] = {str(status): self._answer(status) for status in self.answers}
        document["responses"]["default"] = _PROBLEM
        if self.payload is not None:
            media = (JSON, MSGPACK, NDJSON) if self.batch else (JSON, MSGPACK)
            content = {form.media_type: {"schema": self.payload} for form in media}
            document["requestBody"] = {"required": True, "content": content}
        return document

    def _answer(self, status: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if self.media:
            answer["content"] = {media_type: {"schema": {}} for media_type in self.media}
        return answer
