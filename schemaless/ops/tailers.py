"""The tailers of a datastore: their status, commands to them, seeks, and new generations.

The status has each shard's published location beside its head, and why a shard is blocked.

Progress is read before the heads. A head below it is therefore a real contradiction, and no matter of timing. Lag in
seconds is the age of the oldest cell that is not published yet.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from schemaless.bus.ownership import require_ours
from schemaless.bus.partition_log import (
    Owner,
    PartitionLog,
    PublishStatus,
    committed_progress,
    read_publish_status,
    topic_positions,
)
from schemaless.bus.reader import PartitionReader, TopicHistory
from schemaless.bus.topics import topic_id
from schemaless.errors import BusUnavailable, Fenced, Invalid, LocationGone, Misconfigured, StorageUnavailable
from schemaless.location import BEGINNING, GenerationStart, Location, generation_at, next_start, verify_location
from schemaless.names import TAILER, Stall
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.storage import shard_head, shard_log, tailer_order_table, worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.everywhere import after, read_everywhere, together
from schemaless.storage.failover import run_on_all
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.shard_log import Following, Oldest
from schemaless.storage.standstill import stall_after
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand
from schemaless.topology import Datastore

SHARDS_PER_QUERY = 200


class ShardStatus(msgspec.Struct, frozen=True):
    """`published` is None without a progress record, `head` while the shard's master is unreachable."""

    shard: int
    partition: int
    published: Location | None
    head: Location | None
    lag_s: float
    problem: str | None

    @property
    def lag(self) -> int:
        """How many cells are not published yet."""
        return 0 if self.head is None else max(0, self.head.added_id - (self.published or BEGINNING).added_id)


class TailerStatus(msgspec.Struct, frozen=True):
    """`command` is the last one that an operator gave. `owners` is by partition."""

    datastore: Datastore
    command: TailerCommand
    owners: Mapping[int, Owner]
    shards: Sequence[ShardStatus]
    stalls: Sequence[str] = ()
    """What is wrong with the topics, and why tailers don't continue, each with its word."""


def read_tailer_status(storage: SyncStorage, kafka: str, datastore: Datastore) -> TailerStatus:
    """Reads the status of every shard. Shards of an unreachable master have no head. Raises BusUnavailable."""
    publish_status = read_publish_status(kafka, datastore)
    masters = run_on_all(map(storage.master, datastore.clusters), shard_head.heads, datastore.name)
    heads = {head.shard: head.location for head in datastore.of_home(masters.found, lambda head: head.shard)}
    oldest = _read_oldest(storage, datastore, publish_status.locations, heads)
    lost = _read_lost(storage, datastore, publish_status, heads)
    answers = run_on_all(map(storage.master, datastore.clusters), worker_table.of_datastore, datastore.name)
    rows = {row.worker: row for found in answers.found.values() for row in found if row.consumer == TAILER}
    tailers = [row for row in rows.values() if row.age_s <= worker_table.SEEN_WITHIN_S]
    held = {shard.shard: shard.reason for row in tailers for shard in row.report.failing_shards}
    shards = []
    for shard in range(datastore.shards):
        first = oldest.get(shard)
        status = ShardStatus(
            shard,
            datastore.partition(shard),
            publish_status.locations.get(shard),
            heads.get(shard),
            lag_s=0.0 if first is None else max(0.0, first.age_us / 1e6),
            problem=_problem(datastore, shard, publish_status, heads.get(shard), oldest, lost, masters.failures)
            or held.get(shard),
        )
        shards.append(status)
    command = read_commands(storage).get(datastore.name, NO_COMMAND)
    stalls = [f"{Stall.PARTITION_COUNT}: {why}" for why in publish_status.raised]
    stalls += [
        f"{row.report.stall}: {row.report.stall_reason} (tailer {row.report.host}, pid {row.report.pid})"
        for row in tailers
        if row.report.stall not in (None, Stall.PARTITION_COUNT)
    ]
    return TailerStatus(datastore, command, publish_status.owners, shards, stalls)


def lost_positions(master: SyncNode, datastore: Datastore, positions: Sequence[Position]) -> dict[int, LocationGone]:
    """Returns the shards of which a master doesn't have what was published, and why (I16).

    A shard with a generation that is still to be announced isn't among them. Raises StorageUnavailable.
    """
    found: dict[int, LocationGone] = {}
    for part in chunks(positions, count_max=SHARDS_PER_QUERY):
        answers = master.run(shard_log.follow, datastore, [Following(position, 0) for position in part], 1)
        for position in part:
            answer = answers[position.shard]
            if isinstance(answer, LocationGone) and answer.generation <= position.generation:
                found[position.shard] = answer
    return found


def _read_lost(
    storage: SyncStorage, datastore: Datastore, publish_status: PublishStatus, heads: Mapping[int, Location]
) -> dict[int, LocationGone]:
    found: dict[int, LocationGone] = {}
    for cluster in datastore.clusters:
        positions = [
            position
            for shard, position in publish_status.positions.items()
            if shard in heads and datastore.home(shard) == cluster
        ]
        with contextlib.suppress(StorageUnavailable):
            found |= lost_positions(storage.master(cluster), datastore, positions)
    return found


def _read_oldest(
    storage: SyncStorage, datastore: Datastore, published: Mapping[int, Location], heads: Mapping[int, Location]
) -> dict[int, Oldest | None]:
    """Returns the first unpublished cell of every shard that is behind, or None where the master has no such cell."""
    found: dict[int, Oldest | None] = {}
    for cluster in datastore.clusters:
        behind = {
            shard: published.get(shard, BEGINNING).added_id
            for shard, head in heads.items()
            if datastore.home(shard) == cluster and head.added_id > published.get(shard, BEGINNING).added_id
        }
        for shards in chunks(list(behind), count_max=SHARDS_PER_QUERY):
            positions = {shard: behind[shard] for shard in shards}
            try:
                found.update(storage.master(cluster).run(shard_log.oldest_after, datastore, positions))
            except StorageUnavailable:
                break
    return found


def _problem(
    datastore: Datastore,
    shard: int,
    publish_status: PublishStatus,
    head: Location | None,
    oldest: Mapping[int, Oldest | None],
    lost: Mapping[int, LocationGone],
    failures: Mapping[str, Exception],
) -> str | None:
    """Returns why a shard is blocked, as far as it can be seen from outside."""
    published = publish_status.locations.get(shard)
    if head is None:
        cluster = datastore.home(shard)
        if (error := failures.get(cluster)) is not None:
            return f"{stall_after(error)}: the master of cluster {cluster} can't be asked: {error}"
        return f"the master of cluster {cluster} has no head of the shard"
    if datastore.partition(shard) in publish_status.emptied:
        return "the cells topic was created again: set where to publish from with `schemaless tailer seek`"
    if published is None:
        return "no progress record yet" if head.added_id else None
    if head.generation > published.generation:
        return None
    if shard in lost:
        return f"MySQL has another history than the topic: {published} was published, and {lost[shard]}"
    if shard in oldest:
        first, following = oldest[shard], published.added_id + 1
        if first is None or first.added_id != following:
            return f"cell {following} is missing in MySQL"
    return None


# Operators' commands to the tailers of a datastore: pause, resume, read the progress again. They are durable, and
# every tailer obeys them within two seconds.
#
# A command is written to every master that can be reached, and read from every cluster. The latest one counts. So an
# unreachable cluster does not keep anybody from pausing or resuming.

_READ_TIMEOUT_S = 1.0


latest = together
"""The latest command of each datastore, of what several clusters know."""


def set_paused(storage: SyncStorage, datastore: str, paused: bool) -> list[str]:
    """Pauses or resumes the tailers of a datastore, and returns the clusters whose master is unreachable.

    Raises StorageUnavailable when no master can be reached.
    """
    return _change(storage, datastore, lambda command: msgspec.structs.replace(command, paused=paused))


def announce_seek(storage: SyncStorage, datastore: str) -> list[str]:
    """Makes the tailers of a datastore open their logs again, so that they continue from the progress that was moved.

    Returns and raises what `set_paused` does.
    """
    return _change(storage, datastore, lambda command: msgspec.structs.replace(command, seeks=command.seeks + 1))


def read_commands(storage: SyncStorage) -> dict[str, TailerCommand]:
    """Returns the latest command of each datastore, from the masters that can be reached."""
    return latest(run_on_all(storage.masters, tailer_order_table.all_of).found.values())


async def fetch_commands(storage: AsyncStorage) -> dict[str, TailerCommand]:
    """Returns the latest command of each datastore, from each cluster's master or, if that is unreachable, a minion.

    Raises StorageUnavailable when no server answers.
    """

    answers = await read_everywhere(
        storage, lambda node: node.run(tailer_order_table.all_of, timeout_s=_READ_TIMEOUT_S)
    )
    return latest(answers.at_least_one())


def _change(storage: SyncStorage, datastore: str, change: Callable[[TailerCommand], TailerCommand]) -> list[str]:
    known = read_commands(storage).get(datastore, NO_COMMAND)
    command = msgspec.structs.replace(change(known), changed_at=after(known.changed_at))
    answers = run_on_all(storage.masters, tailer_order_table.put, datastore, command)
    answers.at_least_one()
    return list(answers.failures)


# A seek: where each shard's progress goes, what that does to the topic, and moving it (I7, I16).

_TRANSACTION_TIMEOUT_S = 20.0  # a person waits for the result: late is better than failed
_RETRY_S = 0.5


class SeekMove(msgspec.Struct, frozen=True):
    """What a seek does to one shard. `before` is None without a progress record, and of a topic that was deleted it is
    what that topic had. `held` is how far the present topic has the shard.
    """

    before: Location | None
    to: Position
    again: int
    """Cells that are published a second time."""
    never: int
    """Cells that are never published."""
    announced_again: int
    """Generations that are announced a second time."""
    held: Location = BEGINNING
    is_done: bool = False
    """Progress is there already."""

    @property
    def repeats(self) -> bool:
        """Whether the topic has cells behind the location, which would be in it twice."""
        return self.held > self.to.location


def plan_seek(
    storage: SyncStorage, kafka: str, datastore: Datastore, shards: Sequence[int], generation: int | None, added_id: int
) -> list[SeekMove]:
    """Returns what moving the progress of shards to a location does. Without a generation it is the present one.

    Raises BusUnavailable or StorageUnavailable when Kafka or a shard's master is unreachable, Invalid for a location
    that the log doesn't have, and Misconfigured for a shard that needs a new generation.
    """
    status = read_publish_status(kafka, datastore)
    held: dict[int, Position] = {}
    if status.exists:
        with PartitionReader(kafka) as reader:
            held = topic_positions(reader, datastore, shards)
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
            move = _move(status.locations, shard, to[shard], digests[shard], starts.get(shard, []))
            is_emptied = datastore.partition(shard) in status.emptied
            moves[shard] = msgspec.structs.replace(
                move,
                held=held[shard].location if shard in held else BEGINNING,
                is_done=move.before == to[shard] and not is_emptied,
            )
    return [moves[shard] for shard in shards]


def move_progress(
    kafka: str, datastore: Datastore, plan: Callable[[], Sequence[SeekMove]], *, repeat: bool, timeout_s: float
) -> None:
    """Moves progress where `plan` says so, all shards of a partition in one transaction.

    A tailer that opens a log at the same moment fences this process, and a commit may lose its answer. Then the plan is
    made again, and shows what is left to move. Unless it shall `repeat`, shards stay that a tailer has published since.
    Raises BusUnavailable, Fenced or Misconfigured after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    moved: set[int] = set()
    while True:
        wanted: dict[int, list[Position]] = {}
        for move in plan():
            if not move.is_done and (repeat or not move.repeats):
                wanted.setdefault(datastore.partition(move.to.shard), []).append(move.to)
        try:
            for partition in sorted(wanted.keys() - moved):
                log = PartitionLog(kafka, datastore, partition, transaction_timeout_s=_TRANSACTION_TIMEOUT_S)
                try:
                    log.seek(wanted[partition], repeat=repeat)
                finally:
                    log.close()
                moved.add(partition)
            return
        except (Fenced, BusUnavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


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


# Opening a new generation of a shard whose master was restored, also after it has taken new cells (I13, I16).
#
# The topic holds cells that the master lost. The new generation begins behind the last cell that both have. What the
# topic holds from there on is superseded, and what MySQL holds is published again under the new generation.

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
    require_ours(kafka, datastore)
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
    shown = _highest_number(storage, datastore, shard)
    generation = max(head.generation, published.generation, compared.newest_generation, shown) + 1
    lowest = min((found.first for found in compared.superseded), default=published.added_id)
    start = GenerationStart(generation, _start(shard, agreed, starts_at, min(lowest, head.added_id + 1)))
    again = head.added_id + 1 - start.starts_at
    return GenerationPlan(shard, start, compared.superseded, again, proven=agreed is not None)


def _highest_number(storage: SyncStorage, datastore: Datastore, shard: int) -> int:
    """Returns the highest number of a change or a generation that a server shows which answers."""
    found = [0]
    for node in storage.nodes.values():
        with contextlib.suppress(StorageUnavailable):
            found.append(node.run(shard_head.highest_number, datastore.name, shard))
    return max(found)


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
