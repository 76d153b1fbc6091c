"""Datastores: creates and lists them, and holds the catalogue that services ask. Shard count, partition count and
placement are fixed at creation (I2, I8).

Creation can be interrupted anywhere and repeated. The catalogue row is written first, with ready = 0, on every master.
Then the shards are created on their home clusters, then the topics. At the end ready becomes 1.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import structlog

from schemaless.errors import (
    BusRefuses,
    Invalid,
    Misconfigured,
    NotFound,
    RefusedForGood,
    SchemalessError,
)
from schemaless.quantity import quantity
from schemaless.storage import schema, shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage, Traffic
from schemaless.storage.failover import Answers, answers_of_all, nobody_answers, run_on_all
from schemaless.storage.node_core import Storage
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.topology import Datastore, Topology

log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Called with (shards created, shards in all), from one thread."""

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
    *,
    administrators: Topology | None = None,
) -> Datastore:
    """Creates a datastore, or finishes its creation. Does nothing if it exists with the same counts.

    `administrators` is the topology with an account that may grant: it gives the account of `topology` the datastore's
    databases. Without one, that account must have the rights already.

    Raises Invalid for a name, Misconfigured for counts that don't fit or that differ from the existing ones,
    StorageUnavailable or BusUnavailable when a server is unreachable. It can be called again after any error.
    """
    with SyncStorage(topology) as storage:
        storage.look()
        homes = tuple(each for each in sorted(topology.clusters) if not storage.has_no_master(each))
        wanted = Datastore(parse_name(name), shards, partitions, homes)
        return create_shards(
            storage,
            wanted,
            progress,
            administrators=administrators,
            make_topics=lambda datastore: _make_topics(kafka_bootstrap, datastore),
        )


def _make_topics(kafka_bootstrap: str, datastore: Datastore) -> None:
    from schemaless.bus.kafka_accounts import grant_on_datastore
    from schemaless.bus.topics import ensure_topics

    ensure_topics(kafka_bootstrap, datastore)
    try:
        grant_on_datastore(kafka_bootstrap, datastore.name)
    except BusRefuses as error:  # it may make topics and give no rights: somebody else gives them
        log.error("Kafka's accounts have to be let in by an administrator", why=str(error), hint=error.hint)


def create_shards(
    storage: SyncStorage,
    wanted: Datastore,
    progress: Progress | None = None,
    *,
    administrators: Topology | None = None,
    make_topics: Callable[[Datastore], object] = lambda datastore: None,
) -> Datastore:
    """Does the MySQL half of `create_datastore`, and makes topics only where it is told how."""
    datastore = _register(storage, wanted)
    if administrators is not None:
        # The account of the storage gets the datastore's databases on all clusters: any of them may get shards of
        # it.
        with SyncStorage(administrators) as admin:
            for master in storage.masters:
                account = master.run(schema.current_account)
                admin.master(master.node.cluster).run(schema.grant_datastore, datastore, account)
    try:
        _create_missing_shards(storage, datastore, progress or (lambda made, total: None))
    except RefusedForGood as error:
        if administrators is not None:
            raise
        who = "the services' account may not create databases, and SCHEMALESS_ADMIN_TOPOLOGY names no other one"
        raise RefusedForGood(f"{error}: {who}") from error
    make_topics(datastore)
    for master in storage.masters:
        master.run(schema.set_ready, datastore.name)
    return datastore


def parse_name(name: str) -> str:
    """Raises Invalid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid("datastore", "must match [a-z][a-z0-9_]{0,31}")
    return name


def list_datastores(topology: Topology) -> dict[str, Datastore]:
    """Returns all datastores that are ready, by name, from the masters that can be reached.

    Raises StorageUnavailable when no master can be reached.
    """
    with SyncStorage(topology, timeout_s=_REFRESH_TIMEOUT_S) as storage:
        return _union(storage, run_on_all(storage.masters, schema.datastores))


class Catalogue:
    """The datastores that a service knows, by name. An unknown name is looked up once for all callers that wait."""

    def __init__(self, storage: AsyncStorage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._known: dict[str, Datastore] = {}
        self._refreshed_at = -_REFRESH_PAUSE_S
        self._refreshing = asyncio.Lock()
        self._look: list[asyncio.Task[dict[str, Datastore] | SchemalessError]] = []

    async def datastore(self, name: str) -> Datastore:
        """Returns the datastore of that name. Raises NotFound, or StorageUnavailable when no server answers."""
        known = self._known.get(name)
        if known is not None:
            return known
        asked_at = self._clock()
        async with self._refreshing:  # callers that wait here share one refresh that began after they asked
            if name not in self._known and self._refreshed_at <= asked_at:
                await self._refresh()
        try:
            return self._known[name]
        except KeyError:
            raise NotFound(f"there is no datastore {name!r}") from None

    async def all(self) -> dict[str, Datastore]:
        """Returns all datastores, as they were at most a second ago."""
        async with self._refreshing:
            if self._clock() - self._refreshed_at >= _REFRESH_PAUSE_S:
                await self._refresh()
        return dict(self._known)

    async def readable(self) -> dict[str, Datastore]:
        """Returns what the first server shows that answers, and waits for no other one.

        Callers share a look that is under way. Raises StorageUnavailable when no server answers.
        """
        if all(asked.done() for asked in self._look):
            self._look = [asyncio.create_task(_shown_by(node)) for node in self._storage.nodes.values()]
        failures: list[SchemalessError] = []
        for answer in asyncio.as_completed(self._look):
            shown = await answer
            if not isinstance(shown, SchemalessError):
                return {name: self._storage.live(each) for name, each in shown.items()}
            failures.append(shown)
        raise nobody_answers(failures)

    async def _refresh(self) -> None:
        began = self._clock()
        # Minions are asked too: what they show was ready on their master. A server that fails says nothing.
        questions = {
            name: node.run(schema.datastores, timeout_s=_REFRESH_TIMEOUT_S, traffic=Traffic.PROBE)
            for name, node in self._storage.nodes.items()
        }
        answers = await answers_of_all(questions, tolerated=SchemalessError)
        self._known = _union(self._storage, answers)
        self._refreshed_at = began


async def _shown_by(node: AsyncNode) -> dict[str, Datastore] | SchemalessError:
    try:
        return await node.run(schema.datastores, timeout_s=_REFRESH_TIMEOUT_S, traffic=Traffic.PROBE)
    except SchemalessError as error:
        return error


def _union(storage: Storage[Any], answers: Answers[dict[str, Datastore]]) -> dict[str, Datastore]:
    """Returns what any server knows: a datastore that is ready on one master was created on all of them."""
    return {name: storage.live(each) for answer in answers.at_least_one() for name, each in answer.items()}


def _register(storage: SyncStorage, wanted: Datastore) -> Datastore:
    """Writes the catalogue row on every master. Of two creators at once, the first master decides who was first.

    Raises Misconfigured where it exists with other counts, or where a master is of another installation.
    """

    def existing(master: SyncNode) -> Datastore | None:
        return master.run(lambda: schema.datastores(ready=False)).get(wanted.name)

    masters = storage.masters
    for master in masters:
        master.run(schema.create_server_tables)
    _install(masters)
    # A datastore that was created before a cluster was added keeps its placement.
    agreed = next((found for master in masters if (found := existing(master)) is not None), wanted)
    for master in masters:
        master.run(schema.insert_datastore, agreed)
        written = existing(master)
        if written is None or (written.shards, written.partitions) != (wanted.shards, wanted.partitions):
            raise _other_counts(wanted, written)
        agreed = written
    return agreed


def _install(masters: Sequence[SyncNode]) -> None:
    """Gives every master the id of the installation: the one that some have, or a new one. Raises Misconfigured."""
    known = (master.run(schema.installation_of) for master in masters)
    agreed = next((found for found in known if found is not None), secrets.token_hex(8))
    for master in masters:
        if (written := master.run(schema.install, agreed)) != agreed:
            if master is not masters[0]:
                raise Misconfigured(
                    f"the topology names servers of two installations: {master.node.name} is of {written}, and"
                    f" {masters[0].node.name} of {agreed}"
                )
            agreed = written


def _create_missing_shards(storage: SyncStorage, datastore: Datastore, progress: Progress) -> None:
    """Creates shards on their home clusters. A shard's head is written last, so a head means a whole shard."""
    made = {head.shard for master in storage.masters for head in master.run(shard_head.heads, datastore.name)}
    missing = [shard for shard in range(datastore.shards) if shard not in made]
    before = datastore.shards - len(missing)
    progress(before, datastore.shards)

    def create(shard: int) -> None:
        storage.master(datastore.home(shard)).run(schema.create_shard, datastore, shard)

    with ThreadPoolExecutor(_THREADS_PER_CLUSTER * len(datastore.placement)) as pool:
        futures = [pool.submit(create, shard) for shard in missing]
        try:
            for done, future in enumerate(as_completed(futures), start=before + 1):
                future.result()
                progress(done, datastore.shards)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _other_counts(wanted: Datastore, written: Datastore | None) -> Misconfigured:
    if written is None:
        return Misconfigured(f"datastore {wanted.name} is missing on a master that has just taken it", hint="try again")
    finish = f"--shards {written.shards} --partitions {written.partitions}"
    return Misconfigured(
        f"datastore {wanted.name} exists with {quantity(written.shards, 'shard')} and"
        f" {quantity(written.partitions, 'partition')}, which can't be changed to"
        f" {wanted.shards} and {wanted.partitions}",
        hint=f"give the new one another name, or finish the creation of that one with {finish}",
    )
