"""The catalogue while single servers answer wrongly: they say nothing, and nobody waits for them."""

import asyncio
from types import SimpleNamespace

import pytest

from schemaless.errors import (
    Busy,
    Corrupt,
    Misconfigured,
    NodeRefuses,
    NotFound,
    SchemalessError,
    StorageUnavailable,
    TableMissing,
)
from schemaless.ops.datastores import Catalogue
from schemaless.topology import Datastore

TRIPS = Datastore("trips", 4, 2, ("a",))


class Node:
    """Shows the catalogue, raises its error, or hangs until it is let go."""

    def __init__(self, error=None):
        self.error = error
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.asked = 0

    async def run(self, operation, timeout_s, traffic=None):
        self.asked += 1
        await self.hangs.wait()
        if self.error is not None:
            raise self.error
        return {"trips": TRIPS}


def catalogue_of(**nodes):
    return Catalogue(SimpleNamespace(nodes=nodes, live=lambda datastore: datastore))


@pytest.mark.parametrize(
    "error",
    [StorageUnavailable("down"), TableMissing("1146"), NodeRefuses("1142"), Busy(""), Corrupt(""), SchemalessError("")],
    ids=lambda error: type(error).__name__,
)
async def test_any_error_of_one_node_says_nothing(error):
    """I15: names that exist are found, others are missing, and the process is ready."""
    catalogue = catalogue_of(bad=Node(error), good=Node())
    assert await catalogue.datastore("trips") == TRIPS
    with pytest.raises(NotFound):
        await catalogue.datastore("nope")
    assert await catalogue.all() == await catalogue.readable() == {"trips": TRIPS}


async def test_a_server_of_another_format_is_passed_over():
    """Its databases are another program's. Where no other one answers, it is named."""
    foreign = Misconfigured("format 99")
    assert await catalogue_of(good=Node(), other=Node(foreign)).all() == await catalogue_of(good=Node()).all()
    with pytest.raises(StorageUnavailable, match="format 99"):
        await catalogue_of(other=Node(foreign)).all()


async def test_readiness_waits_for_the_first_server_only():
    """A server that hangs delays no load balancer, and is asked once, however often one looks."""
    slow, good = Node(), Node()
    slow.hangs.clear()
    catalogue = catalogue_of(slow=slow, good=good)
    for _ in range(3):
        assert await catalogue.readable() == {"trips": TRIPS}
    assert (slow.asked, good.asked) == (1, 1)
    slow.hangs.set()


async def test_nobody_answers():
    """The error names what each server said."""
    with pytest.raises(StorageUnavailable, match="down; 1146"):
        await catalogue_of(a=Node(StorageUnavailable("down")), b=Node(TableMissing("1146"))).readable()
