"""What an index is shown as, with all its versions, without servers."""

from types import SimpleNamespace

import pytest

from api.routes import indexes
from schemaless.index.definition import parse_definition
from schemaless.index.versions import merge
from schemaless.storage.index_definition_table import IndexStage, IndexSwitch, defined
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 1, ("a", "b"))
DEFINITION = {
    "name": "by_owner",
    "shard_field": "owner",
    "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
}


@pytest.mark.parametrize(("lags", "asked"), [(True, 1), (False, 0)])
async def test_the_versions_of_an_index_share_what_its_workers_report(monkeypatch, lags, asked):
    """The workers are those of all indexes. Each version asked every cluster for them, at the same time."""
    reads = []

    async def workers(*arguments):
        reads.append(arguments)
        return []

    async def consumer(*arguments):
        return {}, SimpleNamespace(clusters=())

    async def writes(*arguments):
        return {}

    for name, fake in (("read_workers", workers), ("read_consumer", consumer), ("kept_writes", writes)):
        monkeypatch.setattr(indexes, name, fake)
    versions = [
        defined(parse_definition(DEFINITION, number), IndexStage.ACTIVE, switch=IndexSwitch(number))
        for number in (1, 2, 3)
    ]
    known = merge({"a": versions, "b": versions}, {})
    state = SimpleNamespace(
        storage=None,
        build_eta=SimpleNamespace(forget=lambda *names: None),
    )
    named = known.of("d", "by_owner")
    view = await indexes._view(state, DATASTORE, named, known, None, None, lags=lags)
    assert [version["number"] for version in view["versions"]] == [1, 2, 3]
    assert [version.get("waiting_shards") for version in view["versions"]] == [[] if lags else None] * 3
    assert len(reads) == asked
