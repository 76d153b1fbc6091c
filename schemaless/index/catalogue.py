"""The catalogue of a datastore's indexes, which every master keeps: making, listing, and how far a build is.

Creating an index writes a row on each master. An indexer process makes the tables and fills them. When two clients
create different indexes under one name, the first master (by name of its cluster) decides which one was first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schemaless.batching import all_or_first_error
from schemaless.errors import Conflict, NotFound
from schemaless.index.definition import IndexDefinition
from schemaless.names import index_consumer
from schemaless.storage import index_definition_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_definition_table import BuildProgress, DefinedIndex, IndexState
from schemaless.storage.operation import Args, Operation
from schemaless.topology import Datastore

_READ_TIMEOUT_S = 2.0


async def create_index(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> bool:
    """Creates an index. Returns whether it is new: False when the same index exists.

    Raises Conflict when another index has that name. Raises StorageUnavailable when a master is unreachable: run it
    again then.
    """
    first, *others = storage.masters
    known = (await first.run(index_definition_table.all_of, datastore.name)).get(definition.name)
    for master in (first, *others):
        await master.run(index_definition_table.insert, datastore.name, definition)
        found = (await master.run(index_definition_table.all_of, datastore.name))[definition.name]
        if found.definition != definition:
            raise Conflict(f"index {definition.name} of {datastore.name} exists with another definition")
    return known is None


async def list_indexes(storage: AsyncStorage, datastore: Datastore) -> dict[str, DefinedIndex]:
    """Returns the indexes by name, as the masters that answer know them. Raises StorageUnavailable when none does."""
    answers = await answers_of_all(
        {
            master.node.name: master.run(index_definition_table.all_of, datastore.name, timeout_s=_READ_TIMEOUT_S)
            for master in storage.masters
        }
    )
    found: dict[str, DefinedIndex] = {}
    for name, index in ((name, index) for answer in answers.at_least_one() for name, index in answer.items()):
        furthest = max(
            found.get(name, index),
            index,
            key=lambda each: (each.state is IndexState.ACTIVE, each.has_tables),
        )
        found[name] = furthest
    return dict(sorted(found.items()))


async def find_index(storage: AsyncStorage, datastore: Datastore, name: str) -> DefinedIndex:
    """Returns one index. Raises NotFound or StorageUnavailable."""
    try:
        return (await list_indexes(storage, datastore))[name]
    except KeyError:
        raise NotFound(f"there is no index {name!r} in {datastore.name}") from None


class IndexWatch:
    """The indexes of one datastore, for a process that looks often. It reads definitions only after a change."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore) -> None:
        self._storage = storage
        self._datastore = datastore
        self._stamps: Mapping[str, object] = {}
        self._indexes: Mapping[str, DefinedIndex] = {}

    async def look(self) -> Mapping[str, DefinedIndex]:
        """Returns the indexes by name, as the masters that answer know them. Raises StorageUnavailable."""
        answers = await answers_of_all(
            {
                master.node.name: master.run(
                    index_definition_table.stamps_of, self._datastore.name, timeout_s=_READ_TIMEOUT_S
                )
                for master in self._storage.masters
            }
        )
        answers.at_least_one()
        if answers.found != self._stamps:  # read before the definitions: a change in between is seen the next time
            self._indexes = await list_indexes(self._storage, self._datastore)
            self._stamps = answers.found
        return self._indexes


async def build_progress(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> BuildProgress:
    """Returns how far an index is built on the cluster that is furthest behind. Raises StorageUnavailable."""
    if not index.has_tables:
        return BuildProgress(0, None)
    name = index.definition.name
    consumer = index_consumer(name)
    answers = await all_or_first_error(
        storage.master(cluster).run(index_definition_table.build_progress, datastore.name, name, consumer)
        for cluster in datastore.clusters
    )
    return min(answers, key=lambda progress: progress.done - (progress.total or 0))


async def run_on_all_masters(
    storage: AsyncStorage, operation: Callable[[*Args], Operation[None]], *args: *Args
) -> None:
    """Runs an operation on each master. Raises StorageUnavailable when one is unreachable."""
    await all_or_first_error(master.run(operation, *args) for master in storage.masters)
