"""Removal deletes what a version of an index has on each cluster: checkpoints, tables, and the rows of its build.

Any number of indexer processes may do it at once, and again after a kill: each step is idempotent. A process that
worked on the version does it too, once it has stopped. So what it wrote last, perhaps late, goes as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from schemaless.batching import chunks
from schemaless.index.catalogue import read_versions, run_on_masters
from schemaless.names import INDEX_PREFIX, index_consumer, index_table_name
from schemaless.storage import checkpoint_table, consumer_summary, index_definition_table, index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage
from schemaless.topology import Datastore

_TABLES_PER_STATEMENT = 16


async def remove_from(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, cluster: str) -> None:
    """Deletes everything of a version on one cluster, but for its row. Raises StorageUnavailable.

    The row there says before that the version goes. Checkpoints go first: a process that still follows the log then
    loses its compare-and-set, and nothing of its transaction stays (I10).
    """
    master = storage.master(cluster)
    await master.run(index_definition_table.bring_to, datastore.name, index)
    consumer, table = index_consumer(index.name, index.number), index_table_name(index.name, index.number)
    await master.run(checkpoint_table.delete_all, datastore.name, consumer)
    shards = [shard for shard in range(datastore.shards) if datastore.home(shard) == cluster]
    for some in chunks(shards, count_max=_TABLES_PER_STATEMENT):
        await master.run(index_table.drop, datastore, some, table)


async def note_gone(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Records that no cluster has anything of a version. Only its number is left. Raises StorageUnavailable."""
    gone = replace(index, text="", stage=IndexStage.GONE)
    await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, gone)


async def remove_strays(storage: AsyncStorage, datastore: Datastore) -> Collection[str]:
    """Deletes checkpoints of versions that are gone: a process that was killed late may have left some.

    Returns whose they were. Raises StorageUnavailable, also when a master is away: then nobody knows all versions.
    """
    found = {
        (cluster, name)
        for cluster in datastore.clusters
        for name in await storage.master(cluster).run(consumer_summary.names, datastore.name)
        if name.startswith(INDEX_PREFIX)
    }
    versions = await read_versions(storage, datastore)  # after the names: a version is noted before its checkpoints
    if versions.away:
        return ()
    present = {
        index_consumer(index.name, index.number)
        for index in versions.merged.values()
        if index.stage is not IndexStage.GONE
    }
    strays = [(cluster, name) for cluster, name in sorted(found) if name not in present]
    for cluster, name in strays:
        await storage.master(cluster).run(checkpoint_table.delete_all, datastore.name, name)
    return sorted({name for _, name in strays})
