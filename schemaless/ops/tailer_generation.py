"""Opening a new generation of a shard whose master was restored, also after it has taken new cells (I13, I16).

The topic holds cells that the master lost. The new generation begins behind the last cell that both have. What the
topic holds from there on is superseded, and what MySQL holds is published again under the new generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from schemaless.bus.published_progress import committed_progress
from schemaless.bus.reader import PartitionReader
from schemaless.bus.topic_history import TopicHistory
from schemaless.bus.topics import topic_id
from schemaless.errors import Invalid, LocationGone, Misconfigured
from schemaless.location import GenerationStart, Location
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.storage import shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.shard_log import Following
from schemaless.topology import Datastore

COMPARED = 1000  # cells of MySQL that one statement reads, without their bodies


class LocationRange(msgspec.Struct):
    """Locations of one generation, both ends included."""

    generation: int
    first: int
    last: int

    @property
    def cells(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{Location(self.generation, self.first)} to {Location(self.generation, self.last)}"


class GenerationPlan(msgspec.Struct, frozen=True):
    """What opening a generation does to a shard."""

    shard: int
    start: GenerationStart
    superseded: Sequence[LocationRange]
    """What the topic holds and readers must take back, the last cells first."""
    again: int
    """The number of cells that are published with the new generation."""
    proven: bool
    """Topic and MySQL have the same cell before the start. Else the operator has vouched for it."""


class _Comparison(msgspec.Struct):
    """The end of a shard's topic, down to the last cell that MySQL has too."""

    agreed: int | None
    superseded: list[LocationRange]
    newest_generation: int


def plan_generation(
    storage: SyncStorage, kafka: str, datastore: Datastore, shard: int, starts_at: int | None
) -> GenerationPlan:
    """Returns where a new generation of a shard has to begin, and what that supersedes. It changes nothing.

    `starts_at` is what the operator says, for a topic that no longer reaches back. Raises BusUnavailable or
    StorageUnavailable when Kafka or the shard's master is unreachable, Invalid for a wrong start, and Misconfigured
    where no generation may be opened: topic and MySQL agree, one was opened already, or progress is unknown.
    """
    progress_id = topic_id(kafka, datastore.topic, timeout_s=10.0)
    master = storage.master(datastore.home(shard))
    with PartitionReader(kafka) as reader:
        progress = committed_progress(reader, datastore, datastore.partition(shard), progress_id)
        published = progress.positions.get(shard)
        if shard in progress.elsewhere:
            raise Misconfigured(
                f"shard {shard}: the cells topic was created again and holds none of its cells: run `schemaless tailer"
                f" seek {datastore.name} LOCATION --shard {shard}`"
            )
        if published is None:
            raise Misconfigured(f"shard {shard} has no progress record: start a tailer, which makes one")
        answer = master.run(shard_log.follow, datastore, [Following(published, 0)], 1)[shard]
        if isinstance(answer, LocationGone) and answer.generation > published.generation:
            raise Misconfigured(
                f"shard {shard} has a new generation already, {answer.generation}: tailers announce it, and the topic"
                f" is at {published.location}"
            )
        healthy = Misconfigured(
            f"shard {shard} needs no new generation: topic and MySQL have the same cell at {published.location}"
        )
        held = not isinstance(answer, LocationGone)
        if held and published.digest is not None:
            raise healthy
        history = TopicHistory(reader, datastore, shard)
        compared = _compare(master, datastore, history, shard)
    if held and not compared.superseded:
        raise healthy
    head, _ = master.run(shard_head.history, datastore.name, shard)
    agreed = 0 if compared.agreed is None and history.is_whole else compared.agreed
    generation = max(head.generation, published.generation, compared.newest_generation) + 1
    lowest = min((found.first for found in compared.superseded), default=published.added_id)
    start = GenerationStart(generation, _start(shard, agreed, starts_at, min(lowest, head.added_id + 1)))
    again = head.added_id + 1 - start.starts_at
    return GenerationPlan(shard, start, compared.superseded, again, proven=agreed is not None)


def _compare(master: SyncNode, datastore: Datastore, history: Iterable[Sequence[Position]], shard: int) -> _Comparison:
    """Reads the topic backwards until MySQL has the same cell."""
    found = _Comparison(None, [], 0)
    for piece in history:
        for part in chunks(piece, count_max=COMPARED):
            stored = master.run(shard_log.digests_at, datastore, shard, [position.added_id for position in part])
            for position in part:
                if stored.get(position.added_id) == position.digest:
                    found.agreed = position.added_id
                    return found
                _add(found.superseded, position.location)
                found.newest_generation = max(found.newest_generation, position.generation)
    return found


def _add(ranges: list[LocationRange], location: Location) -> None:
    last = ranges[-1] if ranges else None
    if last is not None and last.generation == location.generation and last.first == location.added_id + 1:
        last.first = location.added_id
    else:
        ranges.append(LocationRange(location.generation, location.added_id, location.added_id))


def _start(shard: int, agreed: int | None, starts_at: int | None, greatest: int) -> int:
    """Returns where the generation begins, by proof or by the operator's word. Raises Invalid."""
    if agreed is not None:
        if starts_at not in (None, agreed + 1):
            raise Invalid("from", f"topic and MySQL agree up to {agreed}, so the generation begins at {agreed + 1}")
        return agreed + 1
    if starts_at is None:
        raise Invalid(
            "from",
            f"the topic no longer reaches back to a cell of shard {shard} that MySQL has too: give the first added_id"
            f" that the master lost. It is at most {greatest}",
        )
    if not 1 <= starts_at <= greatest:
        raise Invalid("from", f"must be from 1 to {greatest}: from there on topic and MySQL differ")
    return starts_at
