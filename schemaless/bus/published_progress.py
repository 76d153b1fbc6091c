"""How far each shard of a partition has been published (I7): the records of the progress topic.

Every shard has a record from the first time that its partition is opened, so a missing record means that progress was
lost. Then the shard's last record in the cells topic is its progress. If that is gone, too, an operator has to seek.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from schemaless.bus.reader import PartitionReader, Span
from schemaless.errors import Corrupt, Misconfigured
from schemaless.location import BEGINNING, Location
from schemaless.record import Announcement, DecodedRecord, ForeignRecord, Seek, decoded
from schemaless.topology import Datastore

_FIRST_WINDOW = 100_000


class Progress(msgspec.Struct, frozen=True):
    """Progress of the shards of one partition. A shard that is in none of the mappings is unknown."""

    locations: Mapping[int, Location]
    """The last published location, by shard."""
    unrecorded: Mapping[int, Location]
    """Those of `locations` that the progress topic lacked, found in the cells topic."""
    refused: Mapping[int, Location]
    """The master's head of each shard whose head was below what was published."""
    elsewhere: AbstractSet[int]
    """Shards that were published to a former topic of the same name, which was deleted."""

    def location(self, shard: int, head: int) -> Location:
        """Returns how far a shard is published. Raises Misconfigured when that is lost and the shard has cells."""
        found = self.locations.get(shard)
        if found is not None:
            return found
        if head == 0:
            return BEGINNING
        raise Misconfigured(
            f"shard {shard} has {head} cells, but neither the progress topic nor what is left of the cells topic shows"
            f" how many of them were published: run `schemaless tailer seek DATASTORE LOCATION --shard {shard}`"
        )


class _Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Value of a progress record. `topic` is the id of the cells topic that was published to, not its name."""

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
    """Encodes a progress record. `refused_at` is the master's head, if that is below what was published."""
    head = None if refused_at is None else (refused_at.generation, refused_at.added_id)
    return _encode(_Entry(shard, location.generation, location.added_id, head, topic_id))


def seek_value(shard: int, location: Location) -> bytes:
    return _encode(Seek(shard, location.generation, location.added_id))


def read_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads progress up to the high watermark. Nobody may be publishing: the log of the partition was just fenced.

    Raises Misconfigured when the cells topic was created again since something was published.
    """
    recorded = _recorded(reader, datastore, partition, reader.span(datastore.progress_topic, partition), topic_id)
    if recorded.elsewhere:  # going on in the new topic would silently leave out what the former one held
        raise Misconfigured(
            f"{datastore.topic} was created again, and {len(recorded.elsewhere)} shards of this partition,"
            f" {min(recorded.elsewhere)} is the first, were published to the topic that was deleted. Run"
            f" `schemaless tailer seek {datastore.name} LOCATION`, for all shards or with --shard, with the location"
            " behind which to publish again. 0 is the beginning"
        )
    cells = reader.span(datastore.topic, partition)
    missing = set(datastore.shards_of_partition(partition)) - recorded.locations.keys()
    unrecorded = _from_cells(reader, datastore, partition, cells, missing) if missing else {}
    return msgspec.structs.replace(recorded, locations={**recorded.locations, **unrecorded}, unrecorded=unrecorded)


def committed_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads the progress that committed readers see now. While somebody publishes, it is behind what was published."""
    span = reader.committed_span(datastore.progress_topic, partition)
    return _recorded(reader, datastore, partition, span, topic_id)


def counts_unseen_cells(
    bootstrap: str, datastore: Datastore, partition: int, unseen_from: int, progress: Progress
) -> bool:
    """Returns whether progress counts cells behind that offset of the cells topic, which committed readers don't see.

    A seek may go back behind what was published before it, so it counts only where progress equals it.
    """
    with PartitionReader(bootstrap, committed=False) as reader:
        span = Span(unseen_from, reader.span(datastore.topic, partition).high)
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
    """Returns the last location of each shard of which the end of the cells topic has more than progress counts."""
    cells = reader.committed_span(datastore.topic, partition)
    found: dict[int, Location] = {}
    for records in reader.read(
        datastore.topic, partition, Span(max(cells.low, cells.high - _FIRST_WINDOW), cells.high)
    ):
        found.update(_locations(map(decoded, records)))
    return {shard: at for shard, at in found.items() if at > progress.locations.get(shard, at)}


def _from_cells(
    reader: PartitionReader, datastore: Datastore, partition: int, cells: Span, missing: AbstractSet[int]
) -> dict[int, Location]:
    """Searches the cells topic backwards until every missing shard was seen or the beginning is reached."""
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
    """Returns the progress of each shard by its last record in the span."""
    last: dict[int, _Entry] = {}
    for records in reader.read(datastore.progress_topic, partition, span):
        for record in records:
            try:
                entry = _decode_entry(record.value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"record at offset {record.offset} is not ours: {error}") from error
            last[entry.shard] = entry
    return Progress(
        locations={shard: entry.location for shard, entry in last.items()},
        unrecorded={},
        refused={shard: Location(*entry.refused_at) for shard, entry in last.items() if entry.refused_at},
        elsewhere={shard for shard, entry in last.items() if entry.added_id and entry.topic not in ("", topic_id)},
    )


def _locations(records: Iterable[DecodedRecord]) -> Iterator[tuple[int, Location]]:
    """Yields the shard of each record of the cells topic and the location that it brings the shard to."""
    for found in records:
        if isinstance(found, Announcement):
            yield found.shard, Location(found.generation, found.starts_at - 1)
        elif not isinstance(found, ForeignRecord):
            yield found.shard, Location(found.generation, found.added_id)
