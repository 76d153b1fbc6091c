"""Damage of every kind in the tables of an index is found, named and repaired, on real servers (I11)."""

import asyncio
import functools
import json
import random
import uuid
from types import SimpleNamespace

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from indexer.index_cleaner import IndexCleaner, MinionCleaner
from indexer.maintainer import Maintainer
from schemaless.__main__ import app
from schemaless.cell import RowKey, row_key_text
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints, CommitLanes
from schemaless.consume.ports import Advance, Run
from schemaless.errors import Invalid, NotReady, StorageUnavailable
from schemaless.index import inspection
from schemaless.index.check import REPLICATED_AFTER_S, check_index
from schemaless.index.comparison import EntryFaultKind, EntryPlace, FaultCounts, row_after, row_before
from schemaless.index.inspection import (
    IndexInspector,
    SweepSelection,
    bounds_of,
    one_row,
    range_of,
    ranges_of,
    sweep,
    sweep_span,
)
from schemaless.position import Position
from schemaless.sharding import shard_of
from schemaless.storage import entity_table, index_definition_table, index_table, index_write_table
from schemaless.storage.asyncmy_driver import AsyncServer
from schemaless.storage.index_definition_table import IndexStage, defined
from schemaless.storage.index_pass_table import MASTERS, IndexPass, merged, note, note_found, of_all
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_table import BEFORE_ALL
from schemaless.storage.operation import query
from tests.integration.indexer.test_indexer import SHARDS, Rows, definition, elements, owners
from tests.log_harness import LOCAL_WRITE, REPLICATED_WRITE, replication_stopped, run_sql
from tests.waiting import async_until

pytestmark = pytest.mark.storage

MISSING, STALE, GHOST = EntryFaultKind.MISSING, EntryFaultKind.STALE, EntryFaultKind.GHOST


class Indexed(Rows):
    """Rows of a datastore, and an index of them that one maintainer keeps, without a topic."""

    def __init__(self, storage, async_storage, datastore, index):
        super().__init__(storage, datastore)
        self.index = index
        self.async_storage = async_storage
        self.inspector = IndexInspector(async_storage, datastore, index, page_rows=7)
        self.maintainer = Maintainer(async_storage, datastore, index)
        lanes = CommitLanes(async_storage, datastore)
        self.checkpoints = Checkpoints(lanes, index.consumer, CheckpointPlacement.EVERYWHERE)
        for shard in range(SHARDS):
            self.master(shard).run(index_table.create, datastore, shard, index)

    def master(self, shard):
        return self.storage.master(self.datastore.home(shard))

    async def follow(self):
        """Takes the logs of all shards to their ends."""
        for shard, found in (await self.checkpoints.read(range(SHARDS))).items():
            after = found.position
            while cells := self.master(shard).run(entity_table.read_after, self.datastore, shard, after.added_id, 1000):
                effect = await self.maintainer.handle([Run(shard, after.location, cells)])
                last = cells[effect.outcomes[0].finished - 1]
                after = Position(shard, last.generation, last.added_id)
                assert not await self.checkpoints.move({shard: Advance(after)}, effect.scripts)

    def sql(self, shard, template, node=None):
        """Changes the index table of a shard by hand."""
        table = index_table.table(self.datastore, shard, self.index)
        run_sql(node or self.master(shard), template.format(table=table))

    async def masters(self):
        return [self.async_storage.master(cluster) for cluster in self.datastore.clusters]

    async def inspect(self, nodes=None):
        """All faults of all shards in both directions, those of entries last."""
        nodes = nodes or await self.masters()
        faults = []
        for shard in range(SHARDS):
            after = RowKey(b"")
            while after is not None:
                page = await self.inspector.rows(nodes, shard, after)
                assert not page.unsettled
                faults += [fault for found in page.faults.values() for fault in found]
                after = page.last
        for shard in range(SHARDS):
            (node,) = [node for node in nodes if node.node.cluster == self.datastore.home(shard)]
            after = BEFORE_ALL
            while after is not None:
                page = await self.inspector.entries(node, shard, after)
                assert not page.unsettled
                faults += page.faults
                after = page.last
        return faults

    async def inspect_ranges(self):
        """All faults, as the cleaner finds them: both directions at once, one range of row keys after the other."""
        faults, rows = [], 0
        for number in range(ranges_of(self.datastore)):
            async for page in sweep_span(self.inspector, await self.masters(), *bounds_of(self.datastore, number)):
                assert not page.unsettled
                faults += [fault for found in page.faults.values() for fault in found]
                rows += page.rows
        logs = [
            self.master(shard).run(entity_table.read_after, self.datastore, shard, 0, 1000) for shard in range(SHARDS)
        ]
        assert rows == len({cell.row_key for cells in logs for cell in cells})
        return faults


@pytest.fixture
def indexed(storage, async_storage, make_datastore):
    def make(index):
        return Indexed(storage, async_storage, make_datastore(shards=SHARDS, partitions=2), index)

    return make


async def filled(indexed, index):
    """Forty rows of several versions, whose entries are in all shards."""
    rows, by_shard, chance = indexed(index), owners(), random.Random(5)
    for version in (1, 2):
        for row in (row_keys := [uuid.UUID(int=chance.getrandbits(128)).bytes for _ in range(40)]):
            owner = chance.choice(list(by_shard.values()))
            rows.put(
                rows.cell(row, "BASE", version, {"owner": owner, "number": version, "tags": [owner, "x", "y"]}),
                rows.cell(row, "STATUS", version, {"state": "open"}),
            )
    await rows.follow()
    return rows, row_keys


@pytest.mark.parametrize("index", [definition(), elements()], ids=["one", "elements"])
async def test_an_index_that_follows_its_cells_has_no_faults(indexed, index):
    """Moves, versions, arrays and tombstones are no faults, and an index that is behind has none either."""
    rows, row_keys = await filled(indexed, index)
    assert await rows.inspect() == await rows.inspect_ranges() == []
    rows.put(rows.cell(row_keys[0], "BASE", 3, {"owner": "someone else", "number": 3, "tags": []}))
    assert await rows.inspect() == await rows.inspect_ranges() == []


@pytest.mark.parametrize("bound", ["entries", "bytes", "columns"])
async def test_a_span_keeps_its_bounds(indexed, monkeypatch, bound):
    """Rows with more entries or larger bodies than a span may have are compared alone, and no row is left out."""
    rows, row_keys = await filled(indexed, elements())
    first, last = bytes(16), b"\xff" * 16
    tags = [{"name": "same", "weight": n} for n in range(40)]
    for row in (first, row_keys[3], last):
        rows.put(rows.cell(row, "BASE", 7, {"tags": tags, "text": "".join(map(str, range(2000)))}))
    await rows.follow()
    if bound == "entries":
        monkeypatch.setattr(inspection, "_SPAN_ENTRY_BYTES_MAX", 1)
    elif bound == "bytes":
        monkeypatch.setattr(inspection.entity_table.span, "__defaults__", (100,))
    else:
        rows.inspector.page_rows = 1
    assert await rows.inspect_ranges() == []
    damaged = {place[:2] for place in rows.wanted(rows.index) if place[1] in (first, last) and place[2] == 39}
    for shard, row in damaged:
        rows.sql(shard, f"DELETE FROM {{table}} WHERE row_key = x'{row.hex()}' AND element = 39")
    found = await rows.inspect_ranges()
    assert {fault.place[:2] for fault in found} == damaged != set()
    assert {fault.kind for fault in found} == {MISSING}


async def test_every_kind_of_damage_is_named_and_repaired(indexed, storage):
    """Missing, stale with an old and a huge version, at another shard or element, and ghosts with and without cells."""
    rows, _ = await filled(indexed, definition())
    wanted = rows.wanted(rows.index)
    assert rows.found(rows.index) == wanted
    places = iter(sorted(wanted))
    planted = {}

    def plant(kind, change, place=None):
        place = place or next(places)
        planted[EntryPlace(*place)] = kind
        rows.sql(place[0], change.format(table="{table}", key=f"row_key = x'{place[1].hex()}'"))
        return place

    plant(MISSING, "DELETE FROM {table} WHERE {key}")
    plant(MISSING, "UPDATE {table} SET live = 0, source_added_id = 1000000 WHERE {key}")
    plant(STALE, "UPDATE {table} SET number = 77 WHERE {key}")
    plant(STALE, "UPDATE {table} SET state = x'ff', source_generation = 9, source_added_id = 1000000 WHERE {key}")
    insert = "INSERT INTO {table} (row_key, element, source_generation, source_added_id, live, owner) "
    _, live, _ = next(places)
    free = next(shard for shard in range(SHARDS) if (shard, live, 0) not in wanted)
    rows.sql(free, f"DELETE FROM {{table}} WHERE row_key = x'{live.hex()}'")  # perhaps a tombstone
    plant(STALE, insert + f"VALUES (x'{live.hex()}', 0, 9, 9, 1, 'z')", (free, live, 0))
    plant(STALE, insert + f"VALUES (x'{live.hex()}', 3, 1, 1, 1, 'z')", (free, live, 3))
    nobody = uuid.uuid4().bytes
    plant(GHOST, insert + f"VALUES (x'{nobody.hex()}', 0, 1, 1, 1, 'z')", (0, nobody, 0))
    without = uuid.uuid4().bytes
    rows.put(rows.cell(without, "BASE", 1, {"owner": None}))
    await rows.follow()
    plant(GHOST, insert + f"VALUES (x'{without.hex()}', 0, 5, 5, 1, 'z')", (1, without, 0))

    by_ranges = await rows.inspect_ranges()
    faults = await rows.inspect()
    for found in (faults, by_ranges):
        assert {fault.place: fault.kind for fault in found} == planted
        assert len(found) == len(planted)
    repaired = await rows.inspector.repair(faults)
    assert (repaired.written, repaired.withheld) == (len(planted), {})
    assert rows.found(rows.index) == wanted
    assert await rows.inspect() == []


async def test_what_was_repaired_follows_later_cells_and_refuses_late_writers(indexed):
    """A repaired place has the version of the checkpoint: lower versions lose, the next cell wins."""
    rows, _ = await filled(indexed, definition())
    wanted = rows.wanted(rows.index)
    (shard, row, _), *_ = sorted(wanted)
    rows.sql(shard, f"UPDATE {{table}} SET number = 5, source_added_id = 900000 WHERE row_key = x'{row.hex()}'")
    nobody = next(
        key for key in iter(lambda: uuid.uuid4().bytes, b"") if shard_of(key, SHARDS) == shard_of(row, SHARDS)
    )
    ghost = f"INSERT INTO {{table}} VALUES (x'{nobody.hex()}', 0, 1, 1, 1, 'z', NULL, NULL)"
    rows.sql(shard, ghost)
    faults = await rows.inspect()
    assert {fault.kind for fault in faults} == {STALE, GHOST}
    await rows.inspector.repair(faults)
    late = f"{ghost} ON DUPLICATE KEY UPDATE live = IF(VALUES(source_added_id) > source_added_id, 1, live)"
    rows.sql(shard, late)
    assert rows.found(rows.index) == wanted
    rows.put(rows.cell(row, "BASE", 3, {"owner": "new", "number": 3}), rows.cell(nobody, "BASE", 1, {"owner": "new"}))
    await rows.follow()
    assert rows.found(rows.index) == rows.wanted(rows.index)


async def test_a_checkpoint_that_moves_undoes_a_repair(indexed, monkeypatch):
    """The cells that a repair was computed from are those of the checkpoint, or nothing of it stays."""
    rows, _ = await filled(indexed, definition())
    (shard, row, _), *_ = sorted(rows.wanted(rows.index))
    rows.sql(shard, f"UPDATE {{table}} SET number = 5 WHERE row_key = x'{row.hex()}'")
    faults = await rows.inspect()
    version = iter(range(3, 100))
    kept = rows.inspector.cells.are_kept

    async def moved(*args):
        rows.put(rows.cell(row, "STATUS", next(version), {"state": "later"}))
        await rows.follow()
        return await kept(*args)

    monkeypatch.setattr(rows.inspector.cells, "are_kept", moved)
    assert (await rows.inspector.repair(faults)).written == 0
    assert rows.found(rows.index)[shard, row, 0].values[2] == "later"


async def test_rows_that_have_more_entries_when_they_are_looked_at_again_are_not_forgotten(indexed, monkeypatch):
    """A look reads no more than a page. What the second and the third leave out counts as unsettled."""
    rows = indexed(elements())
    keys = [uuid.UUID(int=n).bytes for n in range(100) if shard_of(uuid.UUID(int=n).bytes, SHARDS) == 1][:3]
    rows.put(*(rows.cell(key, "BASE", 1, {"tags": [{"name": "a", "weight": 1}]}) for key in keys))
    await rows.follow()
    for shard in range(SHARDS):
        rows.sql(shard, "UPDATE {table} SET weight = 77")
    monkeypatch.setattr(inspection, "_PAGE_ENTRIES", 3)
    monkeypatch.setattr(inspection, "_ROWS_AT_ONCE", 1)
    unsettled, looks = rows.inspector._unsettled, []

    async def grown(suspects, reached):
        looks.append(suspects)
        if len(looks) == 1:
            tags = [{"name": "a", "weight": n} for n in range(4)]
            rows.put(*(rows.cell(key, "BASE", 2, {"tags": tags}) for key in keys))
            await rows.follow()
        return await unsettled(suspects, reached)

    monkeypatch.setattr(rows.inspector, "_unsettled", grown)
    page = await rows.inspector.rows(await rows.masters(), 1)
    assert (len(looks), page.rows, len(page.unsettled)) == (3, 3, 1)


@pytest.mark.parametrize("body", ["x'00'", "x''"], ids=["garbage", "empty"])
async def test_a_cell_that_cant_be_decoded_keeps_only_its_own_row_uncompared(indexed, async_storage, command, body):
    """It is named, its entries stay, and what is wrong beside it is repaired."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    wanted = rows.wanted(rows.index)
    corrupt, *others = sorted(wanted, key=lambda place: place[1])
    source = shard_of(corrupt[1], SHARDS)
    entity = f"{rows.datastore.database(source)}.entity"
    run_sql(rows.master(source), f"UPDATE {entity} SET body = {body} WHERE row_key = x'{corrupt[1].hex()}'")
    for shard, row, _ in (corrupt, *others[:3]):
        rows.sql(shard, f"UPDATE {{table}} SET number = 77 WHERE row_key = x'{row.hex()}'")
    status, told = command(rows, "verify", "by_owner", "--no-minions", "--json")
    assert (status, told["stale"], list(told["unreadable"])) == (1, 3, [row_key_text(corrupt[1])])
    assert told["masters"]["unsettled"] == 1  # in both directions
    assert "can't be read" in command(rows, "verify", "by_owner", "--no-minions")[1]
    cleaner = IndexCleaner(async_storage, rows.datastore, lambda: range(SHARDS), 1e6)
    cleaner.watch([rows.index])
    with capture_logs() as logs:
        assert [await cleaner.step() for _ in range(SHARDS)] == [0] * SHARDS
    assert "a range of an index isn't compared" not in {entry["event"] for entry in logs}
    (told,) = [entry for entry in logs if entry["event"] == "a row isn't compared with its index"]
    assert told["row_key"] == row_key_text(corrupt[1])
    found = rows.found(rows.index)
    assert found.pop(corrupt).values[1] == 77
    assert found == {place: entry for place, entry in wanted.items() if place != corrupt}
    status, told = command(rows, "repair", "by_owner", "--no-minions", "--row", row_key_text(corrupt[1]), "--json")
    assert (status, told["clean"], told["stale"], told["ghost"]) == (1, False, 0, 0)


async def test_a_repair_that_would_stop_a_minion_is_withheld(indexed, command, admin):
    """A row on one side only, on either: the minion is named, replication goes on, and the rest is repaired."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    wanted = rows.wanted(rows.index)
    cluster = rows.datastore.home(sorted(wanted)[0][0])
    lost, lacked, plain = [place for place in sorted(wanted) if rows.datastore.home(place[0]) == cluster][:3]
    minions, master = admin.minions(cluster), admin.master(cluster)
    for minion in minions:
        await replicated(rows, minion)
    local = f"{LOCAL_WRITE}; {{change}}; {REPLICATED_WRITE}"

    def key(place):
        return f"row_key = x'{place[1].hex()}'"

    rows.sql(lost[0], local.format(change=f"DELETE FROM {{table}} WHERE {key(lost)}"), master)
    rows.sql(lacked[0], local.format(change=f"DELETE FROM {{table}} WHERE {key(lacked)}"), minions[0])
    rows.sql(lacked[0], local.format(change=f"UPDATE {{table}} SET number = 77 WHERE {key(lacked)}"), master)
    rows.sql(plain[0], f"UPDATE {{table}} SET number = 77 WHERE {key(plain)}")
    status, told = command(rows, "repair", "by_owner", "--no-minions", "--json")
    names = {minion.node.name for minion in minions}
    assert (status, told["missing"], told["stale"], told["repaired"]) == (1, 1, 2, 1)
    assert told["withheld"] == {name: 1 + (name == minions[0].node.name) for name in names}
    assert "would stop its replication" in command(rows, "repair", "by_owner", "--no-minions")[1]
    assert rows.found(rows.index).keys() == wanted.keys() - {lost}
    for minion in minions:
        await replicated(rows, minion)
        rows.sql(lost[0], local.format(change=f"DELETE FROM {{table}} WHERE {key(lost)}"), minion)
    rows.sql(lacked[0], local.format(change=f"DELETE FROM {{table}} WHERE {key(lacked)}"), master)
    for minion in minions[1:]:
        rows.sql(lacked[0], local.format(change=f"DELETE FROM {{table}} WHERE {key(lacked)}"), minion)
    status, told = command(rows, "repair", "by_owner", "--no-minions", "--json")
    assert (status, told["missing"], told["repaired"], told["withheld"]) == (0, 2, 2, {})
    for minion in minions:
        await replicated(rows, minion)
    assert rows.found(rows.index) == wanted
    assert command(rows, "verify", "by_owner")[0] == 0


async def test_a_repair_waits_for_a_minion_that_is_behind(indexed, admin, monkeypatch):
    """What it lacks shows only once it is where its master is. A write before that would stop its replication."""
    rows, _ = await filled(indexed, definition())
    (shard, row, _), *others = sorted(rows.wanted(rows.index))
    source = shard_of(row, SHARDS)
    cluster = rows.datastore.home(shard)
    minion, *_ = minions = admin.minions(cluster)
    for each in minions:
        await replicated(rows, each)
    change = f"{LOCAL_WRITE}; {{}} WHERE row_key = x'{row.hex()}'; {REPLICATED_WRITE}"
    rows.sql(shard, change.format("DELETE FROM {table}"), minion)
    rows.sql(shard, change.format("UPDATE {table} SET number = 77"), admin.master(cluster))
    faults = await rows.inspect()
    waited = []

    async def caught_up(seconds):
        waited.append(rows.found(rows.index)[shard, row, 0].values[1])
        run_sql(minion, "START REPLICA SQL_THREAD")
        for each in minions:
            await replicated(rows, each)

    monkeypatch.setattr(inspection, "asyncio", SimpleNamespace(sleep=caught_up))
    with replication_stopped(minion):
        beside = next(key for _, key, _ in others if key != row and shard_of(key, SHARDS) == source)
        rows.put(rows.cell(beside, "STATUS", 9, {"state": "later"}))
        await rows.follow()
        repaired = await rows.inspector.repair(faults)
    assert waited[0] == 77
    assert (repaired.written, repaired.withheld) == (0, {minion.node.name: 1})
    assert rows.found(rows.index)[shard, row, 0].values[1] == 77


@pytest.fixture
def command(running, kafka, monkeypatch):
    """Runs `schemaless index …` on the servers: exit status and output, the output of --json parsed."""
    monkeypatch.setenv("SCHEMALESS_TOPOLOGY", str(running.path))
    monkeypatch.setenv("SCHEMALESS_KAFKA", kafka)

    def run(rows, *arguments):
        done = CliRunner().invoke(app, ["index", *arguments, "--datastore", rows.datastore.name])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, json.loads(done.stdout) if "--json" in arguments else done.stdout

    return run


def define(rows, stage=IndexStage.ACTIVE):
    for cluster in rows.datastore.clusters:
        master = rows.storage.master(cluster)
        master.run(index_definition_table.bring_to, rows.datastore.name, defined(rows.index, stage))


async def replicated(rows, minion):
    """The minion shows what its master shows."""
    run_sql(minion, "DO 1")
    heads = [rows.storage.master(minion.node.cluster), minion]
    sums = "SELECT COUNT(*), SUM(added_id), SUM(version) FROM schemaless.checkpoint"

    def states():
        def read():
            (result,) = yield sums
            return tuple(result.rows)

        return [node.run(read) for node in heads]

    await async_until(lambda: len(set(states())) == 1)


async def test_the_commands_name_and_repair(indexed, command):
    """verify writes nothing and says 1, a dry run too; repair says 0, and then everything is clean."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    assert command(rows, "verify", "by_owner", "--no-minions")[0] == 0
    (shard, row, _), *_ = sorted(wanted := rows.wanted(rows.index))
    number = wanted[shard, row, 0].values[1]
    rows.sql(shard, f"UPDATE {{table}} SET number = 77 WHERE row_key = x'{row.hex()}'")
    damaged = rows.found(rows.index)
    for read_only in (["verify"], ["repair", "--dry-run"]):
        status, told = command(rows, read_only[0], "by_owner", "--no-minions", *read_only[1:])
        assert status == 1
        assert f'row {row_key_text(row)} has {{"number": 77}}, and the cells say {{"number": {number}}}' in told
        assert rows.found(rows.index) == damaged != wanted
    status, told = command(rows, "repair", "by_owner", "--no-minions", "--json")
    assert (status, told["stale"], told["repaired"], told["masters"]["rows"]) == (0, 1, 1, 80)
    assert rows.found(rows.index) == wanted
    assert command(rows, "verify", "by_owner", "--no-minions", "--rows-per-s", "1000000")[0] == 0


async def test_damage_on_a_minion_is_named_and_never_written(indexed, command, admin):
    """It is told apart from the masters, with what to do; one that can't be asked is named, too."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    ((shard, row, _), entry), *_ = rows.wanted(rows.index).items()
    minion = admin.minions(rows.datastore.home(shard))[0]
    await replicated(rows, minion)
    change = f"UPDATE {{table}} SET number = 77 WHERE row_key = x'{row.hex()}'"
    with replication_stopped(minion):
        rows.sql(shard, f"{LOCAL_WRITE}; {change}; {REPLICATED_WRITE}", minion)
        status, told = command(rows, "repair", "by_owner", "--row", row_key_text(row), "--json")
        assert status == 1
        assert (told["masters"]["stale"], told["minions"]["stale"], told["repaired"]) == (0, 1, 0)
        assert {(fault["node"], fault["kind"]) for fault in told["faults"]} == {(minion.node.name, "stale")}
        assert f"minion {minion.node.name} is never written by a repair" in command(rows, "verify", "by_owner")[1]
        back = change.replace("77", str(entry.values[1]))
        rows.sql(shard, f"{LOCAL_WRITE}; {back}; {REPLICATED_WRITE}", minion)
    assert command(rows, "verify", "by_owner")[0] == 0


@pytest.mark.parametrize("of_range", [True, False])
async def test_a_minion_that_a_check_finds_differing_is_noted_until_it_is_clean(indexed, command, admin, of_range):
    """Queries leave out minions that are noted (C17). What a master has as well says nothing against its minions.

    A check of the range that has the row is enough, so nobody needs the cleaner to take the note away.
    """
    rows, _ = await filled(indexed, definition())
    define(rows)
    wanted = rows.wanted(rows.index)
    place, *others = sorted(wanted)
    shard, row, _ = place
    minion, *_ = minions = admin.minions(rows.datastore.home(shard))
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)
    both = next(other for other in others if other[0] == shard)
    rows.sql(shard, f"UPDATE {{table}} SET number = 77 WHERE row_key = x'{both[1].hex()}'")
    select = (
        f"SELECT number FROM {index_table.table(rows.datastore, shard, rows.index)} WHERE row_key = x'{both[1].hex()}'"
    )

    async def all_replicated():
        """Entries that are written beside the checkpoints, too: a minion that is late would be noted."""
        for cluster in rows.datastore.clusters:
            for each in admin.minions(cluster):
                await replicated(rows, each)
        master = admin.master(rows.datastore.home(shard))
        await async_until(lambda: all(each.run(query, select) == master.run(query, select) for each in minions))

    def noted():
        answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
        return {
            node: found.last.faults
            for answer in answers
            for (of, node), found in answer.items()
            if of == version and found.last.faults
        }

    await all_replicated()
    assert command(rows, "verify", "by_owner")[0] == 1
    assert noted() == {}
    change = f"{LOCAL_WRITE}; UPDATE {{table}} SET number = {{}} WHERE row_key = x'{row.hex()}'; {REPLICATED_WRITE}"
    rows.sql(shard, change.replace("{}", "78"), minion)
    assert command(rows, "verify", "by_owner", "--row", row_key_text(row))[0] == 1
    assert noted() == {minion.node.name: 1}
    rows.sql(shard, change.replace("{}", str(wanted[place].values[1])), minion)
    assert command(rows, "verify", "by_owner", "--row", row_key_text(row))[0] == 0
    assert noted() == {minion.node.name: 1}  # other rows weren't compared
    assert command(rows, "repair", "by_owner", "--row", row_key_text(both[1]))[0] == 0
    await all_replicated()
    before, last = bounds_of(rows.datastore, range_of(rows.datastore, row))
    first = row_after(before)
    for beginning, end in ((row_after(first), last), (first, row_before(last))):
        span = ("--from", row_key_text(beginning), "--to", row_key_text(end))
        assert command(rows, "verify", "by_owner", *span)[0] == 0
        assert noted() == {minion.node.name: 1}  # one row key of the range wasn't compared
    span = ("--from", row_key_text(first), "--to", row_key_text(last))
    assert command(rows, "verify", "by_owner", "--shard", str(shard), *span)[0] == 0
    assert noted() == {minion.node.name: 1}  # nor other shards
    assert command(rows, "verify", "by_owner", *(span if of_range else ()))[0] == 0
    assert noted() == {}


async def test_a_repair_is_looked_for_on_minions_when_they_may_have_followed(indexed, command, admin, monkeypatch):
    """A minion applies nothing until the repair waited twice. It isn't said to differ, and no query leaves it out."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    shard, row, _ = min(rows.wanted(rows.index))
    minion, *_ = minions = admin.minions(rows.datastore.home(shard))
    for each in minions:
        await replicated(rows, each)
    wait, waits = asyncio.sleep, []

    async def sleep(seconds, result=None):
        if seconds == REPLICATED_AFTER_S:
            waits.append(seconds)
            if len(waits) == 2:
                run_sql(minion, "START REPLICA SQL_THREAD")
        return await wait(seconds, result)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    rows.sql(shard, f"UPDATE {{table}} SET number = 77 WHERE row_key = x'{row.hex()}'")
    stale = f"SELECT 1 FROM {index_table.table(rows.datastore, shard, rows.index)} WHERE number = 77"
    await async_until(lambda: all(each.run(query, stale) for each in minions))
    with replication_stopped(minion):
        status, told = command(rows, "repair", "by_owner", "--row", row_key_text(row), "--json")
    assert (status, told["repaired"], told["minions"]["stale"]) == (0, 1, 0)


async def test_a_range_of_which_only_a_check_noted_something_counts_as_not_compared(indexed):
    """Its row has no time of a comparison. Status would show 1970 for it."""
    rows = indexed(definition())
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)
    homes = [rows.storage.master(rows.datastore.home(number)) for number in range(2)]

    def noted():
        answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
        return functools.reduce(merged, [answer[version, "m"] for answer in answers if (version, "m") in answer])

    homes[0].run(note_found, version, 0, FaultCounts(stale=1), "m")
    assert noted() == IndexPass(0, 0, FaultCounts(stale=1), FaultCounts())
    homes[1].run(note, version, 1, FaultCounts(), "m")
    first = noted()
    assert (first.ranges, first.last.faults) == (1, 1)
    assert first.compared_since > 1_600_000_000_000_000
    homes[0].run(note, version, 0, FaultCounts(), "m")
    assert (noted().ranges, noted().compared_since, noted().last.faults) == (2, first.compared_since, 0)


async def test_what_the_cleaner_finds_on_a_minion_during_a_check_stays(indexed, async_storage, admin):
    """It compared the range after the check did, so the check can't say that the minion is clean (C17)."""
    rows, _ = await filled(indexed, definition())
    minion, *_ = admin.minions(rows.datastore.home(0))
    whole = SweepSelection(range(SHARDS), range(SHARDS))
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)

    def find():
        rows.master(0).run(note, version, 0, FaultCounts(stale=1), minion.node.name)

    async def left(on_page):
        for cluster in rows.datastore.clusters:
            for each in admin.minions(cluster):
                await replicated(rows, each)
        check = await check_index(async_storage, rows.inspector, [whole], on_page=on_page)
        assert (check.minions.counts.faults, check.minions.counts.unsettled) == (0, 0)
        return rows.master(0).run(of_all)[version, minion.node.name].last.faults

    find()
    assert await left(lambda role, page: None) == 0
    assert await left(lambda role, page: find() if minion.node.name in page.faults else None) == 1


async def test_a_check_that_couldnt_judge_a_row_doesnt_say_that_a_minion_is_clean(indexed, command, admin):
    """The row that differs got a cell since, and the minion is behind. It differs as before (C17)."""
    rows, _ = await filled(indexed, definition())
    define(rows)
    (shard, row, _), *_ = sorted(rows.wanted(rows.index))
    minion, *_ = admin.minions(rows.datastore.home(shard))
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)

    def noted():
        answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
        found = [answer[version, minion.node.name] for answer in answers if (version, minion.node.name) in answer]
        return [one.last.faults for one in found if one.last.faults]

    for cluster in rows.datastore.clusters:
        for each in admin.minions(cluster):
            await replicated(rows, each)
    with replication_stopped(minion):
        change = f"UPDATE {{table}} SET number = 78 WHERE row_key = x'{row.hex()}'"
        rows.sql(shard, f"{LOCAL_WRITE}; {change}; {REPLICATED_WRITE}", minion)
        assert command(rows, "verify", "by_owner")[0] == 1
        assert noted() == [1]
        rows.put(rows.cell(row, "BASE", 3, {"owner": "someone else", "number": 3}))
        told = command(rows, "verify", "by_owner", "--json")[1]
        assert (told["minions"]["stale"], told["minions"]["unsettled"]) == (0, 1)
        assert noted() == [1]


async def test_a_selection_finds_what_is_in_it(indexed):
    """One row with its entries in all shards; a shard with its rows and its entries; a range of row keys."""
    rows, _ = await filled(indexed, definition())
    ghosts = {shard: uuid.uuid4().bytes for shard in range(SHARDS)}
    for shard, row in ghosts.items():
        rows.sql(shard, f"INSERT INTO {{table}} VALUES (x'{row.hex()}', 0, 1, 1, 1, 'z', NULL, NULL)")
    nodes = await rows.masters()

    async def found(selection):
        pages = [page async for page in sweep(rows.inspector, nodes, selection)]
        assert sum(page.steps for page in pages) == selection.steps
        return {fault.place[:2] for page in pages for faults in page.faults.values() for fault in faults}

    assert await found(one_row(rows.datastore, ghosts[2])) == {(2, ghosts[2])}
    assert await found(SweepSelection([1], [1])) == {(1, ghosts[1])}
    everything = SweepSelection(range(SHARDS), range(SHARDS))
    middle = sorted(ghosts.values())[1:3]
    in_range = msgspec.structs.replace(everything, first=middle[0], last=middle[1])
    assert await found(in_range) == {
        (shard, row) for shard, row in ghosts.items() if row in sorted(ghosts.values())[1:3]
    }
    assert len(await found(everything)) == SHARDS


async def test_only_a_complete_index_is_checked(indexed, command):
    """One that is being built lacks entries by right."""
    rows = indexed(definition())
    define(rows, IndexStage.BUILDING)
    with pytest.raises(NotReady, match="is building"):
        command(rows, "verify", "by_owner")
    with pytest.raises(Invalid, match="has shards 0 to 3"):
        command(rows, "verify", "by_owner", "--shard", "4")


async def test_the_cleaner_repairs_and_notes_what_it_found(indexed, async_storage):
    """It compares each range once in a period, of those that it owns, and goes on where another one was."""
    rows, _ = await filled(indexed, definition())
    wanted = rows.wanted(rows.index)
    (shard, row, _), *_ = sorted(wanted)
    rows.sql(shard, f"DELETE FROM {{table}} WHERE row_key = x'{row.hex()}'")
    ghost = uuid.uuid4().bytes
    rows.sql(1, f"INSERT INTO {{table}} VALUES (x'{ghost.hex()}', 0, 1, 1, 1, 'z', NULL, NULL)")
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)

    async def noted():
        answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
        found = [answer[version, MASTERS] for answer in answers if (version, MASTERS) in answer]
        return found and functools.reduce(merged, found)

    async def clean(owned):
        cleaner = IndexCleaner(async_storage, rows.datastore, lambda: owned, 1e6)
        cleaner.watch([rows.index])
        steps = 0
        while await cleaner.step() == 0:
            steps += 1
        return steps

    assert await clean([0, 1]) == 2
    first = await noted()
    assert first.ranges == 2
    assert await clean(range(SHARDS)) == 2  # the others: those two were compared a moment ago
    found = await noted()
    assert rows.found(rows.index) == wanted
    assert (found.ranges, found.last.rows, found.total.missing, found.total.ghost, found.total.repaired) == (
        SHARDS, 80, 1, 1, 2,
    )  # fmt: skip
    assert first.compared_since == found.compared_since


async def test_what_only_a_minion_has_is_named_and_counted_by_the_cleaner(indexed, async_storage, admin):
    """It writes nothing. What its master has as well is no fault of the minion: the other cleaner repairs it (C17)."""
    rows, _ = await filled(indexed, definition())
    wanted = rows.wanted(rows.index)
    (shard, row, _), *_ = sorted(wanted)
    minion = admin.minions(rows.datastore.home(shard))[0]
    of_both = next(entry for entry in sorted(wanted) if entry[1] != row)
    other, row_of_both, _ = of_both
    rows.sql(other, f"DELETE FROM {{table}} WHERE row_key = x'{row_of_both.hex()}'")
    ghost = uuid.uuid4().bytes
    for cluster in rows.datastore.clusters:
        for each in admin.minions(cluster):
            await replicated(rows, each)
    table = index_table.table(rows.datastore, other, rows.index)
    select = f"SELECT 1 FROM {table} WHERE row_key = x'{row_of_both.hex()}'"
    await async_until(lambda: not admin.minions(rows.datastore.home(other))[0].run(query, select))
    local = f"{LOCAL_WRITE}; {{change}}; {REPLICATED_WRITE}"
    rows.sql(shard, local.format(change=f"DELETE FROM {{table}} WHERE row_key = x'{row.hex()}'"), minion)
    planted = f"INSERT INTO {{table}} VALUES (x'{ghost.hex()}', 0, 1, 1, 1, 'z', NULL, NULL)"
    rows.sql(shard, local.format(change=planted), minion)

    async def sleep(seconds):
        """The minion has what its master wrote."""

    cleaner = MinionCleaner(async_storage, rows.datastore, lambda: range(SHARDS), 1e6, sleep=sleep)
    cleaner.watch([rows.index])
    with capture_logs() as logs:
        assert [await cleaner.step() for _ in range(SHARDS)] == [0] * SHARDS
    told = [entry for entry in logs if entry["event"] == "an entry of an index differs from its cells"]
    assert {(entry["node"], entry["kind"], entry["row_key"]) for entry in told} == {
        (minion.node.name, "missing", row_key_text(row)),
        (minion.node.name, "ghost", row_key_text(ghost)),
    }
    assert rows.found(rows.index) == {entry: fields for entry, fields in wanted.items() if entry != of_both}
    assert await cleaner.step() > 0
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)
    answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
    noted = functools.reduce(merged, [found[version, minion.node.name] for found in answers])
    assert (noted.ranges, noted.last.rows) == (SHARDS, 80)
    assert (noted.last.missing, noted.last.stale, noted.last.ghost, noted.last.repaired) == (1, 0, 1, 0)
    others = [
        found for answer in answers for key, found in answer.items() if key[0] == version and key[1] != minion.node.name
    ]
    assert sum(found.last.faults for found in others) == 0
    rows.sql(shard, local.format(change=f"DELETE FROM {{table}} WHERE row_key = x'{ghost.hex()}'"), minion)


@pytest.mark.parametrize("fails", [None, index_table.live_in_span], ids=["away", "without its tables"])
async def test_a_minion_that_cant_be_compared_holds_up_no_other(indexed, async_storage, monkeypatch, fails):
    """It is named in the log. Where none can be compared, the range is compared later."""
    rows, _ = await filled(indexed, definition())
    minion = async_storage.minions(rows.datastore.clusters[0])[0]
    away, asked = {minion.node.name}, AsyncServer.run

    async def run(node, operation, *arguments, **options):
        if node.node.name in away and fails in (None, operation):
            raise StorageUnavailable(f"{node.node.name} is away")
        return await asked(node, operation, *arguments, **options)

    monkeypatch.setattr(AsyncServer, "run", run)
    cleaner = MinionCleaner(async_storage, rows.datastore, lambda: range(SHARDS), 1e6)
    cleaner.watch([rows.index])
    with capture_logs() as logs:
        while await cleaner.step() == 0:
            pass
        away |= set(cleaner.compared_nodes)
        cleaner = MinionCleaner(async_storage, rows.datastore, lambda: [0], 1e6, pass_period_s=0)
        cleaner.watch([rows.index])
        await cleaner.step()
    events = [entry["event"] for entry in logs]
    assert events.count("a minion isn't compared") >= SHARDS
    assert events[-1] == "a range of an index isn't compared"
    answers = [rows.storage.master(cluster).run(of_all) for cluster in rows.datastore.clusters]
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)
    compared = {node for answer in answers for of, node in answer if of == version}
    assert compared == set(cleaner.compared_nodes) - {minion.node.name}


async def test_each_write_to_a_kept_version_counts_once(indexed):
    """With the entries' own transaction, on the cluster that took them. A move to another shard is two writes."""
    rows, row_keys = await filled(indexed, definition())
    version = IndexVersion(rows.datastore.name, rows.index.name, rows.index.number)

    def counted():
        answers = [
            rows.storage.master(cluster).run(index_write_table.of_datastore, rows.datastore.name)
            for cluster in rows.datastore.clusters
        ]
        return sum(answer.get(version, 0) for answer in answers)

    assert counted() == 0
    rows.maintainer.is_kept = True
    first, second, *_ = by_shard = list(owners().values())
    rows.put(*(rows.cell(row, "BASE", 3, {"owner": first, "number": 3}) for row in row_keys[:5]))
    rows.put(*(rows.cell(uuid.uuid4().bytes, "BASE", 1, {"owner": owner}) for owner in by_shard))
    await rows.follow()
    before = counted()
    assert len(by_shard) + 5 <= before <= len(by_shard) + 10
    rows.put(*(rows.cell(row, "BASE", 4, {"owner": second, "number": 3}) for row in row_keys[:5]))
    await rows.follow()
    assert counted() == before + 10


async def test_a_cleaner_waits_for_an_index_that_it_cannot_read(indexed, async_storage):
    """A table that is gone, or one that is being dropped, holds up neither the other shards nor the process."""
    rows, _ = await filled(indexed, definition())
    rows.sql(2, "DROP TABLE {table}")
    cleaner = IndexCleaner(async_storage, rows.datastore, lambda: range(SHARDS), 1e6)
    cleaner.watch([rows.index])
    with capture_logs() as logs:
        assert [await cleaner.step() for _ in range(SHARDS)] == [0] * SHARDS
    assert "a range of an index isn't compared" in {entry["event"] for entry in logs}
    assert await cleaner.step() > 0
