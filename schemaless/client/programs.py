"""Programs: a trigger program of a client's datastore, its parked cells, and what people order for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schemaless.client.async_client import AsyncClient
    from schemaless.client.client import Client


class Program:
    """One trigger program, by its name. Each method returns the API's document (docs/parked.md).

    They raise NotFound for a program that never ran, Invalid, and StorageUnavailable.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    def status(self) -> dict[str, Any]:
        return self._client.document(f"/triggers/{self._name}")

    def parked(self, **filters: Any) -> dict[str, Any]:
        """Returns a page of parked cells. Filters are trigger, column, row_key, cause, since, limit and cursor."""
        return self._client.document(f"/triggers/{self._name}/parked", **filters)

    def doubts(self, **filters: Any) -> dict[str, Any]:
        """Returns a page of the parked cells with an effect of which nobody knows whether it happened."""
        return self.parked(doubt="true", **filters)

    def retry(self, **order: Any) -> dict[str, Any]:
        """Orders that parked cells are called again: `filter` or `ids`, and dry_run, rate (cells a second), reason."""
        return self._order("parked/retry", order)

    def discard(self, *, reason: str, **order: Any) -> dict[str, Any]:
        """Orders that parked cells are never called. What waits behind them is called, in order."""
        return self._order("parked/discard", {**order, "reason": reason})

    def job(self, job: str) -> dict[str, Any]:
        """Returns what became of a retry or a discard."""
        return self._client.document(f"/jobs/{job}")

    def pause(self, shards: Sequence[int] = (), reason: str | None = None) -> dict[str, Any]:
        """Calls nothing of the program, or of these shards, until it is resumed."""
        return self._order("pause", _without_none(shards=list(shards), reason=reason))

    def resume(self, shards: Sequence[int] = ()) -> dict[str, Any]:
        """Lets what was paused, and what had stopped, run again."""
        return self._order("resume", {"shards": list(shards)})

    def seek(self, to: str | Sequence[str], shards: Sequence[int] = (), *, dry_run: bool = False) -> dict[str, Any]:
        """Moves checkpoints to the beginning, the end, a time or locations."""
        where = to if isinstance(to, str) else list(to)
        return self._order("seek", {"to": where, "shards": list(shards), "dry_run": dry_run})

    def _order(self, order: str, details: dict[str, Any]) -> dict[str, Any]:
        return self._client._run(self._client._requests.order_program(self._name, order, details))


class AsyncProgram:
    """One trigger program, by its name, as `Program` has it."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name

    async def status(self) -> dict[str, Any]:
        return await self._client.document(f"/triggers/{self._name}")

    async def parked(self, **filters: Any) -> dict[str, Any]:
        """Returns a page of parked cells."""
        return await self._client.document(f"/triggers/{self._name}/parked", **filters)

    async def order(self, order: str, **details: Any) -> dict[str, Any]:
        """Orders `pause`, `resume`, `seek`, `parked/retry` or `parked/discard`, with the members of the API's call."""
        return await self._client._run(self._client._requests.order_program(self._name, order, details))


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
