"""cells_topic: the cells topic for agents of users' own Faust apps. An event is a StoredCell, decoded in one place.

Records that are not ours, and notices of the tailer, never reach an agent: they are counted and passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import faust
import msgspec
from faust.exceptions import ValueDecodeError
from faust.types.tuples import Message

from schemaless.cell import StoredCell
from schemaless.names import cells_topic_name
from schemaless.record import Announcement, ForeignRecord, decode_record

_FOREIGN_KEPT_MAX = 100


class TopicCounts(msgspec.Struct):
    """Since the start: cells for agents, announced generations, and records that are not ours, the last hundred named.

    A cell of a topic that two agents read counts once for each.
    """

    cells: int = 0
    generations: int = 0
    foreign: int = 0
    named: deque[ForeignRecord] = msgspec.field(default_factory=lambda: deque(maxlen=_FOREIGN_KEPT_MAX))


class _PassedOver(ValueDecodeError):  # type: ignore[misc]  # Faust has no types for mypy
    """Not for an agent: Faust acknowledges it and goes on."""


class CellSchema(faust.Schema):  # type: ignore[misc]
    """Keys are the row key's text as it came, values StoredCells."""

    def __init__(self) -> None:
        super().__init__(key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
        self.counts = TopicCounts()

    def loads_value(self, app: Any, message: Message, **_: Any) -> StoredCell:
        found = decode_record(
            message.value, message.headers, topic=message.topic, partition=message.partition, offset=message.offset
        )
        if isinstance(found, StoredCell):
            self.counts.cells += 1
            return found
        if isinstance(found, Announcement):
            self.counts.generations += 1
        elif isinstance(found, ForeignRecord):
            self.counts.foreign += 1
            self.counts.named.append(found)
        raise _PassedOver(str(found))


class CellsTopic(faust.Topic):  # type: ignore[misc]
    @property
    def counts(self) -> TopicCounts:
        found: TopicCounts = self.schema.counts
        return found

    async def on_value_decode_error(self, exc: Exception, message: Message) -> None:
        """Nothing is thrown into the agent. Whatever else can't be decoded is thrown as Faust has it."""
        if not isinstance(exc, _PassedOver):
            await super().on_value_decode_error(exc, message)


def cells_topic(app: faust.App, datastore: str) -> CellsTopic:
    """The cells of a datastore for `@app.agent(cells_topic(app, "mezzanine"))`.

    With a plain `faust.App` events get lost and repeated, and aborted records are seen: docs/subscribers.md tells how.
    `faust_app` makes one that reads committed records and commits what was acknowledged. Then an agent that asks for
    `each_cell(stream)` is given every cell at least once, and again after a crash: tell repeats by the cell's
    (shard, generation, added_id). What the topic itself lacks, because its beginning was cut off, no agent sees:
    that is what `Subscriber` is for.
    """
    return CellsTopic(app, topics=[cells_topic_name(datastore)], schema=CellSchema())


async def each_cell(stream: Any) -> AsyncIterator[StoredCell]:
    """The cells of an agent's stream. One is acknowledged when the next is asked for: never when its agent raised."""
    async for event in stream.noack().events():
        yield event.value
        event.ack()
