"""`python -m tailer`: one tailer process. SIGTERM: transactions in hand are finished and the group is left."""

from __future__ import annotations

import asyncio
import signal
import sys

import structlog
import uvloop

from schemaless.config import TailerSettings, read_settings
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology
from tailer.service import TailerService

log = structlog.get_logger()


async def serve(settings: TailerSettings) -> None:
    topology = load_topology(settings.topology)
    async with AsyncStorage(
        topology,
        connections_max=settings.connections_max,
        connect_timeout_s=settings.connect_timeout_s,
        timeout_s=settings.statement_timeout_s,
    ) as storage:
        service = TailerService(settings, storage)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        await service.run()


def main() -> None:
    settings = read_settings(TailerSettings)
    try:
        uvloop.run(serve(settings))
    except Exception:
        log.exception("the tailer ends; started again it goes on after the last committed transactions")
        sys.exit(1)


if __name__ == "__main__":
    main()
