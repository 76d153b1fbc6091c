"""What a process remembers of indexes: the active ones, and when one that is building will be ready."""

import asyncio

import pytest

from api.index import freshness
from api.index.freshness import KEPT_S, BuildEta, IndexCatalogue
from schemaless.errors import NotFound, StorageUnavailable
from schemaless.index.definition import parse_definition
from schemaless.index.versions import NamedIndex
from schemaless.storage.index_definition_table import BuildProgress, IndexStage, defined
from schemaless.topology import Datastore

DATASTORE = Datastore("d", 4, 1, ("a", "b"))
ACTIVE = NamedIndex(
    (
        defined(
            parse_definition(
                {
                    "name": "by_owner",
                    "shard_field": "owner",
                    "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
                }
            ),
            IndexStage.ACTIVE,
        ),
    )
)


class Looks:
    """The look-ups of a catalogue: each ends as the test says, once the test lets it end."""

    def __init__(self, monkeypatch):
        self.now, self.count, self.outcome = 100.0, 0, ACTIVE
        self.may_end = asyncio.Event()
        self.may_end.set()
        monkeypatch.setattr(freshness, "find_versions", self._find)
        monkeypatch.setattr(freshness, "PATIENCE_S", 0.0)
        self.catalogue = IndexCatalogue(None, lambda: self.now)

    async def _find(self, storage, datastore, name):
        self.count += 1
        await self.may_end.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def find(self):
        return await self.catalogue.find(DATASTORE, "by_owner")


@pytest.fixture
async def looks(monkeypatch):
    return Looks(monkeypatch)


async def test_an_active_index_is_looked_up_every_other_second(looks):
    """However many queries come meanwhile. One that is forgotten is looked up at once."""
    assert [await looks.find() for _ in range(5)] == [ACTIVE] * 5
    looks.now += KEPT_S
    looks.may_end.clear()
    assert [await looks.find() for _ in range(5)] == [ACTIVE] * 5
    assert looks.count == 2
    looks.catalogue.forget(DATASTORE, "by_owner")
    looks.may_end.set()
    assert await looks.find() == ACTIVE
    assert looks.count == 3


async def test_a_query_waits_for_no_master_that_hangs(looks):
    """It goes on with what is known. A query of an index that nobody knows here waits, and learns that it failed."""
    await looks.find()
    looks.now += KEPT_S
    looks.may_end.clear()
    looks.outcome = StorageUnavailable("no master answers")
    assert await looks.find() == ACTIVE
    looks.may_end.set()
    for _ in range(3):
        assert await looks.find() == ACTIVE
        await asyncio.sleep(0)
    looks.catalogue.forget(DATASTORE, "by_owner")
    with pytest.raises(StorageUnavailable):
        await looks.find()


async def test_an_index_that_was_dropped_is_forgotten(looks, monkeypatch):
    """As soon as a look-up says so."""
    await looks.find()
    monkeypatch.setattr(freshness, "PATIENCE_S", 60.0)
    looks.now += KEPT_S
    looks.outcome = NotFound("there is no index")
    for _ in range(2):
        with pytest.raises(NotFound):
            await looks.find()


def test_the_time_left_follows_the_pace_that_was_seen():
    """No pace is known at the first look, while tables are being made, or while nothing was built."""
    now = 100.0
    eta = BuildEta(lambda: now)
    assert eta.seconds("trips", "driver", BuildProgress(10, 110)) is None
    now = 105.0
    assert eta.seconds("trips", "driver", BuildProgress(10, 110)) is None
    assert eta.seconds("trips", "driver", BuildProgress(60, None)) is None
    assert eta.seconds("trips", "driver", BuildProgress(60, 110)) == 5.0
    assert eta.seconds("trips", "other", BuildProgress(60, 110)) is None
    eta.forget("trips", "driver")
    assert eta.seconds("trips", "driver", BuildProgress(60, 110)) is None


def test_the_time_left_follows_the_pace_of_the_last_minutes():
    """A build is ten times slower once cells come in, so its earlier pace says nothing. Nor does a walk begun anew."""
    now, done = 0.0, 0
    eta = BuildEta(lambda: now)
    for look in range(1440):
        now, done = look * 10.0, done + (1000 if look < 720 else 10)
        left_s = eta.seconds("trips", "driver", BuildProgress(done, 10_000_000))
    assert left_s == pytest.approx(10_000_000 - done, rel=0.01)
    now += 10
    assert eta.seconds("trips", "driver", BuildProgress(0, 10_000_000)) is None
    now += 10
    assert eta.seconds("trips", "driver", BuildProgress(10, 10_000_000)) == pytest.approx(9_999_990)
