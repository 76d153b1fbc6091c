"""What a process remembers of indexes: the active ones, so that queries don't look them up, and how fast builds are."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemaless.index.catalogue import find_index
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import BuildProgress, DefinedIndex, IndexStage
from schemaless.topology import Datastore

KEPT_S = 2.0


class IndexCatalogue:
    """Remembers active indexes for some seconds, paused ones too. Others are looked up each time."""

    def __init__(self, storage: AsyncStorage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._active: dict[tuple[str, str], tuple[float, DefinedIndex]] = {}

    async def find(self, datastore: Datastore, name: str) -> DefinedIndex:
        """Returns an index. Raises NotFound or StorageUnavailable."""
        looked_at, known = self._active.get((datastore.name, name), (0.0, None))
        now = self._clock()
        if known is not None and now - looked_at < KEPT_S:
            return known
        found = await find_index(self._storage, datastore, name)
        if found.stage is IndexStage.ACTIVE:
            self._active[datastore.name, name] = (now, found)
        return found

    def forget(self, datastore: Datastore, name: str) -> None:
        """Looks the index up the next time: it may have been dropped, or made anew."""
        self._active.pop((datastore.name, name), None)


class BuildEta:
    """Estimates when an index that is building is ready, from the pace since this process first looked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[tuple[str, str], tuple[float, int]] = {}

    def seconds(self, datastore: str, index: str, progress: BuildProgress) -> float | None:
        """Returns the seconds that are left, or None as long as no pace is known."""
        now = self._clock()
        began, done = self._first.setdefault((datastore, index), (now, progress.done))
        built = progress.done - done
        if progress.total is None or built <= 0:
            return None
        return (now - began) / built * (progress.total - progress.done)

    def forget(self, datastore: str, index: str) -> None:
        """Drops what is known of an index, because it is ready."""
        self._first.pop((datastore, index), None)
