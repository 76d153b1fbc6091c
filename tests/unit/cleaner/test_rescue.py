"""What is written again at home, in which order, and what the cleaner forgets (I6, I13)."""

import time

import pytest

from cleaner.pair import Swept
from cleaner.service import RESCUE_GRACE_S, SMALL_BYTES_MAX, Rescue
from schemaless.errors import StorageUnavailable
from schemaless.storage import shard_head
from tests.unit.cleaner.cleaner_world import PAGE_ROWS, World, body

LARGE = SMALL_BYTES_MAX + 1


@pytest.fixture
def world():
    return World()


@pytest.fixture
def rescue(world):
    return Rescue(world.pair(), world.clock)


async def test_a_missing_cell_is_put_at_home_and_its_row_stays(world, rescue):
    """I6: until a minion shows it. A younger row may be under way, and is left to its own put."""
    missing = world.secondary.add(1)
    await rescue.step()
    world.now += RESCUE_GRACE_S
    young = world.secondary.add(2)
    assert await rescue.step() == Swept(rewritten=1)
    assert world.master.cells == {missing: body(1)}
    assert [row.key for row, _ in world.secondary.rows.values()] == [missing, young]


async def test_another_body_is_recorded_with_what_is_stored(world, rescue):
    """I6: the master's word is enough, because a cell never changes."""
    key = world.secondary.add(1)
    world.master.cells[key] = body(2)
    assert await world.passes(rescue) == Swept(conflicts=1)
    assert world.secondary.conflicts == [(key, body(2))]


async def test_what_was_seen_at_home_is_not_asked_again_for_a_minute(world, rescue):
    """S3: and after it, it is: no knowledge of a home lasts longer."""
    world.master.cells[world.secondary.add(1)] = body(1)
    await world.passes(rescue, count=5)
    assert world.master.asked == ["digests"]
    world.master.cells = {world.secondary.add(2): body(2)}  # the first one is lost, and no head fell
    world.now += 61.0
    swept = [await rescue.step() for _ in range(2)]
    assert sum(swept, Swept()).rewritten == 1
    assert len(world.master.cells) == 2


async def test_a_row_that_named_another_home_is_looked_up_at_once(world, rescue):
    """Its id may be lower than what both walks have passed."""
    late, later = world.secondary.add(1), world.secondary.add(2)
    row = world.secondary.rows.pop(1)
    world.master.cells[later] = body(2)
    await world.passes(rescue, count=3)
    world.secondary.rows[1] = row
    assert await rescue.step() == Swept()
    world.arrivals["b", "a"] += 1
    assert await rescue.step() == Swept(rewritten=1)
    assert world.master.cells[late] == body(1)


@pytest.mark.parametrize("told_by", ["heads that fell", "server id"])
async def test_a_home_whose_history_changed_is_asked_for_everything_again(world, rescue, told_by):
    """S3: a restored home lacks cells that the cleaner had seen there. Their buffer rows are the only copies."""
    for value in range(2 * PAGE_ROWS):
        world.master.cells[world.secondary.add(value)] = body(value)
    assert await world.passes(rescue) == Swept()
    lost = list(world.master.cells)[-2:]
    for key in lost:
        del world.master.cells[key]
    if told_by == "server id":
        world.master.server_id = 2
    assert (await rescue.step()).rewritten == 2
    assert world.master.cells.keys() >= set(lost)


async def test_a_home_that_may_lose_what_it_takes_gets_nothing(world, rescue):
    """I5, A26: the buffer row is durable where it is, and the reason is noted."""
    key = world.secondary.add(1)
    world.master.lossy = True
    assert await world.passes(rescue) == Swept(refused=1)
    assert world.master.cells == {}
    assert "may lose" in world.secondary.refusals[key]


@pytest.mark.parametrize("secondary_is_ahead_too", [False, True])
async def test_a_home_whose_clock_is_not_believed_gets_nothing(world, rescue, secondary_is_ahead_too):
    """I4, S17: two minutes ahead of the cleaner and of the secondary. If both servers say so, the cleaner is late."""
    key = world.secondary.add(1)
    world.master.clock_us = int((time.time() + 2 * shard_head.CLOCK_AHEAD_MAX_S) * 1e6)
    world.secondary.clock_us = world.master.clock_us if secondary_is_ahead_too else 0
    await world.passes(rescue)
    assert (key in world.master.cells) is secondary_is_ahead_too
    assert (key in world.secondary.refusals) is not secondary_is_ahead_too


async def test_what_came_while_the_home_was_away_is_put_there_as_soon_as_it_is_back(world, rescue):
    """S12: not a minute later, when all older rows are looked at anyway."""
    await world.passes(rescue, count=3)
    world.master.error = StorageUnavailable("down")
    keys = [world.secondary.add(value) for value in range(2)]
    await world.passes(rescue, count=2)
    world.master.error = None
    for _ in range(2):
        await rescue.step()
    assert world.master.cells.keys() == set(keys)


async def test_small_cells_of_a_backlog_dont_wait_for_large_ones(world, rescue):
    """S12: they take turns. The small ones are at home after as many pages as they need."""
    world.master.error = StorageUnavailable("down")
    for value in range(20 * PAGE_ROWS):
        world.secondary.add(value, LARGE)
    small = [world.secondary.add(value) for value in range(PAGE_ROWS)]
    await world.passes(rescue)
    world.master.error = None
    for _ in range(3):
        await rescue.step()
    order = [key for keys in world.master.looked_up for key in keys]
    assert max(map(order.index, small)) < 3 * PAGE_ROWS
    assert len(world.master.cells) == 21 * PAGE_ROWS


async def test_the_search_for_large_cells_among_many_small_ones_holds_up_nobody(world, rescue):
    """S12: the server looks at every row in between, and millions take longer than the time-out. The search goes on
    in stretches that fit it.
    """
    world.master.error = StorageUnavailable("down")
    keys = {world.secondary.add(value) for value in range(40 * PAGE_ROWS)} | {world.secondary.add(0, LARGE)}
    await world.passes(rescue)
    world.master.error = None
    world.secondary.looks_max = 8 * PAGE_ROWS
    failed = 0
    for _ in range(40):
        try:
            await rescue.step()
        except StorageUnavailable:
            failed += 1
        if world.master.cells.keys() == keys:
            break
    assert world.master.cells.keys() == keys
    assert 0 < failed < 8


async def test_old_rows_hold_up_no_fresh_ones(world, rescue):
    """S12: what came since the home is back goes first, also beside a walk over everything that waits."""
    for value in range(200 * PAGE_ROWS):
        world.master.cells[world.secondary.add(value)] = body(value)
    await rescue.step()
    fresh = world.secondary.add(1)
    world.now += RESCUE_GRACE_S
    await rescue.step()  # the walk ends its pass long before the last row
    await rescue.step()
    world.now += RESCUE_GRACE_S
    world.master.looked_up.clear()
    await rescue.step()
    assert [fresh] in world.master.looked_up[:2]


async def test_an_unreachable_home_costs_one_time_out(world, rescue):
    """And everything that was buffered meanwhile is written when it is back."""
    world.master.error = StorageUnavailable("down")
    keys = [world.secondary.add(value) for value in range(4 * PAGE_ROWS)]
    await world.passes(rescue)
    assert len(world.master.asked) == 2  # one for each pass
    world.master.error = None
    await rescue.step()
    assert world.master.cells.keys() == set(keys)


async def test_a_page_that_is_too_much_gets_smaller_and_grows_again(world, rescue):
    """S12: down to one row."""
    keys = [world.secondary.add(value) for value in range(4 * PAGE_ROWS)]
    world.master.rows_max = 1
    await world.passes(rescue, count=3)
    world.master.rows_max = PAGE_ROWS
    await rescue.step()
    assert world.master.cells.keys() == set(keys)
    assert max(map(len, world.master.looked_up)) == PAGE_ROWS


async def test_a_row_for_which_the_time_never_suffices_holds_up_no_other(world, rescue):
    """It is noted as refused, and the others go on."""
    world.master.rows_max = 0
    first = world.secondary.add(1)
    await world.passes(rescue)
    assert set(world.secondary.refusals) == {first}
    world.master.rows_max = PAGE_ROWS
    second = world.secondary.add(2)
    await rescue.step()
    world.now += RESCUE_GRACE_S
    await rescue.step()
    assert second in world.master.cells


async def test_what_the_home_refuses_is_noted_with_the_error_and_holds_up_no_other(world, rescue):
    """D10: a table is gone, say. The cell is tried again, and the note goes when the home has taken it."""
    keys = [world.secondary.add(value) for value in range(PAGE_ROWS)]
    world.master.refused = {keys[1]}
    swept = await world.passes(rescue)
    assert (swept.rewritten, swept.refused) == (PAGE_ROWS - 1, 1)
    assert world.secondary.refusals == {keys[1]: "no table"}
    world.master.refused = set()
    world.now += 10.0
    await rescue.step()
    assert world.master.cells.keys() == set(keys)
    assert world.secondary.refusals == {}


async def test_a_pass_that_ends_at_a_time_out_is_followed_by_one_that_begins_with_other_cells(world, rescue):
    """S12: small cells that take too long would keep a large one waiting, each for several passes."""
    world.master.error = StorageUnavailable("down")
    world.master.slow = {world.secondary.add(value) for value in range(20)}
    large = world.secondary.add(0, LARGE)
    await world.passes(rescue)
    world.master.error = None
    for _ in range(2):
        await rescue.step()
    assert large in world.master.cells
