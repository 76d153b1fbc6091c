"""`python -m cleaner`: one cleaner process. Any number of cleaners may run at once."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from cleaner.service import Cleaner
from schemaless.config import CleanerSettings, read_settings
from schemaless.lifecycle import run_service
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import load_topology


async def _serve(settings: CleanerSettings, stop: asyncio.Event) -> None:
    topology = load_topology(settings.topology)
    async with AsyncStorage(
        topology,
        connections_max=settings.connections_max,
        connect_timeout_s=settings.connect_timeout_s,
        timeout_s=settings.statement_timeout_s,
    ) as storage:
        await Cleaner(storage, settings).run(stop)


def main() -> int:
    settings = read_settings(CleanerSettings)
    return run_service(
        "cleaner",
        lambda stop: _serve(settings, stop),
        log_level=settings.log_level,
        loop_factory=uvloop.new_event_loop,
    )


if __name__ == "__main__":
    sys.exit(main())
