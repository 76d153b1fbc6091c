"""Tombstones are deleted when they are old and nothing needs them any more (I11).

A tombstone is old when every cluster's checkpoint of its source shard was at or beyond it some time ago. A promotion
seldom takes back as much. If one does, the shard is evaluated again (schemaless/storage/index_tombstones.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from schemaless.index.definition import IndexDefinition
from schemaless.index.versions import VersionKey
from schemaless.location import Location
from schemaless.runtime.batching import all_or_first_error
from schemaless.sharding import shard_of
from schemaless.storage import checkpoint_table, index_tombstones
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_table import BEFORE_ALL, EntryKey
from schemaless.storage.index_tombstones import Tombstone
from schemaless.topology import Datastore

_PAGE_ROWS = 1000
_ROWS_FOR_ONE = 16  # so many rows that are only looked at cost as much as one that is compared


class _Reached(msgspec.Struct):
    """What all clusters had reached by source shard, at two times. Belongs to a version."""

    lately: Mapping[int, Location]
    read_at: float
    before: Mapping[int, Location] = {}


class Tombstones:
    """Belongs to one datastore of one process. All clusters were beyond what it deletes for `age_s`."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        *,
        age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._age_s = age_s
        self._clock = clock
        self._reached: dict[VersionKey, _Reached] = {}

    async def delete(self, definition: IndexDefinition, shard: int) -> AsyncIterator[int]:
        """Deletes the old tombstones of one shard of a version, by pages. Yields what each cost, in compared rows.

        Raises StorageUnavailable.
        """
        reached = await self._reached_before(definition)
        master = self._storage.master(self._datastore.home(shard))
        version = IndexVersion(self._datastore.name, definition.name, definition.number)
        after: EntryKey | None = BEFORE_ALL if reached else None
        while after is not None:
            page = await master.run(index_tombstones.page, self._datastore, definition, shard, after, _PAGE_ROWS)
            old: dict[int, list[Tombstone]] = {}
            for tombstone in page.tombstones:
                source = shard_of(tombstone.row_key, self._datastore.shards)
                if source in reached and tombstone.version <= reached[source]:
                    old.setdefault(source, []).append(tombstone)
            if old:
                await master.run(index_tombstones.forget, version, self._datastore, definition, shard, old)
            yield max(len(page.tombstones), 0 if page.last is None else _PAGE_ROWS // _ROWS_FOR_ONE)
            after = page.last

    async def _reached_before(self, definition: IndexDefinition) -> Mapping[int, Location]:
        """Returns by source shard what all clusters have reached for at least `age_s`."""
        key = definition.name, definition.number
        known, now = self._reached.get(key), self._clock()
        if known is None or now - known.read_at >= self._age_s:
            answers = await all_or_first_error(
                self._storage.master(cluster).run(checkpoint_table.locations, self._datastore.name, definition.consumer)
                for cluster in self._datastore.clusters
            )
            everywhere = set(answers[0]).intersection(*answers)
            lately = {shard: min(found[shard] for found in answers) for shard in everywhere}
            known = self._reached[key] = _Reached(lately, now, {} if known is None else known.lately)
        return known.before

    def keep(self, versions: Mapping[VersionKey, object]) -> None:
        """Forgets what it knows of other versions."""
        self._reached = {key: reached for key, reached in self._reached.items() if key in versions}
