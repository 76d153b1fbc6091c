"""Status of the tailers of a datastore: each shard's published location beside its head, and why a shard is blocked.

Progress is read before the heads. A head below it is therefore a real contradiction, and no matter of timing. Lag in
seconds is the age of the oldest cell that is not published yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from schemaless.bus.published_progress import Owner, PublishStatus, read_publish_status
from schemaless.errors import LocationGone, StorageUnavailable
from schemaless.location import BEGINNING, Location
from schemaless.ops.tailer_control import read_commands
from schemaless.position import Position
from schemaless.runtime.batching import chunks
from schemaless.storage import shard_head, shard_log
from schemaless.storage.failover import run_on_all
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.shard_log import Following, Oldest
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


def read_tailer_status(storage: SyncStorage, kafka: str, datastore: Datastore) -> TailerStatus:
    """Reads the status of every shard. Shards of an unreachable master have no head. Raises BusUnavailable."""
    publish_status = read_publish_status(kafka, datastore)
    heads = read_heads(storage, datastore)
    oldest = _read_oldest(storage, datastore, publish_status.locations, heads)
    lost = _read_lost(storage, datastore, publish_status, heads)
    shards = []
    for shard in range(datastore.shards):
        first = oldest.get(shard)
        status = ShardStatus(
            shard,
            datastore.partition(shard),
            publish_status.locations.get(shard),
            heads.get(shard),
            lag_s=0.0 if first is None else max(0.0, first.age_us / 1e6),
            problem=_problem(datastore, shard, publish_status, heads.get(shard), oldest, lost),
        )
        shards.append(status)
    command = read_commands(storage).get(datastore.name, NO_COMMAND)
    return TailerStatus(datastore, command, publish_status.owners, shards)


def read_heads(storage: SyncStorage, datastore: Datastore) -> dict[int, Location]:
    """Returns the head of each shard whose master can be reached."""
    answers = run_on_all(map(storage.master, datastore.clusters), shard_head.heads, datastore.name)
    return {head.shard: head.location for heads in answers.found.values() for head in heads}


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
) -> str | None:
    """Returns why a shard is blocked, as far as it can be seen from outside."""
    published = publish_status.locations.get(shard)
    if head is None:
        return f"the master of cluster {datastore.home(shard)} is unreachable"
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
