"""A trigger program's process: one Faust app over one datastore, which feeds the program."""

from __future__ import annotations

import asyncio

from schemaless.bus.faust_transport import FaustTransport
from schemaless.config import ConsumerSettings
from schemaless.consume.checkpoints import Checkpoints, Stand, StartAt
from schemaless.consume.host import Consumer, Subscription
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.errors import NotFound
from schemaless.names import trigger_group
from schemaless.ops.datastores import Catalogue
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore

_LOOK_PAUSE_S = 0.5


class ProgramService:
    def __init__(
        self, settings: ConsumerSettings, storage: AsyncStorage, program: TriggerProgram, start_at: StartAt
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._program = program
        self._start_at = start_at

    async def run(self, datastore_name: str) -> None:
        """Until cancelled, or until a part fails: the process then ends and is started again."""
        datastore = await self._find(datastore_name)
        subscription = Subscription(self._storage, datastore, self._settings)
        transport = FaustTransport(
            self._settings.kafka,
            trigger_group(datastore.name, self._program.name),
            datastore.topic,
            subscription,
            session_timeout_s=self._settings.session_timeout_s,
        )
        await subscription.add(self._consumer(datastore))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(transport.run())
            tasks.create_task(subscription.run())

    async def _find(self, name: str) -> Datastore:
        """Waits for a datastore that is still being made."""
        catalogue = Catalogue(self._storage)
        while True:
            try:
                return await catalogue.datastore(name)
            except NotFound:
                await asyncio.sleep(_LOOK_PAUSE_S)

    def _consumer(self, datastore: Datastore) -> Consumer:
        checkpoints = Checkpoints(self._storage, datastore, self._program.consumer, Stand.HOME, self._start_at)
        return Consumer(TriggerHandler(self._program, datastore.name, self._settings), checkpoints)
