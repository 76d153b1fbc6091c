"""Datastores: making one, listing them, and the catalogue that a service asks. Shard count, partition count and
placement are fixed at creation (I2, I8).

Making one can be cut off anywhere and done again: the catalogue row comes first, with ready = 0, on every master;
then the shards on their homes, the topics, and ready = 1 at the end.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from schemaless.errors import Invalid, Misconfigured, NotFound, StorageUnavailable
from schemaless.storage import datastore_table, schema, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.topology import Datastore, Topology

Progress = Callable[[int, int], None]
"""Called with (shards made, shards in all), from one thread."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_THREADS_PER_CLUSTER = 2  # DDL is one server's fsyncs, which two sessions overlap
_REFRESH_PAUSE_S = 1.0
_REFRESH_TIMEOUT_S = 1.0


def create_datastore(
    topology: Topology,
    kafka_bootstrap: str,
    name: str,
    shards: int,
    partitions: int,
    progress: Progress | None = None,
) -> Datastore:
    """Makes a datastore, or finishes making it; harmless when it exists with the same counts.

    Raises Invalid for a name, Misconfigured for counts that don't fit or that differ from the existing ones,
    StorageUnavailable or BusUnavailable when a server is away: run it again then.
    """
    from schemaless.bus.topics import ensure_topics

    wanted = Datastore(parse_name(name), shards, partitions, tuple(sorted(topology.clusters)))
    with SyncStorage(topology) as storage:
        datastore = _register(storage, wanted)
        _make_missing_shards(storage, datastore, progress or (lambda made, total: None))
        ensure_topics(kafka_bootstrap, datastore)
        _set_ready(storage, datastore)
    return datastore


def create_shards(storage: SyncStorage, wanted: Datastore, progress: Progress) -> Datastore:
    """The MySQL half of `create_datastore`, for whoever needs no topics."""
    datastore = _register(storage, wanted)
    _make_missing_shards(storage, datastore, progress)
    _set_ready(storage, datastore)
    return datastore


def parse_name(name: str) -> str:
    """Raises Invalid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid("datastore", "must match [a-z][a-z0-9_]{0,31}")
    return name


def list_datastores(topology: Topology) -> dict[str, Datastore]:
    """All that are ready, by name, as the masters that can be reached know them. Raises StorageUnavailable."""
    with SyncStorage(topology, timeout_s=_REFRESH_TIMEOUT_S) as storage:
        found: list[dict[str, Datastore]] = []
        failures: list[StorageUnavailable] = []
        for master in _masters(storage):
            try:
                found.append(master.run(datastore_table.all_of))
            except StorageUnavailable as error:
                failures.append(error)
    return _union(found, failures)


class Catalogue:
    """Answers which datastore has a name, for a service; looks again, once for all who wait, for an unknown name."""

    def __init__(self, storage: AsyncStorage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._known: dict[str, Datastore] = {}
        self._looked_at = -_REFRESH_PAUSE_S
        self._looking = asyncio.Lock()

    async def datastore(self, name: str) -> Datastore:
        """Raises NotFound, or StorageUnavailable when no server can say."""
        known = self._known.get(name)
        return known if known is not None else await self._look_for(name)

    async def all(self) -> dict[str, Datastore]:
        """All datastores, at most a second old."""
        async with self._looking:
            if self._clock() - self._looked_at >= _REFRESH_PAUSE_S:
                await self._refresh()
        return dict(self._known)

    async def _look_for(self, name: str) -> Datastore:
        asked_at = self._clock()
        async with self._looking:  # those who wait here share one look that began after they asked
            if name not in self._known and self._looked_at <= asked_at:
                await self._refresh()
        try:
            return self._known[name]
        except KeyError:
            raise NotFound(f"there is no datastore {name!r}") from None

    async def _refresh(self) -> None:
        began = self._clock()
        answers = await asyncio.gather(*map(_ask, self._storage.nodes.values()))
        found = [answer for answer in answers if isinstance(answer, dict)]
        self._known = _union(found, [answer for answer in answers if not isinstance(answer, dict)])
        self._looked_at = began


async def _ask(node: AsyncNode) -> dict[str, Datastore] | StorageUnavailable:
    """Minions too: what they show was ready on their master."""
    try:
        return await node.run(datastore_table.all_of, timeout_s=_REFRESH_TIMEOUT_S)
    except StorageUnavailable as error:
        return error


def _union(found: Iterable[dict[str, Datastore]], failures: Sequence[StorageUnavailable]) -> dict[str, Datastore]:
    """Ready on one master means made on all of them: the mark is set last."""
    answers = list(found)
    if not answers:
        raise StorageUnavailable("no server answers: " + "; ".join(map(str, failures)))
    return {name: datastore for answer in answers for name, datastore in answer.items()}


def _register(storage: SyncStorage, wanted: Datastore) -> Datastore:
    """The catalogue row on every master. Of two creators at once, the first master decides who was first."""
    masters = _masters(storage)
    for master in masters:
        master.run(schema.create_server_tables)
    agreed = _existing(masters, wanted.name) or wanted  # made before a cluster was added: its placement stays
    for master in masters:
        master.run(datastore_table.insert, agreed)
        agreed = _same_counts(_existing([master], wanted.name), wanted)
    return agreed


def _existing(masters: Sequence[SyncNode], name: str) -> Datastore | None:
    for master in masters:
        found = master.run(lambda: datastore_table.all_of(ready=False)).get(name)
        if found is not None:
            return found
    return None


def _same_counts(found: Datastore | None, wanted: Datastore) -> Datastore:
    if found is None or (found.shards, found.partitions) != (wanted.shards, wanted.partitions):
        raise Misconfigured(f"datastore {wanted.name} exists with other counts: {found}")
    return found


def _make_missing_shards(storage: SyncStorage, datastore: Datastore, progress: Progress) -> None:
    """On their homes, in a few threads for each; a shard's head is written last, so a head means a whole shard."""
    made = {head.shard for master in _masters(storage) for head in _heads(master, datastore)}
    missing = [shard for shard in range(datastore.shards) if shard not in made]
    before = datastore.shards - len(missing)
    progress(before, datastore.shards)
    with ThreadPoolExecutor(_THREADS_PER_CLUSTER * len(datastore.placement)) as pool:
        futures = [pool.submit(_make_shard, storage, datastore, shard) for shard in missing]
        try:
            for done, future in enumerate(as_completed(futures), start=before + 1):
                future.result()
                progress(done, datastore.shards)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _heads(master: SyncNode, datastore: Datastore) -> list[shard_head.Head]:
    return master.run(shard_head.heads, datastore.name)


def _make_shard(storage: SyncStorage, datastore: Datastore, shard: int) -> None:
    storage.master(datastore.home(shard)).run(schema.create_shard, datastore, shard)


def _set_ready(storage: SyncStorage, datastore: Datastore) -> None:
    for master in _masters(storage):
        master.run(datastore_table.set_ready, datastore.name)


def _masters(storage: SyncStorage) -> list[SyncNode]:
    return [storage.master(cluster) for cluster in sorted(storage.topology.clusters)]
