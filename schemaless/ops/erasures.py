"""Erasures: ordered, carried out on every cluster, and found again place by place (I19).

Every master has a row of each erasure, so a promotion loses no order. Any process may carry one out, and again: bodies
go in transactions that may be repeated. The cleaner does it until each cluster was searched to its end, and brings rows
to masters that lack them: of a cluster that was away, and of a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import structlog

from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.errors import SchemalessError, StorageUnavailable
from schemaless.names import TRIGGER_PREFIX
from schemaless.ops.datastores import Catalogue
from schemaless.quantity import quantity
from schemaless.runtime.batching import chunks
from schemaless.runtime.events import Event, emit
from schemaless.sharding import shard_of
from schemaless.storage import erasure_table
from schemaless.storage.asyncmy_driver import AsyncStorage, Traffic
from schemaless.storage.erasure_table import Erasure, ErasureSum, HeldBody, PlaceName, ServerLook, Stub
from schemaless.storage.everywhere import write_everywhere
from schemaless.storage.failover import Answers, answers_of_all, ask_clusters, ask_masters
from schemaless.topology import Datastore

log = structlog.get_logger()

AT_ONCE_S = 1.0
"""How long an order waits for what can be done at once."""
_TIMEOUT_S = 1.5
_KAFKA_TIMEOUT_S = 3.0
_DUE_MAX = 100
_STUBS_MAX = 1000
HTTP_CACHES_S = 300
"""How long a cell may be cached by HTTP, as its `max-age` says."""
_ROWS_AT_ONCE = 200


class ErasurePlace(msgspec.Struct, frozen=True):
    """What was found and removed at one place. `remains_until`: in microseconds, when what isn't removed is gone.
    `not_searched`: why nobody looked there.
    """

    place: str
    found: int = 0
    removed: int = 0
    remains_until: int | None = None
    not_searched: str | None = None


class ErasureReport(msgspec.Struct, frozen=True):
    erasure: Erasure
    state: Literal["running", "complete"]
    places: Sequence[ErasurePlace]


async def matched(
    storage: AsyncStorage,
    datastore: Datastore,
    row_key: RowKey,
    column_name: ColumnName | None,
    ref_key: RefKey | None,
) -> tuple[int, int]:
    """Returns how many cells an erasure would empty, those at home and those that only a buffer has, and when.

    The time is the home's, in microseconds, for `Erasure.ordered_at`. Raises StorageUnavailable when the home is
    unreachable.
    """
    shard = shard_of(row_key, datastore.shards)
    wanted = Erasure(0, datastore.name, shard, row_key, column_name, ref_key, "", "", 0)
    now, home = await storage.master(datastore.home(shard)).run(erasure_table.keys_at_home, datastore, wanted)
    buffered = await ask_clusters(storage, storage.topology.clusters, erasure_table.keys_in_buffer, wanted)
    return len({*home, *(key for keys in buffered.found.values() for key in keys)}), now


async def order(storage: AsyncStorage, datastore: Datastore, erasure: Erasure) -> None:
    """Writes an erasure on every master that answers, one at least, and carries out what can be done at once.

    Raises StorageUnavailable when no master answers.
    """
    await write_everywhere(
        storage.masters, lambda master: master.run(erasure_table.order, erasure, timeout_s=_TIMEOUT_S)
    )
    emit(Event.ERASURE_KNOWN)
    with suppress(TimeoutError, SchemalessError):  # the cleaner continues
        await asyncio.wait_for(carry_out(storage, datastore, erasure), AT_ONCE_S)


async def carry_out(storage: AsyncStorage, datastore: Datastore, erasure: Erasure) -> None:
    """Carries an erasure out on all clusters whose masters answer. Raises what the home does: it comes first."""
    answers = await ask_masters(
        storage, storage.topology.clusters, erasure_table.of, datastore.name, erasure.erasure, timeout_s=_TIMEOUT_S
    )
    known = merged([erasure, *answers.found.values()])
    home = datastore.home(known.shard)
    await storage.master(home).run(erasure_table.learn, known)
    known = await _erase_home(storage, datastore, known)
    due = [cluster for cluster, own in answers.found.items() if own is None or own.done_at is None]
    cleaned = [_clean(storage, datastore, known, cluster) for cluster in due]
    for cluster, failure in zip(due, await asyncio.gather(*cleaned, return_exceptions=True), strict=True):
        if isinstance(failure, SchemalessError):
            log.info("an erasure waits for a cluster", erasure=known.id, cluster=cluster, why=str(failure))
        elif failure is not None:
            raise failure


def merged(rows: Sequence[Erasure | None]) -> Erasure:
    """Returns an erasure with what any of its rows knows of the home, at least one of which is there."""
    known = [row for row in rows if row is not None]
    until = next((row.until for row in known if row.until is not None), None)
    entry = max((row.entry for row in known if row.entry is not None), default=None)
    return msgspec.structs.replace(known[0], until=until, entry=entry)


async def _erase_home(storage: AsyncStorage, datastore: Datastore, erasure: Erasure) -> Erasure:
    """Empties all bodies at home, and returns the row as the home has it then."""
    home = storage.master(datastore.home(erasure.shard))

    async def own() -> Erasure:
        return await home.run(erasure_table.of, datastore.name, erasure.erasure) or erasure

    known = await own()
    if known.done_at is None:
        while await home.run(erasure_table.erase_page, datastore, known, traffic=Traffic.WRITE):
            emit(Event.ERASED_AT_HOME)
            known = await own()
        await home.run(erasure_table.settle_home, known)
        known = await own()
    return known


async def _clean(storage: AsyncStorage, datastore: Datastore, erasure: Erasure, cluster: str) -> None:
    """Removes what a cluster has beside the log of the home. `erasure` is the home's row."""
    master = storage.master(cluster)
    await master.run(erasure_table.learn, erasure)
    # A row of one table may become one of a later table meanwhile, and not the other way round.
    for place in (PlaceName.BUFFER, PlaceName.DIVERGED, PlaceName.CONFLICT):
        after = 0
        while rows := await master.run(erasure_table.held, erasure, place, after):
            after = rows[-1].number
            if meant := await _meant(storage, datastore, erasure, rows):
                await master.run(erasure_table.remove, erasure, meant)
                emit(Event.ERASED_BESIDE)
    if cluster != (home := datastore.home(erasure.shard)):
        last = 0
        while emptied := await storage.master(home).run(erasure_table.stubs, datastore, erasure, last, _STUBS_MAX):
            last = emptied[-1].added_id
            await master.run(erasure_table.erase_copy, datastore, erasure, emptied)
    emit(Event.ERASURE_SEARCHED)
    await master.run(erasure_table.finish, erasure)


async def _meant(
    storage: AsyncStorage, datastore: Datastore, erasure: Erasure, rows: Sequence[HeldBody]
) -> list[HeldBody]:
    """Returns the rows that are to go: those that were there before the order, and those whose key is erased at home.

    A cell that was there before the order and isn't home gets its place without a body first. One that came home after
    the home was done is erased there.
    """
    home = storage.master(datastore.home(erasure.shard))
    states = await home.run(erasure_table.states, datastore, erasure.shard, [row.key for row in rows])
    early = {row.number for row in rows if row.is_early}
    lacking: dict[CellKey, str | None] = {}
    for row, state in zip(rows, states, strict=True):
        is_home = state is not None and (state.is_erased or state.digest != row.digest)
        if row.number in early and row.place is not PlaceName.CONFLICT and not is_home:
            lacking[row.key] = row.idempotency_key or lacking.get(row.key)
    if lacking:
        await home.run(erasure_table.erase_page, datastore, erasure, lacking, traffic=Traffic.WRITE)
        emit(Event.ERASED_AT_HOME)
    return [
        row
        for row, state in zip(rows, states, strict=True)
        if row.number in early or (state is not None and state.is_erased)
    ]


async def step(storage: AsyncStorage, catalogue: Catalogue) -> None:
    """Carries out what is due anywhere. Costs one SELECT a master where nothing is."""
    sums, due = await _due(storage, (0, 0))
    if len(set(sums.values())) > 1:
        try:
            await _bring(storage, sums)
        except SchemalessError as error:
            log.info("a master lacks erasures that others have", why=str(error))
    away: set[str] = set()
    while due:
        for erasure in due:
            await _carry_out_unless_away(storage, catalogue, erasure, away)
        _, due = await _due(storage, due[-1].age)


async def _due(storage: AsyncStorage, after: tuple[int, int]) -> tuple[dict[str, ErasureSum], list[Erasure]]:
    """Returns which erasures each master has, and the next that are due anywhere, by age."""
    answers = await ask_masters(
        storage, storage.topology.clusters, erasure_table.due, after, _DUE_MAX, timeout_s=_TIMEOUT_S
    )
    pages = [rows for _, rows in answers.found.values()]
    due = {row.age: row for rows in pages for row in rows}
    # Behind the last row of a full page its master may have rows that others lack.
    until = min((rows[-1].age for rows in pages if len(rows) == _DUE_MAX), default=max(due, default=after))
    sums = {cluster: summed for cluster, (summed, _) in answers.found.items()}
    return sums, [due[age] for age in sorted(due) if age <= until]


async def _carry_out_unless_away(storage: AsyncStorage, catalogue: Catalogue, erasure: Erasure, away: set[str]) -> None:
    """Carries an erasure out, unless its home is among those that are away, and adds a home that is."""
    try:
        datastore = await catalogue.datastore(erasure.datastore)
        if (home := datastore.home(erasure.shard)) in away:
            return
        try:
            await carry_out(storage, datastore, erasure)
        except StorageUnavailable:  # it costs one time-out, and not one for each of its rows
            away.add(home)
            raise
    except SchemalessError as error:
        log.info("an erasure waits", erasure=erasure.id, datastore=erasure.datastore, why=str(error))


async def _bring(storage: AsyncStorage, sums: Mapping[str, ErasureSum]) -> None:
    """Writes erasures to the masters that lack them."""
    found: Answers[set[int]] = await ask_masters(storage, sums, erasure_table.numbers, timeout_s=_TIMEOUT_S)
    for source, there in found.found.items():
        for cluster, own in found.found.items():
            for some in chunks(sorted(there - own), count_max=_ROWS_AT_ONCE):
                for row in await storage.master(source).run(erasure_table.of_numbers, some):
                    await storage.master(cluster).run(erasure_table.learn, row)
            own.update(there)


# The report: place by place what was found and removed, what remains until when, and what nobody can look at.

Looks = dict[str, ServerLook | str]
"""By server what it has, or why it wasn't looked at."""


async def report(
    storage: AsyncStorage, datastore: Datastore, erasure: int, bootstrap: str | None
) -> ErasureReport | None:
    """Returns how far an erasure is, None for one that no cluster knows.

    `bootstrap`: of Kafka, whose topic is looked at. Raises StorageUnavailable when no cluster answers.
    """
    known = await _known(storage, datastore, erasure)
    if known is None:
        return None
    looks, stubs = await _look(storage, datastore, known)
    places = _of_servers(storage, datastore, known, looks)
    clusters = [cluster for cluster in storage.topology.clusters if not storage.is_joining(cluster)]
    masters = [looks[storage.present_master(cluster).node.name] for cluster in clusters]
    consumers = _of_consumers(masters)
    searched = [look.row.done_at if isinstance(look, ServerLook) and look.row else None for look in masters]
    is_done = all(searched) and all(place.found == place.removed for place in (*places, *consumers))
    left_at = max(filter(None, searched)) if is_done else time.time_ns() // 1000
    topic = await _of_topic(datastore, known, stubs, bootstrap, consumers)
    places += [*consumers, *topic, *_out_of_reach(looks, left_at)]
    return ErasureReport(known, "complete" if is_done else "running", places)


async def verify(storage: AsyncStorage, datastore: Datastore, erasure: int) -> list[ErasurePlace]:
    """Searches all servers again. A place whose `found` is more than its `removed` has bodies that are still there.

    Raises StorageUnavailable when no cluster answers.
    """
    known = await _known(storage, datastore, erasure)
    if known is None:
        return []
    looks, _ = await _look(storage, datastore, known)
    return _of_servers(storage, datastore, known, looks)


async def _known(storage: AsyncStorage, datastore: Datastore, erasure: int) -> Erasure | None:
    answers = await ask_clusters(storage, storage.topology.clusters, erasure_table.of, datastore.name, erasure)
    rows = answers.at_least_one()
    if all(row is None for row in rows):
        return None
    first = next(row for row in rows if row is not None)
    return merged([answers.found.get(datastore.home(first.shard)), *rows])


async def _look(storage: AsyncStorage, datastore: Datastore, erasure: Erasure) -> tuple[Looks, Sequence[Stub]]:
    """Looks at all servers, and returns the first of the erased cells as the home has them, too."""
    home = datastore.home(erasure.shard)
    answers = await ask_clusters(storage, [home], erasure_table.stubs, datastore, erasure, 0, _STUBS_MAX)
    stubs = answers.found.get(home, [])
    keys = [(stub.column_name, stub.ref_key) for stub in stubs]
    followers = {node.node.name for cluster in storage.topology.clusters for node in storage.minions(cluster)}
    masters = {storage.present_master(cluster).node.name for cluster in storage.topology.clusters}
    asked = {
        name: node.run(erasure_table.look, datastore, erasure, keys, timeout_s=_TIMEOUT_S, traffic=Traffic.PROBE)
        for name, node in storage.nodes.items()
        if name in followers | masters
    }
    looked = await answers_of_all(asked, tolerated=SchemalessError)
    for cluster in storage.topology.clusters:
        look = looked.found.get(storage.present_master(cluster).node.name)
        if look is not None and look.row and look.row.done_at and look.searched.bodies_left:
            with suppress(SchemalessError):  # a body came after the cluster was searched
                await storage.master(cluster).run(erasure_table.reopen, [erasure.erasure])
    looks: Looks = dict.fromkeys(storage.nodes, "it doesn't follow its master now, and gets the erasure before it does")
    return looks | {name: str(error) for name, error in looked.failures.items()} | looked.found, stubs


def _of_servers(storage: AsyncStorage, datastore: Datastore, erasure: Erasure, looks: Looks) -> list[ErasurePlace]:
    places = []
    home = datastore.home(erasure.shard)
    for cluster in sorted(storage.topology.clusters, key=lambda name: (name != home, name)):
        master = storage.present_master(cluster).node.name
        names = [name for name, node in storage.nodes.items() if node.node.cluster == cluster and name != master]
        look = looks[master]
        if isinstance(look, str):
            places.append(ErasurePlace(f"cluster {cluster}", not_searched=look))
        else:
            places += _of_master(cluster, look, is_home=cluster == home)
        for name in names:
            look = looks[name]
            if isinstance(look, str):
                places.append(ErasurePlace(f"minion {name}", not_searched=look))
            else:
                removed = _removed(look, is_home=cluster == home)
                places.append(ErasurePlace(f"minion {name}", removed + _left(look), removed))
    return places


def _of_master(cluster: str, look: ServerLook, *, is_home: bool) -> list[ErasurePlace]:
    counted = look.row.places if look.row else {}
    left = dict(look.searched.left)
    places = []
    if is_home:
        removed = look.searched.stubs
        places.append(ErasurePlace(f"log of {cluster}", removed + (look.searched.log_left or 0), removed))
    elif look.searched.log_left is not None:
        left[PlaceName.COPY] = look.searched.log_left
    for place, count in left.items():
        if not count and place in (PlaceName.PARKED, PlaceName.PARKED_HISTORY):
            continue  # the trigger programs say that they passed it
        removed = counted[place].removed if place in counted else 0
        places.append(ErasurePlace(f"{place} of {cluster}", removed + count, removed))
    keys = look.idempotency_keys
    if is_home and keys:
        kept = f"{quantity(keys, 'row')} kept: they have no body, and refuse a retry"
        places.append(ErasurePlace(f"Idempotency-Keys of {cluster}", not_searched=kept))
    return places


def _removed(look: ServerLook, *, is_home: bool) -> int:
    counted = sum(place.removed for place in look.row.places.values()) if look.row else 0
    return counted + (look.searched.stubs if is_home else 0)


def _left(look: ServerLook) -> int:
    return (look.searched.log_left or 0) + sum(look.searched.left.values())


def _of_consumers(masters: Sequence[ServerLook | str]) -> list[ErasurePlace]:
    """Indexes and trigger programs: how many checkpoints they have on masters, and how many are past the entry."""
    passed: dict[str, list[bool]] = {}
    for look in masters:
        if isinstance(look, ServerLook):
            for consumer, is_past in look.passed.items():
                passed.setdefault(consumer, []).append(is_past)
    return [ErasurePlace(consumer, len(found), sum(found)) for consumer, found in sorted(passed.items())]


async def _of_topic(
    datastore: Datastore,
    erasure: Erasure,
    stubs: Sequence[Stub],
    bootstrap: str | None,
    consumers: Sequence[ErasurePlace],
) -> list[ErasurePlace]:
    name = f"topic {datastore.topic}"
    if bootstrap is None:
        return [ErasurePlace(name, not_searched="this process knows no Kafka")]
    from schemaless.bus.parked_topic import parked_topics
    from schemaless.bus.reader import RecordOffsets, record_offsets
    from schemaless.bus.topics import retention_ms

    cells = {stub.added_id: stub.created_at for stub in stubs}
    programs = [
        place.place.removeprefix(TRIGGER_PREFIX) for place in consumers if place.place.startswith(TRIGGER_PREFIX)
    ]

    def ask() -> tuple[RecordOffsets, int, list[str]]:
        within = {"timeout_s": _KAFKA_TIMEOUT_S}
        return (
            record_offsets(bootstrap, datastore, erasure.shard, erasure.row_key, cells, **within),
            retention_ms(bootstrap, datastore.topic, **within),
            parked_topics(bootstrap, datastore.name, programs, **within),
        )

    try:
        found, kept_ms, parked = await asyncio.to_thread(ask)
    except SchemalessError as error:
        return [ErasurePlace(name, not_searched=str(error))]
    latest = max((cells[added_id] for added_id in found.offsets), default=0)
    until = None if kept_ms < 0 or not latest else latest + kept_ms * 1000
    places = []
    if found.offsets:
        offsets = ", ".join(map(str, sorted(found.offsets.values())))
        places.append(
            ErasurePlace(f"{name} [{found.partition}] at offsets {offsets}", len(found.offsets), remains_until=until)
        )
    if left := len(stubs) - len(found.offsets):
        why = f"no record with a body was met of {quantity(left, 'cell')}: it was published later, or is further away"
        places.append(ErasurePlace(f"{name} [{found.partition}]", not_searched=why))
    return places + [
        ErasurePlace(f"topic {topic}", not_searched="copies of parked cells stay there") for topic in parked
    ]


def _out_of_reach(looks: Looks, left_at: int) -> list[ErasurePlace]:
    """What nobody searches. Binary logs have the bodies as they were just before they went."""
    places = []
    by_expiry: dict[int, list[str]] = {}
    for name, look in looks.items():
        if isinstance(look, ServerLook) and look.expiry_s is not None:
            by_expiry.setdefault(look.expiry_s, []).append(name)
    for expiry_s, names in sorted(by_expiry.items()):
        until = left_at + expiry_s * 1_000_000 if expiry_s else None
        why = None if expiry_s else "kept for ever: binlog_expire_logs_seconds is 0"
        places.append(ErasurePlace(f"binary logs of {', '.join(sorted(names))}", remains_until=until, not_searched=why))
    return [
        *places,
        ErasurePlace("HTTP caches", remains_until=left_at + HTTP_CACHES_S * 1_000_000),
        ErasurePlace("backups", not_searched="nobody knows of them here"),
        ErasurePlace("subscribers", not_searched="the entry tells them, and what they keep is theirs"),
    ]
