"""What the datastores and partitions of one tailer process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from schemaless.config import TailerSettings
from schemaless.location import Location
from tailer.cluster_reader import ClusterSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """`heads` tells what was last seen of a datastore's heads; `paused` which datastores wait for an operator; a tail
    holds a batch only while it has a slot.
    """

    settings: TailerSettings
    sources: Mapping[str, ClusterSource]
    heads: Callable[[str], Mapping[int, Location]]
    paused: Callable[[str], bool]
    slots: asyncio.Semaphore
    publishing: Executor
    opening: Executor


async def in_thread(threads: Executor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call)


async def pause(seconds: float, stopping: asyncio.Event) -> None:
    """Sleeps, but not beyond the moment when `stopping` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        pass
