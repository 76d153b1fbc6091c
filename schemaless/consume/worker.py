"""Worker: a process that runs a trigger program, as other processes and people see it.

It has a number, and under this number a row on every cluster, which a clean stop deletes.
"""

from __future__ import annotations

import asyncio
import secrets

import structlog

from schemaless.errors import SchemalessError
from schemaless.storage import worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

log = structlog.get_logger()

FORGET_AFTER_S = 600.0
_TIMEOUT_S = 2.0


class Worker:
    """This process. Its row is made on a cluster before a checkpoint there names it."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str) -> None:
        self.number = secrets.randbits(63)
        self.consumer = consumer
        self._storage = storage
        self._datastore = datastore
        self._report = "{}"
        self._known_on: set[str] = set()

    async def others(self, cluster: str) -> set[int]:
        """Makes the row on this cluster, and returns the processes that have one there. Raises StorageUnavailable."""
        master, name = self._storage.master(cluster), self._datastore.name
        if cluster not in self._known_on:
            await master.run(worker_table.remove_forgotten, name, self.consumer, FORGET_AFTER_S)
            await master.run(worker_table.put, name, self.consumer, self.number, self._report)
            self._known_on.add(cluster)
        return await master.run(worker_table.numbers_of, name, self.consumer)

    async def leave(self) -> None:
        """Deletes the rows: this process stops, and died of nothing. Where that fails, others are careful."""
        done = await asyncio.gather(
            *(
                self._storage.master(cluster).run(
                    worker_table.remove, self._datastore.name, self.consumer, [self.number], timeout_s=_TIMEOUT_S
                )
                for cluster in self._known_on
            ),
            return_exceptions=True,
        )
        for failure in done:
            if isinstance(failure, SchemalessError):
                log.warning("the row of this process stays", consumer=self.consumer, why=str(failure))
            elif isinstance(failure, BaseException):
                raise failure
