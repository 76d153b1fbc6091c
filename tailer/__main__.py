"""`python -m tailer`: one tailer process. At a stop it finishes the transactions in flight and leaves its groups."""

from __future__ import annotations

import asyncio

from schemaless.config import TailerSettings
from schemaless.runtime.lifecycle import run_service
from schemaless.storage.asyncmy_driver import AsyncStorage
from tailer.service import TailerService

FINISH_TIMEOUT_S = 25.0
"""Opening a log against a slow broker takes up to 20 s. The supervisors wait for longer than this."""


async def serve(settings: TailerSettings, storage: AsyncStorage, stop: asyncio.Event) -> None:
    service = TailerService(settings, storage)

    async def stop_service() -> None:
        await stop.wait()
        service.stop()

    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(stop_service())
        await service.run()
        stopping.cancel()


def main() -> None:
    run_service("tailer", TailerSettings, serve, finish_timeout_s=FINISH_TIMEOUT_S)


if __name__ == "__main__":
    main()
