"""Planning a seek: where each shard's progress goes, and what that does to the topic (I7, I16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from schemaless.bus.published_progress import read_publish_status
from schemaless.errors import Invalid, LocationGone, Misconfigured
from schemaless.location import BEGINNING, GenerationStart, Location, generation_at, next_start, verify_location
from schemaless.ops.tailer_status import SHARDS_PER_QUERY, lost_positions
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.storage import shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore


class SeekMove(msgspec.Struct, frozen=True):
    """What a seek does to one shard. `before` is None without a progress record."""

    before: Location | None
    to: Position
    again: int
    """Cells that are published a second time."""
    never: int
    """Cells that are never published."""
    announced_again: int
    """Generations that are announced a second time."""


def plan_seek(
    storage: SyncStorage, kafka: str, datastore: Datastore, shards: Sequence[int], generation: int | None, added_id: int
) -> list[SeekMove]:
    """Returns what moving the progress of shards to a location does. Without a generation it is the present one.

    Raises BusUnavailable or StorageUnavailable when Kafka or a shard's master is unreachable, Invalid for a location
    that the log doesn't have, and Misconfigured for a shard that needs a new generation.
    """
    status = read_publish_status(kafka, datastore)
    moves = {}
    for cluster in sorted({datastore.home(shard) for shard in shards}):
        master = storage.master(cluster)
        mine = [shard for shard in shards if datastore.home(shard) == cluster]
        heads = {head.shard: head.location for head in master.run(shard_head.heads, datastore.name)}
        starts = master.run(shard_head.generations_of_all, datastore.name)
        published = [
            status.positions[shard]
            for shard in mine
            if shard in status.positions and datastore.partition(shard) not in status.emptied
        ]
        for shard, gone in lost_positions(master, datastore, published).items():
            raise Misconfigured(
                f"shard {shard}: MySQL has another history than the topic: {gone}. A seek would leave out cells or"
                f" repeat them: run `schemaless tailer new-generation {datastore.name} --shard {shard}`"
            )
        to = {
            shard: _resolved(generation, added_id, starts.get(shard, []), heads.get(shard, BEGINNING)) for shard in mine
        }
        digests: dict[int, int | None] = {}
        for part in chunks(mine, count_max=SHARDS_PER_QUERY):
            digests |= master.run(shard_log.digests, datastore, {shard: to[shard].added_id for shard in part})
        for shard in mine:
            if digests[shard] is None:
                raise Invalid("location", f"shard {shard} has no cell at {to[shard]}")
            moves[shard] = _move(status.locations, shard, to[shard], digests[shard], starts.get(shard, []))
    return [moves[shard] for shard in shards]


def _resolved(generation: int | None, added_id: int, starts: Sequence[GenerationStart], head: Location) -> Location:
    """Returns the location that the log has at an added_id. Raises Invalid for one that it doesn't have."""
    try:
        verify_location(generation, added_id, starts or [GenerationStart(1, 1)], head.added_id)
    except LocationGone as gone:
        raise Invalid("location", str(gone)) from gone
    present = generation_at(added_id, starts)
    if generation in (None, present):
        return Location(present, added_id)
    if generation_at(added_id + 1, starts) == generation:  # right before its first cell
        return Location(generation, added_id)
    raise Invalid("location", f"the log has {Location(present, added_id)}: generation {generation} begins later")


def _move(
    published: Mapping[int, Location], shard: int, to: Location, digest: int | None, starts: Sequence[GenerationStart]
) -> SeekMove:
    before = published.get(shard)
    reached = before or BEGINNING
    following = next_start(reached, starts)
    until = reached.added_id if following is None else min(reached.added_id, following.starts_at - 1)
    announced, at = 0, to
    while (start := next_start(at, starts)) is not None and start.generation <= reached.generation:
        announced += 1
        at = Location(start.generation, start.starts_at - 1)
    return SeekMove(
        before,
        Position(shard, to.generation, to.added_id, digest=digest),
        again=max(0, until - to.added_id),
        never=max(0, to.added_id - until),
        announced_again=announced,
    )
