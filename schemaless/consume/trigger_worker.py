"""One worker of a trigger program: a process with one Faust app over one datastore, which feeds the program.

`schemaless triggers run` starts `python -m schemaless.consume.trigger_worker`; the stack starts `python -m consumers`,
which is the same. Any number of workers share the partitions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from schemaless.bus.faust_transport import FaustTransport
from schemaless.config import ConsumerSettings, read_settings
from schemaless.consume.checkpoints import Checkpoints, Stand, StartAt
from schemaless.consume.host import Consumer, Subscription
from schemaless.consume.process import run_consumer_process
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram, load_program
from schemaless.errors import NotFound, SchemalessError
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


def main() -> None:
    """Runs a worker until SIGTERM. `--from` counts for shards that have no checkpoint yet."""
    parser = argparse.ArgumentParser(prog="trigger-worker", description="One worker of a trigger program.")
    parser.add_argument("module", help="dotted module, or a .py file")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--from", dest="start", choices=[start.value for start in StartAt], default="beginning")
    arguments = parser.parse_args()
    try:
        program = load_program(arguments.module)
    except SchemalessError as error:
        print(f"error: {error} ({error.hint})", file=sys.stderr)
        sys.exit(1)
    settings = read_settings(ConsumerSettings)
    start_at = StartAt(arguments.start)
    run_consumer_process(
        program.consumer,
        settings,
        lambda storage: ProgramService(settings, storage, program, start_at).run(arguments.datastore),
    )


if __name__ == "__main__":
    main()
