"""TopicHistory: what the cells topic holds of one shard's history, read backwards, to compare it with MySQL (I16)."""

from __future__ import annotations

from collections.abc import Iterator

from schemaless.bus.reader import PartitionReader, Span
from schemaless.cell import StoredCell
from schemaless.location import ADDED_ID_MAX
from schemaless.position import Position, cell_digest
from schemaless.record import Announcement, decoded
from schemaless.topology import Datastore

WINDOW = 50_000
"""Offsets that are read at once. Of the shard's records in them only positions are kept (I14)."""


class TopicHistory:
    """Yields the positions of a shard's cells, the last ones first, in pieces that aren't empty.

    A cell that a later record superseded is left out: another cell has its added_id, or a lower one. Raises
    BusUnavailable.
    """

    def __init__(self, reader: PartitionReader, datastore: Datastore, shard: int, *, window: int = WINDOW) -> None:
        self._reader = reader
        self._datastore = datastore
        self._shard = shard
        self._window = window
        self._span = reader.committed_span(datastore.topic, datastore.partition(shard))

    @property
    def is_whole(self) -> bool:
        """True while the topic still has its first record."""
        return self._span.low == 0

    def __iter__(self) -> Iterator[list[Position]]:
        stop, visible_below = self._span.high, ADDED_ID_MAX + 1
        while stop > self._span.low:
            start = max(self._span.low, stop - self._window)
            piece = []
            for found in reversed(self._records(Span(start, stop))):
                if isinstance(found, Announcement):
                    visible_below = min(visible_below, found.starts_at)
                elif found.added_id < visible_below:
                    visible_below = found.added_id
                    piece.append(found)
            if piece:
                yield piece
            stop = start

    def _records(self, span: Span) -> list[Position | Announcement]:
        kept: list[Position | Announcement] = []
        for records in self._reader.read(self._datastore.topic, self._datastore.partition(self._shard), span):
            for found in map(decoded, records):
                if isinstance(found, StoredCell) and found.shard == self._shard:
                    digest = cell_digest(found)
                    kept.append(Position(found.shard, found.generation, found.added_id, digest=digest))
                elif isinstance(found, Announcement) and found.shard == self._shard:
                    kept.append(found)
        return kept
