"""How far the tailers of a datastore are: each shard's published location beside its head, and what holds it up.

Progress is read before the heads, so a head below it is no matter of timing. Seconds are the age of the oldest cell
that is not published yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from schemaless.bus.publish_status import Owner, Publication, read_publication
from schemaless.errors import StorageUnavailable
from schemaless.location import BEGINNING, Location
from schemaless.ops.tailer_control import read_orders
from schemaless.storage import shard_head, shard_log
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.shard_log import Oldest
from schemaless.storage.tailer_order_table import NO_ORDER, TailerOrder
from schemaless.topology import Datastore

_SHARDS_PER_QUESTION = 200


class ShardStatus(msgspec.Struct, frozen=True):
    """`published` is None without a progress record, `head` while the shard's master is away."""

    shard: int
    partition: int
    published: Location | None
    head: Location | None
    lag_s: float
    problem: str | None

    @property
    def lag(self) -> int:
        """In cells."""
        return 0 if self.head is None else max(0, self.head.added_id - (self.published or BEGINNING).added_id)


class TailerStatus(msgspec.Struct, frozen=True):
    """`order` is what an operator said last; `owners` by partition."""

    datastore: Datastore
    order: TailerOrder
    owners: Mapping[int, Owner]
    shards: Sequence[ShardStatus]


def read_tailer_status(storage: SyncStorage, kafka: str, datastore: Datastore) -> TailerStatus:
    """Raises BusUnavailable. Of a master that is away nothing is told."""
    publication = read_publication(kafka, datastore)
    heads = read_heads(storage, datastore)
    oldest = _oldest(storage, datastore, publication.locations, heads)
    shards = [_shard(datastore, shard, publication, heads, oldest) for shard in range(datastore.shards)]
    order = read_orders(storage).get(datastore.name, NO_ORDER)
    return TailerStatus(datastore, order, publication.owners, shards)


def read_heads(storage: SyncStorage, datastore: Datastore) -> dict[int, Location]:
    """Of the masters that can be reached."""
    found: dict[int, Location] = {}
    for cluster in sorted(set(datastore.placement)):
        try:
            heads = storage.master(cluster).run(shard_head.heads, datastore.name)
        except StorageUnavailable:
            continue
        found.update({head.shard: Location(head.generation, head.added_id) for head in heads})
    return found


def _oldest(
    storage: SyncStorage, datastore: Datastore, published: Mapping[int, Location], heads: Mapping[int, Location]
) -> dict[int, Oldest | None]:
    """The first cell behind what is published, of every shard that is behind; None where there is none."""
    found: dict[int, Oldest | None] = {}
    for cluster in sorted(set(datastore.placement)):
        behind = {
            shard: published.get(shard, BEGINNING).added_id
            for shard, head in heads.items()
            if datastore.home(shard) == cluster and head.added_id > published.get(shard, BEGINNING).added_id
        }
        for part in _parts(behind, _SHARDS_PER_QUESTION):
            try:
                found.update(storage.master(cluster).run(shard_log.oldest_after, datastore, part))
            except StorageUnavailable:
                break
    return found


def _parts(positions: Mapping[int, int], size: int) -> Iterable[dict[int, int]]:
    left = iter(positions.items())
    while part := dict(islice(left, size)):
        yield part


def _shard(
    datastore: Datastore,
    shard: int,
    publication: Publication,
    heads: Mapping[int, Location],
    oldest: Mapping[int, Oldest | None],
) -> ShardStatus:
    first = oldest.get(shard)
    published, head = publication.locations.get(shard), heads.get(shard)
    return ShardStatus(
        shard,
        datastore.partition(shard),
        published,
        head,
        0.0 if first is None else max(0.0, first.age_us / 1e6),
        _problem(datastore, shard, publication, head, oldest),
    )


def _problem(
    datastore: Datastore,
    shard: int,
    publication: Publication,
    head: Location | None,
    oldest: Mapping[int, Oldest | None],
) -> str | None:
    """Why a shard does not go on, as far as it can be told from outside."""
    published = publication.locations.get(shard)
    if head is None:
        return f"the master of cluster {datastore.home(shard)} can't be reached"
    if datastore.partition(shard) in publication.emptied:
        return "the cells topic was made anew: say with `schemaless tailer seek` from where to publish again"
    if published is None:
        return "no progress record yet" if head.added_id else None
    if head.generation > published.generation:
        return None
    if head < published or shard in publication.refused:
        lost = publication.refused.get(shard, head)
        return f"the topic is ahead of MySQL: {published} was published, but the master's head was {lost}"
    return _hole(published, oldest.get(shard)) if shard in oldest else None


def _hole(published: Location, first: Oldest | None) -> str | None:
    following = published.added_id + 1
    return None if first is not None and first.added_id == following else f"cell {following} is missing in MySQL"
