"""How far each shard of a partition has been published (I7): the records of the progress topic, and what they tell.

Every shard has a record from the first time that its partition is opened, so a missing record means that progress was
lost. Then the cells topic itself tells: a shard's last record there is its progress. What neither can tell is never
guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from schemaless.bus.reader import PartitionReader, Span
from schemaless.errors import Corrupt, Misconfigured
from schemaless.location import BEGINNING, Location
from schemaless.record import Announcement, DecodedRecord, ForeignRecord, Record, Seek, decoded
from schemaless.topology import Datastore

_FIRST_WINDOW = 100_000


class Progress(msgspec.Struct, frozen=True):
    """Last published location of each shard that is known; `unrecorded` are those that the progress topic lacked.

    `refused` are shards whose master showed a head below that location: the head, by shard. `elsewhere` are those that
    were published to another topic of the same name, which was deleted.
    """

    locations: Mapping[int, Location]
    unrecorded: Mapping[int, Location]
    refused: Mapping[int, Location]
    elsewhere: AbstractSet[int]

    def location(self, shard: int, head: int) -> Location:
        """Raises Misconfigured when nothing tells how much of a shard with cells has been published."""
        found = self.locations.get(shard)
        if found is not None:
            return found
        if head == 0:
            return BEGINNING
        raise Misconfigured(
            f"shard {shard} has {head} cells, but neither the progress topic nor what is left of the cells topic tells"
            f" how many of them were published: say it with `schemaless tailer seek DATASTORE LOCATION --shard {shard}`"
        )


class _Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Value of a progress record. `topic`: the id of the cells topic that was published to."""

    shard: int
    generation: int
    added_id: int
    refused_at: tuple[int, int] | None = None
    topic: str = ""

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_encode = msgspec.msgpack.Encoder().encode


def progress_key(shard: int) -> bytes:
    return str(shard).encode()


def progress_value(shard: int, location: Location, topic_id: str, refused_at: Location | None = None) -> bytes:
    """With the head at which publishing was refused, for a shard of which the topic has more than MySQL."""
    head = None if refused_at is None else (refused_at.generation, refused_at.added_id)
    return _encode(_Entry(shard, location.generation, location.added_id, head, topic_id))


def seek_value(shard: int, location: Location) -> bytes:
    return _encode(Seek(shard, location.generation, location.added_id))


def read_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Up to the high watermark. Nobody may be publishing to the partition: its log was opened just now."""
    recorded = _recorded(reader, datastore, partition, reader.span(datastore.progress_topic, partition), topic_id)
    _refuse_another_topic(datastore, recorded.elsewhere)
    cells = reader.span(datastore.topic, partition)
    missing = set(datastore.shards_of_partition(partition)) - recorded.locations.keys()
    unrecorded = _from_cells(reader, datastore, partition, cells, missing) if missing else {}
    return msgspec.structs.replace(recorded, locations={**recorded.locations, **unrecorded}, unrecorded=unrecorded)


def committed_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """What the progress topic shows now: behind what was published while somebody publishes."""
    span = reader.committed_span(datastore.progress_topic, partition)
    return _recorded(reader, datastore, partition, span, topic_id)


def counts_hidden_cells(
    bootstrap: str, datastore: Datastore, partition: int, hidden_from: int, progress: Progress
) -> bool:
    """Whether progress comes from a transaction that has records behind that offset of the cells topic, hidden.

    A seek may well go behind what was published before it: it counts where progress is just there.
    """
    with PartitionReader(bootstrap, hidden=True) as reader:
        span = Span(hidden_from, reader.span(datastore.topic, partition).high)
        for records in reader.read(datastore.topic, partition, span):
            for found in map(decoded, records):
                for shard, location in _locations([found]):
                    counted = progress.locations.get(shard, BEGINNING)
                    if location == counted or (location < counted and not isinstance(found, Seek)):
                        return True
    return False


def published_beyond(
    reader: PartitionReader, datastore: Datastore, partition: int, progress: Progress
) -> dict[int, Location]:
    """Shards whose cells are seen beyond their progress, at the end of the topic."""
    cells = reader.committed_span(datastore.topic, partition)
    found: dict[int, Location] = {}
    for records in reader.read(
        datastore.topic, partition, Span(max(cells.low, cells.high - _FIRST_WINDOW), cells.high)
    ):
        found.update(_locations(map(decoded, records)))
    return {shard: at for shard, at in found.items() if at > progress.locations.get(shard, at)}


def _refuse_another_topic(datastore: Datastore, elsewhere: AbstractSet[int]) -> None:
    """Whoever went on in a topic that was made anew would leave out, unseen, what the former one held."""
    if elsewhere:
        raise Misconfigured(
            f"{datastore.topic} was made anew, and {len(elsewhere)} shards of this partition, {min(elsewhere)} is the"
            f" first, were published to the topic that was deleted. `schemaless tailer seek {datastore.name} LOCATION`,"
            " for all shards or with --shard, says from where to publish again; 0 is the beginning"
        )


def _from_cells(
    reader: PartitionReader, datastore: Datastore, partition: int, cells: Span, missing: AbstractSet[int]
) -> dict[int, Location]:
    """From the topic's own tail, backwards, until every missing shard was seen or the beginning is reached."""
    found: dict[int, Location] = {}
    stop, window = cells.high, _FIRST_WINDOW
    while stop > cells.low and missing - found.keys():
        start = max(cells.low, stop - window)
        earlier: dict[int, Location] = {}
        for records in reader.read(datastore.topic, partition, Span(start, stop)):
            earlier.update(_locations(map(decoded, records)))
        found = earlier | found
        stop, window = start, window * 2
    if cells.low == 0:
        found = dict.fromkeys(missing, BEGINNING) | found  # the whole topic is there: no record means not published
    return {shard: location for shard, location in found.items() if shard in missing}


def _recorded(reader: PartitionReader, datastore: Datastore, partition: int, span: Span, topic_id: str) -> Progress:
    """Of each shard what its last record tells."""
    last: dict[int, _Entry] = {}
    for records in reader.read(datastore.progress_topic, partition, span):
        last.update({entry.shard: entry for entry in map(_entry, records)})
    return Progress(
        locations={shard: entry.location for shard, entry in last.items()},
        unrecorded={},
        refused={shard: Location(*entry.refused_at) for shard, entry in last.items() if entry.refused_at},
        elsewhere={shard for shard, entry in last.items() if entry.added_id and entry.topic not in ("", topic_id)},
    )


def _locations(records: Iterable[DecodedRecord]) -> Iterator[tuple[int, Location]]:
    """Where each record of the cells topic leaves its shard. What isn't ours says nothing."""
    for found in records:
        if isinstance(found, Announcement):
            yield found.shard, Location(found.generation, found.starts_at - 1)
        elif not isinstance(found, ForeignRecord):
            yield found.shard, Location(found.generation, found.added_id)


def _entry(record: Record) -> _Entry:
    try:
        return _decode_entry(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"record at offset {record.offset} is not ours: {error}") from error
