"""Cleaner: sweeps every secondary's buffer rows for every home, and deletes old Idempotency-Keys and refusals."""

from __future__ import annotations

import asyncio
import time

import structlog

from cleaner.confirmation import Confirmation
from cleaner.metrics import CleanerMetrics
from cleaner.pair import ClusterPair, Swept
from cleaner.rescue import Rescue
from schemaless.config import CleanerSettings
from schemaless.errors import SchemalessError
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.lifecycle import pause
from schemaless.storage import idempotency_table, refusal_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all

log = structlog.get_logger()

_PAUSE_GROWTH_MAX = 5  # a pass that changed nothing doubles the pause, up to so many times the setting
_TIDY_PAUSE_S = 60.0
_TIDY_ROWS_MAX = 1000


class Cleaner:
    """Sweeps all pairs of clusters. Pairs don't wait for one another, and neither do a pair's two passes."""

    def __init__(self, storage: AsyncStorage, settings: CleanerSettings, metrics: CleanerMetrics | None = None) -> None:
        self._metrics = metrics or CleanerMetrics()
        catalogue = Catalogue(storage)
        clusters = sorted(storage.topology.clusters)
        pairs = [
            ClusterPair(storage, catalogue, settings, secondary, home)
            for secondary in clusters
            for home in clusters
            if secondary != home
        ]
        self._settings = settings
        self._masters = {cluster: storage.master(cluster) for cluster in clusters}
        self._passes = [(Confirmation(pair, settings), Rescue(pair, settings)) for pair in pairs]

    async def step(self) -> Swept:
        """Makes one complete pass over the buffers of all secondaries that can be reached: confirms, then rescues."""

        async def both(confirmation: Confirmation, rescue: Rescue) -> Swept:
            return await self._swept(confirmation) + await self._swept(rescue)

        return sum(await asyncio.gather(*(both(*passes) for passes in self._passes)), Swept())

    async def tidy(self) -> int:
        """Deletes a bounded number of old Idempotency-Keys and of refusals without a buffer row, on each master that
        can be reached. Returns how many.
        """
        deletions = {
            f"{cluster} {table.__name__}": master.run(delete, _TIDY_ROWS_MAX)
            for cluster, master in self._masters.items()
            for table, delete in (
                (idempotency_table, idempotency_table.delete_old),
                (refusal_table, refusal_table.delete_orphans),
            )
        }
        return sum((await answers_of_all(deletions, tolerated=SchemalessError)).found.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Makes each pass of each pair in a loop of its own, so that a hung home delays only its own rows."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_tidy(stop))
            for passes in self._passes:
                for one in passes:
                    tasks.create_task(self._keep_swept(one, stop))

    async def _keep_swept(self, one: Confirmation | Rescue, stop: asyncio.Event) -> None:
        pause_s = self._settings.pass_pause_s
        while not stop.is_set():
            began = time.monotonic()
            swept = await self._swept(one)
            pause_s = pause_after(swept, time.monotonic() - began, pause_s, self._settings.pass_pause_s)
            await pause(stop, pause_s)

    async def _keep_tidy(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            deleted = await self.tidy()
            await pause(stop, self._settings.pass_pause_s if deleted else _TIDY_PAUSE_S)

    async def _swept(self, one: Confirmation | Rescue) -> Swept:
        began = time.monotonic()
        try:
            swept = await one.step()
        except SchemalessError as error:  # of one pass of one pair: the others go on
            self._metrics.failed(one.name, type(error).__name__)
            log.warning("a buffer can't be swept now", secondary=one.name[0], home=one.name[1], why=str(error))
            return Swept()
        self._metrics.swept(one.name, swept, time.monotonic() - began)
        return swept


def pause_after(swept: Swept, took_s: float, before_s: float, shortest_s: float) -> float:
    """Returns the pause in seconds after a pass that took `took_s`, when the pause before it was `before_s`.

    It is as long as the pass took, so that a busy machine makes few large ones, and longer while nothing changes. A
    pass that wrote cells at home, which only a backlog needs, is followed by the next one soon.
    """
    if swept.rewritten:
        return shortest_s
    longest_s = shortest_s * _PAUSE_GROWTH_MAX
    pause_s = shortest_s if swept.changed else min(before_s * 2, longest_s)
    return max(pause_s, min(took_s, longest_s))
