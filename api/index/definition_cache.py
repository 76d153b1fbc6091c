"""IndexCatalogue: indexes that may be asked, remembered for seconds so that no query pays for looking them up."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemaless.index.catalogue import find_index
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.topology import Datastore

KEPT_S = 5.0


class IndexCatalogue:
    """Remembers active indexes only: an active one stays as it is."""

    def __init__(self, storage: AsyncStorage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._active: dict[tuple[str, str], tuple[float, DefinedIndex]] = {}

    async def find(self, datastore: Datastore, name: str) -> DefinedIndex:
        """Raises NotFound or StorageUnavailable."""
        looked_at, known = self._active.get((datastore.name, name), (0.0, None))
        now = self._clock()
        if known is not None and now - looked_at < KEPT_S:
            return known
        found = await find_index(self._storage, datastore, name)
        if found.state is IndexState.ACTIVE:
            self._active[datastore.name, name] = (now, found)
        return found
