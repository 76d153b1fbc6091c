"""What is deleted from a buffer, and in which order rows are looked up on minions (I6)."""

import pytest

from cleaner import service
from cleaner.pair import PageSize, Swept
from cleaner.service import GRACE_S, Confirmation
from schemaless.errors import Misconfigured, StorageUnavailable
from tests.unit.cleaner.cleaner_world import PAGE_ROWS, World, body


@pytest.fixture
def world():
    return World()


@pytest.fixture
def confirmation(world):
    return Confirmation(world.pair(), world.clock)


async def test_a_row_goes_only_after_a_minion_showed_its_body(world, confirmation):
    """I6: the master's word is not enough, and nobody asks for it."""
    world.master.cells[world.secondary.add(1)] = body(1)
    assert await world.passes(confirmation) == Swept()
    world.minion.cells = dict(world.master.cells)
    assert await confirmation.step() == Swept(confirmed=1)
    assert world.secondary.rows == {}
    assert world.master.asked == []


async def test_a_young_row_is_not_looked_up(world, confirmation):
    """Its cell is hardly on a minion yet."""
    await world.passes(confirmation)
    world.secondary.add(1)
    await confirmation.step()
    world.now += GRACE_S / 2
    await confirmation.step()
    assert world.minion.asked == []
    world.now += GRACE_S / 2
    await confirmation.step()
    assert world.minion.asked == ["digests"]


async def test_another_body_is_recorded_with_what_is_stored(world, confirmation):
    """I6: nothing is dropped silently."""
    key = world.secondary.add(1)
    world.minion.cells[key] = world.master.cells[key] = body(2)
    assert await world.passes(confirmation) == Swept(conflicts=1)
    assert world.secondary.conflicts == [(key, body(2))]


async def test_a_pass_ends_at_a_page_of_which_the_minion_shows_nothing(world, confirmation):
    """A minion shows a prefix of its master's commits. Each pass looks at one page more, in case more is wrong
    with the oldest rows.
    """
    rows = [world.secondary.add(value) for value in range(4 * PAGE_ROWS)]
    pages = [rows[n : n + PAGE_ROWS] for n in range(0, len(rows), PAGE_ROWS)]
    await world.passes(confirmation, count=5)
    first = pages[0]
    assert world.minion.looked_up == [
        first,
        pages[1],
        first,
        pages[2],
        first,
        pages[3],
        first,
        pages[1],
        first,
        pages[2],
    ]


async def test_a_minion_that_lags_is_asked_for_what_it_will_show_next(world, confirmation):
    """And what it shows meanwhile of the oldest rows is confirmed by the next pass, however many wait behind them."""
    rows = [world.secondary.add(value) for value in range(100 * PAGE_ROWS)]
    await world.passes(confirmation, count=5)
    world.minion.cells = {key: body(value) for value, key in enumerate(rows[: 2 * PAGE_ROWS])}
    world.minion.looked_up.clear()
    assert (await confirmation.step()).confirmed == 2 * PAGE_ROWS
    assert world.minion.looked_up == [rows[n : n + PAGE_ROWS] for n in range(0, 3 * PAGE_ROWS, PAGE_ROWS)]


async def test_old_rows_that_no_minion_shows_hold_up_no_fresh_ones(world, confirmation):
    """S12: fresh rows have a cursor of their own. One pass is enough for them, whatever waits before."""
    for value in range(10 * PAGE_ROWS):
        world.secondary.add(value)
    await world.passes(confirmation)
    fresh = {world.secondary.add(value): body(value) for value in range(2 * PAGE_ROWS)}
    world.minion.cells = fresh
    await confirmation.step()
    world.now += GRACE_S
    assert (await confirmation.step()).confirmed == 2 * PAGE_ROWS


async def test_with_no_minion_reachable_nothing_goes_and_one_time_out_is_paid(world, confirmation):
    """What waits then is found when a minion is back."""
    for value in range(2 * PAGE_ROWS):
        world.minion.cells[world.secondary.add(value)] = body(value)
    world.minion.error = StorageUnavailable("down")
    await world.passes(confirmation)
    assert world.minion.asked == ["digests"]
    world.minion.error = None
    await confirmation.step()
    assert world.secondary.rows == {}


async def test_a_page_that_is_too_much_gets_smaller_and_grows_again(world, confirmation):
    """S12: a time-out is followed by less, so a large page doesn't come again and again."""
    for value in range(4 * PAGE_ROWS):
        world.minion.cells[world.secondary.add(value)] = body(value)
    world.minion.rows_max = 1
    await world.passes(confirmation, count=3)
    assert len(world.secondary.rows) == 4 * PAGE_ROWS - 2  # one in each of two passes
    world.minion.rows_max = PAGE_ROWS
    await confirmation.step()
    assert world.secondary.rows == {}
    assert max(map(len, world.minion.looked_up)) == PAGE_ROWS


async def test_a_row_for_which_the_time_never_suffices_holds_up_no_other(world, confirmation):
    """S12: the oldest row takes too long alone. The pass after that begins behind it."""
    slow = world.secondary.add(0)
    world.minion.slow = {slow}
    for value in range(PAGE_ROWS):
        world.minion.cells[world.secondary.add(value)] = body(value)
    await world.passes(confirmation, count=8)
    assert [row.key for row, _ in world.secondary.rows.values()] == [slow]


async def test_a_page_ends_by_bytes_too(world, monkeypatch):
    """I14: the minion hashes as many bytes as a page has, and one row at least."""
    monkeypatch.setattr(service, "BATCH_ROWS_MAX", 1000)
    monkeypatch.setattr(service, "BATCH_BYTES_MAX", 10 << 20)
    confirmation = Confirmation(world.pair(), world.clock)
    for value, size_mib in enumerate((4, 4, 4, 20, 1)):
        world.minion.cells[world.secondary.add(value, size_mib << 20)] = body(value)
    await world.passes(confirmation)
    assert [len(keys) for keys in world.minion.looked_up] == [2, 1, 1, 1]


async def test_a_row_that_a_minion_cant_show_holds_up_no_other(world, confirmation):
    """One body can't be read, and one table is away: the others are confirmed all the same."""
    differing, equal = world.secondary.add(1), world.secondary.add(2)
    world.minion.cells = {differing: body(7), equal: body(2)}
    world.minion.bodies_error = StorageUnavailable("slow")
    assert (await world.passes(confirmation)).confirmed == 1
    world.minion.bodies_error = Misconfigured("damaged")
    await confirmation.step()
    assert [row.key for row, _ in world.secondary.rows.values()] == [differing]


async def test_rows_behind_many_ids_that_are_gone_are_confirmed_soon_after_a_time_out_of_the_secondary(
    world, confirmation
):
    """I6: a time-out makes the stretch of ids that a page looks at smaller, and the oldest row may lie beyond it."""
    world.secondary._newest = 1_000_000
    for value in range(2 * PAGE_ROWS):
        world.minion.cells[world.secondary.add(value)] = body(value)
    await confirmation.step()
    world.now += 10.0
    world.secondary.looks_max = 0
    with pytest.raises(StorageUnavailable):
        await confirmation.step()
    world.secondary.looks_max = 1_000_000
    await confirmation.step()
    await confirmation.step()
    assert world.secondary.rows == {}


async def test_what_came_while_no_minion_answered_holds_up_no_fresh_row(world, confirmation):
    """S12: it is backlog. The fresh cursor begins again at the newest row."""
    await confirmation.step()
    world.minion.error = StorageUnavailable("down")
    for value in range(200 * PAGE_ROWS):
        world.secondary.add(value)
    await world.passes(confirmation)
    world.minion.error = None
    await confirmation.step()
    fresh = world.secondary.add(1)
    world.minion.cells[fresh] = body(1)
    await confirmation.step()
    world.now += GRACE_S
    assert await confirmation.step() == Swept(confirmed=1)


def test_a_time_out_makes_a_page_smaller_in_rows_and_bytes():
    """Rows without bodies weigh nothing, and many of them take long, too."""
    size = PageSize(1000, 4096)
    size.shrink()
    assert (size.rows, size.bytes) == (250, 1024)
    for _ in range(10):
        size.shrink()
    assert (size.rows, size.bytes) == (1, 1)
    size.grow()
    assert (size.rows, size.bytes) == (2, 2)
