"""An index query as HTTP parameters: `trip_created_at__gte=moment` becomes `trip_created_at.gte=TIME`. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from schemaless.client.answers import EntriesPage
from schemaless.client.call import Call, Flow
from schemaless.client.problems import error_of
from schemaless.client.requests import time_text
from schemaless.errors import Invalid

OPTIONS = frozenset({"order", "desc", "limit", "cursor", "fields", "include", "verify", "after", "wait", "read_from"})
"""What is not a field. A field of such a name can't be queried, over HTTP neither."""
OPERATORS = frozenset({"ne", "lt", "lte", "gt", "gte"})


def query_index(base: str, name: str, terms: Mapping[str, Any]) -> Flow[EntriesPage]:
    """Terms: fields with or without an operator, and OPTIONS. Raises Invalid."""
    params = {_name(term): _text(term, value) for term, value in terms.items() if value is not None}
    answer = yield Call("GET", f"{index_path(base, name)}/entries", params)
    if not answer.ok:
        raise error_of(answer)
    return answer.read(EntriesPage)


def index_path(base: str, name: str) -> str:
    if not name.replace("_", "").isalnum():  # it becomes part of a path
        raise Invalid("name", "an index name has letters, digits and underscores")
    return f"{base}/indexes/{name}"


def _name(term: str) -> str:
    field, separator, operator = term.rpartition("__")
    return f"{field}.{operator}" if separator and operator in OPERATORS else term


def _text(term: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return time_text(value, term)
    if term in OPTIONS and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, str | int | float | uuid.UUID):
        return str(value)
    raise Invalid(term, f"a query can't compare with {type(value).__name__}")
