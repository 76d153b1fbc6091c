"""A process that carries an erasure out, and is killed when an event happens the nth time: TOPOLOGY ERASURE EVENT N."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from schemaless.ops import erasures
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.events import Event, observing
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology


async def main(file, event, times):
    left = int(times)

    def met(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async with AsyncStorage(load_topology(Path(file))) as storage:
        await storage.look()
        with observing(met, Event[event]):
            await erasures.step(storage, Catalogue(storage))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
