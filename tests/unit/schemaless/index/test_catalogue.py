"""The catalogue of indexes: how the rows of several masters merge, and how a process reads it that looks often."""

import asyncio
import random
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import msgspec
import pytest

from schemaless.errors import AccountRefused, Conflict, NotFound, StorageUnavailable
from schemaless.index.catalogue import (
    IndexWatch,
    bring_up,
    create_index,
    drop_index,
    pause_index,
    read_versions,
    resume_index,
    throttle_index,
)
from schemaless.index.definition import NUMBER_MAX, parse_definition
from schemaless.index.versions import merge
from schemaless.names import index_consumer, index_table_name
from schemaless.storage import index_definition_table
from schemaless.storage.index_definition_table import (
    IndexLimits,
    IndexOrder,
    IndexStage,
    IndexState,
    RunState,
    defined,
)
from schemaless.topology import Datastore, Node

DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
    }
)
DATASTORE = Datastore("d", 4, 1, ("a", "b"))


class MemoryMaster:
    """One server's index definitions, which merge as the table's rows do. `parsed` counts how often they were read."""

    def __init__(self, name):
        self.node = Node(name, name, "127.0.0.1", 1, "u", "p", "")
        self.rows = []
        self.parsed = 0
        self.away, self.error = False, None
        self.chance = None

    async def run(self, operation, datastore, *arguments, timeout_s=None):
        for _ in range(self.chance.randrange(6) if self.chance else 0):  # others come first
            await asyncio.sleep(0)
        if self.error:
            raise self.error
        if self.away:
            raise StorageUnavailable(f"{self.node.name} is away")
        if operation is index_definition_table.stamps_of:
            return tuple((index.name, index.number, index.stage, index.order.revision) for index in self.rows)
        if operation is index_definition_table.bring_to:
            (given,) = arguments
            for own in self.rows:  # of orders of one revision the first one stays
                if (own.number, own.order.revision) == (given.number, given.order.revision):
                    given = replace(given, order=own.order)
            self.rows = list(merge({"own": self.rows, "new": [given]}, {}).merged.values())
            return None
        assert operation is index_definition_table.all_of
        self.parsed += 1
        return list(self.rows)


class MemoryMasters:
    def __init__(self):
        self.masters = [MemoryMaster("a"), MemoryMaster("b")]
        self.topology = SimpleNamespace(clusters=("a", "b"))

    def master(self, cluster):
        return next(master for master in self.masters if master.node.cluster == cluster)


@pytest.fixture
def storage():
    return MemoryMasters()


async def test_definitions_are_read_only_after_a_change(storage):
    """A look that finds nothing new reads the stamps only. A change on any master is seen by the next look."""
    a, b = storage.masters
    watch = IndexWatch(storage, DATASTORE)
    for stage in (IndexStage.DEFINED, IndexStage.BUILDING, IndexStage.ACTIVE):
        b.rows = [defined(DEFINITION, stage)]
        assert (await watch.look()).of("d", "by_owner").answering == b.rows[0]
        parsed = a.parsed, b.parsed
        for _ in range(3):
            await watch.look()
        assert (a.parsed, b.parsed) == parsed
    assert b.parsed == 3


async def test_a_master_that_is_away_hides_nothing_that_another_knows(storage):
    """With all of them away, there is no answer."""
    a, b = storage.masters
    a.rows = [defined(DEFINITION, IndexStage.ACTIVE)]
    watch = IndexWatch(storage, DATASTORE)
    b.away = True
    found = await watch.look()
    assert list(found.indexes()) == ["by_owner"]
    assert list(found.away) == ["b"]
    a.away = True
    with pytest.raises(StorageUnavailable):
        await watch.look()


async def test_an_index_that_needs_every_cluster_names_who_refuses_the_account(storage):
    """A cluster that is only away is named as well."""
    storage.masters[1].error = AccountRefused("b refuses the account 'u': Access denied", "b refuses the account 'u'")
    with pytest.raises(AccountRefused, match="made on every cluster, and these are away: b") as raised:
        await create_index(storage, DATASTORE, DEFINITION)
    assert raised.value.shown == "b refuses the account 'u'"


def test_rows_of_several_masters_merge_in_any_sequence():
    """The furthest stage and the highest revision count, whoever has them. A row that goes back is never seen."""
    paused, limited = IndexOrder(RunState.PAUSED, revision=2), IndexOrder(limits=IndexLimits(5), revision=1)
    rows = [
        defined(DEFINITION, IndexStage.ACTIVE, limited),
        defined(DEFINITION, IndexStage.BUILDING, paused),
        defined(DEFINITION, IndexStage.DEFINED),
    ]
    for some in permutations(rows):
        merged = merge({str(n): [row] for n, row in enumerate(some)}, {})
        assert merged.of("d", "by_owner").answering == defined(DEFINITION, IndexStage.ACTIVE, paused)
        assert len(merged.lagging) == 3


def test_two_orders_of_one_revision_count_the_same_everywhere():
    """They were given at the same moment, each to another master first."""
    one, other = IndexOrder(RunState.PAUSED, revision=1), IndexOrder(limits=IndexLimits(5), revision=1)
    another = IndexOrder(limits=IndexLimits(None, 7), revision=1)
    pairs = [*permutations((one, other, another), 2)]
    assert (
        len(
            {
                merge({"a": [defined(DEFINITION, order=x)], "b": [defined(DEFINITION, order=y)]}, {})
                .of("d", "by_owner")
                .answering.order
                for x, y in pairs
            }
        )
        == 2
    )


def test_a_version_that_is_gone_is_hidden_but_its_number_stays():
    """A later version of the name is another one. A master with a later number is never given the earlier one."""
    gone, later = replace(defined(DEFINITION, IndexStage.GONE), text=""), defined(replace(DEFINITION, number=2))
    assert merge({"a": [gone], "b": [defined(DEFINITION, IndexStage.DELETING)]}, {}).indexes() == {}
    both = merge({"a": [gone, later], "b": [later]}, {})
    assert both.of("d", "by_owner").versions == (later,)
    assert both.lagging == []
    with pytest.raises(NotFound, match="was dropped, and nothing of it is left"):
        merge({"a": [gone]}, {}).of("d", "by_owner")
    with pytest.raises(NotFound, match="there is no index 'other'"):
        merge({"a": [gone]}, {}).of("d", "other")


async def test_a_drop_reaches_the_masters_that_answer_and_wins_over_everything(storage):
    """The one that was away has an older stage, and counts no more when it is back."""
    a, b = storage.masters
    a.rows = b.rows = [defined(DEFINITION, IndexStage.ACTIVE)]
    b.away = True
    assert (await drop_index(storage, DATASTORE, "by_owner")).state is IndexState.DELETING
    b.away = False
    assert (await IndexWatch(storage, DATASTORE).look()).of("d", "by_owner").answering.state is IndexState.DELETING
    with pytest.raises(Conflict):
        await resume_index(storage, DATASTORE, "by_owner")


async def test_orders_follow_one_another(storage):
    """Each has a higher revision, also if a master missed the last ones. The same order again is no order."""
    a, b = storage.masters
    a.rows = b.rows = [defined(DEFINITION, IndexStage.ACTIVE)]
    assert (await pause_index(storage, DATASTORE, "by_owner")).state is IndexState.PAUSED
    b.away = True
    limited = await throttle_index(storage, DATASTORE, "by_owner", {"cells_per_s": 7})
    assert (limited.state, limited.order.limits, limited.order.revision) == (IndexState.PAUSED, IndexLimits(7), 2)
    lagging = await throttle_index(storage, DATASTORE, "by_owner", {"build_busy_share": 0.05})
    assert lagging.order.limits == IndexLimits(7, build_busy_share=0.05)
    a.away, b.away = True, False
    a.away = False
    assert (await resume_index(storage, DATASTORE, "by_owner")).order == IndexOrder(
        limits=lagging.order.limits, revision=4
    )
    assert (await resume_index(storage, DATASTORE, "by_owner")).order.revision == 4


@pytest.mark.parametrize("seed", range(20))
async def test_orders_that_are_given_at_once_all_count(storage, seed):
    """Whichever comes first on which master. Afterwards the masters have the same order."""
    a, b = storage.masters
    a.rows = b.rows = [defined(DEFINITION, IndexStage.ACTIVE)]
    a.chance = b.chance = random.Random(seed)
    given = {"cells_per_s": 7, "build_lag_cells_max": 8, "build_commit_max_s": 0.9, "build_busy_share": 0.1}
    orders = [throttle_index(storage, DATASTORE, "by_owner", {limit: value}) for limit, value in given.items()]
    *throttled, paused = await asyncio.gather(*orders, pause_index(storage, DATASTORE, "by_owner"))
    for (limit, value), answer in zip(given.items(), throttled, strict=True):
        assert getattr(answer.order.limits, limit) == value
    assert paused.state is IndexState.PAUSED
    assert a.rows == b.rows
    (left,) = a.rows
    assert (left.order.run_state, left.order.limits) == (RunState.PAUSED, IndexLimits(**given))


async def test_masters_with_other_orders_of_one_revision_are_brought_to_the_one_that_counts(storage):
    """Else another one would count while a master is away."""
    a, b = storage.masters
    a.rows = [defined(DEFINITION, order=IndexOrder(RunState.PAUSED, revision=3))]
    b.rows = [defined(DEFINITION, order=IndexOrder(limits=IndexLimits(5), revision=3))]
    versions = await read_versions(storage, DATASTORE)
    assert versions.disputed == {("by_owner", 1)}
    counts = versions.of("d", "by_owner").answering.order
    await bring_up(storage, DATASTORE, versions)
    assert a.rows == b.rows == [defined(DEFINITION, order=msgspec.structs.replace(counts, revision=4))]
    assert (await read_versions(storage, DATASTORE)).disputed == frozenset()


async def test_a_failed_index_is_resumed_and_not_paused(storage):
    """A pause would hide why it failed."""
    failed = IndexOrder(RunState.FAILED, "its table is gone", revision=1)
    storage.masters[0].rows = [defined(DEFINITION, IndexStage.BUILDING, failed)]
    with pytest.raises(Conflict, match="its table is gone"):
        await pause_index(storage, DATASTORE, "by_owner")
    assert (await resume_index(storage, DATASTORE, "by_owner")).state is IndexState.BUILDING


def test_names_of_versions_fit_a_table_and_never_meet():
    """The first version keeps the plain names. The longest name with the highest number has 64 characters."""
    assert (index_table_name("x"), index_consumer("x")) == ("index_x", "index:x")
    assert (index_table_name("x", 2), index_consumer("x", 2)) == ("index_x$2", "index:x:2")
    assert len(index_table_name("x" * 48, NUMBER_MAX)) == 64
