"""The shapes of erasures: what is ordered, and where bodies were found, removed, or remain."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemaless.access import Scope
from schemaless.cell import REF_KEY_MAX, ColumnName, RefKey, RowKey, parse_column_name, parse_row_key, row_key_text
from schemaless.contract.call import ApiCall, within
from schemaless.contract.cells import ROW_KEY, Count, ErasureText, RefKeyNumber, RowKeyText, TimeText, View
from schemaless.contract.parameters import FLAG, Parameter, parse_flag
from schemaless.errors import Invalid

REASON_CHARACTERS_MAX = 1000
_ID = "5a1c0ffee00c0ffe"
_AT = "2026-01-31T08:00:00.000000Z"


class EraseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Bodies to erase: of a row, of a column of it, or of one cell. `reason` is kept, so put no name into it.

    `dry_run` only counts.
    """

    row_key: RowKeyText
    reason: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": REASON_CHARACTERS_MAX})]
    column_name: str | None = None
    ref_key: Annotated[int, within(0, REF_KEY_MAX)] | None = None
    dry_run: bool = False

    example: ClassVar[Any] = {"row_key": ROW_KEY, "column_name": "BASE", "reason": "request 4711", "dry_run": True}


class ErasureTarget(NamedTuple):
    """What an erasure means. Without `ref_key` all versions, without `column_name` all columns."""

    row_key: RowKey
    column_name: ColumnName | None
    ref_key: RefKey | None

    def __str__(self) -> str:
        parts = (row_key_text(self.row_key), self.column_name, self.ref_key)
        return "/".join(str(part) for part in parts if part is not None)


def target_of(wanted: EraseRequest) -> ErasureTarget:
    """Raises Invalid for a wrong name, or a reason that says nothing or too much."""
    row_key = parse_row_key(wanted.row_key)
    column_name = None if wanted.column_name is None else parse_column_name(wanted.column_name)
    if column_name is None and wanted.ref_key is not None:
        raise Invalid("ref_key", "is that of a cell in a column: give column_name, too")
    if not 1 <= len(wanted.reason.strip()) <= REASON_CHARACTERS_MAX:
        raise Invalid("reason", f"must have 1 to {REASON_CHARACTERS_MAX} characters")
    return ErasureTarget(row_key, column_name, None if wanted.ref_key is None else RefKey(wanted.ref_key))


class EraseView(View, frozen=True):
    """How many cells an erasure means, and its id. `job` is the same. Both are null for a dry run."""

    erasure: ErasureText | None
    matched: Count
    job: ErasureText | None

    example: ClassVar[Any] = {"erasure": _ID, "matched": 3, "job": _ID}


class ErasurePlaceView(View, frozen=True):
    """A place where bodies were looked for. Where `found` is more than `removed`, bodies are still there:
    `remains_until` is when they go by themselves, where that is known. `not_searched` says why nobody looked.
    """

    place: str
    found: Count
    removed: Count
    remains_until: TimeText | UnsetType = UNSET
    not_searched: str | UnsetType = UNSET


class ErasureView(View, frozen=True):
    """An erasure, and what came of it place by place. Without ref_key all versions are meant, without column_name all
    columns.
    """

    erasure: ErasureText
    state: Literal["running", "complete"]
    row_key: RowKeyText
    column_name: str | None
    ref_key: RefKeyNumber | None
    reason: str
    who: str
    ordered_at: TimeText
    places: list[ErasurePlaceView]

    example: ClassVar[Any] = {
        "erasure": _ID,
        "state": "complete",
        "row_key": ROW_KEY,
        "column_name": "BASE",
        "ref_key": None,
        "reason": "request 4711",
        "who": "ada",
        "ordered_at": _AT,
        "places": [
            {"place": "home", "found": 3, "removed": 3},
            {"place": "backups", "found": 0, "removed": 0, "not_searched": "nobody knows where they are"},
        ],
    }


VERIFY: Parameter[bool] = Parameter(
    "verify", parse_flag, False, "true: searches again, and the places say what was found now.", FLAG
)

ERASE = ApiCall(
    method="POST",
    path="/erase",
    scope=Scope.ADMIN,
    says="Erases bodies for good: of a row, of a column of it, or of one cell. Keys, places and times stay.",
    payload=EraseRequest,
    answers={202: EraseView, 200: EraseView},
)
ERASURE = ApiCall(
    method="GET",
    path="/erasures/{erasure}",
    scope=Scope.READ,
    says="What came of an erasure, place by place, also those where bodies remain or that can't be searched.",
    parameters=(VERIFY,),
    answers={200: ErasureView},
)
