"""Which version of an index answers queries, and when the others go. The first master decides (A21).

A switch and the end of a version are transactions on the first master (by name of its cluster), so one of them comes
first. The other masters take what it decided. Rows only move forward, so a master that was away is brought up later.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from schemaless.errors import NotReady, StateConflict
from schemaless.index.catalogue import bring_reachable, find_index, find_versions, version_of
from schemaless.index.versions import NamedIndex
from schemaless.location import Location
from schemaless.quantity import quantity
from schemaless.storage import checkpoint_table, index_definition_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage, RunState
from schemaless.topology import Datastore

CAUGHT_UP_WITHIN_S = 2.0
_LOOK_PAUSE_S = 0.05

Reached = dict[int, Location]
"""The checkpoints of a version by cluster and shard."""


async def switch_index(
    storage: AsyncStorage,
    datastore: Datastore,
    name: str,
    number: int | None = None,
    *,
    back: bool = False,
    keep_s: int | None = None,
) -> DefinedIndex:
    """Lets another version of an index answer: the newest one, with `back` the one before, or the one with a number.

    The version that answered until now is kept for `keep_s`, by default as long as the last change said. Returns the
    version that answers then. Raises NotFound, Conflict, or NotReady for a version that isn't complete yet. Raises
    StorageUnavailable when the first master is away, and when any cluster is away that a newer version needs: nobody
    can then say whether its entries are complete.
    """
    named = await find_versions(storage, datastore, name)
    target = target_of(named, number, back=back)
    if target == named.answering:
        return target
    return await switch_to(storage, datastore, named, target, keep_s)


def target_of(named: NamedIndex, number: int | None, *, back: bool) -> DefinedIndex:
    """Returns the version that a switch means, which can answer. Raises NotFound, StateConflict or NotReady."""
    target = _meant(named, number, back)
    if target != named.answering:
        verify_can_answer(target)
    return target


def _meant(named: NamedIndex, number: int | None, back: bool) -> DefinedIndex:
    answering = named.answering
    if number is not None:
        return version_of(named, number)
    present = [index for index in named.versions if index.is_present]
    if not back:
        return present[-1] if present else answering
    earlier = [index for index in present if index.number < answering.number]
    if not earlier:
        raise StateConflict(f"version {answering.number} of index {answering.name} answers, and none before it is kept")
    return earlier[-1]


async def switch_to(
    storage: AsyncStorage, datastore: Datastore, named: NamedIndex, target: DefinedIndex, keep_s: int | None = None
) -> DefinedIndex:
    """Switches to a version as it was read. A newer one must have all that the present one has.

    Raises NotReady, StorageUnavailable, or Conflict when something else was ordered meanwhile.
    """
    if target.number > named.answering.number and named.answering.is_complete:
        await _caught_up(storage, datastore, named.answering, target)
    first = storage.masters[0]
    await first.run(index_definition_table.bring_to, datastore.name, target)
    if keep_s is None:
        keep_s = (named.answering if target.switch.number else target).switch.keep_s
    await first.run(index_definition_table.switch_to, datastore.name, target, keep_s)
    answering = await find_index(storage, datastore, target.name)
    await bring_reachable(storage, datastore, answering)
    if answering.number != target.number:
        raise StateConflict(f"version {answering.number} of index {target.name} answers: another order came first")
    return answering


def verify_can_answer(index: DefinedIndex) -> None:
    """Raises NotReady for a version that isn't complete yet, and Conflict for one that doesn't run."""
    if not index.is_present:
        raise StateConflict(f"version {index.number} of index {index.name} is being deleted")
    if index.order.run_state is not RunState.RUNNING:
        raise StateConflict(
            f"version {index.number} of index {index.name} is {index.state}: resume it first, with"
            f" `schemaless index resume {index.name} --version {index.number}`"
        )
    if not index.is_complete:
        raise NotReady(f"version {index.number} of index {index.name} is {index.state}, and not complete")


async def drop_version(storage: AsyncStorage, datastore: Datastore, name: str, number: int) -> DefinedIndex:
    """Orders that one version of an index is deleted: a change that is given up, or one that was kept. Returns it.

    Raises NotFound, Conflict for the version that answers, or StorageUnavailable when the first master is away.
    """
    version = version_of(await find_versions(storage, datastore, name), number)
    await _retire(storage, datastore, version)
    named = await find_versions(storage, datastore, name)
    version = named.version(number) or replace(version, stage=IndexStage.DELETING)
    if version.is_present:
        raise answers_queries(version)
    return version


def answers_queries(version: DefinedIndex) -> StateConflict:
    return StateConflict(
        f"version {version.number} of index {version.name} answers queries: switch first, or drop the whole index"
    )


async def retire_when_due(storage: AsyncStorage, datastore: Datastore, named: NamedIndex, now: int) -> None:
    """Deletes the kept versions whose time is over. `now`: microseconds since the epoch. Raises StorageUnavailable."""
    for index in named.versions:
        until = named.kept_until(index)
        if until is not None and now >= until:
            await _retire(storage, datastore, index, until)


async def _retire(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, not_before: int = 0) -> None:
    first = storage.masters[0]
    await first.run(index_definition_table.bring_to, datastore.name, index)
    await first.run(index_definition_table.retire, datastore.name, index, not_before)
    retired = (await find_versions(storage, datastore, index.name)).version(index.number)
    if retired is not None and not retired.is_present:
        await bring_reachable(storage, datastore, retired)


async def _caught_up(storage: AsyncStorage, datastore: Datastore, old: DefinedIndex, new: DefinedIndex) -> None:
    """Waits until a version has all that another one has, so that a switch takes no entry away.

    Both follow the log. If the new one is never seen level in CAUGHT_UP_WITHIN_S, it must have what the old one had at
    the beginning. Raises NotReady when it hasn't, or StorageUnavailable.
    """
    deadline = time.monotonic() + CAUGHT_UP_WITHIN_S
    first = wanted = await reached(storage, datastore, old)
    while True:
        found = await reached(storage, datastore, new)
        if not _behind(found, wanted):
            return
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(_LOOK_PAUSE_S)
        wanted = await reached(storage, datastore, old)
    if behind := _behind(found, first):
        raise NotReady(
            f"version {new.number} of index {new.name} is behind version {old.number} in"
            f" {quantity(len(behind), 'shard')}, such as shard {behind[0]}: ask again when it has caught up"
        )


def _behind(found: Reached, wanted: Reached) -> list[int]:
    return [shard for shard, location in wanted.items() if found.get(shard, Location(0, 0)) < location]


async def reached(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> Reached:
    """Returns by shard the lowest checkpoint of a version on its clusters. Raises StorageUnavailable."""
    operation, consumer = checkpoint_table.of_consumer, index.definition.consumer
    clusters = index.definition.placed(datastore).clusters
    found = await all_masters(storage, clusters, operation, datastore.name, consumer)
    lowest: Reached = {}
    for row in (row for rows in found.values() for row in rows):
        lowest[row.shard] = min(row.location, lowest.get(row.shard, row.location))
    return lowest
