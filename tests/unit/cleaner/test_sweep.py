"""The two passes over a buffer: what is deleted, what is written again, and where each pass ends (I6)."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleaner.sweep import BufferSweep, Swept
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.config import CleanerSettings
from schemaless.errors import StorageUnavailable
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.buffer_table import Buffered
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 4, 2, ("a",))
PAGE_ROWS = 3
SETTINGS = CleanerSettings(topology=Path("unused"), kafka="unused").model_copy(update={"batch_rows_max": PAGE_ROWS})


def body(value):
    return encode_body({"n": value})


class Server:
    """The cells that one node of the home shows, by key. `asked` names the operations that it ran."""

    def __init__(self, name):
        self.node = SimpleNamespace(name=name)
        self.cells = {}
        self.asked = []
        self.error = self.bodies_error = None

    async def run(self, operation, datastore, keys, timeout_s):
        self.asked.append(operation.__name__)
        if self.error is not None:
            raise self.error
        if operation is entity_table.put_cells:
            self.cells |= {cell.key: cell.body for cell in keys}
            return None
        found = [self.cells.get(key) for _, key in keys]
        if operation is entity_table.digests:
            return [cell and hashlib.sha256(cell).digest() for cell in found]
        assert operation is entity_table.get
        if self.bodies_error is not None:
            raise self.bodies_error
        return [cell and SimpleNamespace(body=cell) for cell in found]


class Secondary:
    """The buffer, by id, and the conflicts that were recorded."""

    def __init__(self):
        self.rows = {}
        self.conflicts = []
        self.pages = 0

    def add(self, value, age_s=10.0):
        number = len(self.rows) + 1
        key = CellKey(RowKey(number.to_bytes(16)), ColumnName("BASE"), RefKey(1))
        digest = hashlib.sha256(body(value)).digest()
        self.rows[number] = (Buffered(number, "trips", 0, key, number, age_s, len(body(value)), digest), body(value))
        return key

    async def run(self, operation, *args, timeout_s):
        if operation is buffer_table.oldest:
            self.pages += 1
            _, after, limit, _ = args
            return [row for number, (row, _) in sorted(self.rows.items()) if number > after][:limit]
        if operation is buffer_table.bodies:
            return [self.rows[row.buffer_id][1] for row in args[0]]
        if operation is buffer_table.delete_confirmed:
            return sum(self.rows.pop(row.buffer_id, None) is not None for row in args[0])
        assert operation is buffer_table.record_conflict
        row, stored = args
        self.conflicts.append((row.key, stored))
        return self.rows.pop(row.buffer_id, None) is not None


@pytest.fixture
def world():
    return SimpleNamespace(secondary=Secondary(), master=Server("a-master"), minion=Server("a-minion"))


@pytest.fixture
def sweep(world):
    async def datastore(name):
        return TRIPS

    storage = SimpleNamespace(
        master=lambda cluster: {"a": world.master, "b": world.secondary}[cluster],
        minions=lambda cluster: [world.minion],
    )
    return BufferSweep(storage, SimpleNamespace(datastore=datastore), SETTINGS, "b", "a")


async def test_a_row_goes_only_after_a_minion_showed_its_body(world, sweep):
    """I6: the master's word is not enough, and the next pass doesn't ask the master again."""
    world.master.cells[world.secondary.add(1)] = body(1)
    assert await sweep.step() == Swept(waiting=1)
    assert await sweep.step() == Swept(waiting=1)
    assert world.master.asked == ["digests"]
    world.minion.cells = dict(world.master.cells)
    assert await sweep.step() == Swept(confirmed=1)
    assert world.secondary.rows == {}


async def test_a_missing_cell_is_put_at_home_and_its_row_stays(world, sweep):
    """I6: until a minion shows it. One that is younger may be under way, and is left to its own put."""
    missing, young = world.secondary.add(1), world.secondary.add(2, age_s=SETTINGS.rescue_grace_s / 2)
    assert await sweep.step() == Swept(rewritten=1, waiting=2)
    assert world.master.cells == {missing: body(1)}
    assert [row.key for row, _ in world.secondary.rows.values()] == [missing, young]


@pytest.mark.parametrize("shown_by", ["minion", "master"])
async def test_another_body_is_recorded_with_what_is_stored(world, sweep, shown_by):
    """I6: nothing is dropped silently, whichever node shows the conflict first."""
    key = world.secondary.add(1)
    getattr(world, shown_by).cells[key] = body(2)
    swept = await sweep.step()
    assert (swept.conflicts, swept.confirmed, swept.rewritten) == (1, 0, 0)
    assert world.secondary.conflicts == [(key, body(2))]


async def test_the_confirming_pass_ends_at_a_page_that_the_minion_does_not_show(world, sweep):
    """A minion shows a prefix of its master's commits: of ten pages one is looked up there, all of them at home."""
    for value in range(10 * PAGE_ROWS):
        world.master.cells[world.secondary.add(value)] = body(value)
    assert await sweep.step() == Swept(waiting=10 * PAGE_ROWS)
    assert world.minion.asked == ["digests"]
    assert world.master.asked == ["digests"] * 10


async def test_an_unreachable_home_costs_one_time_out_and_not_one_for_each_page(world, sweep):
    """What was known to be at home stays known, so that its return is no flood of questions."""
    for value in range(2 * PAGE_ROWS):
        world.master.cells[world.secondary.add(value)] = body(value)
    await sweep.step()
    for value in range(2 * PAGE_ROWS):
        world.secondary.add(100 + value)
    world.master.error = StorageUnavailable("down")
    world.master.asked.clear()
    await sweep.step()
    assert world.master.asked == ["digests"]
    world.master.error = None
    world.master.asked.clear()
    swept = await sweep.step()
    assert swept.rewritten == 2 * PAGE_ROWS
    assert world.master.asked.count("digests") == 2


async def test_what_a_minion_shows_goes_although_the_master_is_unreachable(world, sweep):
    """And with no minion reachable either nothing goes."""
    shown, other = world.secondary.add(1), world.secondary.add(2)
    world.minion.cells[shown] = body(1)
    world.master.error = StorageUnavailable("down")
    assert (await sweep.step()).confirmed == 1
    world.minion.error = StorageUnavailable("down")
    await sweep.step()
    assert [row.key for row, _ in world.secondary.rows.values()] == [other]


async def test_a_buffer_whose_rows_are_all_confirmed_is_read_once(world, sweep):
    """The rescuing pass has nothing to look for: the usual case costs one question to the secondary."""
    world.minion.cells[world.secondary.add(1)] = body(1)
    await sweep.step()
    await sweep.step()
    assert world.secondary.pages == 2
    assert world.master.asked == []


async def test_a_row_that_no_node_can_show_holds_up_no_other(world, sweep):
    """The minion fails to show one body. The other rows are confirmed and rescued all the same."""
    differing, equal = world.secondary.add(1), world.secondary.add(2)
    missing = world.secondary.add(3)
    world.minion.cells = {differing: body(7), equal: body(2)}
    world.master.cells = dict(world.minion.cells)
    world.minion.bodies_error = StorageUnavailable("slow")
    swept = await sweep.step()
    assert (swept.confirmed, swept.rewritten, swept.conflicts) == (1, 1, 1)  # the master shows the difference, too
    assert missing in world.master.cells
