"""ParkedStore: what a trigger handler stores and reads of parked cells, and of the rows that wait behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from schemaless.bus.parked_topic import ParkedCopy
from schemaless.cell import RowKey, StoredCell
from schemaless.codec import Erasing
from schemaless.consume.ports import Script
from schemaless.errors import Overloaded, SchemalessError
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import erasure_table, parked_selection, parked_table, shard_log, worker_table
from schemaless.storage.asyncmy_driver import AsyncNode, AsyncStorage
from schemaless.storage.failover import ask_masters
from schemaless.storage.parked_table import Cause, Ending, ParkedCell
from schemaless.topology import Datastore

_FORGET_TIMEOUT_S = 2.0
_TURN_S = 10.0  # how long a row waits until others are read

ROW_BYTES_MAX = 4 << 20
"""Bodies of one page of a row. One larger cell is read alone (I14)."""


class ParkedStore(Protocol):
    async def of_shards(self, shards: Iterable[int]) -> Mapping[int, Sequence[ParkedCell]]:
        """Returns the records of these shards, by shard, in the order of added_ids. Raises StorageUnavailable."""

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        """Returns the first cells of a row in these columns, after one added_id and up to another, bounded.

        None means that there are no more. Raises StorageUnavailable, Overloaded.
        """

    async def forget_calls(self, row_key: RowKey) -> None:
        """Removes from reports of processes, also of those that died, what failed for a row: errors may tell of bodies.

        Where a cluster is away the report stays, until it is forgotten.
        """

    # Scripts for the transaction that moves the checkpoint

    def erase(self, row_key: bytes, erasing: Erasing) -> Script:
        """Empties the errors of cells that an erasure names, also of those that ended: they may tell of bodies (I19).

        Records of them are ordered to be called again, which ends them.
        """

    def put(self, record: ParkedCell) -> Script:
        """Makes or replaces a record. A retry of it is done with that. A discard that came meanwhile stays ordered."""

    def begin(self, record: ParkedCell) -> Script:
        """Marks that a process begins to call a record's cell again."""

    def unmark(self, record: ParkedCell) -> Script:
        """Takes that mark away, and stores the kills. What people ordered, and the error, stay."""

    def release_row(self, record: ParkedCell) -> Script:
        """Lets the later cells of a record's row pass it."""

    def keep(self, record: ParkedCell, ending: Ending) -> Script:
        """Keeps what a record of a parked cell says for people, before it is replaced."""

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        """Deletes a record. If its cell was parked, people can see what became of it."""

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        """Deletes the records of a shard from an added_id on."""


class MySQLParkedStore:
    """Reads from the masters of the shards' homes. Its scripts are SQL.

    It reads `row_reads_max` rows of each master at a time: if all rows fail, checkpoints and orders still get their
    connections.
    """

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str, row_reads_max: int) -> None:
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._row_reads_max = row_reads_max
        self._row_reads: dict[str, asyncio.Semaphore] = {}

    async def of_shards(self, shards: Iterable[int]) -> Mapping[int, Sequence[ParkedCell]]:
        by_home = self._datastore.by_home(list(shards), lambda shard: shard)
        answers = await all_or_first_error(
            self._storage.master(home).run(parked_table.of_shards, self._datastore.name, self._consumer, numbers)
            for home, numbers in by_home.items()
        )
        found: dict[int, list[ParkedCell]] = {}
        for answer in answers:
            for cell in answer:
                found.setdefault(cell.shard, []).append(cell)
        return found

    async def of_row(
        self, shard: int, row_key: bytes, columns: Collection[str], after: int, until: int
    ) -> Sequence[StoredCell]:
        home = self._datastore.home(shard)
        turn = self._row_reads.setdefault(home, asyncio.Semaphore(self._row_reads_max))
        try:
            async with asyncio.timeout(_TURN_S):
                await turn.acquire()
        except TimeoutError as late:
            raise Overloaded(f"{home}: other rows have been read for {_TURN_S:.0f} s") from late
        try:
            return await self._storage.master(home).run(
                shard_log.of_row, self._datastore, shard, row_key, columns, after, until, ROW_BYTES_MAX
            )
        finally:
            turn.release()

    async def forget_calls(self, row_key: RowKey) -> None:
        of = self._datastore.name, self._consumer, row_key
        await ask_masters(
            self._storage, self._datastore.clusters, worker_table.forget_calls, *of, timeout_s=_FORGET_TIMEOUT_S
        )

    def erase(self, row_key: bytes, erasing: Erasing) -> Script:
        return parked_table.erase(self._datastore.name, self._consumer, row_key, erasure_table.these(erasing.cells))

    def put(self, record: ParkedCell) -> Script:
        return parked_table.put(self._datastore.name, self._consumer, record)

    def begin(self, record: ParkedCell) -> Script:
        return parked_table.begin(self._datastore.name, self._consumer, record.shard, record.added_id)

    def unmark(self, record: ParkedCell) -> Script:
        return parked_table.unmark(self._datastore.name, self._consumer, record.shard, record.added_id, record.kills)

    def release_row(self, record: ParkedCell) -> Script:
        return parked_table.release_row(self._datastore.name, self._consumer, record.shard, record.added_id)

    def keep(self, record: ParkedCell, ending: Ending) -> Script:
        place = self._datastore.name, self._consumer, record.shard, record.added_id
        return parked_table.keep(*place, ending)

    def delete(self, record: ParkedCell, ending: Ending) -> Script:
        place = self._datastore.name, self._consumer, record.shard, record.added_id
        delete = parked_table.delete(*place)
        return f"{parked_table.keep(*place, ending)};{delete}" if is_kept(record) else delete

    def delete_from(self, shard: int, added_id: int, ending: Ending) -> Script:
        place = self._datastore.name, self._consumer, shard, added_id
        return f"{parked_table.keep(*place, ending, later=True)};{parked_table.delete_from(*place)}"


def is_kept(record: ParkedCell) -> bool:
    """Whether people may want to know what became of a record: it was parked, and not only waiting."""
    return record.cause is not Cause.WAITING or record.job is not None


# ParkedCopies: copies parked cells to a topic, after they are durable in MySQL, and each at least once.
#
# A record says whether its copy is owed, in the transaction that parks the cell. So nothing is forgotten when a
# process dies or Kafka is away, and no shard ever waits for a copy. What is retried or discarded before that isn't
# copied.

log = structlog.get_logger()

PAGE_RECORDS_MAX = 16
"""Of a page, with their bodies: at most 16 MiB."""
_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0


class ParkedCopies:
    """The copies of one program. `publish` blocks until Kafka has them. It raises SchemalessError."""

    def __init__(
        self,
        storage: AsyncStorage,
        datastore: Datastore,
        consumer: str,
        publish: Callable[[Sequence[ParkedCopy]], None],
    ) -> None:
        self.copied = self.failed = 0
        """How many cells were copied, and how many attempts failed, since the process started."""
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._publish = publish

    async def run(self, shards: Callable[[], Collection[int]]) -> None:
        """Copies what the process's own shards have parked, until it is cancelled."""
        failures = 0
        while True:
            try:
                copied = await self.step(shards())
                failures = 0
            except SchemalessError as error:
                copied, failures = 0, failures + 1
                self.failed += 1
                log.warning("parked cells wait for their copies", failed=self.failed, why=str(error), hint=error.hint)
            if not copied:
                await asyncio.sleep(min(_PAUSE_MAX_S, _PAUSE_S * 2**failures))

    async def step(self, shards: Collection[int]) -> int:
        """Copies a page of each cluster. Returns how many cells were copied. Raises what the last failure was."""
        copied, failure = 0, None
        for cluster, own in self._datastore.by_home(sorted(shards), lambda shard: shard).items():
            try:
                copied += await self._copy_page(self._storage.master(cluster), own)
            except SchemalessError as error:  # the other clusters' cells are copied all the same
                failure = error
        self.copied += copied
        if failure is not None:
            raise failure
        return copied

    async def _copy_page(self, master: AsyncNode, shards: Collection[int]) -> int:
        name, consumer = self._datastore.name, self._consumer
        records = await master.run(parked_table.uncopied, name, consumer, shards, PAGE_RECORDS_MAX)
        if not records:
            return 0
        keys = [(record.shard, record.added_id) for record in records]
        _, cells = await master.run(parked_selection.read, self._datastore, consumer, keys)
        copies = [
            ParkedCopy(
                cell, record.function_name, record.cause, record.error,
                record.attempts, record.parked_at,
            )
            for record in records
            if (cell := cells.get((record.shard, record.added_id))) is not None and not cell.is_erased
        ]  # fmt: skip
        await asyncio.to_thread(self._publish, copies)
        await master.run(parked_table.note_copied, name, consumer, records)
        log.info("parked cells were copied", cells=len(copies), copied=self.copied + len(copies))
        return len(records)
