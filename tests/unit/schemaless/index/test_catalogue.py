"""The catalogue of indexes, as a process that looks often reads it."""

import pytest

from schemaless.errors import StorageUnavailable
from schemaless.index.catalogue import IndexWatch
from schemaless.index.definition import parse_definition
from schemaless.storage import index_definition_table
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.topology import Datastore, Node, Role

DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
    }
)


class MemoryMaster:
    """One server's index definitions. `parsed` counts how often they were read."""

    def __init__(self, name):
        self.node = Node(name, name, Role.MASTER, "127.0.0.1", 1, "u", "p", "")
        self.indexes = {}
        self.parsed = 0
        self.away = False

    async def run(self, operation, datastore, *, timeout_s):
        if self.away:
            raise StorageUnavailable(f"{self.node.name} is away")
        if operation is index_definition_table.stamps_of:
            return tuple((name, index.state, index.has_tables, 0) for name, index in self.indexes.items())
        assert operation is index_definition_table.all_of
        self.parsed += 1
        return dict(self.indexes)


class MemoryMasters:
    def __init__(self):
        self.masters = [MemoryMaster("a"), MemoryMaster("b")]


async def test_definitions_are_read_only_after_a_change():
    """A look that finds nothing new reads the stamps only. A change on any master is seen by the next look."""
    storage = MemoryMasters()
    a, b = storage.masters
    watch = IndexWatch(storage, Datastore("d", 4, 1, ("a", "b")))
    for state, has_tables in [(IndexState.BUILDING, False), (IndexState.BUILDING, True), (IndexState.ACTIVE, True)]:
        b.indexes = {"by_owner": DefinedIndex(DEFINITION, state, has_tables)}
        assert (await watch.look())["by_owner"] == b.indexes["by_owner"]
        parsed = a.parsed, b.parsed
        for _ in range(3):
            await watch.look()
        assert (a.parsed, b.parsed) == parsed
    assert b.parsed == 3


async def test_a_master_that_is_away_hides_nothing_that_another_knows():
    """With all of them away, there is no answer."""
    storage = MemoryMasters()
    a, b = storage.masters
    a.indexes = {"by_owner": DefinedIndex(DEFINITION, IndexState.ACTIVE, True)}
    watch = IndexWatch(storage, Datastore("d", 4, 1, ("a", "b")))
    b.away = True
    assert list(await watch.look()) == ["by_owner"]
    a.away = True
    with pytest.raises(StorageUnavailable):
        await watch.look()
