"""The index cleaner gives way to the indexes: while cells come in, each page costs ten times its rows."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from indexer import index_cleaner
from indexer.index_cleaner import BUSY_FACTOR, IndexCleaner
from schemaless.cell import RowKey
from schemaless.index.inspection import InspectedSpan
from schemaless.topology import Datastore

ROWS = 500


class Rate:
    """Notes what it was asked for, and never waits."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def wait_s(self, rows: int) -> float:
        self.asked.append(rows)
        return 0.0


class Node:
    async def run(self, *arguments: Any, **options: Any) -> dict[int, Any]:
        """Stores nothing, and has no checkpoints."""
        return {}


class Storage:
    def master(self, cluster: str) -> Node:
        return Node()


class Inspector:
    class definition:
        name, number, consumer = "by_city", 1, "index:by_city"

        @staticmethod
        def placed(datastore: Datastore) -> Datastore:
            return datastore

    placed = Datastore("trips", 4, 4, ("a",))


@pytest.mark.parametrize(("busy", "counted"), [(False, ROWS), (True, ROWS * BUSY_FACTOR)])
async def test_a_page_counts_more_while_cells_come_in(monkeypatch: pytest.MonkeyPatch, busy: bool, counted: int):
    """So the rate is a tenth, and never nothing."""

    async def pages(*arguments: Any) -> AsyncIterator[InspectedSpan]:
        yield InspectedSpan(ROWS, {"a": ROWS}, {}, (), {}, RowKey(b""))

    monkeypatch.setattr(index_cleaner, "sweep_span", pages)
    datastore = Datastore("trips", 4, 4, ("a",))
    cleaner = IndexCleaner(Storage(), datastore, lambda: [0], 700, is_busy=lambda: busy)  # type: ignore[arg-type]
    cleaner._rate = rate = Rate()  # type: ignore[assignment]
    await cleaner._compare(Inspector(), 0)  # type: ignore[arg-type]
    assert rate.asked == [counted]
