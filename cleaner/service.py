"""Cleaner: sweeps every secondary's buffer rows for every home, and deletes old Idempotency-Keys."""

from __future__ import annotations

import asyncio

import structlog

from cleaner.sweep import BufferSweep, Swept
from schemaless.config import CleanerSettings
from schemaless.errors import SchemalessError
from schemaless.lifecycle import pause
from schemaless.ops.datastores import Catalogue
from schemaless.storage import idempotency_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all

log = structlog.get_logger()

_PAUSE_GROWTH_MAX = 5  # a pass that changed nothing doubles the pause, up to so many times the setting
_TIDY_PAUSE_S = 60.0
_TIDY_ROWS_MAX = 1000


class Cleaner:
    """Sweeps all pairs of clusters. Pairs don't wait for one another."""

    def __init__(self, storage: AsyncStorage, settings: CleanerSettings) -> None:
        catalogue = Catalogue(storage)
        clusters = sorted(storage.topology.clusters)
        self._settings = settings
        self._masters = {cluster: storage.master(cluster) for cluster in clusters}
        self._sweeps = [
            BufferSweep(storage, catalogue, settings, secondary, home)
            for secondary in clusters
            for home in clusters
            if secondary != home
        ]

    async def step(self) -> Swept:
        """Makes one complete pass over the buffers of all secondaries that can be reached."""
        passes = await asyncio.gather(*(_swept(sweep) for sweep in self._sweeps))
        return sum(passes, Swept())

    async def tidy(self) -> int:
        """Deletes a bounded number of old Idempotency-Keys on each master that can be reached. Returns how many."""
        deletions = {
            cluster: master.run(idempotency_table.delete_old, _TIDY_ROWS_MAX)
            for cluster, master in self._masters.items()
        }
        return sum((await answers_of_all(deletions, tolerated=SchemalessError)).found.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Sweeps each pair in a loop of its own, so that a hung home delays only its own rows."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_tidy(stop))
            for sweep in self._sweeps:
                tasks.create_task(self._keep_swept(sweep, stop))

    async def _keep_swept(self, sweep: BufferSweep, stop: asyncio.Event) -> None:
        shortest_s = pause_s = self._settings.pass_pause_s
        while not stop.is_set():
            swept = await _swept(sweep)
            worked = swept.confirmed or swept.rewritten or swept.conflicts
            pause_s = shortest_s if worked else min(pause_s * 2, shortest_s * _PAUSE_GROWTH_MAX)
            await pause(stop, pause_s)

    async def _keep_tidy(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            deleted = await self.tidy()
            await pause(stop, self._settings.pass_pause_s if deleted else _TIDY_PAUSE_S)


async def _swept(sweep: BufferSweep) -> Swept:
    try:
        return await sweep.step()
    except SchemalessError as error:  # of one pair: the others go on
        log.warning("a buffer can't be swept now", error=str(error))
        return Swept()
