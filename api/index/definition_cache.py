"""What a process remembers of indexes: those that answer, so that queries needn't ask, and how fast builds are."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from schemaless.errors import StorageUnavailable
from schemaless.index.catalogue import find_versions
from schemaless.index.versions import NamedIndex
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import BuildProgress
from schemaless.topology import Datastore

KEPT_S = 2.0
PATIENCE_S = 0.2
"""How long a query waits for a look-up if the index is known already."""

_PACE_S, _LOOK_PAUSE_S = 300.0, 10.0  # what an estimate looks back on, and in which steps


class IndexCatalogue:
    """Remembers indexes that answer for some seconds, with all versions. Others are looked up each time.

    So for KEPT_S after a switch a process may answer from the version before (A21).

    While a master hangs a look-up takes seconds. A query then waits for a moment only, and goes on with what is known.
    """

    def __init__(self, storage: AsyncStorage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._active: dict[tuple[str, str], tuple[float, NamedIndex]] = {}
        self._looking: dict[tuple[str, str], asyncio.Task[NamedIndex]] = {}

    async def find(self, datastore: Datastore, name: str) -> NamedIndex:
        """Returns the versions of an index. Raises NotFound or StorageUnavailable."""
        key = (datastore.name, name)
        looked_at, known = self._active.get(key, (0.0, None))
        if known is not None and self._clock() - looked_at < KEPT_S:
            return known
        looking = self._looking.get(key)
        if looking is None:
            looking = self._looking[key] = asyncio.create_task(self._look(datastore, name))
            looking.add_done_callback(lambda task: self._looked(key, task))
        await asyncio.wait([looking], timeout=None if known is None else PATIENCE_S)
        if not looking.done() or (known is not None and isinstance(looking.exception(), StorageUnavailable)):
            assert known is not None, "without a time-out it is done"
            return known
        return looking.result()

    def forget(self, datastore: Datastore, name: str) -> None:
        """Looks the index up the next time: it may have been dropped, or made anew."""
        self._active.pop((datastore.name, name), None)
        self._looking.pop((datastore.name, name), None)

    async def _look(self, datastore: Datastore, name: str) -> NamedIndex:
        return await find_versions(self._storage, datastore, name)

    def _looked(self, key: tuple[str, str], task: asyncio.Task[NamedIndex]) -> None:
        if self._looking.get(key) is not task:
            return  # forgotten meanwhile: what it found may be older
        del self._looking[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StorageUnavailable) or task.cancelled():
            return
        self._active.pop(key, None)
        if error is None and task.result().answering.is_complete:
            self._active[key] = (self._clock(), task.result())


class BuildEta:
    """Estimates when an index that is building is ready, from its pace of the last minutes, as this process saw it.

    A build works a tenth of the time while cells come in, so an earlier pace says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def seconds(self, datastore: str, consumer: str, progress: BuildProgress) -> float | None:
        """Returns the seconds that are left for a version, by its consumer, or None as long as no pace is known."""
        now = self._clock()
        seen = self._seen.setdefault((datastore, consumer), deque())
        if seen and progress.done < seen[0][1]:  # a walk began anew
            seen.clear()
        if not seen or now - seen[-1][0] >= _LOOK_PAUSE_S:
            seen.append((now, progress.done))
        while len(seen) > 1 and seen[1][0] <= now - _PACE_S:
            seen.popleft()
        began, done = seen[0]
        built = progress.done - done
        if progress.total is None or built <= 0:
            return None
        return (now - began) / built * (progress.total - progress.done)

    def forget(self, datastore: str, consumer: str) -> None:
        """Drops what is known of a version, because it isn't being built."""
        self._seen.pop((datastore, consumer), None)
