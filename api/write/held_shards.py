"""HeldShards: the shards of one master whose heads another transaction holds.

A locked head costs its own shard only. The put that met it waited once. From then on the shard's cells stay out of the
shared transactions, and their puts are buffered, until a look finds that the head is free. While a head is held, idle
transactions of our own account that hold rows are ended: a process that stands still must not stop a shard for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import structlog

from schemaless.errors import HeadsLocked, SchemalessError
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncNode, Traffic

log = structlog.get_logger()

LOOK_PAUSE_S = 0.1
IDLE_MAX_S = 5
"""A transaction that holds heads takes one script, which is milliseconds."""


class HeldShards:
    """Keeps the held shards of one datastore on one master. It looks only while a shard is held."""

    def __init__(
        self,
        master: AsyncNode,
        datastore: str,
        *,
        timeout_s: float,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.shards: frozenset[int] = frozenset()
        self._master = master
        self._datastore = datastore
        self._timeout_s = timeout_s
        self._pause = pause
        self._looking: asyncio.Task[None] | None = None

    def hold(self, shards: Collection[int]) -> None:
        """Keeps these shards out of shared transactions until their heads are free."""
        log.warning(
            "heads are held by another transaction",
            node=self._master.node.name,
            datastore=self._datastore,
            shards=sorted(shards),
        )
        self.shards |= frozenset(shards)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_until_free())

    def error(self) -> HeadsLocked:
        return HeadsLocked(f"datastore {self._datastore}: another transaction holds the head of this shard")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def look(self) -> None:
        """Lets the shards whose heads are free return, and ends idle transactions that hold rows."""
        try:
            locked = await self._master.run(
                shard_head.locked,
                self._datastore,
                sorted(self.shards),
                timeout_s=self._timeout_s,
                traffic=Traffic.PROBE,
            )
            free = self.shards - frozenset(locked)
            self.shards -= free
            if free:
                log.info("heads are free again", node=self._master.node.name, shards=sorted(free))
            if self.shards:
                for ended in await self._master.run(
                    shard_head.end_idle_holders, IDLE_MAX_S, timeout_s=self._timeout_s, traffic=Traffic.PROBE
                ):
                    log.warning("an idle transaction is ended", node=self._master.node.name, connection=ended)
        except SchemalessError as error:
            log.info("held heads can't be looked at", node=self._master.node.name, error=str(error))

    async def _look_until_free(self) -> None:
        while self.shards:
            await self._pause(LOOK_PAUSE_S)
            await self.look()
