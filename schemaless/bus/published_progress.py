"""How far each shard of a partition has been published (I7): the records of the progress topic, and who publishes.

Every shard has a record from the first time that its partition is opened, so a missing record means that progress was
lost. Then the shard's last record in the cells topic is its progress. If that is gone, too, an operator has to seek.
A record carries the digest of the cell that it stands on, so nobody continues on another history (I16).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec
from confluent_kafka.admin import AdminClient

from schemaless.bus.client import client_settings, metadata_of, translated
from schemaless.bus.reader import PartitionReader, Span
from schemaless.bus.topics import topic_ids
from schemaless.cell import StoredCell
from schemaless.errors import Corrupt, Misconfigured
from schemaless.location import BEGINNING, Location
from schemaless.names import tailer_group
from schemaless.position import BEGINNING_DIGEST, Position, cell_digest
from schemaless.record import Announcement, DecodedRecord, Seek, decoded
from schemaless.topology import Datastore

PROGRESS_FORMAT = 2
"""The version of progress records. Those of version 1 have no digest."""
_FIRST_WINDOW = 100_000


class Progress(msgspec.Struct, frozen=True):
    """Progress of the shards of one partition. A shard that is in none of the mappings is unknown."""

    positions: Mapping[int, Position]
    """How far each shard was published, by shard. A position without a digest is taken by its number, once."""
    unrecorded: Mapping[int, Position]
    """Those of `positions` that the progress topic lacked, found in the cells topic."""
    elsewhere: AbstractSet[int]
    """Shards that were published to a former topic of the same name, which was deleted."""

    def position(self, shard: int, head: int) -> Position:
        """Returns how far a shard is published. Raises Misconfigured when that is lost and the shard has cells."""
        found = self.positions.get(shard)
        if found is not None:
            return found
        if head == 0:
            return beginning(shard)
        raise Misconfigured(
            f"shard {shard} has {head} cells, but neither the progress topic nor what is left of the cells topic shows"
            f" how many of them were published: run `schemaless tailer seek DATASTORE LOCATION --shard {shard}`"
        )


class _Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Value of a progress record. `topic` is the id of the cells topic that was published to, not its name."""

    shard: int
    generation: int
    added_id: int
    topic: str = ""
    digest: int | None = None
    format: int = 1

    @property
    def position(self) -> Position:
        return Position(self.shard, self.generation, self.added_id, digest=self.digest)


_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_encode = msgspec.msgpack.Encoder().encode


def progress_key(shard: int) -> bytes:
    return str(shard).encode()


def progress_value(position: Position, topic_id: str) -> bytes:
    at = position.location
    return _encode(
        _Entry(position.shard, at.generation, at.added_id, topic_id, position.digest, format=PROGRESS_FORMAT)
    )


def seek_value(position: Position) -> bytes:
    return _encode(Seek(position.shard, position.generation, position.added_id))


def beginning(shard: int) -> Position:
    """Returns the position of a shard of which nothing is published."""
    return Position(shard, BEGINNING.generation, BEGINNING.added_id, digest=BEGINNING_DIGEST)


def read_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads progress up to the high watermark. Nobody may be publishing: the log of the partition was just fenced.

    Raises Misconfigured when the cells topic was created again since something was published, or when the progress has
    another format.
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
    missing = set(datastore.shards_of_partition(partition)) - recorded.positions.keys()
    unrecorded = _from_cells(reader, datastore, partition, cells, missing) if missing else {}
    return msgspec.structs.replace(recorded, positions={**recorded.positions, **unrecorded}, unrecorded=unrecorded)


def committed_progress(reader: PartitionReader, datastore: Datastore, partition: int, topic_id: str) -> Progress:
    """Reads the progress that committed readers see now. While somebody publishes, it is behind what was published.

    Raises Misconfigured when it has another format.
    """
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
                for position in _positions([found]):
                    counted = progress.positions.get(position.shard, beginning(position.shard)).location
                    reached = position.location
                    if reached == counted or (reached < counted and not isinstance(found, Seek)):
                        return True
    return False


def published_beyond(
    reader: PartitionReader, datastore: Datastore, partition: int, progress: Progress
) -> dict[int, Position]:
    """Returns the last position of each shard of which the end of the cells topic has more than progress counts."""
    cells = reader.committed_span(datastore.topic, partition)
    found: dict[int, Position] = {}
    for records in reader.read(
        datastore.topic, partition, Span(max(cells.low, cells.high - _FIRST_WINDOW), cells.high)
    ):
        found.update({position.shard: position for position in _positions(map(decoded, records))})
    return {shard: at for shard, at in found.items() if at.location > progress.positions.get(shard, at).location}


class Owner(msgspec.Struct, frozen=True):
    """A process that tails a partition: the client id that it chose, and its address."""

    client: str
    host: str


class PublishStatus(msgspec.Struct, frozen=True):
    positions: Mapping[int, Position]
    """How far each shard was published, by shard."""
    emptied: frozenset[int]
    """Partitions of a topic that was made anew after cells were published to them."""
    owners: Mapping[int, Owner]
    """The process that tails a partition, by partition."""

    @property
    def locations(self) -> dict[int, Location]:
        return {shard: position.location for shard, position in self.positions.items()}


def read_publish_status(bootstrap: str, datastore: Datastore, *, timeout_s: float = 10.0) -> PublishStatus:
    """Reads the status, which is empty while the topics don't exist. Raises BusUnavailable."""
    admin = AdminClient(client_settings(bootstrap))
    topics = metadata_of(admin, bootstrap, "asking Kafka for its topics", timeout_s).topics
    group = tailer_group(datastore.name)
    asked = admin.describe_consumer_groups([group], request_timeout=timeout_s)
    with translated("asking Kafka for the group of the tailers"):
        members = asked[group].result().members
    owners = {
        assigned.partition: Owner(member.client_id, member.host)
        for member in members
        for assigned in member.assignment.topic_partitions
    }
    if not {datastore.topic, datastore.progress_topic} <= topics.keys():
        return PublishStatus({}, frozenset(), owners)
    (topic_id,) = topic_ids(admin, bootstrap, [datastore.topic], timeout_s=timeout_s)
    positions: dict[int, Position] = {}
    emptied: set[int] = set()
    with PartitionReader(bootstrap, timeout_s=timeout_s) as reader:
        for partition in range(datastore.partitions):
            progress = committed_progress(reader, datastore, partition, topic_id)
            positions.update(progress.positions)
            if progress.elsewhere:
                emptied.add(partition)
    return PublishStatus(positions, frozenset(emptied), owners)


def _from_cells(
    reader: PartitionReader, datastore: Datastore, partition: int, cells: Span, missing: AbstractSet[int]
) -> dict[int, Position]:
    """Searches the cells topic backwards until every missing shard was seen or the beginning is reached."""
    found: dict[int, Position] = {}
    stop, window = cells.high, _FIRST_WINDOW
    while stop > cells.low and missing - found.keys():
        start = max(cells.low, stop - window)
        earlier: dict[int, Position] = {}
        for records in reader.read(datastore.topic, partition, Span(start, stop)):
            earlier.update({position.shard: position for position in _positions(map(decoded, records))})
        found = earlier | found
        stop, window = start, window * 2
    if cells.low == 0:
        found = {shard: beginning(shard) for shard in missing} | found  # the topic is whole: not published
    return {shard: position for shard, position in found.items() if shard in missing}


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
    for entry in last.values():
        if entry.format != PROGRESS_FORMAT:
            raise Misconfigured(
                f"{datastore.progress_topic} has a record of format {entry.format}, of shard {entry.shard}, and this"
                f" program knows format {PROGRESS_FORMAT}: "
                + (
                    "delete that topic. Tailers make it again, and rebuild progress from the cells topic"
                    if entry.format < PROGRESS_FORMAT
                    else "run the newer program that wrote it"
                )
            )
    return Progress(
        positions={shard: entry.position for shard, entry in last.items()},
        unrecorded={},
        elsewhere={shard for shard, entry in last.items() if entry.added_id and entry.topic not in ("", topic_id)},
    )


def _positions(records: Iterable[DecodedRecord]) -> Iterator[Position]:
    """Yields the position to which each record of the cells topic brings its shard."""
    for found in records:
        if isinstance(found, StoredCell):
            yield Position(found.shard, found.generation, found.added_id, digest=cell_digest(found))
        elif isinstance(found, Announcement):
            yield Position(found.shard, found.generation, found.starts_at - 1)
        elif isinstance(found, Seek):
            yield Position(found.shard, found.generation, found.added_id)
