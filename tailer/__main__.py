"""`python -m tailer`: one tailer process. SIGTERM: transactions in hand are finished and the group is left."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from schemaless.config import TailerSettings
from schemaless.storage.async_driver import AsyncStorage
from schemaless.topology import load_topology
from tailer.service import TailerService


async def serve(settings: TailerSettings) -> None:
    topology = load_topology(settings.topology)
    async with AsyncStorage(
        topology, connections_max=settings.connections_max, timeout_s=settings.statement_timeout_s
    ) as storage:
        service = TailerService(settings, storage)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        await service.run()


def main() -> None:
    settings = TailerSettings()  # type: ignore[call-arg]  # from the environment
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
