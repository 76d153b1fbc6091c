"""Explainer: reads what all servers know of one row, and makes its timeline and what it waits for.

Any node may answer for its cluster. A cluster that can't be asked is named, and the rest is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from api.explain.index_standing import IndexStanding, RowBodies
from api.explain.program_standing import ProgramStanding
from api.explain.row_facts import (
    CellWindow,
    ClusterFacts,
    HomeFacts,
    newest_programs,
    read_cluster,
    read_home,
    read_row_at,
)
from api.explain.timeline import events_of, waits_of
from api.read.reader import Reader, Served, served_together
from api.status.workers import present_workers
from schemaless.cell import ColumnName, RowKey, row_key_text
from schemaless.errors import CellMissing, NotFound, SchemalessError, StorageUnavailable, Unavailable
from schemaless.index.versions import merge
from schemaless.location import ADDED_ID_MAX, ShardLocation
from schemaless.names import TRIGGER_PREFIX
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_table
from schemaless.storage.failover import answers_of_all
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.operation import Operation
from schemaless.storage.trigger_order_table import TriggerOrders, latest
from schemaless.topology import Datastore, Role

EXPLAIN_BYTES_MAX = 4 << 20
"""What one explanation holds at most of what it read."""

EXPLAINED_AT_ONCE = 16
_NEWEST_BYTES_MAX = 1 << 20
T = TypeVar("T")
Looked = Mapping[int, Sequence[RowKey]]
Entries = Mapping[int, Sequence[FoundEntry]]


class Explainer:
    """Explains rows, a bounded number at once. All requests of a process share it."""

    def __init__(self, reader: Reader, *, wait_s: float) -> None:
        self._reader = reader
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(EXPLAINED_AT_ONCE)

    async def explain(
        self, datastore: Datastore, where: RowKey | ShardLocation, limit: int, read_from: Role | None
    ) -> tuple[dict[str, Any], Served]:
        """Returns the explanation of a row, or of the row of the cell at a location.

        Raises CellMissing, NotFound for a shard that doesn't exist, LocationGone for a superseded location,
        StorageUnavailable when nobody knows of the row, and Unavailable when too many explanations are under way.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable(f"{EXPLAINED_AT_ONCE} explanations are under way in this process already") from None
        try:
            return await _Explanation(self._reader, datastore, read_from).of(where, limit)
        finally:
            self._slots.release()


class _Explanation:
    """One explanation on its way. `unknown` says by cluster why it couldn't be asked."""

    def __init__(self, reader: Reader, datastore: Datastore, read_from: Role | None) -> None:
        self._reader = reader
        self._datastore = datastore
        self._read_from = read_from
        self._unknown: dict[str, str] = {}
        self._served: list[Served] = []

    async def of(self, where: RowKey | ShardLocation, limit: int) -> tuple[dict[str, Any], Served]:
        datastore = self._datastore
        if isinstance(where, ShardLocation):
            row_key = await self._row_at(where)
            window = CellWindow(where.location.added_id, (limit + 1) // 2, limit // 2)
        else:
            row_key, window = where, CellWindow(ADDED_ID_MAX, limit, 0)
        shard = shard_of(row_key, datastore.shards)
        parts = await self._ask({name: lambda: read_cluster(datastore, row_key) for name in datastore.clusters})
        home = (await self._ask({datastore.home(shard): lambda: read_home(datastore, shard, row_key, window)})).get(
            datastore.home(shard)
        )
        copies = {name: part.copies for name, part in parts.items() if part.copies}
        self._require_known(row_key, found=bool(copies) or (home is not None and bool(home.page.cells)))
        programs = [] if home is None else _programs(row_key, shard, home, parts)
        program_views = [program.view() for program in programs]
        index_views = [] if home is None else await self._indexes(row_key, shard, home, parts)
        document = {
            "row_key": row_key_text(row_key),
            "shard": shard,
            "cluster": datastore.home(shard),
            "head": None if home is None else f"{shard}:{home.head}",
            "events": events_of(shard, home, copies, programs),
            "earlier": home is not None and home.page.earlier,
            "later": home is not None and home.page.later,
            "programs": program_views,
            "indexes": index_views,
            "waits": list(waits_of(copies, home, program_views, index_views)),
            "unknown": self._unknown,
        }
        return document, served_together(self._served)

    async def _row_at(self, at: ShardLocation) -> RowKey:
        if at.shard >= self._datastore.shards:
            raise NotFound(f"{self._datastore.name} has no shard {at.shard}")
        row_key, _ = await self._reader.read(
            self._datastore.home(at.shard), read_row_at, self._datastore, at, read_from=self._read_from
        )
        if row_key is None:
            raise CellMissing(f"there is no cell at {at}")
        return row_key

    async def _ask(self, questions: Mapping[str, Callable[[], Operation[T]]]) -> dict[str, T]:
        """Asks one node of each cluster. Notes those of which none answers."""
        answers = await answers_of_all(
            {
                name: self._reader.read(name, question, read_from=self._read_from)
                for name, question in questions.items()
            },
            tolerated=SchemalessError,
        )
        self._unknown |= {name: str(error) for name, error in answers.failures.items()}
        self._served += [served for _, served in answers.found.values()]
        return {name: value for name, (value, _) in answers.found.items()}

    def _require_known(self, row_key: RowKey, *, found: bool) -> None:
        if found:
            return
        if self._unknown:
            raise StorageUnavailable("; ".join(f"cluster {name}: {why}" for name, why in self._unknown.items()))
        raise CellMissing(f"there is no row {row_key_text(row_key)}")

    async def _indexes(
        self, row_key: RowKey, shard: int, home: HomeFacts, parts: Mapping[str, ClusterFacts]
    ) -> list[dict[str, Any]]:
        """Looks for the row's entries where its newest cells put them, all indexes of a cluster in one read.

        Of an index this is the version that answers queries.
        """
        known = merge({name: part.indexes for name, part in parts.items()}, {}).indexes()
        standings = [
            IndexStanding(index, home.checkpoints.get(index.definition.consumer), home.starts, self._datastore.shards)
            for index in (named.answering for named in known.values())
            if index.is_present
        ]
        with_tables = [standing for standing in standings if standing.index.has_tables]
        bodies = await self._bodies(row_key, shard, with_tables)
        looked: dict[str, dict[str, Looked]] = {}
        for standing in with_tables:
            shards = sorted({place for place, _, _ in standing.expected(bodies)}) if bodies else []
            for cluster, here in self._datastore.by_home(shards, lambda place: place).items():
                looked.setdefault(cluster, {})[standing.index.name] = {place: [row_key] for place in here}
        found = await self._ask({cluster: self._entries(each, standings) for cluster, each in looked.items()})
        views = []
        for standing in standings:
            name = standing.index.name
            wanted = [cluster for cluster, each in looked.items() if name in each]
            entries: Entries | None = None
            if found.keys() >= set(wanted):
                entries = {place: each for cluster in wanted for place, each in found[cluster][name].items()}
            views.append(standing.view(bodies, entries))
        return views

    def _entries(
        self, looked: Mapping[str, Looked], standings: Sequence[IndexStanding]
    ) -> Callable[[], Operation[dict[str, Entries]]]:
        definitions = {standing.index.name: standing.index.definition for standing in standings}

        def read() -> Operation[dict[str, Entries]]:
            found: dict[str, Entries] = {}
            for name, rows in looked.items():
                found[name] = yield from index_table.entries_of(self._datastore, definitions[name], rows)
            return found

        return read

    async def _bodies(self, row_key: RowKey, shard: int, standings: Sequence[IndexStanding]) -> RowBodies | None:
        """Returns the newest bodies of all indexes' columns, None where they can't be read or are too large."""
        columns = sorted({column for standing in standings for column in standing.index.definition.columns})
        if not columns:
            return RowBodies([])
        keys = [(shard, row_key, ColumnName(column), None) for column in columns]
        try:
            cells, _ = await self._reader.read(
                self._datastore.home(shard),
                entity_table.get_or_newest,
                self._datastore,
                keys,
                _NEWEST_BYTES_MAX,
                read_from=self._read_from,
            )
            return RowBodies(cells)
        except SchemalessError:
            return None


def _programs(row_key: RowKey, shard: int, home: HomeFacts, parts: Mapping[str, ClusterFacts]) -> list[ProgramStanding]:
    functions = newest_programs(parts.values())
    workers = present_workers([part.workers for part in parts.values()])
    consumers = {*functions, *(name for name in home.checkpoints if name.startswith(TRIGGER_PREFIX))}
    standings = []
    for consumer in sorted(consumers):
        orders = [part.orders.get(consumer, TriggerOrders()) for part in parts.values()]
        standings.append(
            ProgramStanding(
                consumer.removeprefix(TRIGGER_PREFIX),
                row_key,
                shard,
                home,
                home.checkpoints.get(consumer),
                home.records.get(consumer, ()),
                home.ended.get(consumer, ()),
                functions.get(consumer),
                latest(orders),
                TriggerOrders(
                    paused={place: why for one in orders for place, why in one.paused.items()},
                    seeks={place: seek for one in orders for place, seek in one.seeks.items()},
                ),
                [row for row in workers if row.consumer == consumer],
            )
        )
    return standings
