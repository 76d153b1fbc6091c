"""cells_topic: the cells topic for agents of users' own Faust apps. An event is a FoundCell.

Records that are not ours, and notices of the tailer, never reach an agent. They are counted and skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import faust
import msgspec
from faust.exceptions import ValueDecodeError
from faust.types.tuples import Message

from schemaless.found_cell import FoundCell
from schemaless.names import cells_topic_name
from schemaless.record import Announcement, ForeignRecord, decode_record

_FOREIGN_KEPT_MAX = 100


class TopicCounts(msgspec.Struct):
    """Counts since the start: cells for agents, announced generations, and records that are not ours. `named` keeps the
    last hundred of these.

    A cell of a topic that two agents read counts once for each.
    """

    cells: int = 0
    generations: int = 0
    foreign: int = 0
    named: deque[ForeignRecord] = msgspec.field(default_factory=lambda: deque(maxlen=_FOREIGN_KEPT_MAX))


class _Skipped(ValueDecodeError):  # type: ignore[misc]  # Faust has no types for mypy
    """A record that is not for an agent. Faust acknowledges and skips it."""


class CellSchema(faust.Schema):  # type: ignore[misc]
    """Decodes values into cells. Keys stay the bytes of the row key's text."""

    def __init__(self) -> None:
        super().__init__(key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        self.counts = TopicCounts()

    def loads_value(self, app: Any, message: Message, **_: Any) -> FoundCell:
        found = decode_record(
            message.value, message.headers, topic=message.topic, partition=message.partition, offset=message.offset
        )
        if isinstance(found, FoundCell):
            self.counts.cells += 1
            return found
        if isinstance(found, Announcement):
            self.counts.generations += 1
        elif isinstance(found, ForeignRecord):
            self.counts.foreign += 1
            self.counts.named.append(found)
        raise _Skipped(str(found))


class CellsTopic(faust.Topic):  # type: ignore[misc]
    @property
    def counts(self) -> TopicCounts:
        found: TopicCounts = self.schema.counts
        return found

    async def on_value_decode_error(self, exc: Exception, message: Message) -> None:
        """Keeps skipped records away from the agent. Faust handles other values that can't be decoded."""
        if not isinstance(exc, _Skipped):
            await super().on_value_decode_error(exc, message)


def cells_topic(app: faust.App, datastore: str) -> CellsTopic:
    """Returns the cells of a datastore for `@app.agent(cells_topic(app, "mezzanine"))`.

    A plain `faust.App` loses and repeats events, and reads aborted records: docs/subscribers.md says how. `faust_app`
    makes one that reads committed records and commits what was acknowledged. Then an agent that iterates over
    `each_cell(stream)` gets every cell at least once, and some again after a crash. Recognise repeats by the cell's
    (shard, generation, added_id). No agent sees cells that the topic has lost, because its beginning was cut off. Use
    `Subscriber` for them.
    """
    return CellsTopic(app, topics=[cells_topic_name(datastore)], schema=CellSchema())


async def each_cell(stream: Any) -> AsyncIterator[FoundCell]:
    """Yields the cells of a stream. A cell is acknowledged when the agent asks for the next, so not if it raised."""
    async for event in stream.noack().events():
        yield event.value
        event.ack()
