"""How far each shard of a partition has been published (I7): the records of the progress topic, and what they tell.

Where the progress topic was lost, the cells topic itself tells: the last record of a shard is its progress. What
neither can tell is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from schemaless.bus.reader import PartitionReader, Record, Span
from schemaless.errors import Corrupt, Misconfigured
from schemaless.location import BEGINNING, Location
from schemaless.topology import Datastore

_FIRST_WINDOW = 100_000


class Progress(msgspec.Struct, frozen=True):
    """Last published location of each shard that has one. `complete`: a shard that is missing was never published."""

    locations: Mapping[int, Location]
    complete: bool
    rebuilt: bool = False

    def location(self, shard: int, head: int) -> Location:
        """Raises Misconfigured when nothing tells how much of a shard with cells has been published."""
        found = self.locations.get(shard)
        if found is not None:
            return found
        if self.complete or head == 0:
            return BEGINNING
        raise Misconfigured(
            f"shard {shard} has {head} cells, but neither the progress topic nor what is left of the cells topic tells"
            f" how many of them were published: say it with `schemaless tailer seek DATASTORE {shard} LOCATION`"
        )


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """Value of a progress record, and the fields of a cell or generation record that progress needs."""

    shard: int
    generation: int
    added_id: int


class _Opening(msgspec.Struct, frozen=True, gc=False):
    shard: int
    generation: int
    starts_at: int


_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_decode_opening = msgspec.msgpack.Decoder(_Opening).decode
_encode = msgspec.msgpack.Encoder().encode


def progress_key(shard: int) -> bytes:
    return str(shard).encode()


def progress_value(shard: int, location: Location) -> bytes:
    return _encode(_Entry(shard, location.generation, location.added_id))


def read_progress(reader: PartitionReader, datastore: Datastore, partition: int) -> Progress:
    """Up to the high watermark. Nobody may be publishing to the partition: its log was opened just now."""
    span = reader.span(datastore.progress_topic, partition)
    cells = reader.span(datastore.topic, partition)
    if span.low > 0 or (span.high == 0 and cells.high > 0):  # cut, or made anew: it can't be trusted to be whole
        return _rebuilt(reader, datastore, partition, cells)
    locations: dict[int, Location] = {}
    for records in reader.read(datastore.progress_topic, partition, span):
        locations.update(_entries(records))
    if locations and cells.high == 0:
        raise Misconfigured(
            f"{datastore.topic} [{partition}] is empty, but cells were published to it before: the topic was made"
            " anew. `schemaless tailer seek DATASTORE SHARD LOCATION` says from where to publish again"
        )
    return Progress(locations, complete=True)


def _rebuilt(reader: PartitionReader, datastore: Datastore, partition: int, cells: Span) -> Progress:
    """From the topic's own tail, backwards, until every shard was seen or the beginning is reached."""
    locations: dict[int, Location] = {}
    shards = len(datastore.shards_of_partition(partition))
    stop, window = cells.high, _FIRST_WINDOW
    while stop > cells.low and len(locations) < shards:
        start = max(cells.low, stop - window)
        later = locations
        locations = {}
        for records in reader.read(datastore.topic, partition, Span(start, stop)):
            locations.update(_published(records))
        locations |= later
        stop, window = start, window * 2
    return Progress(locations, complete=cells.low == 0, rebuilt=True)


def _entries(records: Iterable[Record]) -> dict[int, Location]:
    return {entry.shard: Location(entry.generation, entry.added_id) for entry in map(_entry, records)}


def _published(records: Iterable[Record]) -> dict[int, Location]:
    """Where records of the cells topic leave their shards. Kinds that we don't know say nothing."""
    locations: dict[int, Location] = {}
    for record in records:
        if record.kind == b"cell":
            entry = _entry(record)
            locations[entry.shard] = Location(entry.generation, entry.added_id)
        elif record.kind == b"generation":
            opening = _decode_opening(record.value)
            locations[opening.shard] = Location(opening.generation, opening.starts_at - 1)
    return locations


def _entry(record: Record) -> _Entry:
    try:
        return _decode_entry(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"record at offset {record.offset} is not ours: {error}") from error
