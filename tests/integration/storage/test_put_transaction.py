"""What puts write to one master at a time: cells at home there and second copies of others, in one transaction (I5)."""

import uuid
from functools import partial

import pytest

from schemaless.cell import CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.errors import ClockAhead
from schemaless.sharding import shard_of
from schemaless.storage import buffer_table, entity_table, shard_head
from schemaless.storage.buffer_table import BufferOutcome, BufferRow
from schemaless.storage.operation import query
from schemaless.storage.sql import sql

pytestmark = pytest.mark.storage

BASE = ColumnName("BASE")


@pytest.fixture
def datastore(make_datastore):
    return make_datastore(shards=16, partitions=1, placement=("a", "b"))


@pytest.fixture
def master(storage):
    return storage.master("a")


def rows(datastore, count, home):
    """Whose home is `home`, with the claims 0, 1 and so on."""
    found = []
    while len(found) < count:
        key = CellKey(RowKey(uuid.uuid4().bytes), BASE, RefKey(1))
        shard = shard_of(key.row_key, datastore.shards)
        if datastore.home(shard) == home:
            found.append(BufferRow(key, encode_body({"n": len(found)}), shard, home, len(found)))
    return found


def with_body(row, **body) -> BufferRow:
    return BufferRow(row.key, encode_body(body), row.shard, row.home, row.claim + 100)


def put(master, datastore, written, scripts=None):
    return master.run(noted, scripts if scripts is not None else [], datastore, written)


def noted(scripts, datastore, written):
    """The operation, with what it says to the server."""
    operation = buffer_table.put_copies(datastore, "a", written)
    script = next(operation)
    while True:
        scripts.append(script)
        try:
            results = yield script
        except Exception as error:
            step = partial(operation.throw, error)
        else:
            step = partial(operation.send, results)
        try:
            script = step()
        except StopIteration as stop:
            return stop.value


def buffered(master, datastore):
    select = sql("SELECT row_key, body FROM schemaless.buffer WHERE datastore = %s", datastore.name.encode())
    found = master.run(query, select)
    return {row_key: body for row_key, body in found}


def at_home(master, datastore, wanted):
    found = master.run(entity_table.get, datastore, [(row.shard, row.key) for row in wanted])
    return [cell and cell.body for cell in found]


def told(outcomes):
    return [outcome.status if isinstance(outcome, Placed) else outcome for outcome in outcomes]


def mixed(home, others):
    return [row for pair in zip(home, others, strict=True) for row in pair]


def test_both_kinds_are_one_script_and_one_commit(master, datastore):
    """In any mixture; each row is told of its own kind, in order."""
    home, others = rows(datastore, 5, "a"), rows(datastore, 5, "b")
    scripts = []
    outcomes = put(master, datastore, mixed(home, others), scripts)
    assert told(outcomes) == [PutStatus.STORED, BufferOutcome.INSERTED] * 5
    assert [script.count("COMMIT") for script in scripts] == [1]
    assert at_home(master, datastore, home) == [row.body for row in home]
    assert buffered(master, datastore) == {row.key.row_key: row.body for row in others}
    found = master.run(entity_table.get, datastore, [(row.shard, row.key) for row in home])
    assert [cell.added_id for cell in found] == [placed.added_id for placed in outcomes[::2]]


@pytest.mark.parametrize("kind", ["a", "b"])
def test_one_kind_alone_is_what_it_was(master, datastore, kind):
    alone = rows(datastore, 3, kind)
    expected = PutStatus.STORED if kind == "a" else BufferOutcome.INSERTED
    assert told(put(master, datastore, alone)) == [expected] * 3


def test_repeats_and_rivals_of_either_kind_get_their_own_outcome(master, datastore):
    """I1: what stands already is compared, each kind in its own table; what is new is written beside it."""
    home, others = rows(datastore, 3, "a"), rows(datastore, 3, "b")
    put(master, datastore, [*home[:2], *others[:2]])
    again = [home[0], with_body(home[1], other=1), home[2], with_body(others[0], n=0), with_body(others[1], other=1)]
    outcomes = put(master, datastore, [*again, others[2]])
    assert told(outcomes) == [
        PutStatus.ALREADY_STORED,
        PutStatus.CONFLICT,
        PutStatus.STORED,
        BufferOutcome.SHARED,
        BufferOutcome.CONFLICT,
        BufferOutcome.INSERTED,
    ]
    assert at_home(master, datastore, home) == [row.body for row in home]
    assert buffered(master, datastore) == {row.key.row_key: row.body for row in others}


def test_run_twice_it_is_the_same_as_once(master, datastore):
    """The connection was lost and nobody knows whether the first try went through: runners try again."""
    home, others = rows(datastore, 4, "a"), rows(datastore, 4, "b")
    first = put(master, datastore, mixed(home, others))
    second = put(master, datastore, mixed(home, others))
    assert told(second) == [PutStatus.ALREADY_STORED, BufferOutcome.INSERTED] * 4
    assert [placed.added_id for placed in second[::2]] == [placed.added_id for placed in first[::2]]
    assert master.run(shard_head.movement, datastore.name).heads_sum == 4
    assert len(buffered(master, datastore)) == 4


def test_a_key_twice_in_one_batch_counts_in_order(master, datastore):
    """Of either kind."""
    (home,), (other,) = rows(datastore, 1, "a"), rows(datastore, 1, "b")
    outcomes = put(master, datastore, [home, other, with_body(home, x=1), with_body(other, x=1)])
    assert told(outcomes) == [
        PutStatus.STORED,
        BufferOutcome.INSERTED,
        PutStatus.CONFLICT,
        BufferOutcome.CONFLICT,
    ]


def test_more_shards_than_variables(master, make_datastore):
    """One transaction for each 64 shards, and one for the second copies: none holds a head for a round trip."""
    datastore = make_datastore(shards=256, partitions=1, placement=("a", "b"))
    home, others = rows(datastore, 400, "a"), rows(datastore, 400, "b")
    assert len({row.shard for row in home}) > 64
    scripts = []
    outcomes = put(master, datastore, [*home, *others], scripts)
    assert told(outcomes) == [PutStatus.STORED] * 400 + [BufferOutcome.INSERTED] * 400
    shards = len({row.shard for row in home})
    assert sum(script.count("COMMIT") for script in scripts) == -(-shards // 64)
    assert all(script.count("BEGIN") == script.count("COMMIT") for script in scripts)
    assert len(buffered(master, datastore)) == 400


def test_a_clock_behind_a_head_changes_no_outcome(master, datastore):
    """I4: the quick way refuses itself, the other one keeps created_at where it was, and writes both kinds once."""
    home, others = rows(datastore, 3, "a"), rows(datastore, 3, "b")
    ahead = sql(
        "UPDATE schemaless.shard_head SET last_created_at = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND"
        " WHERE datastore = %s AND shard = %s",
        datastore.name,
        home[0].shard,
    )
    master.run(query, ahead)
    (head,) = (h for h in master.run(shard_head.heads, datastore.name) if h.shard == home[0].shard)
    outcomes = put(master, datastore, mixed(home, others))
    assert told(outcomes) == [PutStatus.STORED, BufferOutcome.INSERTED] * 3
    assert outcomes[0].created_at == head.last_created_at
    assert all(p.created_at < head.last_created_at for p in outcomes[2::2] if p.shard != head.shard)
    assert len(buffered(master, datastore)) == 3


def test_a_clock_that_is_not_believed_writes_nothing(master, datastore):
    """I4: one insert would freeze the shard's time. Repeats and late clocks are refused alike."""
    home, others = rows(datastore, 3, "a"), rows(datastore, 3, "b")
    now = master.run(shard_head.clock)
    with pytest.raises(ClockAhead):
        master.run(buffer_table.put_copies, datastore, "a", mixed(home, others), now - 60_000_000)
    assert at_home(master, datastore, home) == [None] * 3
    believed = now + 60_000_000
    outcomes = master.run(buffer_table.put_copies, datastore, "a", mixed(home, others), believed)
    assert told(outcomes) == [PutStatus.STORED, BufferOutcome.INSERTED] * 3
    with pytest.raises(ClockAhead):
        master.run(buffer_table.put_copies, datastore, "a", home, now - 60_000_000)


def test_a_shard_that_met_a_clock_ahead_goes_on_at_its_last_time(master, datastore):
    """I4: created_at never decreases. The shard is named, and takes cells."""
    (row,) = rows(datastore, 1, "a")
    ahead = "UPDATE schemaless.shard_head SET last_created_at = '2099-01-01' WHERE datastore = %s AND shard = %s"
    master.run(query, sql(ahead, datastore.name, row.shard))
    now = master.run(shard_head.clock)
    (placed,) = master.run(buffer_table.put_copies, datastore, "a", [row], now + 60_000_000)
    heads = master.run(shard_head.heads, datastore.name)
    assert [head.shard for head in shard_head.ahead(heads, now / 1e6)] == [row.shard]
    assert placed.created_at == next(head.last_created_at for head in heads if head.shard == row.shard)
