"""A shard that is moved by hand, step by step as the mover does it, with writers stopped or running."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from schemaless.cell import StoredCell
from schemaless.sharding import shard_of
from schemaless.stack.local import RunningTopology
from schemaless.storage import entity_table, placement_table
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore, Node, Placement
from tests.log_harness import new_cell
from tests.waiting import async_until, until

WAIT_S = 30.0
LEARNT_S = 1.2
"""Within this a process has learnt of a placement. It looks twice a second."""
TRIGGERS = "consumer LIKE 'trigger:%%'"
BY_SHARD = {
    "shard_generation": "",
    "checkpoint": f" AND {TRIGGERS}",
    "parked": "",
    "parked_history": "",
    "trigger_order": "",
}
OF_DATASTORE = {"trigger_program": "", "job": "", "worker": ""}


class Move:
    """One move of one shard. `datastore` is told where the shard is, as a process is that looks."""

    def __init__(self, running: RunningTopology, datastore: Datastore, shard: int, target: str) -> None:
        self.datastore, self.shard = datastore, shard
        self.source, self.target = datastore.home(shard), target
        self._running = running

    def run(self) -> None:
        self.announce()
        self.close()
        self.open()
        self.publish()

    def announce(self) -> None:
        self._place(self.source, self.target)

    def close(self) -> None:
        """From now on the source takes no cells, and workers can't move their checkpoints there."""
        with self._master(self.source) as source:
            source.query(
                "BEGIN; SELECT * FROM schemaless.shard_head WHERE datastore = %s AND shard = %s FOR UPDATE;"
                " UPDATE schemaless.shard_head SET moved_to = %s WHERE datastore = %s AND shard = %s;"
                " UPDATE schemaless.checkpoint SET version = version + 1, state = 'moved'"
                f" WHERE datastore = %s AND shard = %s AND state <> 'moved' AND {TRIGGERS};"
                " COMMIT",
                *self._key, self.target, *self._key, *self._key,
            )  # fmt: skip
        self._until_shown(self.source, "moved_to IS NOT NULL")

    def open(self) -> None:
        """Brings over all that the shard has, and opens it, in one transaction."""
        table = f"`{self.datastore.database(self.shard)}`.entity"
        with self._master(self.source) as source, self._master(self.target) as target:
            (made,) = source.query(f"SHOW CREATE TABLE {table}")
            target.query(f"CREATE DATABASE IF NOT EXISTS `{self.datastore.database(self.shard)}`")
            target.query(made["Create Table"].replace("CREATE TABLE `entity`", f"CREATE TABLE IF NOT EXISTS {table}"))
            target.query("BEGIN")
            _write(target, table, source.query(f"SELECT * FROM {table}"), "INSERT IGNORE")
            for name, more in BY_SHARD.items():
                self._copy(source, target, name, f"WHERE datastore = %s AND shard = %s{more}", self._key)
            for name in OF_DATASTORE:
                rows = source.query(f"SELECT * FROM schemaless.{name} WHERE datastore = %s", self.datastore.name)
                # A job counts on its own cluster what matched there.
                rows = [row | {"matched": 0, "replaced": 0} if name == "job" else row for row in rows]
                _write(target, f"schemaless.{name}", rows, "INSERT IGNORE")
            keys = source.query("SELECT * FROM schemaless.idempotency WHERE datastore = %s", self.datastore.name)
            mine = [row for row in keys if shard_of(row["row_key"], self.datastore.shards) == self.shard]
            _write(target, "schemaless.idempotency", mine, "REPLACE")
            target.query(
                "UPDATE schemaless.checkpoint SET state = IF(reason IS NULL, 'running', 'stopped')"
                f" WHERE datastore = %s AND shard = %s AND {TRIGGERS}",
                *self._key,
            )
            (head,) = source.query(
                "SELECT * FROM schemaless.shard_head WHERE datastore = %s AND shard = %s", *self._key
            )
            (appointed,) = target.query(
                "SELECT COALESCE(MAX(epoch), 0) AS epoch FROM schemaless.appointment WHERE cluster = %s", self.target
            )
            _write(target, "schemaless.shard_head", [head | {"moved_to": None, "epoch": appointed["epoch"]}], "REPLACE")
            target.query("COMMIT")
        self._until_shown(self.target, "moved_to IS NULL")

    def publish(self) -> None:
        self._place(self.target, None)

    @property
    def _key(self) -> tuple[str, int]:
        return self.datastore.name, self.shard

    def _place(self, home: str, coming: str | None) -> None:
        before = self.datastore.moves.get(self.shard)
        number = 1 if before is None else before.number + 1
        row = Placement(*self._key, number, home, coming, time.time_ns() // 1000)
        with SyncStorage(self._running.topology) as storage:
            for master in storage.masters:
                master.run(placement_table.write, [row])
        self.datastore.moves[self.shard] = row

    def _copy(
        self, source: AdminSession, target: AdminSession, table: str, which: str, values: Sequence[object]
    ) -> None:
        rows = source.query(f"SELECT * FROM schemaless.{table} {which}", *values)
        target.query(f"DELETE FROM schemaless.{table} {which}", *values)
        if table == "parked_history":
            rows = [{name: value for name, value in row.items() if name != "number"} for row in rows]
        _write(target, f"schemaless.{table}", rows, "INSERT")

    @contextmanager
    def _master(self, cluster: str) -> Iterator[AdminSession]:
        with SyncStorage(self._running.topology) as storage:
            storage.look()
            name = storage.master(cluster).node.name
        node = next(node for node in self._nodes(cluster) if node.name == name)
        with AdminSession(node) as session:
            yield session

    def _nodes(self, cluster: str) -> Sequence[Node]:
        return self._running.administrators.cluster(cluster).nodes

    def _until_shown(self, cluster: str, condition: str) -> None:
        which = f"SELECT * FROM schemaless.shard_head WHERE datastore = %s AND shard = %s AND {condition}"
        with ExitStack() as stack:
            for session in [stack.enter_context(AdminSession(node)) for node in self._nodes(cluster)]:
                until(
                    lambda session=session: session.query(which, *self._key), lambda session=session: session.node.name
                )


def _write(target: AdminSession, table: str, rows: Sequence[dict[str, object]], verb: str) -> None:
    for row in rows:
        names = ",".join(f"`{name}`" for name in row)
        target.query(f"{verb} INTO {table} ({names}) VALUES ({','.join(['%s'] * len(row))})", *row.values())


def move_shard(running: RunningTopology, datastore: Datastore, shard: int, target: str) -> None:
    Move(running, datastore, shard, target).run()


class Writers:
    """Put cells into some shards for as long as they run. One that is refused asks again where the shard is."""

    def __init__(
        self, storage: AsyncStorage, datastore: Datastore, shards: Sequence[int], pause_s: float = 0.01
    ) -> None:
        self.datastore = storage.live(datastore)
        self.put = 0
        self._storage, self._shards, self._pause_s = storage, shards, pause_s
        self._stop = asyncio.Event()

    async def __aenter__(self) -> "Writers":
        self._tasks = [asyncio.create_task(self._write(shard)) for shard in self._shards]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _write(self, shard: int) -> None:
        while not self._stop.is_set():
            cell = new_cell(self.datastore, {"n": self.put}, shard=shard)
            self.put += 1

            async def is_put(cell: ShardCell = cell) -> bool:
                home = self._storage.master(self.datastore.home(shard))
                await home.run(entity_table.put_cells, self.datastore, [cell])
                return True

            await async_until(is_put)
            await asyncio.sleep(self._pause_s)


async def moved_while_written(move: Move, writers: Writers, cells: int = 20) -> None:
    """Moves a shard between writes, and returns when some more were written at its new home."""

    async def written(more: int) -> None:
        wanted = writers.put + more
        await async_until(lambda: writers.put >= wanted)

    await written(cells)
    await asyncio.to_thread(move.run)
    await asyncio.sleep(LEARNT_S)
    await written(cells)


def places(cells: Sequence[StoredCell]) -> dict[int, list[int]]:
    """The added_ids by shard, in the order given."""
    found: dict[int, list[int]] = {}
    for cell in cells:
        found.setdefault(cell.shard, []).append(cell.added_id)
    return found
