"""Where a trigger program begins: its start in the shards that have no checkpoint yet, and the positions of that.

A time begins at the first cell that isn't older. A location begins after its cell, as checkpoints and `log --after` do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

import msgspec

from schemaless.cell import parse_time
from schemaless.errors import Invalid, LocationGone, Misconfigured
from schemaless.location import Location, generation_at, parse_shard_location
from schemaless.position import BEGINNING_DIGEST, Position, verify_position
from schemaless.storage import checkpoint_table, shard_head, shard_log
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import Operation
from schemaless.storage.shard_head import Head
from schemaless.topology import Datastore


class StartAt(Enum):
    """One of the two ends of a log."""

    BEGINNING = "beginning"
    END = "end"


class StartSince(msgspec.Struct, frozen=True):
    """The first cell whose created_at (microseconds) isn't earlier. A time in the future is the end."""

    created_at: int


class StartAfter(msgspec.Struct, frozen=True):
    """The cell after a location, by shard. Other shards begin at the beginning."""

    locations: Mapping[int, Location]


Start = StartAt | StartSince | StartAfter


def parse_start(texts: Sequence[str]) -> Start:
    """Parses the values of `--from`, of which only locations may be several. Raises Invalid."""
    if not texts:
        return StartAt.BEGINNING
    if len(texts) == 1 and texts[0] in {edge.value for edge in StartAt}:
        return StartAt(texts[0])
    if len(texts) == 1 and "T" in texts[0].upper():
        return StartSince(parse_time(texts[0], "--from"))
    locations: dict[int, Location] = {}
    for text in texts:
        try:
            found = parse_shard_location(text)
        except Invalid:
            raise Invalid(
                "--from", f"must be beginning, end, an RFC 3339 time or SHARD:GENERATION:ADDED_ID, not {text[:100]!r}"
            ) from None
        if found.shard in locations:
            raise Invalid("--from", f"shard {found.shard} has two locations")
        locations[found.shard] = found.location
    return StartAfter(locations)


def start_positions(datastore: Datastore, start: Start, shards: Collection[int]) -> Operation[list[Position]]:
    """Returns the checkpoints of shards at a start, on their home. Raises Misconfigured for a location that is gone."""
    if start is StartAt.BEGINNING or not shards:
        return [_beginning(shard) for shard in sorted(shards)]
    heads = {head.shard: head for head in (yield from shard_head.heads_of(datastore.name, shards))}
    if isinstance(start, StartAfter):
        positions = []
        for shard, head in sorted(heads.items()):
            positions.append((yield from _named(datastore, start.locations.get(shard), head)))
        return positions
    left_out: dict[int, Location] = {}  # by shard, the last cell before the start
    for shard, head in sorted(heads.items()):
        left_out[shard] = (
            head.location if not isinstance(start, StartSince) else (yield from _before(datastore, start, head))
        )
    digests = yield from shard_log.digests(datastore, {shard: found.added_id for shard, found in left_out.items()})
    return [Position(n, found.generation, found.added_id, digest=digests[n]) for n, found in left_out.items()]


async def verify_start(storage: AsyncStorage, datastore: Datastore, consumer: str, start: Start) -> None:
    """Raises Misconfigured for a location that can't be begun at, where its shard has no checkpoint yet."""
    if not isinstance(start, StartAfter):
        return
    unknown = [shard for shard in start.locations if shard >= datastore.shards]
    if unknown:
        raise Misconfigured(
            f"--from names shard {unknown[0]}, and {datastore.name} has shards 0 to {datastore.shards - 1}"
        )
    for cluster, shards in datastore.by_home(start.locations, lambda shard: shard).items():
        master = storage.master(cluster)
        known = await master.run(checkpoint_table.of_consumer, datastore.name, consumer, shards)
        missing = set(shards) - {row.shard for row in known}
        await master.run(start_positions, datastore, start, missing)


def _beginning(shard: int) -> Position:
    return Position(shard, 1, 0, digest=BEGINNING_DIGEST)


def _before(datastore: Datastore, start: StartSince, head: Head) -> Operation[Location]:
    added_id = (yield from shard_log.first_since(datastore, head.shard, start.created_at, head.added_id)) - 1
    if added_id == head.added_id:
        return head.location
    return Location(generation_at(added_id, (yield from shard_head.generations(datastore.name, head.shard))), added_id)


def _named(datastore: Datastore, location: Location | None, head: Head) -> Operation[Position]:
    if location is None:
        return _beginning(head.shard)
    starts = yield from shard_head.generations(datastore.name, head.shard)
    digests = yield from shard_log.digests(datastore, {head.shard: location.added_id})
    position = Position(head.shard, location.generation, location.added_id, digest=digests[head.shard])
    try:
        verify_position(position, digests[head.shard], starts, head.location)
    except LocationGone as gone:
        raise Misconfigured(
            f"--from {head.shard}:{location}: {gone}; shard {head.shard} is read from {gone.resume_at}"
        ) from gone
    return position
