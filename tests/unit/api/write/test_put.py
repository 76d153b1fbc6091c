"""The writer's way of a put, with servers that say what the test gives them (I1, I5, I6)."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from api.write.put import BREAKER_OPEN_S, CellWriter, _look_up
from api.write.queue import MasterWriteQueues
from schemaless.cell import Cell, CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body, same_body
from schemaless.config import ApiSettings
from schemaless.errors import (
    Busy,
    Corrupt,
    LockTimeout,
    Misconfigured,
    NodeRefuses,
    Overloaded,
    SchemalessError,
    StaleTopology,
    StorageUnavailable,
    TableMissing,
    Unavailable,
)
from schemaless.storage import buffer_table, post_version
from schemaless.storage.buffer_table import BufferedColumn, BufferOutcome
from schemaless.storage.post_version import NextVersion
from schemaless.topology import Datastore

SETTINGS = ApiSettings(topology=Path("unused"), kafka="unused")
TRIPS = Datastore("trips", 4, 2, ("a",))  # home a, so the secondary is b
BODY = {"a": 1, "b": 2}
CELL = Cell(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1)), encode_body(BODY))


class Server:
    """Says of each row what it was told to say: a put status at home, an outcome of the buffer, or an error.

    `shown` is the body that reads show under the key. `did` names the operations, in order.
    """

    def __init__(self, name, says, did):
        self.node = SimpleNamespace(name=name, cluster=name[0])
        self.says = says
        self.shown = None
        self.reads = self.removes = None  # the errors of these operations
        self.damaged = None  # the key at which alone a read fails
        self.claims = []
        self._did = did

    async def run(self, operation, *args, timeout_s, again_on=None, traffic=None):
        self._did.append(f"{operation.__name__} {self.node.name}")
        if isinstance(self.says, Exception):
            raise self.says
        if operation is buffer_table.columns:
            return [BufferedColumn() for _ in args[0]]
        if operation is post_version.put_next:
            return [NextVersion(CELL, _at_home(PutStatus.STORED), replayed=False) for _ in args[1]]
        if operation is buffer_table.put_copies:
            self.claims.append([row.claim for row in args[2]])
            return [
                self.says if isinstance(self.says, BufferOutcome) else Placed(self.says, 3, 1, 42, 99) for _ in args[2]
            ]
        if operation is _look_up:
            if self.reads is not None and (self.damaged is None or self.damaged in [row.key for row in args[1]]):
                raise self.reads
            if self.shown is None:
                return [None for _ in args[1]]
            same = [same_body(row.body, encode_body(self.shown)) for row in args[1]]
            return [_at_home(PutStatus.ALREADY_STORED if is_same else PutStatus.CONFLICT) for is_same in same]
        assert operation is buffer_table.remove
        if self.removes is not None:
            raise self.removes
        return None


def _at_home(status):
    return Placed(status, 3, 1, 42, 99)


@pytest.fixture
def world():
    """Home a with one minion, secondary b, all well."""
    did = []
    return SimpleNamespace(
        did=did,
        now=0.0,
        home=Server("a", PutStatus.STORED, did),
        minion=Server("a2", None, did),
        secondary=Server("b", BufferOutcome.INSERTED, did),
        third=None,
        leased=True,
        lost=False,
        settled=False,
    )


def writer_of(world, **settings):
    async def is_leased(cluster):
        return world.leased

    masters = {"a": world.home, "b": world.secondary} | ({"c": world.third} if world.third else {})
    storage = SimpleNamespace(
        topology=SimpleNamespace(clusters=dict.fromkeys(masters)),
        master=lambda cluster: masters[cluster],
        minions=lambda cluster: [world.minion],
        is_leased=is_leased,
        is_joining=lambda cluster: False,
        has_lost=lambda cluster: world.lost,
    )
    return CellWriter(
        storage,
        SETTINGS.model_copy(update=settings),
        clock=lambda: world.now,
        may_wait=lambda datastore, shard: not world.settled,
    )


async def put(writer):
    (result,) = await writer.put(TRIPS, [CELL])
    return result


async def test_the_buffer_row_comes_before_the_entity_row(world):
    """I5: so no crash in between loses a cell whose put was answered."""
    result = await put(writer_of(world))
    assert (result.status, result.copies, result.placed.added_id) == (PutStatus.STORED, 2, 42)
    assert world.did == ["put_copies b", "put_copies a"]


@pytest.mark.parametrize(("outcome", "removed"), [(BufferOutcome.INSERTED, ["remove b"]), (BufferOutcome.SHARED, [])])
async def test_a_refused_put_removes_only_a_row_of_its_own(world, outcome, removed):
    """I6: a shared row was promised to another put."""
    world.home.says, world.secondary.says = PutStatus.CONFLICT, outcome
    result = await put(writer_of(world))
    assert (result.status, result.copies) == (PutStatus.CONFLICT, 0)
    assert world.did[2:] == removed


@pytest.mark.parametrize(
    ("at_home", "status", "copies"),
    [
        (None, PutStatus.CONFLICT, 0),
        (dict(reversed(BODY.items())), PutStatus.ALREADY_STORED, 1),
        ({"a": 2, "b": 1}, PutStatus.CONFLICT, 0),
    ],
)
@pytest.mark.parametrize("master_answers", [True, False])
async def test_a_conflict_in_the_buffer_is_decided_by_the_cell_at_home(world, master_answers, at_home, status, copies):
    """I1: the same body there is a success; no cell there means that the buffered one came first.

    A minion shows it as well as the master, and the home is never written.
    """
    world.secondary.says = BufferOutcome.CONFLICT
    (world.home if master_answers else world.minion).shown = at_home
    if not master_answers:
        world.home.says = StorageUnavailable("down")
    result = await put(writer_of(world))
    assert (result.status, result.copies) == (status, copies)
    assert (result.placed and result.placed.added_id) == (at_home and 42)
    assert "put_copies a" not in world.did


async def test_an_unreachable_home_means_buffered_and_is_not_asked_again_until_a_probe(world):
    """I5: the breaker keeps the next puts from waiting; after BREAKER_OPEN_S one put tries the home."""
    writer = writer_of(world)
    world.home.says = StorageUnavailable("down")
    assert [(await put(writer)).status for _ in range(2)] == [PutStatus.BUFFERED] * 2
    assert world.did.count("put_copies a") == 1
    world.now += BREAKER_OPEN_S
    world.home.says = PutStatus.STORED
    assert (await put(writer)).status is PutStatus.STORED


async def test_without_a_secondary_the_home_alone_stores_unless_two_copies_are_required(world):
    """I5: an unreachable secondary costs a copy and never the put; with min_copies 2 the home isn't touched."""
    world.secondary.says = StorageUnavailable("down")
    result = await put(writer_of(world))
    assert (result.status, result.copies) == (PutStatus.STORED, 1)
    world.did.clear()
    assert isinstance(await put(writer_of(world, min_copies=2)), Unavailable)
    assert world.did == ["put_copies b"]


async def test_a_home_that_nobody_confirms_stores_nothing_alone(world):
    """Another master may be open since. With a second copy the cell comes home all the same."""
    world.leased = False
    assert (await put(writer_of(world))).copies == 2
    world.secondary.says = StorageUnavailable("down")
    result = await put(writer_of(world))
    assert isinstance(result, StaleTopology)
    assert "nobody confirms" in str(result)


async def test_with_nobody_reachable_the_error_says_so(world):
    """Nothing is known to be durable, and the same put may be sent again."""
    world.home.says = world.secondary.says = StorageUnavailable("down")
    result = await put(writer_of(world))
    assert isinstance(result, StorageUnavailable)
    assert result.retryable


@pytest.mark.parametrize(
    "error", [Misconfigured("no table"), Busy("deadlock"), Corrupt("damaged"), StorageUnavailable("x")]
)
async def test_a_buffer_row_that_cant_be_removed_costs_the_answer_nothing(world, error):
    """The contract: a batch is a 200. The conflict is known, and the cleaner records what stays."""
    world.home.says, world.secondary.removes = PutStatus.CONFLICT, error
    assert (await put(writer_of(world))).status is PutStatus.CONFLICT


@pytest.mark.parametrize("error", [Misconfigured("no table"), Busy("deadlock"), Corrupt("damaged")])
async def test_a_home_that_cant_be_read_fails_its_own_items(world, error):
    """The contract: a batch is a 200, and an item that can't be decided is an error of its own."""
    world.secondary.says, world.home.reads = BufferOutcome.CONFLICT, error
    assert await put(writer_of(world)) is error


async def test_cells_of_a_batch_that_share_their_way_share_a_claim(world):
    """I6: so a key that comes twice takes no row over from itself, and a conflict of both removes it (fuzz I)."""
    writer = writer_of(world)
    await writer.put(TRIPS, [CELL, CELL])
    ((first, second),) = world.secondary.claims
    assert first == second
    await writer.put(TRIPS, [CELL])
    assert world.secondary.claims[1] != [first]


async def test_a_put_that_is_only_buffered_is_no_success_where_two_copies_are_required(world):
    """I5, min_copies=2: the home is away, one copy exists, and the answer says that it isn't enough."""
    world.home.says = StorageUnavailable("down")
    result = await put(writer_of(world, min_copies=2))
    assert isinstance(result, Unavailable)
    assert result.retryable


async def test_a_put_whose_home_is_away_is_buffered_twice_where_there_are_three_clusters(world):
    """I5, I6: so the loss of one more server loses no acknowledged cell. Two copies are enough for min_copies=2."""
    world.third = Server("c", BufferOutcome.INSERTED, world.did)
    writer = writer_of(world, min_copies=2)
    assert (await put(writer)).status is PutStatus.STORED
    assert len(world.did) == 2  # one second copy while the home answers
    world.home.says = StorageUnavailable("down")
    result = await put(writer)
    assert (result.status, result.copies) == (PutStatus.BUFFERED, 2)
    assert {"put_copies b", "put_copies c"} <= set(world.did[2:])


@pytest.mark.parametrize("says", [BufferOutcome.CONFLICT, Corrupt("damaged"), StorageUnavailable("down")])
async def test_a_second_buffer_that_doesnt_take_the_cell_costs_a_copy_and_never_the_put(world, says):
    """The first one has it, so the answer is the same, and each is tried once."""
    world.home.says, world.third = StorageUnavailable("down"), Server("c", BufferOutcome.INSERTED, world.did)
    writer = writer_of(world)
    first = writer._secondaries.choose("a", CELL.key.row_key)
    (world.third if first == "b" else world.secondary).says = says
    result = await put(writer)
    assert (result.status, result.copies) == (PutStatus.BUFFERED, 1)
    assert len(world.did) == 3


ERRORS = [
    StorageUnavailable("down"),
    NodeRefuses("1203: too many user connections"),
    TableMissing("1146: no table"),
    Misconfigured("shard 3 does not live here"),
    Busy("deadlock"),
    Corrupt("damaged"),
    Unavailable("no connection was free"),
    SchemalessError("something new"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_any_error_of_a_secondary_costs_a_copy_and_never_the_put(world, error):
    """I5: the home alone stores it."""
    world.secondary.says = error
    result = await put(writer_of(world))
    assert (result.status, result.copies) == (PutStatus.STORED, 1)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_any_error_of_the_home_is_buffered_where_a_copy_is_durable(world, error):
    """I5: the cleaner stores the cell, so an error would be a wrong answer."""
    world.home.says = error
    result = await put(writer_of(world))
    assert (result.status, result.copies) == (PutStatus.BUFFERED, 1)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_the_next_secondary_takes_the_copy_that_one_refuses(world, error):
    """I5: each of them is tried once, whichever the row prefers."""
    world.secondary.says = error
    world.third = Server("c", BufferOutcome.INSERTED, world.did)
    for row in range(8):
        cell = Cell(CellKey(RowKey(bytes([row] * 16)), ColumnName("BASE"), RefKey(1)), CELL.body)
        (result,) = await writer_of(world).put(TRIPS, [cell])
        assert (result.status, result.copies) == (PutStatus.STORED, 2)
    assert {"put_copies b", "put_copies c"} <= set(world.did)


async def test_a_refusing_secondary_is_not_asked_again_until_a_probe(world):
    """Its refusals cost one put in BREAKER_OPEN_S, and it stays the home of its own rows."""
    writer = writer_of(world)
    world.secondary.says = TableMissing("1146: no buffer")
    for _ in range(3):
        await put(writer)
    assert world.did.count("put_copies b") == 1
    world.secondary.says, world.home.says = PutStatus.STORED, BufferOutcome.INSERTED
    (result,) = await writer.put(Datastore("trips", 4, 2, ("b",)), [CELL])
    assert (result.status, result.copies) == (PutStatus.STORED, 2)
    world.secondary.says, world.home.says = BufferOutcome.INSERTED, PutStatus.STORED
    assert (await put(writer)).copies == 1
    world.now += BREAKER_OPEN_S
    assert (await put(writer)).copies == 2


async def test_a_post_that_can_t_ask_a_buffer_for_want_of_time_takes_no_ref_key(world):
    """A process that has too much to do says nothing about the buffer, which may hold a cell that was acknowledged."""
    world.secondary.says = Overloaded("no connection was free")
    with pytest.raises(Overloaded):
        await writer_of(world).put_next(TRIPS, CELL.key.row_key, CELL.key.column_name, CELL.body)
    assert world.did == ["columns b"]


async def post(writer):
    return await writer.put_next(TRIPS, CELL.key.row_key, CELL.key.column_name, CELL.body)


@pytest.mark.parametrize("error", [Busy("1213: deadlock"), LockTimeout("3024: too long"), TableMissing("1146")])
async def test_whatever_a_secondary_answers_a_post_is_stored(world, error):
    """Any error of a secondary costs a copy, and never the put (I5)."""
    world.secondary.says = error
    outcome = await post(writer_of(world))
    assert (outcome.status, outcome.copies) == (PutStatus.STORED, 1)


async def test_a_post_is_stored_first_and_copied_then(world):
    """A buffer that can't be asked, because its master is away, is not waited for."""
    writer = writer_of(world)
    outcome = await post(writer)
    assert (outcome.status, outcome.copies) == (PutStatus.STORED, 2)
    assert world.did == ["columns b", "put_next a", "put_copies b"]
    writer._queues.breakers["b"].failed()
    world.did.clear()
    assert (await post(writer)).copies == 1
    assert world.did == ["put_next a"]


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("key", ["k", None])
async def test_after_a_promotion_a_post_waits_for_each_buffer_until_all_is_settled(world, key, is_asked):
    """One that can't be asked may have the only copy of a version that was acknowledged (I1)."""
    writer = writer_of(world)
    world.lost, world.secondary.says = True, StorageUnavailable("down")
    if not is_asked:
        writer._queues.breakers["b"].failed()
    with pytest.raises(StorageUnavailable, match="the buffer of cluster b may have a later version"):
        await writer.put_next(TRIPS, CELL.key.row_key, CELL.key.column_name, CELL.body, key)
    assert "put_next a" not in world.did
    world.settled = True
    assert (await post(writer)).copies == 1


async def test_a_post_with_two_copies_required(world):
    """Without a secondary the home isn't asked. With one that fails, the version may be stored."""
    writer = writer_of(world, min_copies=2)
    assert (await post(writer)).copies == 2
    world.secondary.says = StorageUnavailable("down")
    world.did.clear()
    with pytest.raises(Unavailable, match="2 durable copies are required, and 1"):
        await post(writer)
    assert "put_next a" in world.did
    world.did.clear()
    with pytest.raises(Unavailable, match="2 durable copies are required, and 0"):
        await post(writer)
    assert world.did == []


async def test_a_full_queue_of_the_home_refuses_before_anything_is_buffered(world, monkeypatch):
    """The caller comes again, and no buffer row waits for a cell that nobody was told about (I14)."""
    monkeypatch.setattr(MasterWriteQueues, "is_full", lambda self, cluster, datastore: True)
    refused = await put(writer_of(world))
    assert isinstance(refused, Unavailable)
    assert world.did == []


async def test_a_damaged_cell_fails_its_own_put_only(world):
    """The others of the batch are compared without it."""
    other = Cell(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(2)), encode_body(BODY))
    world.secondary.says, world.home.shown = BufferOutcome.CONFLICT, BODY
    world.home.reads, world.home.damaged = Corrupt("cut short"), CELL.key
    damaged, compared = await writer_of(world).put(TRIPS, [CELL, other])
    assert isinstance(damaged, Corrupt)
    assert compared.status is PutStatus.ALREADY_STORED


async def test_secondaries_are_tried_within_the_time_of_a_put(world):
    """I5: the first one may take all of it. What the next one does is waited for no longer."""
    order = []

    async def hangs(operation, *args, **options):
        order.append("hangs")
        await asyncio.Event().wait()

    async def takes_all_the_time(operation, *args, **options):
        order.append("late")
        world.now += 1.25
        raise StorageUnavailable("no answer within 1.25 s")

    async def fails(operation, *args, **options):
        raise StorageUnavailable("down")

    world.third = Server("c", BufferOutcome.INSERTED, world.did)
    for server in (world.secondary, world.third):
        server.run = takes_all_the_time
    assert (await put(writer_of(world))).copies == 1
    assert order == ["late"]
    world.secondary.run, world.third.run = fails, hangs
    writer = writer_of(world, write_timeout_s=0.01)
    first = writer._secondaries.choose("a", CELL.key.row_key)
    if first == "c":
        world.secondary.run, world.third.run = hangs, fails
    assert (await put(writer)).copies == 1
    assert order == ["late", "hangs"]
