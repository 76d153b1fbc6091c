"""Problems of an index over all clusters: a page of them, their exact number, and samples of it for metrics."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from schemaless.cell import RowKey, row_key_text
from schemaless.errors import Invalid, SchemalessError, StorageUnavailable
from schemaless.index.definition import IndexDefinition
from schemaless.runtime.batching import all_or_first_error
from schemaless.runtime.pace import sample_forever
from schemaless.storage import index_problem_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

SAMPLE_PERIOD_S = 5.0
ITEM_BYTES_MAX = 1 << 10  # of one problem, about


class ProblemCursor(msgspec.Struct, frozen=True, array_like=True):
    """The next row of cells, and how many of its problems were shown."""

    number: int
    shard: int = 0
    row_key: str = ""
    shown: int = 0


def read_cursor(text: str, index: IndexDefinition) -> ProblemCursor:
    """Raises Invalid, also for a cursor of another version of the index."""
    try:
        raw = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        cursor = msgspec.convert(raw, ProblemCursor)
        if len(bytes.fromhex(cursor.row_key)) != 16 or not 0 <= cursor.shard < 1 << 32 or cursor.shown < 0:
            raise ValueError("another shape")
    except (ValueError, binascii.Error, RecursionError, msgspec.ValidationError):
        raise Invalid("cursor", "is not a cursor of this API: begin again without it") from None
    if cursor.number != index.number:
        raise Invalid("cursor", "belongs to another version of the index: begin again without it")
    return cursor


def cursor_text(cursor: ProblemCursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


async def problems_page(
    storage: AsyncStorage, datastore: Datastore, index: IndexDefinition, after: ProblemCursor, limit: int
) -> tuple[list[dict[str, Any]], ProblemCursor | None]:
    """Returns problems by shard and row key, and where the next page begins. Raises StorageUnavailable."""
    version = IndexVersion(datastore.name, index.name, index.number)
    begin = RowKey(bytes.fromhex(after.row_key))
    found = await all_or_first_error(
        storage.master(cluster).run(index_problem_table.page, version, after.shard, begin, limit + 1)
        for cluster in datastore.clusters
    )
    rows = sorted((row for part in found for row in part), key=lambda row: (row.shard, row.row_key))[: limit + 1]
    shown: list[dict[str, Any]] = []
    for row in rows:
        first = after.shown if (row.shard, row.row_key) == (after.shard, begin) else 0
        for number, misfit in list(enumerate(row.misfits))[first:]:
            if len(shown) == limit:
                return shown, ProblemCursor(index.number, row.shard, row.row_key.hex(), number)
            view = {"row_key": row_key_text(row.row_key), "column_name": index.field(misfit.field).column}
            shown.append(view | msgspec.to_builtins(misfit))
    return shown, None


async def count_problems(storage: AsyncStorage, datastore: Datastore, timeout_s: float) -> Mapping[IndexVersion, int]:
    """Returns how many values don't fit, by version of an index. Raises StorageUnavailable when a master is away."""
    counts = await all_or_first_error(
        storage.master(cluster).run(index_problem_table.counts_of, datastore.name, timeout_s=timeout_s)
        for cluster in datastore.clusters
    )
    return _sum(counts)


async def counts_or_none(
    storage: AsyncStorage, datastore: Datastore, timeout_s: float
) -> Mapping[IndexVersion, int] | None:
    """Returns what `count_problems` does, or None when a master is away."""
    try:
        return await count_problems(storage, datastore, timeout_s)
    except StorageUnavailable:
        return None


def _sum(counts: list[dict[IndexVersion, int]]) -> dict[IndexVersion, int]:
    found: dict[IndexVersion, int] = {}
    for part in counts:
        for version, count in part.items():
            found[version] = found.get(version, 0) + count
    return found


class ProblemSamples:
    """How many problems the indexes have, as of the last sample. It has what the masters that answer know."""

    def __init__(self, storage: AsyncStorage, *, timeout_s: float) -> None:
        self.counts: Mapping[IndexVersion, int] = {}
        self._storage = storage
        self._timeout_s = timeout_s

    async def run(self) -> None:
        await sample_forever(self.step, SAMPLE_PERIOD_S)

    async def step(self) -> None:
        questions = {
            cluster: self._storage.master(cluster).run(index_problem_table.counts, timeout_s=self._timeout_s)
            for cluster in self._storage.topology.clusters
        }
        answers = await answers_of_all(questions, tolerated=SchemalessError)
        self.counts = _sum(list(answers.found.values()))
