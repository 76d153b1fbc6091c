"""A datastore, its indexes and the processes that keep them, for histories in which any of them may stop anywhere.

Everything runs the services' own code on real servers. Two things are made up. A process is a set of objects whose
every operation on a server passes a gate, so it can be stopped between two operations, and continue much later. And
what a promotion does to a cluster is done by SQL: the cluster becomes what its minion had, and opens a generation.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from indexer.index_cleaner import IndexCleaner
from indexer.maintainer import Maintainer
from indexer.service import build_step, note_gone, remove_from, remove_strays
from indexer.walker import BuildLoad, WalkedCheckpoints, Walker
from schemaless.cell import CellKey
from schemaless.codec import decode_body, encode_body
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.delivery import Delivery
from schemaless.consume.host import HomeLog, ShardHeads
from schemaless.errors import SchemalessError
from schemaless.index.catalogue import Change, IndexWatch, bring_up, create_index, drop_index
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entries_for, entry_shard, misfits_of, with_column
from schemaless.index.switch import retire_when_due, switch_to
from schemaless.names import index_table_name
from schemaless.shard_cursor import CursorState
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_problem_table, index_table
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.index_definition_table import IndexStage, RunState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.operation import query
from schemaless.storage.sql import Name, commas, literal
from tests.log_harness import put

SHARDS = 2
NAME = "by_owner"
_ROUNDS_MAX = 60


def _definition(path, **more):
    return parse_definition(
        {
            "name": NAME,
            "shard_field": "owner",
            "fields": [{"name": "owner", "column": "BASE", "path": f"{path}owner", "type": "int"}],
            "stored": [{"name": "state", "column": "STATUS", "path": "state", "type": "int"}],
            **more,
        }
    )


LEAVING = [{"field": "state", "op": "ne", "value": 2}]
DEFINITIONS = [_definition("", where=LEAVING), _definition("owners[].", where=LEAVING), _definition("")]
ROWS = [next(key for n in range(99) if shard_of(key := bytes([n, seed]) * 8, SHARDS) == seed // 2) for seed in range(4)]
OWNERS = list(range(4))
COLUMNS = ["BASE", "STATUS", "OTHER"]


def body_of(ref_key, value):
    """As many elements as the ref_key says. A text fits no field."""
    owners = [{"owner": (value + n) % 4} for n in range(ref_key % 3)] if isinstance(value, int) else None
    return {"owner": value, "state": value, "owners": owners}


class Gate:
    """Lets operations of one process pass, one after the other, as many as it is told. A dead one lets none pass."""

    def __init__(self):
        self.holds = asyncio.Event()
        self.is_dead = False
        self._left = 0
        self._opened = asyncio.Event()
        self._turn = asyncio.Lock()

    async def run(self, node, *args, **kwargs):
        async with self._turn:
            while not self._left or self.is_dead:
                self._opened.clear()
                self.holds.set()
                await self._opened.wait()
            self._left -= 1
            return await node.run(*args, **kwargs)

    def open(self, operations):
        self._left = operations
        self.holds.clear()
        self._opened.set()


class GatedNode:
    def __init__(self, node, gate):
        self.node, self._node, self._gate = node.node, node, gate

    async def run(self, *args, **kwargs):
        return await self._gate.run(self._node, *args, **kwargs)


class GatedStorage:
    def __init__(self, storage, gate):
        self._storage, self.topology = storage, storage.topology
        self.nodes = {name: GatedNode(node, gate) for name, node in storage.nodes.items()}

    def master(self, cluster):
        return self.nodes[self.topology.cluster(cluster).nodes[0].name]

    @property
    def masters(self):
        return [self.master(cluster) for cluster in sorted(self.topology.clusters)]

    def minions(self, cluster):
        return []

    def live(self, datastore):
        return datastore


class Hosted:
    """A version of an index in one process."""

    def __init__(self, process, definition):
        storage, datastore = process.storage, process.world.datastore
        self.definition = definition
        maintainer = Maintainer(storage, datastore, definition, effect_bytes_max=3000, examined_rows_max=3)
        load = BuildLoad(storage, datastore, maintainer.version, lag_cells_max=0, commit_max_s=9.0, busy_share=1)
        self.walker = Walker(storage, datastore, definition, maintainer, load)
        kept = Checkpoints(process.lanes, definition.consumer, CheckpointPlacement.EVERYWHERE, start_at=None)
        self.checkpoints = WalkedCheckpoints(kept, self.walker)
        self.deliveries = [
            Delivery(
                maintainer,
                self.checkpoints,
                HomeLog(storage, datastore, home),
                batch_cells_max=3,
                clock=lambda: process.now,
            )
            for home in datastore.clusters
        ]
        for home, delivery in zip(datastore.clusters, self.deliveries, strict=True):
            delivery.gain([shard for shard in range(SHARDS) if datastore.home(shard) == home])


class Process:
    """An indexer that does one job at a time, as far as its gate lets it."""

    def __init__(self, world):
        self.world, self.gate, self.now = world, Gate(), 0.0
        self.storage = GatedStorage(world.async_storage, self.gate)
        self.lanes = CommitLanes(self.storage, world.datastore)
        self.watch = IndexWatch(self.storage, world.datastore)
        self.heads = ShardHeads(self.storage, world.datastore)
        self.cleaner = IndexCleaner(
            self.storage,
            world.datastore,
            lambda: range(SHARDS),
            1e9,
            pass_period_s=1.0,
            clock=lambda: self.now,
        )
        self.hosted, self.touched = {}, {}
        self.job = None

    @property
    def is_stopped(self):
        """Whether it is within a job."""
        return self.job is not None and not self.job.done()

    def begin(self, job):
        async def guarded():
            with suppress(SchemalessError):
                await job

        self.job = asyncio.get_running_loop().create_task(guarded())

    async def advance(self, operations):
        """Lets it make so many operations, or end its job before. None: to the end."""
        self.gate.open(10**9 if operations is None else operations)
        held = asyncio.create_task(self.gate.holds.wait())
        await asyncio.wait([self.job, held], return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        if self.job.done():
            self.job.result()

    async def do(self, job):
        """Does a job to its end."""
        self.begin(job)
        await self.advance(None)

    async def index(self, heard=()):
        """Does all there is to do: stages, walks, deliveries, switches and removals."""
        versions = await self.watch.look()
        datastore = self.world.datastore
        await bring_up(self.storage, datastore, versions)
        present = {key: index for key, index in versions.merged.items() if index.stage is not IndexStage.GONE}
        for key, index in present.items():
            if index.stage is IndexStage.DELETING:
                await self._remove(index)
            elif index.order.run_state is RunState.RUNNING:
                self.touched[key] = index
                with suppress(SchemalessError):
                    await build_step(self.storage, datastore, index)
                if index.has_tables:
                    hosted = self.hosted.get(key) or self.hosted.setdefault(key, Hosted(self, index.definition))
                    with suppress(SchemalessError):
                        await self._follow(hosted, heard)
        for index in [index for key, index in self.touched.items() if key not in present]:
            await self._remove(index)
        for named in versions.indexes().values():
            if len(named.versions) > 1:
                await retire_when_due(self.storage, datastore, named, time.time_ns() // 1000)
                if named.change is not None and named.change.is_complete:
                    with suppress(SchemalessError):
                        await switch_to(self.storage, datastore, named, named.change)
        self.cleaner.watch(
            index.definition
            for key, index in present.items()
            if key in self.hosted and index.stage is IndexStage.ACTIVE
        )
        if not versions.away:
            await remove_strays(self.storage, datastore)

    async def clean(self):
        """Compares and repairs what it hosts, all of it."""
        for _ in range(len(self.hosted) * SHARDS):
            await self.cleaner.step()
        self.now += 100

    async def keep_up(self):
        """Does all there is to do, and compares twice."""
        for _ in range(3):
            await self.index()
        for _ in range(2):
            await self.clean()

    async def _follow(self, hosted, heard):
        found = await hosted.checkpoints.read(range(SHARDS))
        for shard in set(range(SHARDS)) - found.keys():
            while await hosted.walker.step(shard):
                pass
            assert hosted.walker.reason is None
        await self.heads.look()
        for delivery in hosted.deliveries:
            for shard, cells in heard:
                if cells and shard in delivery.cursors():
                    delivery.take(shard, cells)
            for _ in range(_ROUNDS_MAX):
                delivery.confirmed(delivery.unconfirmed())
                delivery.look(self.heads.known)
                pause_s = await delivery.step()
                if delivery.calls:
                    await asyncio.wait(delivery.calls)
                cursors = delivery.cursors().values()
                if pause_s and all(
                    cursor.state is CursorState.LIVE
                    and cursor.done.location == self.heads.known[cursor.at.shard].location
                    for cursor in cursors
                ):
                    break
                self.now += pause_s

    async def _remove(self, index):
        key = index.name, index.number
        self.hosted.pop(key, None)
        deleted = replace(index, stage=IndexStage.DELETING)
        for cluster in self.world.datastore.clusters:
            await remove_from(self.storage, self.world.datastore, deleted, cluster)
        await note_gone(self.storage, self.world.datastore, deleted)
        self.touched.pop(key, None)


class World:
    """One datastore, over and over again."""

    def __init__(self, storage, async_storage, datastore):
        self.storage, self.async_storage, self.datastore = storage, async_storage, datastore
        self.tables = {
            name
            for (name,) in self._rows(
                "a",
                "SELECT table_name FROM information_schema.columns"
                " WHERE table_schema = 'schemaless' AND column_name = 'datastore'",
            )
        } - {"buffer", "admin_action"}
        self.empty = {cluster: self._state(cluster) for cluster in datastore.clusters}

    def reset(self):
        self.processes = [Process(self) for _ in range(3)]
        self.topic = {shard: [] for shard in range(SHARDS)}
        self.kept = dict(self.empty)
        self.generation = 1
        self.orders = 0
        self.was_killed = False
        for cluster in self.datastore.clusters:
            self._bring(cluster, self.empty[cluster])

    # What clients do

    def put(self, found):
        cells = [
            ShardCell(CellKey(row, column, ref_key), encode_body(body_of(ref_key, value)), shard_of(row, SHARDS))
            for row, column, ref_key, value in found
        ]
        put(self.storage, self.datastore, cells)
        for shard in range(SHARDS):
            known = {(cell.generation, cell.added_id) for cell in self.topic[shard]}
            self.topic[shard] += [c for c in self.log(shard) if (c.generation, c.added_id) not in known]

    def log(self, shard):
        master = self.storage.master(self.datastore.home(shard))
        return master.run(entity_table.read_after, self.datastore, shard, 0, 10_000)

    async def define(self, which):
        """Makes the index, or changes it."""
        self.orders += 1
        with suppress(SchemalessError):
            await create_index(self.async_storage, self.datastore, DEFINITIONS[which], change=Change(keep_s=0))

    async def drop(self):
        self.orders += 1
        with suppress(SchemalessError):
            await drop_index(self.async_storage, self.datastore, NAME)

    # What happens to servers

    def stand_still(self, cluster):
        """The cluster's minion has what the master has now, and nothing later."""
        self.kept[cluster] = self._state(cluster)

    def promote(self, cluster):
        """The minion becomes the master, and each of its shards begins a generation.

        Nothing happens where the minion lacks an index table, or has one that was dropped: such an index fails.
        """
        if self._state(cluster)[1].keys() != self.kept[cluster][1].keys():
            return
        self._bring(cluster, self.kept[cluster])
        self._open_generation(cluster, {shard: len(self.log(shard)) + 1 for shard in self._homes(cluster)})
        self.kept[cluster] = self._state(cluster)

    def lose(self, cluster):
        """A generation of each shard begins after what the cluster's minion has of its cells. The rest stays."""
        cells, _ = self.kept[cluster]
        starts = {shard: len(cells[f"{self.datastore.database(shard)}.`entity`"]) + 1 for shard in self._homes(cluster)}
        for shard, starts_at in starts.items():
            own = f"datastore = {literal(self.datastore.name)} AND shard = {shard}"
            self._run(
                cluster,
                f"DELETE FROM {self.datastore.database(shard)}.entity WHERE added_id >= {starts_at};"
                f"UPDATE schemaless.shard_head SET head = {starts_at - 1} WHERE {own}",
            )
        self._open_generation(cluster, starts)

    def _open_generation(self, cluster, starts):
        self.generation += 1
        for shard, starts_at in starts.items():
            own = f"datastore = {literal(self.datastore.name)} AND shard = {shard}"
            self._run(
                cluster,
                f"INSERT INTO schemaless.shard_generation VALUES ({literal(self.datastore.name)}, {shard},"
                f" {self.generation}, {starts_at}, UTC_TIMESTAMP(6));"
                f"UPDATE schemaless.shard_head SET generation = {self.generation} WHERE {own}",
            )

    def _homes(self, cluster):
        return [shard for shard in range(SHARDS) if self.datastore.home(shard) == cluster]

    def _state(self, cluster):
        """All rows of the datastore's tables, and how its index tables are made."""
        own = f"WHERE datastore = {literal(self.datastore.name)}"
        rows = {
            f"schemaless.{name}": self._rows(cluster, f"SELECT * FROM schemaless.{name} {own}") for name in self.tables
        }
        made = {}
        for shard in self._homes(cluster):
            database = self.datastore.database(shard)
            for (name,) in self._rows(cluster, f"SHOW TABLES FROM {database}"):
                table = f"{database}.{literal(Name(name))}"
                rows[table] = self._rows(cluster, f"SELECT * FROM {table}")
                if name != "entity":
                    ((_, text),) = self._rows(cluster, f"SHOW CREATE TABLE {table}")
                    made[table] = text.replace("CREATE TABLE ", f"CREATE TABLE {database}.", 1)
        return rows, made

    def _bring(self, cluster, state):
        rows, made = state
        present = self._state(cluster)[1]
        script = [f"DROP TABLE {table}" for table in present.keys() - made.keys()]
        script += [made[table] for table in made.keys() - present.keys()]
        for table, found in rows.items():
            own = f" WHERE datastore = {literal(self.datastore.name)}" if table.startswith("schemaless.") else ""
            script.append(f"DELETE FROM {table}{own}")
            if found:
                values = commas([f"({commas([_literal(value) for value in row])})" for row in found])
                script.append(f"INSERT INTO {table} VALUES {values}")
        self._run(cluster, ";".join(script))

    def _rows(self, cluster, statement):
        return [tuple(row) for row in self.storage.master(cluster).run(query, statement)]

    def _run(self, cluster, script):
        self.storage.master(cluster).run(index_table.write, script)

    # What must hold

    async def settle(self):
        """A process that nobody stops does what is left. Returns the definitions of the versions that are there."""
        process = Process(self)
        for _ in range(20):
            await process.do(process.index())
            versions = await process.watch.look()
            left = [index for index in versions.merged.values() if index.stage is not IndexStage.GONE]
            if all(index.stage is IndexStage.ACTIVE for index in left) and len(left) <= 1:
                break
        else:
            raise AssertionError([(index.number, index.state, index.order) for index in left])
        await process.do(process.index())
        return [index.definition for index in left]

    def check(self, definitions):
        for definition in definitions:
            assert self.found(definition) == self.wanted(definition)
            assert self.found_problems(definition) == self.wanted_problems(definition)

    def check_dropped(self, definitions):
        """No other version has a table. A process that was killed just after it woke up late may have left some."""
        tables = {index_table_name(definition.name, definition.number) for definition in definitions} | {"entity"}
        for cluster in self.datastore.clusters:
            for shard in self._homes(cluster):
                found = self._rows(cluster, f"SHOW TABLES FROM {self.datastore.database(shard)}")
                assert self.was_killed or {name for (name,) in found} == tables

    def newest(self, definition):
        """By row and column, of the columns that the index reads."""
        rows = {}
        for shard in range(SHARDS):
            for cell in self.log(shard):
                known = rows.setdefault(cell.row_key, {})
                if cell.column_name in definition.columns and (
                    cell.column_name not in known or cell.ref_key > known[cell.column_name].ref_key
                ):
                    known[cell.column_name] = cell
        return rows

    def wanted(self, definition):
        """By (shard, row key, element): the index computed from nothing."""
        entries = {}
        for row_key, columns in self.newest(definition).items():
            bodies = {column: decode_body(cell.body) for column, cell in columns.items()}
            for element, entry in enumerate(entries_for(definition, bodies)):
                if entry is not None:
                    entries[entry_shard(definition, entry, SHARDS), row_key, element] = entry
        return entries

    def wanted_problems(self, definition):
        problems = {}
        for row_key, columns in self.newest(definition).items():
            misfits = []
            for column in sorted(columns):
                body = decode_body(columns[column].body)
                values = with_column(definition, [None] * len(definition.fields), column, body)
                misfits += misfits_of(definition, column, values, body)
            if misfits:
                problems[row_key] = tuple(misfits)
        return problems

    def found(self, definition):
        return {
            (shard, found.row_key, found.element): found.entry
            for shard in range(SHARDS)
            for found in self.storage.master(self.datastore.home(shard)).run(
                index_table.live_entries, self.datastore, shard, definition, index_table.BEFORE_ALL, 10_000
            )
        }

    def tombstones(self, definition):
        """How many there are."""
        return sum(
            self._rows(cluster, f"SELECT COUNT(*) FROM {table} WHERE live = 0")[0][0]
            for cluster in self.datastore.clusters
            for shard in self._homes(cluster)
            for table in [index_table.table(self.datastore, shard, definition)]
        )

    def found_problems(self, definition):
        version = IndexVersion(self.datastore.name, definition.name, definition.number)
        return {
            row.row_key: tuple(row.misfits)
            for cluster in self.datastore.clusters
            for row in self.storage.master(cluster).run(index_problem_table.page, version, 0, b"", 10_000)
        }


def _literal(value):
    return literal(value.isoformat(" ") if isinstance(value, datetime) else value)
