"""The builder takes a defined index through its stages: tables on every shard, then building, then active.

Any number of indexer processes may do it at once. Each stage is idempotent, and the first process to begin the build
fixes how far it must come. What a stage needs is on every master before any row says that the stage has begun.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from indexer.sample_check import compare
from schemaless.index.catalogue import build_progress, read_versions, run_on_masters
from schemaless.index.definition import IndexDefinition
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import checkpoint_table, index_definition_table, index_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexStage
from schemaless.topology import Datastore

log = structlog.get_logger()

_TABLES_AT_ONCE = 4  # on one server: its fsyncs overlap, more would only queue


async def build_step(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> None:
    """Takes an index one stage further if it is time. Raises StorageUnavailable.

    A change of an index is compared with the cells before it counts as complete. Raises DiffersFromCells.
    """
    where = {"datastore": datastore.name, "index": index.name, "number": index.number}
    if index.stage is IndexStage.DEFINED:
        cells = await _make_and_begin(storage, datastore, index)
        await _bring_to(storage, datastore, index, IndexStage.BUILDING)
        log.info("index tables are made", **where, cells=cells)
    elif index.stage is IndexStage.BUILDING:
        progress = await build_progress(storage, datastore, index)
        if progress.total is None:
            # A promotion may lose what was made on a master just before. Or the index is built, or dropped, meanwhile.
            known = (await read_versions(storage, datastore)).merged.get((index.name, index.number))
            if known is not None and known.stage is IndexStage.BUILDING:
                log.info("index tables are made again", **where, cells=await _make_and_begin(storage, datastore, index))
        elif progress.done == progress.total and await _has_checkpoints(storage, datastore, index.definition):
            if not index.switch.number:
                log.info(
                    "new version is compared with its cells", **where, rows=await compare(storage, datastore, index)
                )
            await _bring_to(storage, datastore, index, IndexStage.ACTIVE)
            log.info("index is active", **where)


async def _make_and_begin(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex) -> int:
    """Makes the tables, and notes how far the build must come where nobody has. Returns how many cells there are."""
    await make_tables(storage, datastore, index.definition)
    answers = await all_or_first_error(
        storage.master(cluster).run(shard_head.heads, datastore.name) for cluster in datastore.clusters
    )
    heads = {head.shard: head.added_id for answer in answers for head in answer}
    arguments = (datastore.name, index.name, index.number, heads)
    await run_on_masters(storage.masters, index_definition_table.begin_build, *arguments)
    return sum(heads.values())


async def _has_checkpoints(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> bool:
    """Whether each shard has its checkpoint on every master. One without cells counts as done before it has one.

    Queries with `after` wait for it, and comparisons need it.
    """
    answers = await all_or_first_error(
        storage.master(cluster).run(checkpoint_table.locations, datastore.name, definition.consumer)
        for cluster in datastore.clusters
    )
    return all(len(found) == datastore.shards for found in answers)


async def _bring_to(storage: AsyncStorage, datastore: Datastore, index: DefinedIndex, stage: IndexStage) -> None:
    further = replace(index, stage=stage)
    await run_on_masters(storage.masters, index_definition_table.bring_to, datastore.name, further)


async def make_tables(storage: AsyncStorage, datastore: Datastore, definition: IndexDefinition) -> None:
    """Makes the index table of every shard that has none. Raises StorageUnavailable."""
    slots = {cluster: asyncio.Semaphore(_TABLES_AT_ONCE) for cluster in datastore.clusters}

    async def make(shard: int) -> None:
        home = datastore.home(shard)
        async with slots[home]:
            await storage.master(home).run(index_table.create, datastore, shard, definition)

    await all_or_first_error(make(shard) for shard in range(datastore.shards))
