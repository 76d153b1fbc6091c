"""Queries with `after` see the put at once: what the index lacks is evaluated with them, and is right on every page."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.index import entry_reader as overlay_module
from api.index.entry_reader import (
    AT_ONCE_MAX,
    CELLS_MAX,
    EntryReader,
    Overlay,
    Overlays,
    Unevaluated,
    changed_rows,
    page_of,
    verify_evaluable,
)
from api.index.search import Behind, ManyDamaged, MinionsDiffer, NodeAnswer, find_entries, merged, parse_query
from api.read.reader import Served
from schemaless.cell import CellKey
from schemaless.codec import decode_body, encode_body
from schemaless.errors import LocationGone, StorageUnavailable
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entries_for, entry_shard
from schemaless.location import Location, ShardLocation
from schemaless.storage import shard_head
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.index_definition_table import IndexOrder, IndexStage, RunState, defined
from schemaless.storage.index_select import NodePage
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.shard_log import Changes
from schemaless.testing import MemoryEntityTable
from schemaless.topology import Datastore, Role

DATASTORE = Datastore("d", 4, 1, ("a", "b"))
OWNERS = range(4)
ROWS = [bytes([n]) * 16 for n in range(6)]


def definition(array):
    part = "owners[]." if array else ""
    return parse_definition(
        {
            "name": "by_owner",
            "shard_field": "owner",
            "fields": [
                {"name": "owner", "column": "BASE", "path": f"{part}owner", "type": "int"},
                {"name": "share", "column": "BASE", "path": f"{part}share", "type": "decimal"},
                {"name": "state", "column": "STATUS", "path": "state", "type": "string"},
            ],
            "where": "state is null or state != 's2'",
        }
    )


ONE, ELEMENTS = definition(array=False), definition(array=True)


class World:
    """One source shard, and an index of it that two clusters have reached up to a checkpoint each.

    `before_read` is called before each read of a node, with what it is asked for: so the indexer works meanwhile.
    """

    def __init__(self, index=ONE):
        self.index = index
        self.table = MemoryEntityTable(DATASTORE)
        self.reached = dict.fromkeys(DATASTORE.clusters, Location(1, 0))
        self.read_bytes_max = 1 << 20
        self.away, self.damaged = set(), []
        self.asked = []
        self.before_read = lambda operation: None
        self.waits = []

    @property
    def head(self):
        return self.table.heads()[0]

    @property
    def all(self):
        return list(self.table.read_after(0, 0, 100_000))

    def put(self, row, column, ref_key, body):
        self.table.put_cells([ShardCell(CellKey(row, column, ref_key), encode_body(body), 0)])

    def entries(self, until):
        """Returns what an index that has reached this added_id holds."""
        newest = self.table.newest_until({0: (until, ROWS)}, self.index.columns).cells
        found = []
        for row in ROWS:
            bodies = {cell.column_name: decode_body(cell.body) for cell in newest if cell.row_key == row}
            made = entries_for(self.index, bodies)
            found += [FoundEntry(row, entry, n) for n, entry in enumerate(made) if entry is not None]
        return found

    async def read(self, cluster, operation, *args, read_from=None, without=()):
        self.before_read(operation)
        await asyncio.sleep(0)
        self.asked.append(operation)
        if operation in self.away or (read_from is Role.MINION and self.minions(cluster) <= set(without)):
            raise StorageUnavailable("away")
        served = Served(read_from or Role.MASTER, cluster, 0)
        if operation is find_entries:
            _, index, query, places, _, _, excluded = args
            reached = self.reached[cluster]
            here = [
                found
                for found in self.entries(reached.added_id if reached else 0)
                if (entry_shard(index, found.entry, 4), found.entry.values[0]) in places
                and found.row_key not in excluded
            ]
            values = [value for _, value in places]
            page = page_of(index, values, query.selection, here, self.read_bytes_max)
            return NodeAnswer(NodePage(page.entries, page.more, self.damaged), reached), served
        if operation is shard_head.history:
            return (self.head, self.table.generations(0)), served
        assert operation is changed_rows
        _, index, after, reached = args
        cells = self.table.read_after(0, reached[0].added_id, 100_000, index.columns)
        row_keys = list(dict.fromkeys(cell.row_key for cell in cells))
        changes = Changes(self.head.location, self.table.generations(0), row_keys)
        verify_evaluable(changes, after.location, reached)
        return (changes, self.table.newest_until({0: (self.head.added_id, row_keys)}, index.columns).cells), served

    async def reached_put(self, place, after, *, has_seen):
        """The index reaches the put while a query waits for it, unless it is to wait for ever."""
        self.waits.append(place.cluster)
        if None in self.waits:
            await asyncio.Event().wait()
        self.reached[place.cluster] = max(self.reached[place.cluster], after.location)

    def minions(self, cluster):
        return frozenset([f"{cluster}-minion"])

    def reader(self, differing=()):
        waiter = SimpleNamespace(reached=self.reached_put)
        return EntryReader(self, waiter, Overlays(self), lambda version: differing)

    async def page(self, *parameters, order=None, read_from=None, reader=None):
        query = parse_query(self.index, DATASTORE.shards, parameters)
        index = defined(self.index, IndexStage.ACTIVE, *([] if order is None else [order]))
        found = await (reader or self.reader()).find(DATASTORE, index, query, read_from)
        pages = [answer.page for answer, _ in found.answers.values()]
        return merged(self.index, query, pages if found.overlay is None else [*pages, found.overlay.page]), found

    def after(self):
        return ("after", f"0:{self.head.generation}:{self.head.added_id}")


def body(owner, share, state):
    shares = None if share is None else [{"owner": owner, "share": n % 3} for n in range(share)]
    return {"owner": owner, "share": share, "state": f"s{state}", "owners": shares}


puts = st.lists(
    st.tuples(
        st.sampled_from(ROWS),
        st.sampled_from(["BASE", "STATUS", "OTHER"]),
        st.integers(0, 5),
        st.builds(body, st.sampled_from([*OWNERS, None, "x"]), st.sampled_from([0, 1, 2, 4, None]), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=25,
    unique_by=lambda one: one[:3],
)
questions = st.tuples(
    st.lists(st.sampled_from(OWNERS), min_size=1, max_size=4, unique=True),
    st.sampled_from(["owner", "share", "state"]),
    st.booleans(),
    st.sampled_from([1, 2, 3, 1000]),
    st.lists(
        st.sampled_from(
            [("share.gte", "1"), ("share.isnull", "true"), ("state", "s1"), ("state.ne", "s1"), ("state.prefix", "s")]
        ),
        max_size=2,
        unique=True,
    ),
)


@pytest.mark.parametrize("index", [ONE, ELEMENTS], ids=["one", "elements"])
@given(data=st.data(), found=puts, question=questions)
def test_every_page_is_that_of_an_index_that_has_reached_the_head(index, data, found, question):
    """Whatever moved, left or entered, however far each cluster is, and while the indexer goes on between reads."""
    world = World(index)
    for put in found:
        world.put(*put)
    head = world.head.added_id
    for cluster in world.reached:
        world.reached[cluster] = Location(1, data.draw(st.integers(0, head), label=cluster))
    world.read_bytes_max = data.draw(st.sampled_from([1, 200, 1 << 20]), label="bytes")

    def work(operation):
        cluster = data.draw(st.sampled_from([None, *world.reached]), label="indexer")
        if cluster is not None:
            at = world.reached[cluster].added_id
            world.reached[cluster] = Location(1, data.draw(st.integers(at, head), label="to"))

    world.before_read = work
    owners, order, descending, limit, terms = question
    parameters = [*(("owner", str(owner)) for owner in owners), *terms]
    parameters += [("order", order), ("desc", str(descending).lower()), ("limit", str(limit))]
    everything = parse_query(index, DATASTORE.shards, [pair for pair in parameters if pair[0] != "limit"])
    wanted = page_of(index, owners, everything.selection, world.entries(head), 1 << 30).entries
    shown = []

    async def ask():
        more = [world.after()]
        while True:
            page, _ = await world.page(*parameters, *more)
            assert len(page.entries) <= limit
            shown.extend(page.entries)
            if page.cursor is None:
                return
            more = [("cursor", page.cursor)]  # which carries `after`

    asyncio.run(ask())
    assert shown == wanted
    assert not world.waits


@given(data=st.data(), found=puts, later=puts)
def test_a_row_is_never_older_than_the_put(data, found, later):
    """Also while cells are put and indexed between the reads: each row is shown as it was at the put or later."""
    world = World()
    for put in found:
        world.put(*put)
    after = world.after()
    wanted = world.head.added_id
    at = data.draw(st.integers(0, wanted))
    world.reached = dict.fromkeys(world.reached, Location(1, at))
    left = [put for put in later if put[:3] not in {one[:3] for one in found}]

    def work(operation):
        for _ in range(data.draw(st.integers(0, len(left)), label="puts")):
            world.put(*left.pop())
        reached = data.draw(st.integers(world.reached["a"].added_id, world.head.added_id), label="indexed")
        world.reached = dict.fromkeys(world.reached, Location(1, reached))

    world.before_read = work
    owner = data.draw(st.sampled_from(OWNERS))
    page, _ = asyncio.run(world.page(("owner", str(owner)), after))
    for row in ROWS:
        shown = [one for one in page.entries if one.row_key == row]
        possible = [
            [one for one in world.entries(until) if one.row_key == row and one.entry.values[0] == owner]
            for until in range(wanted, world.head.added_id + 1)
        ]
        assert shown in possible


@pytest.fixture
def world():
    """A row that owner 1 had, and the index has so; then the log moves it to owner 2."""
    made = World()
    made.put(ROWS[0], "BASE", 1, body(1, 1, 1))
    made.put(ROWS[1], "BASE", 1, body(1, 2, 1))
    made.reached = dict.fromkeys(made.reached, Location(1, 2))
    made.put(ROWS[0], "BASE", 2, body(2, 1, 1))
    return made


def rows(page):
    return [one.row_key for one in page.entries]


async def test_a_row_that_moved_is_where_it_is_now(world):
    """Its old place doesn't show it, its new one does. The answer says how many cells were evaluated."""
    assert rows((await world.page(("owner", "1")))[0]) == [ROWS[0], ROWS[1]]
    page, found = await world.page(("owner", "1"), world.after())
    assert rows(page) == [ROWS[1]]
    assert (found.overlay.cells, found.waited_s) == (1, None)
    assert rows((await world.page(("owner", "2"), world.after()))[0]) == [ROWS[0]]


async def test_cells_of_other_columns_cost_no_second_select(world):
    """No row of the index changed: the first page is the answer."""
    world.reached = dict.fromkeys(world.reached, Location(1, 3))
    world.put(ROWS[2], "OTHER", 1, {})
    page, found = await world.page(("owner", "1"), world.after())
    assert rows(page) == [ROWS[1]]
    assert (found.overlay.cells, world.asked) == (1, [find_entries, changed_rows])


async def test_an_index_that_has_reached_the_put_is_only_asked_for_its_page(world):
    """As ever: one statement, and nothing said about cells or waiting."""
    world.reached = dict.fromkeys(world.reached, Location(1, 3))
    _, found = await world.page(("owner", "1"), world.after())
    assert (found.overlay, found.waited_s, world.asked) == (None, None, [find_entries])


async def test_too_many_cells_are_waited_for(world):
    """It says so: how long the query waited, and no overlay."""
    for n in range(CELLS_MAX):
        world.put(ROWS[0], "OTHER", n, {})
    page, found = await world.page(("owner", "1"), world.after())
    assert rows(page) == [ROWS[1]]
    assert found.overlay is None
    assert found.waited_s is not None
    assert world.waits


@pytest.mark.parametrize(
    ("why", "spoil"),
    [
        ("1001 cells", lambda world: [world.put(ROWS[0], "OTHER", n, {}) for n in range(CELLS_MAX)]),
        ("generation is 2", lambda world: world.table.open_generation(0, 4) or world.put(ROWS[3], "BASE", 9, {})),
        ("can't be read now", lambda world: world.away.add(changed_rows)),
        ("past the head", lambda world: setattr(world, "after", lambda: ("after", "0:1:99"))),
        ("generation 3 is unknown", lambda world: setattr(world, "after", lambda: ("after", "0:3:1"))),
        ("no checkpoint", lambda world: world.reached.update(a=None, b=None)),
    ],
)
async def test_what_can_t_be_evaluated_or_reached_in_time_is_refused_with_the_reason(world, why, spoil):
    """A 503, never an answer without the put."""
    spoil(world)
    world.waits.append(None)
    with pytest.raises(Behind, match=why):
        await world.page(("owner", "1"), world.after(), ("wait", "0"))


async def test_a_paused_index_refuses_what_it_has_not_reached(world):
    """At once, and it says what to do."""
    with pytest.raises(Behind, match="paused: resume it"):
        await world.page(("owner", "1"), world.after(), order=IndexOrder(run_state=RunState.PAUSED))


async def test_a_superseded_location_is_gone(world):
    """Also before the index knows of the new generation: nobody waits for what never comes."""
    lost = world.after()
    world.table.open_generation(0, 3)
    with pytest.raises(LocationGone) as gone:
        await world.page(("owner", "1"), lost)
    assert gone.value.resume_at == 2
    assert not world.waits


async def test_a_location_that_is_superseded_is_gone_also_for_an_index_that_is_beyond_it(world):
    """Its generation is over, so a higher number proves nothing (I13)."""
    lost = world.after()
    world.table.open_generation(0, 3)
    world.reached = dict.fromkeys(world.reached, Location(2, 2))
    with pytest.raises(LocationGone):
        await world.page(("owner", "1"), lost)


async def test_a_location_that_is_superseded_while_a_query_waits_is_gone(world):
    """The log can't be evaluated, so nobody finds that out before the end of the wait."""
    lost = world.after()
    world.away.add(changed_rows)
    world.waits.append(None)
    world.table.open_generation(0, 3)
    with pytest.raises(LocationGone):
        await world.page(("owner", "1"), lost, ("wait", "0"))


@pytest.mark.parametrize(
    ("asked", "log_asked"), [(None, None), (Role.MINION, None), (Role.MASTER, Role.MASTER)], ids=["any", "minion", "m"]
)
async def test_the_cells_that_an_index_lacks_are_read_from_the_master_of_their_shard(world, asked, log_asked):
    """D6: a minion may lack the put. It is asked only where the master is away, and the caller allows that."""
    read, asked_from = world.read, {}

    async def noting(cluster, operation, *args, read_from=None, without=()):
        asked_from[operation] = read_from
        return await read(cluster, operation, *args, read_from=read_from, without=without)

    world.read = noting
    await world.page(("owner", "1"), world.after(), read_from=asked)
    assert asked_from == {find_entries: asked, changed_rows: log_asked}


def test_a_log_that_ends_before_what_a_node_has_reached_is_not_evaluated():
    """A minion of the source shard lags behind the index. What it shows is older than the entries."""
    changes = Changes(Location(1, 4), World().table.generations(0), [])
    verify_evaluable(changes, Location(1, 3), (Location(1, 2), 4))
    with pytest.raises(Unevaluated, match="shows it up to 4 only"):
        verify_evaluable(changes, Location(1, 3), (Location(1, 2), 5))


async def test_a_node_that_is_behind_the_first_one_is_not_believed(world):
    """A minion that lags answers the second time: the overlay is read again, from its checkpoint."""
    world.put(ROWS[1], "BASE", 3, body(3, 1, 1))
    world.reached = dict.fromkeys(world.reached, Location(1, 3))

    def lag(operation):
        if operation is changed_rows:
            world.reached = dict.fromkeys(world.reached, Location(1, 1))

    world.before_read = lag
    page, found = await world.page(("owner", "1"), world.after())
    assert rows(page) == []
    assert found.overlay.cells == 3


async def test_few_overlays_are_read_at_once(world):
    """The others wait for the index, as they did before there were overlays."""
    gate, all_read, read = asyncio.Event(), asyncio.Event(), world.read
    reading = []

    async def held(cluster, operation, *args, **options):
        if operation is changed_rows:
            reading.append(operation)
            if len(reading) == AT_ONCE_MAX:
                all_read.set()
            await gate.wait()
        return await read(cluster, operation, *args, **options)

    world.read = held
    reader = world.reader()
    asking = [asyncio.create_task(world.page(("owner", "1"), world.after(), reader=reader)) for _ in range(AT_ONCE_MAX)]
    await all_read.wait()
    _, found = await world.page(("owner", "1"), world.after(), reader=reader)
    assert found.waited_s is not None
    gate.set()
    assert all(found.overlay is not None for _, found in await asyncio.gather(*asking))


@pytest.mark.parametrize(
    ("bound", "value"), [("BYTES_MAX", 10), ("ENTRIES_MAX", 0), ("EXCLUDED_MAX", 0)], ids=["bytes", "entries", "rows"]
)
async def test_an_overlay_is_bounded(world, monkeypatch, bound, value):
    """I14: in bytes as decoded, in elements, and in row keys of the statement."""
    monkeypatch.setattr(overlay_module, bound, value)
    reached = (Location(1, 2), 2)
    query = parse_query(ONE, DATASTORE.shards, [("owner", "1")])
    with pytest.raises(Unevaluated, match="1 rows"):
        await Overlays(world).read(DATASTORE, ONE, query, ShardLocation(0, Location(1, 3)), reached, None)


def test_a_lagging_node_s_cells_don_t_hide_the_overlay():
    """`include` and `verify` on a minion see at least what the entries were made of."""
    world = World()
    for ref_key in (1, 2):
        world.put(ROWS[0], "BASE", ref_key, body(1, ref_key, 1))
    old, new = world.all
    found = Overlay(1, [ROWS[0]], NodePage([], False), {(ROWS[0], "BASE"): new})
    key = (ROWS[0], "BASE")
    for shown in (None, old, new):
        assert found.with_newest({key: shown, (ROWS[1], "BASE"): None}) == {key: new, (ROWS[1], "BASE"): None}
    assert Overlay(1, [], NodePage([], False), {key: old}).with_newest({key: new}) == {key: new}


async def test_values_of_several_clusters_are_asked_for_in_parallel(world):
    """A23: no cluster is asked after another one has answered."""
    asked, all_asked, read = set(), asyncio.Event(), world.read

    async def read_when_all_are_asked(cluster, operation, *args, **options):
        asked.add(cluster)
        if asked == set(DATASTORE.clusters):
            all_asked.set()
        await all_asked.wait()
        return await read(cluster, operation, *args, **options)

    world.read = read_when_all_are_asked
    await world.page(*(("owner", str(owner)) for owner in OWNERS), ("order", "owner"))


@pytest.mark.parametrize(("read_from", "hint"), [(None, "are being repaired"), (Role.MINION, "read_from=master")])
async def test_too_much_damage_says_who_can_help(world, read_from, hint):
    """The rows of masters are being repaired. A minion isn't repaired, so asking it again would be no use."""
    world.damaged = [bytes([n % 256, n // 256]) * 8 for n in range(1001)]
    with pytest.raises(ManyDamaged) as raised:
        await world.page(("owner", "1"), read_from=read_from)
    assert hint in raised.value.hint
    assert raised.value.row_keys == world.damaged


async def test_a_minion_that_differs_is_not_asked(world):
    """C17. The master answers, and where only such minions may, nobody does."""
    differing = {f"{cluster}-minion" for cluster in DATASTORE.clusters}
    await world.page(("owner", "1"), reader=world.reader(differing))
    with pytest.raises(MinionsDiffer, match="differ from their cells"):
        await world.page(("owner", "1"), reader=world.reader(differing), read_from=Role.MINION)
    await world.page(("owner", "1"), reader=world.reader({"another"}), read_from=Role.MINION)


def test_an_explicit_location_counts_more_than_the_cursor_s():
    """And a cursor's is verified like any other."""
    owner = [("owner", "1")]
    world = World()
    for n in range(2):
        world.put(ROWS[n], "BASE", 1, body(1, n + 1, 1))
    page, _ = asyncio.run(world.page(*owner, ("limit", "1"), world.after()))
    following = parse_query(ONE, 4, [*owner, ("cursor", page.cursor)])
    assert following.after == ShardLocation(0, Location(1, 2))
    other = "3:1:7"
    assert str(parse_query(ONE, 4, [*owner, ("cursor", page.cursor), ("after", other)]).after) == other
