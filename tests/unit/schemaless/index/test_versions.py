"""Versions of an index side by side: which one answers, whatever sequence the rows of several masters merge in."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.errors import Conflict, NotFound, NotReady, StorageUnavailable
from schemaless.index.catalogue import Change, create_index, drop_index, pause_index
from schemaless.index.definition import parse_definition
from schemaless.index.switch import drop_version, switch_index, switch_to
from schemaless.index.versions import NamedIndex, VersionRole, merge
from schemaless.storage import checkpoint_table, index_definition_table
from schemaless.storage.index_definition_table import (
    DefinedIndex,
    IndexOrder,
    IndexStage,
    IndexState,
    IndexSwitch,
    RunState,
)
from schemaless.topology import Datastore, Node

DATASTORE = Datastore("d", 4, 1, ("a", "b"))
PRESENT = (IndexStage.DEFINED, IndexStage.BUILDING, IndexStage.ACTIVE)


def definition(*stored):
    return parse_definition(
        {
            "name": "by_owner",
            "shard_field": "owner",
            "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
            "stored": [{"name": name, "column": "BASE", "path": name, "type": "int"} for name in stored],
        }
    )


class MemoryMaster:
    """One server's versions. tests/integration/storage/test_index_versions.py asks the same of real ones."""

    def __init__(self, name):
        self.node = Node(name, name, "127.0.0.1", 1, "u", "p", "")
        self.rows = {}
        self.now = 0
        self.away = False

    async def run(self, operation, datastore, *arguments, timeout_s=None):
        if self.away:
            raise StorageUnavailable(f"{self.node.name} is away")
        statements = {
            index_definition_table.all_of: lambda: list(self.rows.values()),
            checkpoint_table.of_consumer: lambda consumer: [],  # so none is behind
            index_definition_table.insert: self._insert,
            index_definition_table.bring_to: self._bring_to,
            index_definition_table.switch_to: self._switch_to,
            index_definition_table.retire: self._retire,
        }
        return statements[operation](*arguments)

    def _insert(self, index, indexes_max):
        if all(number < index.number for number in self.rows):
            self.rows[index.number] = index

    def _bring_to(self, index):
        if index.number in self.rows or all(number < index.number for number in self.rows):
            merged = merge({"own": self.rows.values(), "new": [index]}, {}).merged
            self.rows = {row.number: row for row in merged.values()}

    def _switch_to(self, index, keep_s):
        own, latest = self.rows[index.number], self._latest()
        if own.stage is IndexStage.ACTIVE and own.switch.number == index.switch.number < latest:
            self.now += 1
            self.rows[index.number] = replace(own, switch=IndexSwitch(latest + 1, self.now, keep_s))

    def _retire(self, index, not_before):
        own = self.rows[index.number]
        if own.is_present and own.switch.number == index.switch.number < self._latest():
            self.rows[index.number] = replace(own, stage=IndexStage.DELETING)

    def _latest(self):
        return max((row.switch.number for row in self.rows.values() if row.is_present), default=0)


class MemoryMasters:
    def __init__(self):
        self.masters = [MemoryMaster("a"), MemoryMaster("b")]
        self.topology = SimpleNamespace(clusters=("a", "b"))

    def master(self, cluster):
        return next(master for master in self.masters if master.node.cluster == cluster)

    def built(self, number):
        """What indexers do."""
        for master in self.masters:
            master.rows[number] = replace(master.rows[number], stage=IndexStage.ACTIVE)

    def named(self):
        return merge({each.node.cluster: each.rows.values() for each in self.masters}, {}).of("d", "by_owner")


@pytest.fixture
def storage():
    return MemoryMasters()


async def change(storage, *stored, **options):
    return await create_index(storage, DATASTORE, definition(*stored), change=Change(600, **options))


async def changed(storage):
    """Version 1 answers, and version 2 is built."""
    await create_index(storage, DATASTORE, definition())
    storage.built(1)
    assert await change(storage, "state")
    storage.built(2)


async def test_a_change_is_a_version_beside_the_one_that_answers(storage):
    """It is asked for in so many words. Asking again changes nothing, and a third definition has to wait."""
    await create_index(storage, DATASTORE, definition())
    storage.built(1)
    with pytest.raises(Conflict, match="--change"):
        await create_index(storage, DATASTORE, definition("state"))
    assert await change(storage, "state")
    assert not await change(storage, "state")
    assert not await create_index(storage, DATASTORE, definition())
    with pytest.raises(Conflict, match="drop by_owner --version 2"):
        await change(storage, "other")
    named = storage.named()
    assert [(index.number, named.role(index)) for index in named.versions] == [
        (1, VersionRole.ANSWERS),
        (2, VersionRole.CHANGE),
    ]
    with pytest.raises(NotReady):
        await switch_index(storage, DATASTORE, "by_owner")
    assert storage.named().answering.number == 1


async def test_a_switch_there_and_back(storage):
    """Each one twice is harmless. The version that doesn't answer is kept from the last switch on."""
    await changed(storage)
    for _ in range(2):
        assert (await switch_index(storage, DATASTORE, "by_owner")).number == 2
    named = storage.named()
    assert named.kept_until(named.version(1)) == 1 + 600 * 10**6
    with pytest.raises(Conflict, match="switch by_owner --version 1"):
        await change(storage)
    for _ in range(2):
        assert (await switch_index(storage, DATASTORE, "by_owner", 1)).number == 1
    named = storage.named()
    assert (named.role(named.version(2)), named.kept_until(named.version(2))) == (VersionRole.KEPT, 2 + 600 * 10**6)
    with pytest.raises(Conflict, match="none before it"):
        await switch_index(storage, DATASTORE, "by_owner", back=True)
    assert (await switch_index(storage, DATASTORE, "by_owner", keep_s=7)).number == 2
    named = storage.named()
    assert named.kept_until(named.version(1)) == 3 + 7 * 10**6
    assert (await switch_index(storage, DATASTORE, "by_owner", back=True)).number == 1


async def test_a_late_switch_of_an_indexer_doesn_t_undo_an_order(storage):
    """It saw the change before it was switched to and back from. Its compare-and-set fails."""
    await changed(storage)
    seen = storage.named()
    await switch_index(storage, DATASTORE, "by_owner")
    await switch_index(storage, DATASTORE, "by_owner", back=True)
    with pytest.raises(Conflict, match="another order"):
        await switch_to(storage, DATASTORE, seen, seen.change)
    assert storage.named().answering.number == 1


async def test_the_first_master_decides(storage):
    """Without it nothing is switched or ended. Without another one a switch back is, and that one takes it later."""
    await changed(storage)
    await switch_index(storage, DATASTORE, "by_owner")
    a, b = storage.masters
    b.away = True
    with pytest.raises(StorageUnavailable):
        await create_index(storage, DATASTORE, definition("third"), change=Change(600))
    assert (await switch_index(storage, DATASTORE, "by_owner", back=True)).number == 1
    with pytest.raises(StorageUnavailable):  # nobody knows whether its entries on b are complete
        await switch_index(storage, DATASTORE, "by_owner")
    a.away, b.away = True, False
    for order in (switch_index(storage, DATASTORE, "by_owner", 1), drop_version(storage, DATASTORE, "by_owner", 1)):
        with pytest.raises(StorageUnavailable):
            await order
    assert storage.named().answering.number == 1
    assert [(cluster, index.number) for cluster, index in merge(rows_of(storage), {}).lagging] == [("b", 1)]


def rows_of(storage):
    return {master.node.cluster: master.rows.values() for master in storage.masters}


async def test_only_a_version_that_doesn_t_answer_is_dropped_alone(storage):
    """Dropping the index drops all of them. A version that is being deleted never answers again."""
    await changed(storage)
    with pytest.raises(Conflict, match="answers queries"):
        await drop_version(storage, DATASTORE, "by_owner", 1)
    with pytest.raises(NotFound):
        await drop_version(storage, DATASTORE, "by_owner", 3)
    assert (await drop_version(storage, DATASTORE, "by_owner", 2)).state is IndexState.DELETING
    with pytest.raises(Conflict):
        await switch_index(storage, DATASTORE, "by_owner", 2)
    assert await change(storage, "again")
    await drop_index(storage, DATASTORE, "by_owner")
    assert {index.state for index in storage.named().versions} == {IndexState.DELETING}
    assert await create_index(storage, DATASTORE, definition())
    assert (storage.named().answering.number, storage.named().answering.state) == (4, IndexState.BUILDING)


async def test_an_order_means_the_change_as_long_as_there_is_one(storage):
    """So a build that is too much for the servers is paused, and not the version that answers."""
    await changed(storage)
    assert (await pause_index(storage, DATASTORE, "by_owner")).number == 2
    with pytest.raises(Conflict, match="resume it first"):
        await switch_index(storage, DATASTORE, "by_owner")
    assert (await pause_index(storage, DATASTORE, "by_owner", 1)).number == 1
    with pytest.raises(NotFound, match="it has 1, 2"):
        await pause_index(storage, DATASTORE, "by_owner", 7)


def row(number, stage, switch, revision):
    text = "" if stage is IndexStage.GONE else f"definition {number}"
    return DefinedIndex("by_owner", number, text, stage, IndexOrder(RunState.RUNNING, revision=revision), switch)


switches = st.builds(IndexSwitch, st.integers(0, 4), st.none() | st.integers(1, 3), st.integers(0, 2), st.booleans())
rows = st.builds(row, st.integers(1, 3), st.sampled_from(IndexStage), switches, st.integers(0, 2))


@given(st.lists(rows, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_rows_merge_to_the_same_versions_in_any_sequence(found, chance):
    """One by one, in groups, or again: the same version answers everywhere, and only one."""
    together = merge({str(n): [each] for n, each in enumerate(found)}, {}).merged
    shuffled = chance.sample(found, len(found))
    one_by_one = {}
    for each in [*shuffled, chance.choice(found)]:
        one_by_one = merge({"before": one_by_one.values(), "now": [each]}, {}).merged
    assert one_by_one == together
    present = tuple(each for _, each in sorted(together.items()) if each.stage is not IndexStage.GONE)
    if present:
        named = NamedIndex(present)
        answering = [each for each in present if named.role(each) is VersionRole.ANSWERS]
        assert answering == [named.answering] * any(each.is_present for each in present)
