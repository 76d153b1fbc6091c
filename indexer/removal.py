"""Removal deletes what a version of an index has on each cluster: checkpoints, tables, problems, the rows of its build.

Any number of indexer processes may do it at once, and again after a kill: each step is idempotent. A process that
worked on the version does it too, once it has stopped. So what it wrote last, perhaps late, goes as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import structlog

from schemaless.index.catalogue import read_versions, run_on_masters
from schemaless.index.versions import VersionKey
from schemaless.names import INDEX_PREFIX, index_consumer, index_table_name
from schemaless.runtime.batching import chunks
from schemaless.storage import (
    checkpoint_table,
    consumer_summary,
    index_check_table,
    index_definition_table,
    index_pass_table,
    index_problem_table,
    index_table,
    index_tombstones,
    index_walk_table,
    index_write_table,
)
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.topology import Datastore

log = structlog.get_logger()

_TABLES_PER_STATEMENT = 16
_TABLES = (
    index_problem_table,
    index_walk_table,
    index_tombstones,
    index_pass_table,
    index_check_table,
    index_write_table,
)
"""They have rows of versions."""


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
    await _delete_rows(master, IndexVersion(datastore.name, index.name, index.number))


async def _delete_rows(master: AsyncNode, version: IndexVersion) -> None:
    """Deletes walks, passes of the cleaner, parts of ordered checks, counts of writes, and problems."""
    await master.run(index_walk_table.delete, version)
    await master.run(index_tombstones.delete, version)
    await master.run(index_pass_table.delete_all, version)
    await master.run(index_check_table.delete_all, version)
    await master.run(index_write_table.delete_all, version)
    while await master.run(index_problem_table.delete_some, version):
        pass


async def note_gone(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Records that no cluster has anything of a version. Only its number is left. Raises StorageUnavailable."""
    gone = replace(index, text="", stage=IndexStage.GONE)
    await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, gone)


async def remove_strays(storage: AsyncStorage, datastore: Datastore) -> Collection[str]:
    """Deletes what versions that are gone have: a process that was killed late may have left tables, checkpoints and
    rows.

    Returns whose the checkpoints were. Raises StorageUnavailable, also when a master is away: then nobody knows all
    versions.
    """
    found, rows = set[tuple[str, str]](), set[tuple[str, VersionKey]]()
    tables: dict[str, list[tuple[int, str]]] = {}
    for cluster in datastore.clusters:
        master = storage.master(cluster)
        names = await master.run(consumer_summary.names, datastore.name)
        found |= {(cluster, name) for name in names if name.startswith(INDEX_PREFIX)}
        for table in _TABLES:
            rows |= {(cluster, key) for key in await master.run(table.versions, datastore.name)}
        tables[cluster] = await master.run(index_table.places, datastore)
    versions = await read_versions(storage, datastore)  # after the names: a version is noted before anything is made
    if versions.away:
        return ()
    keys = {key for key, index in versions.merged.items() if index.stage is not IndexStage.GONE}
    for cluster, (index, number) in sorted(rows):
        if (index, number) not in keys:
            await _delete_rows(storage.master(cluster), IndexVersion(datastore.name, index, number))
    needed = {index_table_name(*key) for key in keys}
    for cluster, places in tables.items():
        await _drop_tables(storage.master(cluster), datastore, [place for place in places if place[1] not in needed])
    present = {index_consumer(*key) for key in keys}
    strays = [(cluster, name) for cluster, name in sorted(found) if name not in present]
    for cluster, name in strays:
        await storage.master(cluster).run(checkpoint_table.delete_all, datastore.name, name)
    return sorted({name for _, name in strays})


async def _drop_tables(master: AsyncNode, datastore: Datastore, places: Collection[tuple[int, str]]) -> None:
    """Deletes tables by shard and name, many in one statement."""
    for table in sorted({name for _, name in places}):
        shards = [shard for shard, name in places if name == table]
        log.info("tables of a dropped index are deleted", node=master.node.name, table=table, shards=len(shards))
        for some in chunks(shards, count_max=_TABLES_PER_STATEMENT):
            await master.run(index_table.drop, datastore, some, table)
