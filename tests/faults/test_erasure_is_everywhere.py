"""What was erased is in no table of any server, whoever was away or died, and the report says what remains (I19).

Bodies are a random text. Servers are searched for it as bytes: all columns of all tables of all databases. Bodies are
short, so they are stored as they are.
"""

import asyncio
import secrets
import subprocess
import sys
import time
import uuid

import pytest

from schemaless.bus.reader import PartitionReader
from schemaless.bus.topics import ensure_topics
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.index.catalogue import create_index
from schemaless.ops import erasures
from schemaless.ops.datastores import create_shards
from schemaless.runtime.events import Event
from schemaless.sharding import shard_of
from schemaless.stack.local import running_topology
from schemaless.storage import buffer_table, diverged_table, entity_table, erasure_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferRow
from schemaless.storage.diverged_table import DivergedCell, DivergedKind
from schemaless.storage.erasure_table import ErasedPlace, Erasure
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.sql import Name, sql
from schemaless.topology import Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.consumer_harness import running_consumer, write_program
from tests.failover_harness import cleaning
from tests.integration.indexer.test_indexer import definition, wait_active
from tests.log_harness import running_tailers
from tests.waiting import async_until

pytestmark = [pytest.mark.storage, pytest.mark.faults, pytest.mark.timeout(300)]

BASE, STATUS = ColumnName("BASE"), ColumnName("STATUS")
PROGRAM = """
from schemaless import RetryPolicy, trigger

@trigger(column="BASE", retry=RetryPolicy(attempts=1))
def bill(cell):
    raise ValueError(f"can't bill {cell.body['owner']}")
"""


def tables_with(node, secret):
    """The tables of a server in which a text is somewhere."""
    found = set()
    tables = node.run(
        query,
        "SELECT table_schema, table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE'"
        " AND table_schema NOT IN ('information_schema', 'performance_schema', 'sys')",
    )
    for schema, table in tables:
        for row in node.run(query, sql("SELECT * FROM %s.%s", Name(schema), Name(table))):
            if any(secret.encode() in (value if isinstance(value, bytes) else str(value).encode()) for value in row):
                found.add(f"{'shard' if '_' in schema else schema}.{table}")
    return found


def everywhere(admin, secret, servers):
    return {name: found for name in servers if (found := tables_with(admin.nodes[name], secret))}


class Secret:
    """One row of a datastore whose cells have a secret, with copies wherever they may be."""

    def __init__(self, storage, datastore, home, other):
        self.text = secrets.token_hex(16)
        self.datastore = datastore
        self.storage = storage
        self.home, self.other = home, other
        row_key = RowKey(uuid.uuid4().bytes)
        while datastore.home(shard_of(row_key, datastore.shards)) != home:
            row_key = RowKey(uuid.uuid4().bytes)
        self.row_key, self.shard = row_key, shard_of(row_key, datastore.shards)

    def row(self, column, ref_key, **more):
        key = CellKey(self.row_key, column, RefKey(ref_key))
        body = encode_body({"owner": self.text, "number": ref_key, "state": self.text[:20], **more})
        return BufferRow(key, body, self.shard, self.home, secrets.randbits(63))

    def write(self):
        """Puts cells, and copies: one whose cell isn't home, a conflict, and two cells of a tail."""
        home, other = self.storage.master(self.home), self.storage.master(self.other)
        stored = [self.row(BASE, 1), self.row(BASE, 2), self.row(STATUS, 1)]
        home.run(entity_table.put_cells, self.datastore, stored)
        other.run(buffer_table.insert, self.datastore, [stored[1], self.row(BASE, 7), self.row(STATUS, 1, other=1)])
        kept = [(DivergedKind.CELL, self.row(BASE, 8)), (DivergedKind.CONFLICT, self.row(BASE, 1, other=2))]
        cells = [
            DivergedCell(kind, self.datastore.name, self.shard, row.key, row.body, secrets.token_bytes(32))
            for kind, row in kept
        ]
        other.run(diverged_table.keep, "gone", 7, cells)
        refused = f"FROM schemaless.buffer WHERE row_key = x'{self.row_key.hex()}' AND column_name = 'STATUS'"
        other.run(
            query,
            "INSERT INTO schemaless.conflict (datastore, row_key, column_name, ref_key, stored_body, buffered_body,"
            f" detected_at) SELECT datastore, row_key, column_name, ref_key, body, body, UTC_TIMESTAMP(6) {refused}",
        )
        other.run(query, f"DELETE {refused}")
        number, now = secrets.randbits(63), time.time_ns() // 1000
        self.erasure = Erasure(number, self.datastore.name, self.shard, self.row_key, None, None, "asked", "ada", now)


EVERY_TABLE = {"schemaless.buffer", "schemaless.conflict", "schemaless.diverged"}


@pytest.fixture
def servers(tmp_path):
    with running_topology(tmp_path / "mysql", ("a", "b"), 1, FLAVOUR, options=SMALL_REDO_LOGS) as running:
        yield running


async def test_no_server_has_what_was_erased(servers, kafka, tmp_path):
    """Log, buffer, conflicts, tails, index, parked cells. A minion was stopped before, and is started afterwards."""
    datastore = Datastore(f"e{uuid.uuid4().hex[:8]}", 4, 2, ("a", "b"))
    settings = {"topology": servers.path, "kafka": kafka, "datastores": datastore.name}
    program = write_program(tmp_path, "billing", PROGRAM)
    with SyncStorage(servers.topology) as storage, SyncStorage(servers.administrators) as admin:
        datastore = create_shards(storage, datastore, administrators=servers.administrators)
        ensure_topics(kafka, datastore)
        secret = Secret(storage, datastore, "a", "b")
        secret.write()
        with (
            running_tailers(1, servers.path, kafka, datastore),
            running_consumer(["indexer"], settings),
            running_consumer(["consumers", program, "--datastore", datastore.name], settings),
        ):
            async with AsyncStorage(servers.topology) as async_storage:
                await create_index(async_storage, datastore, definition())
                await wait_active(async_storage, datastore, "by_owner")

                async def is_parked():
                    return storage.master("a").run(query, "SELECT 1 FROM schemaless.parked")

                async def is_published():
                    return len(offsets_with(kafka, datastore, secret)) == 3

                await async_until(is_parked)
                await async_until(is_published)

                async def is_copied():
                    found = everywhere(admin, secret.text, ("a1", "b1", "a2", "b2"))
                    return found if found.get("a1") == found.get("a2") and found.get("b1") == found.get("b2") else None

                before = await async_until(is_copied)
                assert {"schemaless.parked", "shard.entity"} <= before["a1"]
                assert before["b1"] >= EVERY_TABLE
                assert [table for found in before.values() for table in found if "by_owner" in table]
                servers.servers["a2"].kill()
                async with cleaning(async_storage):
                    await erasures.order(async_storage, datastore, secret.erasure)

                    async def is_complete():
                        told = await erasures.report(async_storage, datastore, secret.erasure.erasure, kafka)
                        return told if told.state == "complete" else None

                    told = await async_until(is_complete)
                assert everywhere(admin, secret.text, ("a1", "b1", "b2")) == {}
                assert "minion a2" in {place.place for place in told.places if place.not_searched}
                servers.servers["a2"].start()

                async def is_back():
                    return everywhere(admin, secret.text, ("a1", "b1", "a2", "b2")) == {}

                await async_until(is_back)
                assert all(
                    place.found == place.removed
                    for place in await erasures.verify(async_storage, datastore, secret.erasure.erasure)
                )
        check_topic(told, kafka, datastore, secret)


def check_topic(told, kafka, datastore, secret):
    """The offsets that the report names are those at which Kafka has the text."""
    named, unmet = [place for place in told.places if place.place.startswith(f"topic {datastore.topic}")]
    assert "2 cells" in unmet.not_searched
    offsets = {int(offset) for offset in named.place.partition(" at offsets ")[2].split(", ")}
    assert offsets_with(kafka, datastore, secret) == offsets
    assert (named.found, named.removed, named.remains_until) == (3, 0, None)


def offsets_with(kafka, datastore, secret):
    partition = datastore.partition(secret.shard)
    with PartitionReader(kafka) as reader:
        pages = reader.read(datastore.topic, partition, reader.span(datastore.topic, partition))
        return {record.offset for page in pages for record in page if secret.text.encode() in record.value}


KILLS = [
    (Event.ERASED_AT_HOME, 1),
    (Event.ERASED_AT_HOME, 2),
    (Event.ERASED_BESIDE, 1),
    (Event.ERASED_BESIDE, 2),
    (Event.ERASED_BESIDE, 3),
    (Event.ERASURE_SEARCHED, 1),
    (Event.ERASURE_SEARCHED, 2),
]


@pytest.mark.parametrize(("event", "times"), KILLS, ids=lambda value: getattr(value, "name", value))
async def test_a_killed_process_leaves_what_another_one_finishes(running, storage, admin, make_datastore, event, times):
    """Wherever it is killed. What was removed is counted once."""
    datastore = make_datastore()
    secret = Secret(storage, datastore, "a", "b")
    secret.write()
    for cluster in ("a", "b"):
        storage.master(cluster).run(erasure_table.order, secret.erasure)
    command = [sys.executable, "-m", "tests.erasing_process", running.path, event.name, str(times)]
    ended = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
    assert ended.returncode == -9
    async with AsyncStorage(running.topology) as opened:
        await opened.look()
        await erasures.carry_out(opened, datastore, secret.erasure)
        assert everywhere(admin, secret.text, ("a1", "b1")) == {}
        own = storage.master("b").run(erasure_table.of, datastore.name, secret.erasure.erasure)
        assert own.done_at
        assert own.places == {
            "buffer": ErasedPlace(2, 2),
            "diverged": ErasedPlace(2, 2),
            "conflict": ErasedPlace(1, 1),
        }

        async def minions_follow():
            return everywhere(admin, secret.text, running.servers) == {}

        await async_until(minions_follow)
    cells = storage.master("a").run(entity_table.read_after, datastore, secret.shard, 0, 100)
    keys = [(cell.column_name, cell.ref_key) for cell in cells if cell.is_erased]
    assert sorted(keys) == [("BASE", 1), ("BASE", 2), ("BASE", 7), ("BASE", 8), ("STATUS", 1)]
