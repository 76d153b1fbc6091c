"""The rows of an index's versions on a server: they only move forward, and the statements that decide are atomic."""

from dataclasses import replace

import pytest

from schemaless.index.definition import parse_definition
from schemaless.index.versions import NamedIndex
from schemaless.storage import index_definition_table
from schemaless.storage.index_definition_table import IndexOrder, IndexStage, IndexSwitch, RunState, defined

pytestmark = pytest.mark.storage

DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
    }
)
FIRST = defined(DEFINITION, IndexStage.ACTIVE)
CHANGE = defined(replace(DEFINITION, number=2), IndexStage.ACTIVE, switch=IndexSwitch(0, keep_s=600, by_hand=True))


@pytest.fixture
def table(make_datastore, storage):
    """The operations of one datastore's rows on its first master."""
    datastore = make_datastore(shards=1, partitions=1)
    master = storage.masters[0]

    def run(operation, *arguments):
        return master.run(operation, datastore.name, *arguments)

    run(index_definition_table.bring_to, FIRST)
    run(index_definition_table.bring_to, CHANGE)
    return run


def rows(table):
    return {index.number: index for index in table(index_definition_table.all_of)}


def test_a_row_is_read_as_it_was_written(table):
    """With all that a switch says, and a time to the microsecond."""
    switched = replace(CHANGE, switch=IndexSwitch(3, 1_700_000_000_123_456, 7, False))
    table(index_definition_table.bring_to, switched)
    assert rows(table) == {1: FIRST, 2: switched}
    for older in (CHANGE, replace(CHANGE, switch=IndexSwitch(2, 5, 9, True))):
        table(index_definition_table.bring_to, older)
        assert rows(table)[2] == switched
    both = replace(switched, order=IndexOrder(RunState.PAUSED, revision=1), switch=IndexSwitch(4, None, 0, False))
    table(index_definition_table.bring_to, both)
    assert rows(table)[2] == both


def test_a_switch_happens_once(table):
    """A second one that read the same row finds it changed, and so does one to the version that answers."""
    for _ in range(2):
        table(index_definition_table.switch_to, CHANGE, 60)
    switched = rows(table)[2].switch
    assert (switched.number, switched.keep_s) == (2, 60)
    table(index_definition_table.switch_to, rows(table)[2], 60)
    assert rows(table)[2].switch == switched
    table(index_definition_table.switch_to, FIRST, 30)
    named = NamedIndex(tuple(rows(table).values()))
    assert (named.answering.number, named.answering.switch.number) == (1, 3)
    assert named.answering.switch.at >= switched.at
    table(index_definition_table.switch_to, CHANGE, 60)
    assert rows(table)[1].switch.number == 3


@pytest.mark.parametrize("stage", [IndexStage.DEFINED, IndexStage.BUILDING, IndexStage.DELETING])
def test_only_a_complete_version_is_switched_to(table, stage):
    """One that is built, or that is being deleted, answers nothing."""
    third = defined(replace(DEFINITION, number=3), stage, switch=IndexSwitch(0))
    table(index_definition_table.bring_to, third)
    table(index_definition_table.switch_to, third, 0)
    assert rows(table)[3] == third


def test_the_version_that_answers_is_not_retired(table):
    """Nor one before its time, nor one that was switched to meanwhile."""
    table(index_definition_table.retire, FIRST)
    table(index_definition_table.retire, CHANGE, 4_000_000_000_000_000)
    assert rows(table) == {1: FIRST, 2: CHANGE}
    table(index_definition_table.switch_to, CHANGE, 0)
    table(index_definition_table.switch_to, FIRST, 0)
    table(index_definition_table.retire, CHANGE)
    assert rows(table)[2].is_present
    table(index_definition_table.retire, rows(table)[2], rows(table)[1].switch.at)
    assert rows(table)[2].stage is IndexStage.DELETING
    table(index_definition_table.switch_to, rows(table)[2], 0)
    assert rows(table)[2].stage is IndexStage.DELETING


def test_what_changes_is_seen_in_the_stamps(table):
    """So indexers read definitions only then."""
    before = table(index_definition_table.stamps_of)
    table(index_definition_table.switch_to, CHANGE, 60)
    assert table(index_definition_table.stamps_of) != before


@pytest.mark.parametrize("stage", [IndexStage.DELETING, IndexStage.GONE, None])
def test_no_build_is_noted_of_a_version_that_was_dropped(table, stage):
    """A late process may begin it. None: its row went, too, as a later version took the name."""
    third = defined(replace(DEFINITION, number=3), IndexStage.DEFINED)
    first = (index_definition_table.begin_build, "by_owner", 3, {0: 7})
    table(*first)  # this server doesn't have the row yet
    assert table(index_definition_table.build_until, "by_owner", 3) == {0: 7}
    table(index_definition_table.bring_to, third)
    table(index_definition_table.begin_build, "by_owner", 3, {0: 9})
    assert table(index_definition_table.build_until, "by_owner", 3) == {0: 7}
    table(index_definition_table.bring_to, replace(third, stage=stage or IndexStage.GONE))
    if stage is None:
        table(index_definition_table.bring_to, defined(replace(DEFINITION, number=4)))
        assert rows(table).keys() == {1, 2, 4}
    table(*first)
    assert table(index_definition_table.build_until, "by_owner", 3) == {}
