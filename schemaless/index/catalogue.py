"""The catalogue of a datastore's indexes, which every master keeps: making, dropping, ordering, and how far a build is.

What people ask for is a row on each master that can be reached. Indexer processes do the work, and bring rows of
masters that were away to what the others have. When two clients create different indexes under one name, the first
master (by name of its cluster) decides which one was first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from schemaless.batching import all_or_first_error
from schemaless.errors import Conflict, Invalid, StorageUnavailable
from schemaless.index.definition import NUMBER_MAX, IndexDefinition
from schemaless.storage import index_definition_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_definition_table import (
    BuildProgress,
    DefinedIndex,
    IndexOrder,
    IndexStage,
    IndexVersions,
    RunState,
    defined,
    merge,
)
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

_READ_TIMEOUT_S = 2.0
_CREATE_ATTEMPTS_MAX = 5


async def read_versions(storage: AsyncStorage, datastore: Datastore) -> IndexVersions:
    """Returns what the masters that answer have. Raises StorageUnavailable when none does."""
    answers = await answers_of_all(
        {
            master.node.cluster: master.run(index_definition_table.all_of, datastore.name, timeout_s=_READ_TIMEOUT_S)
            for master in storage.masters
        }
    )
    answers.at_least_one()
    return merge(answers.found, {cluster: str(error) for cluster, error in answers.failures.items()})


async def list_indexes(storage: AsyncStorage, datastore: Datastore) -> dict[str, DefinedIndex]:
    """Returns the indexes by name, as the masters that answer know them. Raises StorageUnavailable when none does."""
    return (await read_versions(storage, datastore)).newest()


async def find_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Returns one index. Raises NotFound or StorageUnavailable."""
    return (await read_versions(storage, datastore)).of(datastore.name, name)


async def create_index(
    storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition, indexes_max: int = 100
) -> bool:
    """Creates an index. Returns whether it is new: False when the same index exists.

    A name that was dropped may be used again at once: the new version has a number of its own. Raises Conflict when
    another index has that name, and Invalid when the datastore has as many as it may have. Raises StorageUnavailable
    when a master is unreachable: run it again then.
    """
    first, *others = storage.masters
    is_new = False
    for _ in range(_CREATE_ATTEMPTS_MAX):
        versions = await read_versions(storage, datastore)
        if versions.away:
            raise StorageUnavailable(f"an index is made on every cluster, and some are away: {dict(versions.away)}")
        index = versions.newest().get(definition.name)
        if index is not None and index.stage is not IndexStage.DELETING:
            if index.definition != replace(definition, number=index.number):
                raise Conflict(f"index {definition.name} of {datastore.name} exists with another definition")
            await run_on_masters(others, index_definition_table.bring_to, datastore.name, index)
            return is_new
        present = sum(each.stage is not IndexStage.GONE for each in versions.merged.values())
        if present >= indexes_max:
            raise Invalid(
                "name",
                f"{datastore.name} has {present} indexes, those that are being deleted too, and may have {indexes_max}:"
                " drop one, or raise SCHEMALESS_API_INDEXES_MAX",
            )
        number = 1 + max((each.number for each in versions.merged.values() if each.name == definition.name), default=0)
        if number > NUMBER_MAX:
            raise Conflict(f"the name {definition.name} was used {NUMBER_MAX} times: take another name")
        wanted = defined(replace(definition, number=number))
        await first.run(index_definition_table.insert, datastore.name, wanted, indexes_max)
        is_new = True  # the next pass reads what became of it
    raise Conflict(f"index {definition.name} of {datastore.name} is created and dropped at the same time: try again")


async def drop_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Orders that an index is deleted, on every master that answers. Returns the version that goes.

    Indexers delete it, on a cluster that is away when it is back. Raises NotFound, or StorageUnavailable when no master
    answers.
    """
    index = (await read_versions(storage, datastore)).of(datastore.name, name)
    dropped = replace(index, stage=IndexStage.DELETING)
    await _bring_reachable(storage, datastore, dropped)
    return dropped


async def pause_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Orders that no indexer works on an index. Raises NotFound, Conflict or StorageUnavailable."""
    return await _order(storage, datastore, name, _paused)


async def resume_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Orders that indexers work on an index again, also on one that failed. Raises NotFound, Conflict, …"""
    return await _order(storage, datastore, name, _resumed)


async def throttle_index(
    storage: AsyncStorage, datastore: Datastore, name: str, cells_per_s: int | None
) -> DefinedIndex:
    """Bounds what each process delivers to an index. None: no bound. Raises NotFound, Conflict, StorageUnavailable."""
    return await _order(storage, datastore, name, lambda order: msgspec.structs.replace(order, cells_per_s=cells_per_s))


async def fail_index(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, reason: str) -> None:
    """Gives an index up until somebody resumes it, unless something else was ordered meanwhile."""
    order = index.order
    if order.run_state is RunState.RUNNING:
        order = IndexOrder(RunState.FAILED, reason, order.cells_per_s, order.revision + 1)
        await _bring_reachable(storage, datastore, replace(index, order=order))


def _paused(order: IndexOrder) -> IndexOrder:
    if order.run_state is RunState.FAILED:
        raise Conflict(f"it has failed and doesn't run: {order.reason}")
    return msgspec.structs.replace(order, run_state=RunState.PAUSED)


def _resumed(order: IndexOrder) -> IndexOrder:
    return msgspec.structs.replace(order, run_state=RunState.RUNNING, reason=None)


async def _order(
    storage: AsyncStorage, datastore: Datastore, name: str, change: Callable[[IndexOrder], IndexOrder]
) -> DefinedIndex:
    """Gives an order to every master that answers. Returns the index as it is then."""
    index = (await read_versions(storage, datastore)).of(datastore.name, name)
    if index.stage is IndexStage.DELETING:
        raise Conflict(f"index {name} of {datastore.name} is being deleted")
    changed = change(index.order)
    if changed != index.order:
        index = replace(index, order=msgspec.structs.replace(changed, revision=index.order.revision + 1))
    await _bring_reachable(storage, datastore, index)
    return index


async def bring_up(storage: AsyncStorage, datastore: Datastore, versions: IndexVersions) -> None:
    """Brings the masters that lack something to what the others have. Raises StorageUnavailable."""
    await all_or_first_error(
        storage.master(cluster).run(index_definition_table.bring_to, datastore.name, index)
        for cluster, index in versions.lagging
    )


async def _bring_reachable(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Brings every master that answers to a version's stage and order. Raises StorageUnavailable when none does."""
    answers = await answers_of_all(
        {
            master.node.cluster: master.run(
                index_definition_table.bring_to, datastore.name, index, timeout_s=_READ_TIMEOUT_S
            )
            for master in storage.masters
        }
    )
    answers.at_least_one()


class IndexWatch:
    """The indexes of one datastore, for a process that looks often. It reads definitions only after a change."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore
        self._stamps: Mapping[str, object] = {}
        self._versions = IndexVersions()

    async def look(self) -> IndexVersions:
        """Returns all versions, as the masters that answer know them. Raises StorageUnavailable."""
        answers = await answers_of_all(
            {
                master.node.cluster: master.run(
                    index_definition_table.stamps_of, self._datastore.name, timeout_s=_READ_TIMEOUT_S
                )
                for master in self._storage.masters
            }
        )
        answers.at_least_one()
        if answers.found != self._stamps:  # read before the definitions: a change in between is seen the next time
            self._versions = await read_versions(self._storage, self._datastore)
            self._stamps = answers.found
        return self._versions


async def build_progress(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> BuildProgress:
    """Returns how far an index is built on the cluster that is furthest behind. Raises StorageUnavailable."""
    if not index.has_tables:
        return BuildProgress(0, None)
    arguments = (datastore.name, index.name, index.number, index.definition.consumer)
    answers = await all_or_first_error(
        storage.master(cluster).run(index_definition_table.build_progress, *arguments) for cluster in datastore.clusters
    )
    return min(answers, key=lambda progress: progress.done - (progress.total or 0))


async def run_on_masters(
    masters: Iterable[AsyncNode], operation: Callable[[*Args], Operation[None]], *args: *Args
) -> None:
    """Runs an operation on each master. Raises StorageUnavailable when one is unreachable."""
    await all_or_first_error(master.run(operation, *args) for master in masters)
