"""Work on buffer rows in parts: what one row, or one shard, costs the others."""

from types import SimpleNamespace

import pytest

from cleaner.pair import in_parts
from schemaless.errors import ClockAhead, NotDurable, ShardsLocked, ShardsMoved, TableMissing

ROWS = [SimpleNamespace(buffer_id=n, shard=n % 4) for n in range(100)]


@pytest.mark.parametrize("error", [ShardsLocked, ShardsMoved])
async def test_a_locked_head_costs_its_own_rows_only_and_one_wait(error):
    """I6: cells of other shards are stored while another transaction holds a head, or a shard moves."""
    calls, done = [], []

    async def put(rows):
        calls.append(len(rows))
        if any(row.shard == 2 for row in rows):
            raise error("not now", {2})
        done.extend(rows)

    errors = await in_parts(ROWS, put)
    assert errors.keys() == {row.buffer_id for row in ROWS if row.shard == 2}
    assert done == [row for row in ROWS if row.shard != 2]
    assert calls == [100, 75]


async def test_a_row_that_is_refused_is_found_by_halves():
    """I6: one row that the home refuses holds up no other."""
    done = []

    async def put(rows):
        if any(row.buffer_id == 37 for row in rows):
            raise TableMissing("1146")
        done.extend(rows)

    assert (await in_parts(ROWS, put)).keys() == {37}
    assert len(done) == 99


@pytest.mark.parametrize("error", [NotDurable("sync_binlog is 0"), ClockAhead("an hour")])
async def test_a_home_that_takes_nothing_is_asked_once(error):
    """Each half would have the bodies of all rows read again."""
    calls = []

    async def put(rows):
        calls.append(len(rows))
        raise error

    assert (await in_parts(ROWS, put)).keys() == {row.buffer_id for row in ROWS}
    assert calls == [100]
