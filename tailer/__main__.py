"""`python -m tailer`: one tailer process. At a stop it finishes the transactions in flight and leaves its groups."""

from __future__ import annotations

import asyncio

from schemaless.config import TailerSettings
from schemaless.runtime.lifecycle import ServiceParts, run_service
from tailer.metrics import TailerMetrics
from tailer.service import TailerService

FINISH_TIMEOUT_S = 25.0
"""Opening a log against a slow broker takes up to 20 s. The supervisors wait for longer than this."""


async def serve(parts: ServiceParts[TailerSettings]) -> None:
    metrics = TailerMetrics(parts.metrics.registry)
    service = TailerService(parts.settings, parts.storage, metrics)
    metrics.watch(service)

    async def stop_service() -> None:
        await parts.stop.wait()
        service.stop()

    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(stop_service())
        await service.run()
        stopping.cancel()


def main() -> None:
    run_service("tailer", TailerSettings, serve, finish_timeout_s=FINISH_TIMEOUT_S)


if __name__ == "__main__":
    main()
