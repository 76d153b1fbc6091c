"""The logs of shards over HTTP, for the subscribers' kit: their cells are as the topic would bring them.

A body comes as a value and is encoded again. Its bytes may differ from those in the topic, but the value is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell, microseconds_since_epoch
from schemaless.client.answers import LogPage
from schemaless.client.client import Client
from schemaless.codec import encode_body
from schemaless.errors import LocationGone, SchemalessError
from schemaless.found_cell import FoundCell
from schemaless.location import Location
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.shard_cursor import ProvenPage
from schemaless.subscriber.engine import LogAnswers, ReadLog

_SHARDS_PER_CALL = 1000


class ShardHistory:
    """Reads the logs and the heads of shards. Each call raises Unavailable when no host answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def heads(self) -> dict[int, Location]:
        """Returns the head of every shard."""
        listed = self._client.document("/shards")["shards"]
        return {shard["shard"]: Location(shard["generation"], shard["head"]) for shard in listed}

    def read(self, wanted: ReadLog) -> LogAnswers:
        """Returns the pages that were asked for, or the errors that say where a log continues.

        Of several shards one may be missing: its cluster is away, or there was no room for its page.
        """
        if len(wanted.positions) == 1:
            (at,) = wanted.positions
            try:
                return {at.shard: _proven_page(at, self._client.get_cells_for_shard(at.shard, at, wanted.limit))}
            except LocationGone as gone:
                return {at.shard: gone}
        answers: dict[int, ProvenPage | LocationGone] = {}
        pages = self._client.get_cells_for_shards({at.shard: at for at in wanted.positions}, wanted.limit)
        for at in wanted.positions:
            page = pages[at.shard]
            if isinstance(page, LocationGone):
                answers[at.shard] = page
            elif isinstance(page, SchemalessError):
                if not page.retryable:
                    raise page
            elif page.cells or not page.pending:
                answers[at.shard] = _proven_page(at, page)
        return answers

    def since(self, shards: Sequence[int], moment: datetime) -> dict[int, Location]:
        """Returns by shard the location after which cells were created at or after a moment."""
        found: dict[int, Location] = {}
        for some in chunks(shards, count_max=_SHARDS_PER_CALL):
            for shard, page in self._client.get_cells_for_shards(dict.fromkeys(some, moment), limit=1).items():
                if isinstance(page, SchemalessError):
                    raise page
                first = next(iter(page), None)
                found[shard] = page.location if first is None else Location(first.generation, first.added_id - 1)
        return found


def _proven_page(at: Position, page: LogPage) -> ProvenPage:
    cells = [stored_cell(cell) for cell in page]
    digest = page.position.digest if page.location.added_id == at.added_id else None
    return ProvenPage(cells, Location(page.generation or page.next.generation, page.head), digest)


def stored_cell(found: FoundCell) -> StoredCell:
    """Returns a cell of the API as the topic would bring it."""
    return StoredCell(
        row_key=RowKey(found.row_key.bytes),
        column_name=ColumnName(found.column_name),
        ref_key=RefKey(found.ref_key),
        shard=found.shard,
        generation=found.generation,
        added_id=found.added_id,
        created_at=microseconds_since_epoch(found.created_at),
        body=encode_body(found.body, check_shape=False),
        cause=found.cause,
    )
