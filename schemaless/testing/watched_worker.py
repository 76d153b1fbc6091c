"""What a test sees of a worker, and does to it: points that it reaches, calls that it makes, and where it is killed."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from schemaless.cell import StoredCell
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.testing.memory_api import MemoryApi
from schemaless.triggers.context import Context
from schemaless.triggers.decorator import Takes, Trigger
from schemaless.triggers.verdicts import Retry


class Killed(BaseException):  # like the kill, it passes what functions catch
    """The worker is killed. Functions that it runs end here."""


class RowHeld(Retry):
    """The test holds the row, so this is no call of the function."""


class WorkerLife:
    """One worker from its start to its end. `points` are those that it reached. Threads may share it."""

    def __init__(self, points: list[str]) -> None:
        self.points = points
        self.kill_at: int | None = None
        self.is_over = False
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """Notes a point. Raises Killed where the worker is killed, and ever after."""
        with self._lock:
            if self.is_over:
                raise Killed(point)
            self.points.append(point)
            if self.kill_at is not None and len(self.points) > self.kill_at:
                self.is_over = True
                raise Killed(point)


class WatchedTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """The API as the functions of one worker see it. Each request has a point before it and one after it."""

    def __init__(self, api: MemoryApi, life: WorkerLife) -> None:
        self._api = api
        self._life = life

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._life.reach(f"before {_name(request)}")
        response = self._api.handle_request(request)
        self._life.reach(f"after {_name(request)}")
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._life.reach(f"before {_name(request)}")
        response = await self._api.handle_async_request(request)
        self._life.reach(f"after {_name(request)}")
        return response


def _name(request: httpx.Request) -> str:
    """Returns `GET STATUS`, or `POST batch/put`."""
    parts = request.url.path.strip("/").split("/")[2:]
    return f"{request.method} {parts[2] if parts[0] == 'cells' and len(parts) > 2 else '/'.join(parts)}"


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of a function. `error` is what it raised, and `attempt` counts from 1."""

    function: str
    row_key: uuid.UUID
    column_name: str
    ref_key: int
    attempt: int
    error: BaseException | None = None


BeforeCall = Callable[[SeenCall], None]
"""May raise in place of the call."""


@dataclass(frozen=True, slots=True)
class _WatchedTrigger(Trigger):
    """A trigger whose function gets the stored cell and the context, whatever the user's takes."""

    def arguments(self, cell: StoredCell, context: Context) -> tuple[Any, ...]:
        return cell, context


def watched(program: TriggerProgram, life: WorkerLife, before: BeforeCall, calls: list[SeenCall]) -> TriggerProgram:
    """Returns a program whose calls are noted, and whose functions have a point before them and one after them."""

    def watch(marked: Trigger) -> Trigger:
        def begin(cell: StoredCell, context: Context) -> SeenCall:
            life.reach(f"before {marked.name}")
            row_key = uuid.UUID(bytes=cell.row_key)
            return SeenCall(marked.name, row_key, cell.column_name, cell.ref_key, context.attempt)

        def end(seen: SeenCall, error: BaseException | None) -> None:
            if not isinstance(error, RowHeld):
                calls.append(replace(seen, error=error))
            life.reach(f"after {marked.name}")

        def call(cell: StoredCell, context: Context) -> Any:
            seen = begin(cell, context)
            try:
                before(seen)
                result = marked.function(*marked.arguments(cell, context))
            except Exception as error:
                end(seen, error)
                raise
            end(seen, None)
            return result

        async def acall(cell: StoredCell, context: Context) -> Any:
            seen = begin(cell, context)
            try:
                before(seen)
                result = await marked.function(*marked.arguments(cell, context))
            except Exception as error:
                end(seen, error)
                raise
            end(seen, None)
            return result

        return _WatchedTrigger(
            marked.name, marked.column, acall if marked.is_async else call, Takes.CELL_AND_CONTEXT, marked.is_async,
            marked.retry, marked.park, marked.max_age_s, marked.where,
        )  # fmt: skip

    return TriggerProgram(
        program.name, {column: [watch(m) for m in found] for column, found in program.triggers.items()}, program.version
    )
