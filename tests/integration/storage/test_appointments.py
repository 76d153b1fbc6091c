"""A process that doesn't know the latest appointment of a master writes nothing and deletes nothing there (I5, I6)."""

import uuid
from collections import Counter
from functools import partial

import msgspec
import pytest

from cleaner import service
from cleaner.pair import ClusterPair, Swept
from cleaner.service import Confirmation
from schemaless.cell import CellKey, ColumnName, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import StaleTopology
from schemaless.location import GenerationStart
from schemaless.ops.datastores import Catalogue, create_shards
from schemaless.sharding import shard_of
from schemaless.stack.local import running_topology
from schemaless.storage import appointment_table, asyncmy_driver, buffer_table, conflict_table, entity_table, shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import BufferOutcome, BufferRow, Sizes
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Appointment, Ballot, Datastore
from tests.conftest import FLAVOUR, SMALL_REDO_LOGS
from tests.log_harness import LOCAL_WRITE, REPLICATED_WRITE, replication_stopped, run_sql
from tests.move_harness import ShardMove
from tests.waiting import until

pytestmark = pytest.mark.storage

EPOCH = 7


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Servers of their own: the session's have processes that would learn of these masters, and never go back."""
    with running_topology(
        tmp_path_factory.mktemp("servers"), ("a", "b"), 1, FLAVOUR, options=SMALL_REDO_LOGS
    ) as started:
        yield started


@pytest.fixture
def admin(servers):
    with SyncStorage(servers.administrators) as opened:
        yield opened


@pytest.fixture
def late(servers):
    """A process that looked before the appointment, and doesn't look again."""
    with SyncStorage(servers.topology) as opened:
        opened.look()
        yield opened


@pytest.fixture
def datastore(servers, late):
    made = Datastore(f"t{uuid.uuid4().hex[:12]}", 4, 2, ("a", "b"))
    made = create_shards(late, made, administrators=servers.administrators)
    for cluster in made.clusters:
        shown_on(late.minions(cluster)[0], lambda: shard_head.heads(made.name))
    return made


@pytest.fixture
def appoint(admin, datastore):
    """Has every server name the master of a cluster, as a controller does: by an administrator, unlogged."""

    def write(cluster="a"):
        ballot = Ballot(EPOCH, "test")
        row = Appointment(
            cluster=cluster,
            ballot=ballot,
            master=f"{cluster}1",
            is_open=True,
            voters=(f"{cluster}2",),
            revision=0,
            generation=0,
            changed_at=1,
        )
        for node in admin.nodes.values():
            run_sql(node, f"{LOCAL_WRITE};{appointment_table.TABLE.insert([row])};{REPLICATED_WRITE}")

    yield write
    for node in admin.nodes.values():
        run_sql(node, f"{LOCAL_WRITE};DELETE FROM schemaless.appointment;{REPLICATED_WRITE}")


@pytest.fixture
def open_heads(admin, datastore):
    """Gives the heads of cluster a the epoch, as the opening of a master does. Minions get it by replication."""

    def write():
        run_sql(
            admin.master("a"), f"UPDATE schemaless.shard_head SET epoch = {EPOCH} WHERE datastore = '{datastore.name}'"
        )

    return write


@pytest.fixture
def never_looks(monkeypatch):
    """A service looks when it starts, and when a server refuses it."""
    monkeypatch.setattr(asyncmy_driver, "_LOOK_PERIOD_S", 3600)


def row_of(datastore, home, **body):
    """A cell of that home. As a row of the buffer, it lies elsewhere."""
    while True:
        key = CellKey(RowKey(uuid.uuid4().bytes), ColumnName("BASE"), RefKey(1))
        shard = shard_of(key.row_key, datastore.shards)
        if datastore.home(shard) == home:
            return BufferRow(key, encode_body(body), shard, home, uuid.uuid4().int >> 65)


def counts(node, datastore):
    """Returns the sum of the heads, the cells and the rows of the buffer that a server has of a datastore."""
    where = f"WHERE datastore = '{datastore.name}'"
    shards = [shard for shard in range(datastore.shards) if datastore.home(shard) == node.node.cluster]
    cells = " + ".join(f"(SELECT COUNT(*) FROM {datastore.database(shard)}.entity)" for shard in shards)
    (found,) = node.run(
        query,
        f"SELECT (SELECT CAST(SUM(head) AS SIGNED) FROM schemaless.shard_head {where}), {cells},"
        f" (SELECT COUNT(*) FROM schemaless.buffer {where})",
    )
    return found


def buffered(node, datastore, home="a"):
    """Returns the rows that wait for a cluster."""
    found = node.run(partial(buffer_table.page, home, 0, 1 << 60, Sizes(), rows_max=100, bytes_max=1 << 20))
    return [row for row in found if row.datastore == datastore.name]


def shown_on(minion, question):
    """Waits until a minion has it."""
    return until(lambda: minion.run(question))


def test_a_late_process_stores_no_cell(servers, late, datastore, appoint, open_heads):
    """Its put is refused whole, also where cells of it exist. A process that looked is served."""
    a1, cells = late.master("a"), [row_of(datastore, "a", n=n) for n in range(3)]
    a1.run(entity_table.put_cells, datastore, cells[:1])
    appoint()
    open_heads()
    for put in (cells[1:], cells, cells[:1]):
        with pytest.raises(StaleTopology, match="another epoch"):
            a1.run(entity_table.put_cells, datastore, put)
    assert counts(a1, datastore) == (1, 1, 0)
    with SyncStorage(servers.topology) as opened:
        placed = opened.master("a").run(entity_table.put_cells, datastore, cells)
    assert [place.status for place in placed] == [PutStatus.ALREADY_STORED, PutStatus.STORED, PutStatus.STORED]


def test_a_late_process_opens_no_generation(late, datastore, open_heads):
    """What locks heads for something else is bound as well."""
    shard = row_of(datastore, "a").shard
    open_heads()
    with pytest.raises(StaleTopology):
        late.master("a").run(shard_head.open_generation, datastore, shard, GenerationStart(2, 1))
    (head,) = [head for head in late.master("a").run(shard_head.heads, datastore.name) if head.shard == shard]
    assert head.generation == 1


@pytest.mark.parametrize("cluster", ["a", "b"])
def test_a_late_process_buffers_nothing(servers, late, datastore, appoint, cluster):
    """Whichever cluster has another master: the row's home, or the one that would buffer it."""
    b1, row = late.master("b"), row_of(datastore, "a")
    appoint(cluster)
    with pytest.raises(StaleTopology, match="another master was appointed"):
        b1.run(buffer_table.insert, datastore, [row])
    assert counts(b1, datastore) == (0, 0, 0)
    with SyncStorage(servers.topology) as opened:
        assert opened.master("b").run(buffer_table.insert, datastore, [row]) == [BufferOutcome.INSERTED]


@pytest.mark.parametrize("known_by", ["heads", "rows"])
def test_a_late_batch_writes_neither_cells_nor_rows(late, datastore, appoint, open_heads, known_by):
    """Both are one transaction, and each half refuses it for both: the heads of the cells, or the row of cluster b."""
    if known_by == "heads":
        open_heads()
    else:
        appoint("b")
    a1 = late.master("a")
    with pytest.raises(StaleTopology):
        a1.run(buffer_table.put_copies, datastore, "a", [row_of(datastore, "a"), row_of(datastore, "b")])
    assert counts(a1, datastore) == (0, 0, 0)


async def test_a_late_service_goes_on_by_itself(servers, late, datastore, appoint, open_heads, never_looks):
    """The refusal makes it look, and its put is written under the new epoch."""
    async with AsyncStorage(servers.topology) as opened:
        appoint()
        open_heads()
        assert opened.epoch("a") == 0
        batch = [row_of(datastore, "a"), row_of(datastore, "b")]
        placed, outcome = await opened.master("a").run(buffer_table.put_copies, datastore, "a", batch)
        assert (placed.status, outcome) == (PutStatus.STORED, BufferOutcome.INSERTED)
        assert (opened.epoch("a"), opened.epoch("b"), opened.version) == (EPOCH, 0, EPOCH)
    assert counts(late.master("a"), datastore) == (1, 1, 1)


def test_a_row_goes_only_by_the_word_of_the_present_history(servers, late, datastore, appoint):
    """What a minion showed under an earlier master may be another history. Another cluster's master changes nothing."""
    b1 = late.master("b")
    b1.run(buffer_table.insert, datastore, [row_of(datastore, "a", n=n) for n in range(4)])
    rows = buffered(b1, datastore)
    appoint("b")
    assert b1.run(buffer_table.delete_confirmed, rows[:1], "a", 0) == 1
    assert b1.run(buffer_table.record_conflict, rows[1], b"another body", "a", 0)
    appoint()
    with SyncStorage(servers.topology) as opened:  # the process knows it, and what it was shown is older
        b1 = opened.master("b")
        assert b1.run(buffer_table.delete_confirmed, rows[2:3], "a", EPOCH - 1) == 0
        assert not b1.run(buffer_table.record_conflict, rows[3], b"another body", "a", EPOCH - 1)
        assert buffered(b1, datastore) == rows[2:]
        assert b1.run(conflict_table.count, datastore.name) == 1
        assert b1.run(buffer_table.delete_confirmed, rows[2:3], "a", EPOCH) == 1
        assert b1.run(buffer_table.record_conflict, rows[3], b"another body", "a", EPOCH)
    assert buffered(b1, datastore) == []


class StoppedCleaner(ClusterPair):
    """A cleaner that stops just before it writes, and goes on once its process knows of another master."""

    def __init__(self, storage, home, appoint):
        super().__init__(storage, Catalogue(storage), "b", home, Counter())
        self._appoint = appoint

    async def run(self, node, operation, *args):
        if operation in (buffer_table.delete_confirmed, buffer_table.record_conflict) and not self.epoch:
            self._appoint(self.home)
            await self._storage.look()
            assert self.epoch == EPOCH
        return await super().run(node, operation, *args)


@pytest.mark.parametrize("home", ["a", "b"])
@pytest.mark.parametrize("stored", ["the same body", "another body"])
async def test_a_cleaner_that_stopped_removes_nothing_by_what_it_saw_before(
    servers, late, datastore, appoint, monkeypatch, stored, home
):
    """By hand another minion is promoted without the one that showed the cell, so the row is the only copy (I6). So it
    is where the shard moved to the cluster on which the row lies.
    """
    monkeypatch.setattr(service, "GRACE_S", 0.0)
    row = row_of(datastore, "a", n=1)
    if home == "b":
        ShardMove(late, datastore, row.shard, home).all()
        row = msgspec.structs.replace(row, home=home)
    at_home = row if stored == "the same body" else msgspec.structs.replace(row, body=encode_body({"n": 2}))
    late.master(home).run(entity_table.put_cells, datastore, [at_home])
    shown_on(late.minions(home)[0], lambda: (yield from entity_table.digests(datastore, [(row.shard, row.key)]))[0])
    b1 = late.master("b")
    b1.run(buffer_table.insert, datastore, [row])
    rows = buffered(b1, datastore, home)
    async with AsyncStorage(servers.topology) as storage:
        swept = await Confirmation(StoppedCleaner(storage, home, appoint)).step()
    assert (swept, buffered(b1, datastore, home)) == (Swept(), rows)
    assert len(rows) == 1
    assert b1.run(conflict_table.count, datastore.name) == 0


async def test_a_minion_without_the_opening_of_the_present_master_confirms_nothing(
    servers, admin, late, datastore, appoint, open_heads
):
    """It may follow the former one. It has the cell all the while, and shows it once its heads have the epoch."""
    row = row_of(datastore, "a")
    late.master("a").run(entity_table.put_cells, datastore, [row])
    late.master("b").run(buffer_table.insert, datastore, [row])
    wanted = [(row.shard, row.key)]
    shown_on(late.minions("a")[0], lambda: (yield from entity_table.digests(datastore, wanted))[0])
    (waiting,) = buffered(late.master("b"), datastore)
    with replication_stopped(admin.minions("a")[0]):
        appoint()
        open_heads()
        async with AsyncStorage(servers.topology) as opened:
            pair = ClusterPair(opened, Catalogue(opened), "b", "a", Counter())
            (minion,) = pair.minions
            with pytest.raises(StaleTopology, match="another epoch"):
                await pair.digests(minion, [waiting])
            assert await pair.compare(pair.minions, [waiting], EPOCH) == ([], 0)
    question = f"SELECT 1 FROM schemaless.shard_head WHERE datastore = '{datastore.name}' AND epoch = {EPOCH}"
    shown_on(late.minions("a")[0], lambda: query(question))
    async with AsyncStorage(servers.topology) as opened:
        pair = ClusterPair(opened, Catalogue(opened), "b", "a", Counter())
        assert await pair.digests(pair.minions[0], [waiting]) == ({waiting.buffer_id: waiting.digest}, {})
        assert await pair.compare(pair.minions, [waiting], EPOCH) == ([waiting], 0)
