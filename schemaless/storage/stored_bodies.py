"""Stored bodies compared with those of a put that met an existing key (I1), within bounds of what is read (I14).

Equal bytes are recognised by length and SHA-256 on the server. A body is read only where the bytes differ and could
still be the same JSON value, at most once for each key, and never while heads are locked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from schemaless.cell import CellKey
from schemaless.codec import BodyComparison, may_be_same_body
from schemaless.errors import Corrupt
from schemaless.runtime.batching import chunks
from schemaless.storage.operation import PAUSE, Operation
from schemaless.storage.sql import Script, commas

if TYPE_CHECKING:
    from schemaless.storage.entity_table import ShardCell

_SCRIPT_BYTES_MAX = 4 << 20
"""The most bytes of bodies that one script reads, beyond the first."""
_STEP_BYTES_MAX = 256 << 10
"""Bytes of bodies that are compared without a pause."""


Select = Callable[["ShardCell", str], Script]
"""Returns the statement that selects something of the row under a cell's key."""


def same_as_stored(cells: Sequence[ShardCell], known: Mapping[CellKey, bytes], select: Select) -> Operation[list[bool]]:
    """Returns of each cell, in order, whether the body that is stored under its key is the same JSON value.

    All keys exist. `known` has the stored bodies that the caller knows: those are not read.
    """
    verdicts: dict[tuple[CellKey, bytes], bool] = {}
    asked: dict[CellKey, list[ShardCell]] = {}
    for cell in cells:
        if cell.key not in known:
            asked.setdefault(cell.key, []).append(cell)
    lengths: dict[CellKey, int] = {}
    if asked:
        results = yield ";".join(select(group[0], _length_and_digest(group)) for group in asked.values())
        for (key, group), result in zip(asked.items(), results, strict=True):
            if not result.rows:
                raise Corrupt(f"{key} was there, and is not any more")
            length, digest = result.rows[0]
            for body in {cell.body for cell in group}:
                if len(body) == length and sha256(body).digest() == digest:
                    verdicts[key, body] = True
                elif may_be_same_body(body, length):
                    lengths[key] = length
                else:
                    verdicts[key, body] = False
    unequal = [cell for cell in cells if (cell.key, cell.body) not in verdicts]
    yield from _compare([cell for cell in unequal if cell.key in known], known, verdicts)
    to_read = [asked[key][0] for key in lengths]
    for some in chunks(to_read, bytes_max=_SCRIPT_BYTES_MAX, size_bytes=lambda cell: lengths[cell.key]):
        results = yield ";".join(select(cell, "body") for cell in some)
        stored = {cell.key: result.rows[0][0] for cell, result in zip(some, results, strict=True)}
        yield from _compare([cell for cell in unequal if cell.key in stored], stored, verdicts)
    return [verdicts[cell.key, cell.body] for cell in cells]


def _compare(
    cells: Sequence[ShardCell], stored: Mapping[CellKey, bytes], verdicts: dict[tuple[CellKey, bytes], bool]
) -> Operation[None]:
    """Decodes each stored body at most once, and each given one at most once."""
    comparisons: dict[CellKey, BodyComparison] = {}
    compared = 0
    for cell in cells:
        if (cell.key, cell.body) in verdicts:
            continue
        if cell.key not in comparisons:
            comparisons[cell.key] = BodyComparison(stored[cell.key])
        comparison = comparisons[cell.key]
        verdicts[cell.key, cell.body] = comparison.same(cell.body)
        compared += comparison.compared_bytes
        if compared >= _STEP_BYTES_MAX:
            compared = 0
            yield PAUSE


def _length_and_digest(cells: Sequence[ShardCell]) -> str:
    """Names the length of a stored body, and its digest if one of the given bodies is as long."""
    lengths = commas([str(length) for length in {len(cell.body) for cell in cells}])
    return f"LENGTH(body), IF(LENGTH(body) IN ({lengths}), UNHEX(SHA2(body, 256)), NULL)"
