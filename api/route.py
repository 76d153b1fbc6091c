"""Route: one call of the contract: method, path under /v1/{datastore}, handler, and what its documentation says."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from api.call import Handler
from api.parameters import Parameter

_PART = re.compile(r"{(\w+)(?::path)?}")


class Route(msgspec.Struct, frozen=True):
    """`payload` is a JSON schema of what the call takes; `batch` says that it takes NDJSON too."""

    method: str
    path: str
    handler: Handler
    parameters: tuple[Parameter[Any], ...] = ()
    payload: dict[str, Any] | None = None
    batch: bool = False

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
        document: dict[str, Any] = {"parameters": parts + [parameter.openapi() for parameter in self.parameters]}
        if self.payload is not None:
            media = ["application/json", "application/msgpack", *(["application/x-ndjson"] if self.batch else [])]
            content = {media_type: {"schema": self.payload} for media_type in media}
            document["requestBody"] = {"required": True, "content": content}
        return document
