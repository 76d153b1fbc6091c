"""Worker: a process that runs a trigger program or maintains indexes, as other processes and people see it.

It has a number, and under this number a row on every cluster, which a clean stop deletes. The row says what it does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from schemaless.errors import SchemalessError
from schemaless.storage import worker_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.worker_table import WorkerReport
from schemaless.topology import Datastore

log = structlog.get_logger()

FORGET_AFTER_S = 600.0
_TIMEOUT_S = 2.0
_LOOK_PAUSE_S = 1.0
_REPORT_PERIOD_S = 10.0


class Worker:
    """This process. Its row is made on a cluster before a checkpoint there names it."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str, origin: str = "") -> None:
        self.number = secrets.randbits(63)
        self.consumer = consumer
        self._storage = storage
        self._datastore = datastore
        self._report = WorkerReport(origin=origin)
        self._reported_at = -_REPORT_PERIOD_S
        self._telling: asyncio.Future[None] | None = None
        self._known_on: set[str] = set()

    async def others(self, cluster: str) -> set[int]:
        """Makes the row on this cluster, and returns the processes that have one there. Raises StorageUnavailable."""
        master, name = self._storage.master(cluster), self._datastore.name
        if cluster not in self._known_on:
            await master.run(worker_table.put, name, self.consumer, self.number, self._report)
            self._known_on.add(cluster)
        return await master.run(worker_table.numbers_of, name, self.consumer)

    async def run(self, report: Callable[[], WorkerReport]) -> None:
        """Reports what changes within a second or two, and that the process lives every ten, until it is cancelled."""
        name = self._datastore.name
        await self._on_clusters(
            lambda master: master.run(worker_table.remove_forgotten, name, self.consumer, FORGET_AFTER_S),
            otherwise="rows of processes that ended stay",
        )
        while True:
            await self.tell(report(), time.monotonic())
            await asyncio.sleep(_LOOK_PAUSE_S)

    async def tell(self, report: WorkerReport, now: float) -> None:
        """Stores a report on every cluster, unless the one before says the same and is young."""
        is_news = _without_figures(report) != _without_figures(self._report)
        if is_news or now - self._reported_at >= _REPORT_PERIOD_S:
            self._report, self._reported_at = report, now
            name = self._datastore.name
            self._telling = asyncio.ensure_future(
                self._on_clusters(
                    lambda master: master.run(
                        worker_table.put, name, self.consumer, self.number, report, timeout_s=_TIMEOUT_S
                    ),
                    otherwise="this process isn't seen",
                )
            )
            await asyncio.shield(self._telling)

    async def leave(self) -> None:
        """Deletes the rows: this process stops, and died of nothing. Where that fails, others are careful."""
        if self._telling is not None:
            await asyncio.wait({self._telling})  # or it might make a row after this
        name = self._datastore.name
        await self._on_clusters(
            lambda master: master.run(worker_table.remove, name, self.consumer, [self.number], timeout_s=_TIMEOUT_S),
            otherwise="the row of this process stays",
        )

    async def _on_clusters(self, action: Callable[[AsyncNode], Awaitable[None]], otherwise: str) -> None:
        """Does it on all clusters at once. One that can't be reached is logged."""

        async def on(cluster: str) -> None:
            try:
                await action(self._storage.master(cluster))
            except SchemalessError as error:
                log.warning(otherwise, consumer=self.consumer, cluster=cluster, why=str(error))

        await asyncio.gather(*map(on, self._datastore.clusters))


def _without_figures(report: WorkerReport) -> WorkerReport:
    """Returns a report without what changes all the time."""
    report = msgspec.structs.replace(report, rate=0.0, calls=0, failures={})
    if (call := report.oldest_call) is None:
        return report
    return msgspec.structs.replace(report, oldest_call=msgspec.structs.replace(call, age_s=0.0))
