"""ShardEvents: a shard's log as server-sent events. Owns what a reader is told, and where it goes on after each event.

`event: cell`, `heartbeat`, `generation` (a new one begins, I13) and `problem` (the last one of its stream). `id` is a
location to resume from; a problem has none, so that the one before it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.follow.log_reader import ShardLogPage
from api.http.content import JSON
from api.http.response import problem_of
from schemaless.errors import SchemalessError
from schemaless.location import GenerationStart, Location, visible_starts


class ShardEvents:
    """Stands at `position`, of which it told last. `head` is the last one shown."""

    def __init__(self, position: Location) -> None:
        self.position = position
        self.head = position.added_id

    def of_page(self, page: ShardLogPage, views: Sequence[msgspec.Raw]) -> bytes:
        """A page that was read after `position`; `views` are its cells as JSON. Nothing when nothing came."""
        starts = [start for start in visible_starts(page.starts) if start.generation > self.position.generation]
        events = b"".join(self._in_order(page, views, starts))
        self.position = Location(self.position.generation, page.examined)
        self.head = page.head
        return events

    def heartbeat(self, head: int = 0) -> bytes:
        position = self.position
        data = {
            "generation": position.generation,
            "added_id": position.added_id,
            "head": max(self.head, head),
        }
        return _event("heartbeat", data, position)

    def _in_order(
        self, page: ShardLogPage, views: Sequence[msgspec.Raw], starts: list[GenerationStart]
    ) -> Iterator[bytes]:
        for cell, view in zip(page.cells, views, strict=True):
            yield from self._begun_until(cell.added_id, starts)
            yield b"event: cell\nid: %b\ndata: %b\n\n" % (str(cell.location).encode(), bytes(view))
        yield from self._begun_until(page.examined + 1, starts)

    def _begun_until(self, added_id: int, starts: list[GenerationStart]) -> Iterator[bytes]:
        """Of the generations in `starts` those that have begun there; they are told once."""
        while starts and starts[0].starts_at <= added_id:
            start = starts.pop(0)
            self.position = Location(start.generation, start.starts_at - 1)
            data = {"generation": start.generation, "starts_at": start.starts_at}
            yield _event("generation", data, self.position)


def problem_event(error: SchemalessError) -> bytes:
    return _event("problem", problem_of(error))


def _event(kind: str, data: dict[str, Any], location: Location | None = None) -> bytes:
    named = b"" if location is None else b"id: %b\n" % str(location).encode()
    return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), named, JSON.encode(data))
