"""The shapes of what clients of cells send and get: cells, puts, batches, logs, conflicts, and problems.

A shape documents what handlers build (api/http/openapi.py). The tests hold every answer to it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

ROW_KEY = "6c9e5b1e-7f5a-4a8f-9c58-0d7b52d1f001"
_BODY = {"fare": 12.5, "status": "completed"}
_AT = "2026-01-31T08:00:00.000000Z"

RowKeyText = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
TimeText = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0)]
RefKeyNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ErasureText = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
DigestText = Annotated[str, Meta(pattern="^[0-7][0-9a-f]{15}$")]
CellBody = Annotated[dict[str, Any], Meta(description="The cell's body: any JSON object.", examples=[_BODY])]


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shape has an example of itself. `UNSET` is a member that isn't always there."""

    example: ClassVar[Any]


class ErasedView(View, frozen=True):
    """Which erasure removed a body, and when."""

    erasure: ErasureText
    erased_at: TimeText


class ProblemView(View, frozen=True):
    """A problem document (RFC 9457): what failed, and whether the same request may be sent again."""

    type: str
    title: str
    status: int
    detail: str
    retryable: bool
    hint: str | UnsetType = UNSET
    field: Annotated[str, Meta(description="The part of the request that is wrong.")] | UnsetType = UNSET
    shard: int | UnsetType = UNSET
    generation: int | UnsetType | None = UNSET
    added_id: int | UnsetType | None = UNSET
    created_at: TimeText | UnsetType | None = UNSET
    location: str | UnsetType | None = UNSET
    head: int | UnsetType = UNSET
    resume_at: Annotated[int, Meta(description="Where the log of the shard can be read on.")] | UnsetType = UNSET
    progress: dict[str, float | None] | UnsetType = UNSET
    erasure: Annotated[ErasureText, Meta(description="Of a cell that is gone: what erased it.")] | UnsetType = UNSET
    erased_at: TimeText | UnsetType = UNSET
    erased: Annotated[ErasedView, Meta(description="Of a put: what erased the body under its key.")] | UnsetType = UNSET

    example: ClassVar[Any] = {
        "type": "urn:schemaless:problem:invalid",
        "title": "A part of the request is wrong",
        "status": 422,
        "detail": "limit must be an integer from 1 to 1000",
        "retryable": False,
        "field": "limit",
    }


class CellView(View, frozen=True):
    """A stored cell. `cause` is there where the put gave one, and `trace` where the put was traced. `buffered`: it
    waits in a buffer while its home is away, and its place isn't known yet. `erased`: its body was erased, and isn't
    there.
    """

    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber
    shard: Count
    generation: Count | None
    added_id: Count | None
    created_at: TimeText | None
    cause: str | UnsetType = UNSET
    trace: str | UnsetType = UNSET
    buffered: bool | UnsetType = UNSET
    body: CellBody | UnsetType = UNSET
    erased: ErasedView | UnsetType = UNSET

    example: ClassVar[Any] = {
        "row_key": ROW_KEY,
        "column_name": "BASE",
        "ref_key": 1,
        "body": _BODY,
        "shard": 12,
        "generation": 1,
        "added_id": 7,
        "created_at": _AT,
    }


class PutView(View, frozen=True):
    """The outcome of a put. The place of a cell that is only buffered isn't known yet, and is null."""

    status: Literal["stored", "already_stored", "buffered"]
    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber
    shard: Count
    generation: Count | None
    added_id: Count | None
    created_at: TimeText | None
    location: Annotated[str | None, Meta(description="SHARD:GENERATION:ADDED_ID.")]
    digest: DigestText | None
    copies: Annotated[int, Meta(ge=0, description="On how many masters the cell is known to be durable.")]

    example: ClassVar[Any] = {
        "status": "stored",
        **{name: value for name, value in CellView.example.items() if name != "body"},
        "location": "12:1:7",
        "digest": "5f0c2a9d4be61378",
        "copies": 2,
    }


class RowView(View, frozen=True):
    """The newest version of each column of a row."""

    row_key: RowKeyText
    cells: dict[str, CellView]

    example: ClassVar[Any] = {"row_key": ROW_KEY, "cells": {"BASE": CellView.example}}


class VersionsView(View, frozen=True):
    """A page of versions. `next` is the first ref_key that isn't in it, null on the last page."""

    cells: list[CellView]
    next: RefKeyNumber | None

    example: ClassVar[Any] = {"cells": [CellView.example], "next": 2}


class BatchPutItem(View, frozen=True):
    """One cell of a batch."""

    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber
    body: CellBody

    example: ClassVar[Any] = {"row_key": ROW_KEY, "column_name": "BASE", "ref_key": 1, "body": _BODY}


class BatchPutRequest(View, frozen=True):
    """A batch to put. As NDJSON it is one cell a line."""

    cells: Annotated[list[BatchPutItem], Meta(min_length=1, max_length=1000)]

    example: ClassVar[Any] = {"cells": [BatchPutItem.example]}


class BatchItemView(View, frozen=True):
    """What became of one cell of a batch: a put's outcome, or a problem."""

    status: Literal["stored", "already_stored", "buffered", "conflict", "error"]
    problem: ProblemView | UnsetType = UNSET
    row_key: RowKeyText | UnsetType = UNSET
    column_name: str | UnsetType = UNSET
    ref_key: RefKeyNumber | UnsetType = UNSET
    shard: Count | UnsetType = UNSET
    generation: Count | UnsetType | None = UNSET
    added_id: Count | UnsetType | None = UNSET
    created_at: TimeText | UnsetType | None = UNSET
    location: str | UnsetType | None = UNSET
    digest: DigestText | UnsetType | None = UNSET
    copies: Count | UnsetType = UNSET


class BatchPutView(View, frozen=True):
    """The results, in the order of the cells."""

    results: list[BatchItemView]

    example: ClassVar[Any] = {
        "results": [PutView.example, {"status": "error", "problem": ProblemView.example}],
    }


class BatchGetItem(View, frozen=True):
    """A key. Without ref_key the newest version of the column is meant."""

    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber | UnsetType | None = UNSET

    example: ClassVar[Any] = {"row_key": ROW_KEY, "column_name": "BASE", "ref_key": 1}


class BatchGetRequest(View, frozen=True):
    """The keys to get. As NDJSON it is one key a line."""

    keys: Annotated[list[BatchGetItem], Meta(min_length=1, max_length=1000)]

    example: ClassVar[Any] = {"keys": [BatchGetItem.example, {"row_key": ROW_KEY, "column_name": "STATUS"}]}


class BatchGetView(View, frozen=True):
    """The cells in the order of the keys, null where there is none."""

    cells: list[CellView | None]

    example: ClassVar[Any] = {"cells": [CellView.example, None]}


class ShardView(View, frozen=True):
    """One shard with its home and its head."""

    shard: Count
    cluster: str
    generation: Count
    head: Count

    example: ClassVar[Any] = {"shard": 12, "cluster": "a", "generation": 1, "head": 1400}


class ShardsView(View, frozen=True):
    """All shards of a datastore."""

    shards: list[ShardView]

    example: ClassVar[Any] = {"shards": [ShardView.example]}


class LogPositionView(View, frozen=True):
    """A location in a log, with the digest of the cell there where it is known."""

    generation: Count
    added_id: Count
    digest: DigestText | None


class LogPageView(View, frozen=True):
    """Cells of a shard after a location. `next` is where the next page begins, and `pending` how many cells remain."""

    cells: list[CellView]
    next: LogPositionView
    head: Count
    generation: Count
    pending: int

    example: ClassVar[Any] = {
        "cells": [CellView.example],
        "next": {"generation": 1, "added_id": 7, "digest": "5f0c2a9d4be61378"},
        "head": 1400,
        "generation": 1,
        "pending": 1393,
    }


class ShardPageView(View, frozen=True):
    """The page of one of several shards, or its problem."""

    cells: list[CellView] | UnsetType = UNSET
    next: LogPositionView | UnsetType = UNSET
    head: Count | UnsetType = UNSET
    generation: Count | UnsetType = UNSET
    pending: int | UnsetType = UNSET
    problem: ProblemView | UnsetType = UNSET


class ShardPagesView(View, frozen=True):
    """Pages by shard."""

    shards: dict[str, ShardPageView]

    example: ClassVar[Any] = {"shards": {"12": LogPageView.example, "99": {"problem": ProblemView.example}}}


class ConflictView(View, frozen=True):
    """A buffered cell that met another body at home.

    A body that can't be decoded is null, and `unreadable` has the reason by the member's name.
    """

    row_key: RowKeyText
    column_name: str
    ref_key: RefKeyNumber
    stored_body: CellBody | None
    buffered_body: CellBody | None
    detected_at: TimeText
    unreadable: dict[str, str] | UnsetType = UNSET


class ConflictsView(View, frozen=True):
    """Conflicts, newest first. `cursor` leads to older ones, and is null on the last page."""

    conflicts: list[ConflictView]
    cursor: str | None

    example: ClassVar[Any] = {
        "conflicts": [
            {
                "row_key": ROW_KEY,
                "column_name": "BASE",
                "ref_key": 1,
                "stored_body": _BODY,
                "buffered_body": {"fare": 13},
                "detected_at": _AT,
            }
        ],
        "cursor": None,
    }
