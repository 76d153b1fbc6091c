"""The catalogue of a datastore's indexes, which every master keeps: making, dropping, ordering, and how far a build is.

What people ask for is a row on each master that can be reached. Indexer processes do the work, and bring rows of
masters that were away to what the others have. When two clients create different indexes under one name, or change one
index, the first master (by name of its cluster) decides which one was first. Which version answers: index/switch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from schemaless.errors import Invalid, NotFound, StateConflict, StorageUnavailable
from schemaless.index.definition import NUMBER_MAX, IndexDefinition
from schemaless.index.versions import IndexVersions, NamedIndex, VersionRole, merge
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import index_definition_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.everywhere import write_everywhere
from schemaless.storage.failover import ask_masters, nobody_answers, without_frames
from schemaless.storage.index_definition_table import (
    BuildProgress,
    DefinedIndex,
    IndexOrder,
    IndexStage,
    IndexSwitch,
    RunState,
    defined,
)
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

_READ_TIMEOUT_S = 2.0
INDEXES_MAX = 100  # versions that a datastore may have: each has tables, and follows the whole log
_CREATE_ATTEMPTS_MAX = 5
ChangeOrder = Callable[[IndexOrder], IndexOrder]
_ORDER_ATTEMPTS_MAX = 20  # of orders that are given at once, one counts in each attempt


async def read_versions(storage: AsyncStorage, datastore: Datastore) -> IndexVersions:
    """Returns what the masters that answer have. Raises StorageUnavailable when none does."""
    answers = await ask_masters(
        storage,
        storage.topology.clusters,
        index_definition_table.all_of,
        datastore.name,
        timeout_s=_READ_TIMEOUT_S,
        tolerated=StorageUnavailable,
    )
    answers.at_least_one()
    return merge(answers.found, {cluster: without_frames(error) for cluster, error in answers.failures.items()})


async def find_versions(storage: AsyncStorage, datastore: Datastore, name: str) -> NamedIndex:
    """Returns all versions of one index. Raises NotFound or StorageUnavailable."""
    return (await read_versions(storage, datastore)).of(datastore.name, name)


async def find_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Returns the version of an index that answers queries. Raises NotFound or StorageUnavailable."""
    return (await find_versions(storage, datastore, name)).answering


class Change(msgspec.Struct, frozen=True):
    """How an index is changed. The version that answered before is kept for `keep_s`.

    `by_hand`: the new version waits for an order before it answers.
    """

    keep_s: int
    by_hand: bool = False


async def create_index(
    storage: AsyncStorage,
    datastore: Datastore,
    definition: IndexDefinition,
    indexes_max: int = INDEXES_MAX,
    change: Change | None = None,
) -> bool:
    """Creates an index, or with `change` a new version of it. Returns whether it is new: False when the same exists.

    A name that was dropped may be used again at once: the new version has a number of its own. Raises Conflict when
    the name has another definition and no change is asked for, or is being changed to a third one. Raises Invalid when
    the datastore has as many versions as it may have. Raises StorageUnavailable when a master is unreachable: run it
    again then.
    """
    first, *others = storage.masters
    is_new = False
    for _ in range(_CREATE_ATTEMPTS_MAX):
        versions = await read_versions(storage, datastore)
        if versions.away:
            what = f"an index is made on every cluster, and these are away: {', '.join(versions.away)}"
            raise nobody_answers(versions.away.values(), what)
        named = versions.indexes().get(definition.name)
        present = [] if named is None else [index for index in named.versions if index.is_present]
        if named is not None and present and _exists(named, definition, change is not None):
            for index in present:
                await run_on_masters(others, index_definition_table.bring_to, datastore.name, index)
            return is_new
        count = sum(index.stage is not IndexStage.GONE for index in versions.merged.values())
        if count >= indexes_max:
            raise Invalid(
                "name",
                f"{datastore.name} has {count} versions of indexes, those that are being deleted too, and may have"
                f" {indexes_max}: drop one",
            )
        known = [index for index in versions.merged.values() if index.name == definition.name]
        number = 1 + max((index.number for index in known), default=0)
        if number > NUMBER_MAX:
            raise StateConflict(f"the name {definition.name} was used {NUMBER_MAX} times: take another name")
        if change is not None and present:
            switch = IndexSwitch(0, keep_s=change.keep_s, by_hand=change.by_hand)
        else:
            switch = IndexSwitch(1 + max((index.switch.number for index in known), default=0))
        for index in present:  # a master that lacks one can't take it any more once it has a later number
            await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, index)
        homes = {shard: move.home for shard, move in datastore.moves.items()}
        wanted = defined(replace(definition, number=number, homes=homes), switch=switch)
        await first.run(index_definition_table.insert, datastore.name, wanted, indexes_max)
        is_new = True  # the next pass reads what became of it
    raise StateConflict(
        f"index {definition.name} of {datastore.name} is created and dropped at the same time: try again"
    )


def _exists(named: NamedIndex, definition: IndexDefinition, may_change: bool) -> bool:
    """Returns whether an index has, or is about to have, a definition. Raises Conflict if it can't get it."""
    name, answering, change = definition.name, named.answering, named.change
    same = [index for index in named.versions if index.is_present and has_definition(index, definition)]
    if answering in same:
        return True
    if not may_change:
        raise StateConflict(
            f"index {name} exists with another definition: to change it in place, ask with change=true, on the command"
            " line with --change"
        )
    if change is not None and change not in same:
        raise StateConflict(
            f"index {name} is being changed already: version {change.number} is {change.state}. Wait for it, or give it"
            f" up with `schemaless index drop {name} --version {change.number}`"
        )
    if change is None and same:
        raise StateConflict(
            f"version {same[-1].number} of index {name} has this definition, and is still kept:"
            f" `schemaless index switch {name} --version {same[-1].number}` lets it answer again"
        )
    return change is not None


def has_definition(index: DefinedIndex, definition: IndexDefinition) -> bool:
    """Returns whether a version has a definition, whatever its number."""
    return index.definition == replace(definition, number=index.number)


async def drop_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Orders that all versions of an index are deleted, on every master that answers. Returns the one that answered.

    Indexers delete them, on a cluster that is away when it is back. Raises NotFound, or StorageUnavailable when no
    master answers.
    """
    named = await find_versions(storage, datastore, name)
    dropped = {index.number: replace(index, stage=IndexStage.DELETING) for index in named.versions}
    for index in dropped.values():
        await bring_reachable(storage, datastore, index)
    return dropped[named.answering.number]


async def pause_index(
    storage: AsyncStorage, datastore: Datastore, name: str, number: int | None = None
) -> DefinedIndex:
    """Orders that no indexer works on a version of an index: the change, or else the one that answers.

    Raises NotFound, Conflict or StorageUnavailable.
    """
    return await order_index(storage, datastore, name, number, paused)


async def resume_index(
    storage: AsyncStorage, datastore: Datastore, name: str, number: int | None = None
) -> DefinedIndex:
    """Orders that indexers work on a version again, also on one that failed. Raises what `pause_index` does."""
    return await order_index(storage, datastore, name, number, resumed)


async def throttle_index(
    storage: AsyncStorage,
    datastore: Datastore,
    name: str,
    limits: Mapping[str, float | None],
    number: int | None = None,
) -> DefinedIndex:
    """Changes some limits of a version, by their names in IndexLimits. Raises what `pause_index` does."""
    return await order_index(storage, datastore, name, number, throttled(limits))


async def fail_index(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, reason: str) -> None:
    """Gives an index up until somebody resumes it, unless something else was ordered meanwhile."""
    order = index.order
    if order.run_state is RunState.RUNNING:
        order = IndexOrder(RunState.FAILED, reason, order.limits, order.revision + 1)
        await bring_reachable(storage, datastore, replace(index, order=order))


def paused(order: IndexOrder) -> IndexOrder:
    """Raises StateConflict."""
    if order.run_state is RunState.FAILED:
        raise StateConflict(f"the index has failed, and nobody works on it: resume or drop it ({order.reason})")
    return msgspec.structs.replace(order, run_state=RunState.PAUSED)


def resumed(order: IndexOrder) -> IndexOrder:
    return msgspec.structs.replace(order, run_state=RunState.RUNNING, reason=None)


def throttled(limits: Mapping[str, float | None]) -> ChangeOrder:
    return lambda order: msgspec.structs.replace(order, limits=msgspec.structs.replace(order.limits, **limits))


async def order_index(
    storage: AsyncStorage, datastore: Datastore, name: str, number: int | None, change: ChangeOrder
) -> DefinedIndex:
    """Gives an order to every master that answers. Returns the version as it is then.

    Of orders that are given at once only one counts. The others are given again, on top of it. So none is lost while
    every master answers.
    """
    for attempt in range(_ORDER_ATTEMPTS_MAX):
        versions = await read_versions(storage, datastore)
        index = version_to_order(versions.of(datastore.name, name), number)
        number = index.number  # an order means one version, also if another one answers meanwhile
        changed = change(index.order)
        counts = changed == index.order and (name, number) not in versions.disputed
        if not counts:
            index = replace(index, order=msgspec.structs.replace(changed, revision=index.order.revision + 1))
        if not counts or not attempt:
            await bring_reachable(storage, datastore, index)
        if counts:
            return index
    raise StateConflict(f"index {name} of {datastore.name} has too many orders at the same time: try again")


def version_to_order(named: NamedIndex, number: int | None) -> DefinedIndex:
    """Returns the version that an order means. Raises NotFound, or StateConflict for one that is being deleted."""
    index = named.meant if number is None else version_of(named, number)
    if named.role(index) is VersionRole.DELETING:
        hint = "make it anew if it is needed: its name is free, and what is deleted never comes back"
        raise StateConflict(f"index {index.name} is being deleted", hint=hint)
    return index


def version_of(named: NamedIndex, number: int) -> DefinedIndex:
    """Returns a version by its number. Raises NotFound."""
    index = named.version(number)
    if index is None:
        present = ", ".join(str(each.number) for each in named.versions)
        hint = f"give the number of a version that it has: {present}"
        raise NotFound(f"index {named.answering.name} has no version {number}: it has {present}", hint=hint)
    return index


async def bring_up(storage: AsyncStorage, datastore: Datastore, versions: IndexVersions) -> None:
    """Brings the masters that lack something to what the others have. Raises StorageUnavailable.

    Where they have different orders of one revision, the one that counts becomes the next revision.
    """
    await all_or_first_error(
        storage.master(cluster).run(index_definition_table.bring_to, datastore.name, index)
        for cluster, index in versions.lagging
    )
    for key in sorted(versions.disputed):
        index = versions.merged[key]
        order = msgspec.structs.replace(index.order, revision=index.order.revision + 1)
        await bring_reachable(storage, datastore, replace(index, order=order))


async def bring_reachable(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Brings every master that answers to a version's stage and order. Raises StorageUnavailable when none does."""
    await write_everywhere(
        storage.masters,
        lambda master: master.run(index_definition_table.bring_to, datastore.name, index, timeout_s=_READ_TIMEOUT_S),
    )


class IndexWatch:
    """The indexes of one datastore, for a process that looks often. It reads definitions only after a change."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore
        self._stamps: Mapping[str, object] = {}
        self._versions = IndexVersions()

    async def look(self) -> IndexVersions:
        """Returns all versions, as the masters that answer know them. Raises StorageUnavailable."""
        answers = await ask_masters(
            self._storage,
            self._storage.topology.clusters,
            index_definition_table.stamps_of,
            self._datastore.name,
            timeout_s=_READ_TIMEOUT_S,
            tolerated=StorageUnavailable,
        )
        answers.at_least_one()
        if answers.found != self._stamps:  # read before the definitions: a change in between is seen the next time
            self._versions = await read_versions(self._storage, self._datastore)
            self._stamps = answers.found
        return self._versions


async def build_progress(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> BuildProgress:
    """Returns how far an index is built on the cluster that is furthest behind. Raises StorageUnavailable.

    That is one where the build hasn't begun, or where a promotion lost what was noted of it.
    """
    if not index.has_tables:
        return BuildProgress(0, None)
    arguments = (datastore.name, index.name, index.number, index.definition.consumer)
    answers = await all_or_first_error(
        storage.master(cluster).run(index_definition_table.build_progress, *arguments)
        for cluster in index.definition.placed(datastore).clusters
    )
    return min(answers, key=lambda progress: (progress.total is not None, progress.done - (progress.total or 0)))


async def run_on_masters(
    masters: Iterable[AsyncNode], operation: Callable[[*Args], Operation[None]], *args: *Args
) -> None:
    """Runs an operation on each master. Raises StorageUnavailable when one is unreachable."""
    await all_or_first_error(master.run(operation, *args) for master in masters)
