"""ShardHistory: the logs of shards over HTTP, for the subscribers' kit: the cells as a topic would bring them.

A body comes as a value and is stored again: its bytes may differ from those in the topic, the value is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell
from schemaless.client.answers import FoundCell, LogPage
from schemaless.client.client import Client
from schemaless.codec import encode_body
from schemaless.errors import LocationGone, SchemalessError
from schemaless.location import Location
from schemaless.subscriber.engine import HistoryPage, LogAnswer, ReadLog

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHARDS_AT_ONCE = 1000  # of one call


class ShardHistory:
    """Raises Unavailable, from every call, when no host answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def heads(self) -> dict[int, Location]:
        """Of every shard."""
        listed = self._client.document("/shards")["shards"]
        return {shard["shard"]: Location(shard["generation"], shard["head"]) for shard in listed}

    def read(self, wanted: ReadLog) -> LogAnswer:
        try:
            found = self._client.get_cells_for_shard(wanted.shard, wanted.after, wanted.limit)
        except LocationGone as gone:
            return gone
        return HistoryPage([stored_cell(cell) for cell in found])

    def since(self, shards: Sequence[int], moment: datetime) -> dict[int, Location]:
        """By shard, the location after which cells were created at or after a moment."""
        found: dict[int, Location] = {}
        for first in range(0, len(shards), _SHARDS_AT_ONCE):
            wanted = dict.fromkeys(shards[first : first + _SHARDS_AT_ONCE], moment)
            for shard, page in self._client.get_cells_for_shards(wanted, limit=1).items():
                if isinstance(page, SchemalessError):
                    raise page
                found[shard] = _before(page)
        return found


def stored_cell(found: FoundCell) -> StoredCell:
    return StoredCell(
        row_key=RowKey(found.row_key.bytes),
        column_name=ColumnName(found.column_name),
        ref_key=RefKey(found.ref_key),
        shard=found.shard,
        generation=found.generation,
        added_id=found.added_id,
        created_at=(found.created_at - _EPOCH) // timedelta(microseconds=1),
        body=encode_body(found.body, check_depth=False),
    )


def _before(page: LogPage) -> Location:
    """Of the first cell of a page; of an empty one, its end."""
    for cell in page:
        return Location(cell.generation, cell.added_id - 1)
    return page.location
