"""Context: what a trigger function knows beside its cell, and what it does to the outside world through it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from schemaless.cell import CellKey
from schemaless.errors import Misconfigured, SchemalessError
from schemaless.location import ShardLocation
from schemaless.triggers.effects import EffectFlow, EffectKey, EffectStep, Ledger, MakeCall, PutEntry, ReadEntry
from schemaless.triggers.lazy_work import WorkNotDone, is_lazy, waited_for
from schemaless.triggers.verdicts import DidNotHappen

if TYPE_CHECKING:
    from schemaless.client.async_client import AsyncClient
    from schemaless.client.client import Client

T = TypeVar("T")


class ContextServices:
    """What the contexts of one process and datastore share. Its clients are made when they are first used."""

    def __init__(self, datastore: str, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self._datastore = datastore

    @cached_property
    def client(self) -> Client:
        from schemaless.client.client import Client

        return Client(datastore=self._datastore)

    @cached_property
    def async_client(self) -> AsyncClient:
        from schemaless.client.async_client import AsyncClient

        return AsyncClient(datastore=self._datastore)


services_of = cache(ContextServices)


@dataclass(frozen=True, slots=True)
class Context:
    """`attempt` counts from 1. A cell that was finished just before a crash is called again with attempt 1.

    `function` and `cell` are the function's name and the cell's key. `location` is the cell's, for the cause of cells
    that the function puts.
    """

    program: str
    datastore: str
    attempt: int
    function: str = ""
    cell: CellKey | None = None
    services: ContextServices | None = None
    location: ShardLocation | None = None
    _effects: dict[str, Coroutine[Any, Any, Any] | None] = field(default_factory=dict, repr=False, compare=False)

    def of_attempt(self, attempt: int) -> Context:
        return Context(self.program, self.datastore, attempt, services=self.services)

    def of_call(self, function: str, cell: CellKey, location: ShardLocation | None = None) -> Context:
        """Returns the context of one call. Its effects are that cell's."""
        return Context(self.program, self.datastore, self.attempt, function, cell, self.services, location)

    @property
    def cause(self) -> str | None:
        """What cells say that are put through the context's clients: PROGRAM/FUNCTION@LOCATION of the cell."""
        return None if self.location is None else f"{self.program}/{self.function}@{self.location}"

    @property
    def client(self) -> Client:
        """A client of the datastore. Hosts and token come from SCHEMALESS_HOSTS and SCHEMALESS_TOKEN."""
        client = self._services().client
        return client if self.cause is None else client.caused_by(self.cause)

    @property
    def async_client(self) -> AsyncClient:
        """The same for async functions."""
        client = self._services().async_client
        return client if self.cause is None else client.caused_by(self.cause)

    def idempotency_key(self, effect: str) -> str:
        """Returns the key of an effect of this cell, for a provider. Retries, replays and new generations share it."""
        return self._effect_key(effect).text

    @overload
    def once(
        self,
        effect: str,
        call: Callable[[], Coroutine[Any, Any, T]],
        resolve: Callable[[], Coroutine[Any, Any, T]] | None = None,
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def once(self, effect: str, call: Callable[[], T], resolve: Callable[[], T] | None = None) -> T: ...

    def once(self, effect: str, call: Callable[[], Any], resolve: Callable[[], Any] | None = None) -> Any:
        """Returns the result of an outside effect, which is made at most once for this cell (docs/triggers.md).

        In an async function it must be awaited, and `call` and `resolve` are async. Raises Doubt when the effect was
        begun and no result is known, unless `resolve` finds one, or raises DidNotHappen.
        """
        key = self._effect_key(effect)
        if effect in self._effects:
            raise Misconfigured(f"once({effect!r}) is called twice for one cell: give each effect a name of its own")
        flow = self._services().ledger.once(key, call, resolve)
        self._effects[effect] = begun = _run_async(flow, self) if _is_in_event_loop() else None
        return _run(flow, self.client) if begun is None else begun

    def _services(self) -> ContextServices:
        return self.services or services_of(self.datastore)

    def _effect_key(self, effect: str) -> EffectKey:
        if self.cell is None:
            raise Misconfigured("this context has no cell: make it with Context(…, function=…, cell=CellKey(…))")
        return EffectKey(self.datastore, self.program, self.function, effect, self.cell)


def require_effects(arguments: Iterable[object]) -> None:
    """Raises WorkNotDone for an effect that a function with these arguments has begun and didn't wait for."""
    for given in arguments:
        if isinstance(given, Context):
            for effect, begun in given._effects.items():
                if begun is not None and (state := inspect.getcoroutinestate(begun)) != inspect.CORO_CLOSED:
                    if state == inspect.CORO_CREATED:
                        begun.close()  # so that Python says nothing of it later
                    raise WorkNotDone(f"once({effect!r}) wasn't awaited, so nobody knows what becomes of the effect")


def _run(flow: EffectFlow, client: Client) -> Any:
    move = flow.__next__
    while True:
        try:
            step = move()
        except StopIteration as done:  # of the flow. One that the user's call raises is an error of that
            return done.value
        try:
            move = partial(flow.send, _perform(step, client))
        except (SchemalessError, DidNotHappen) as error:
            move = partial(flow.throw, error)


def _perform(step: EffectStep, client: Client) -> Any:
    match step:
        case ReadEntry():
            return client.get_versions(step.row_key, step.column, **_newest(step))
        case PutEntry():
            return client.put_cell(step.row_key, step.column, step.ref_key, step.body)
        case MakeCall():
            result = step.call()
            return _made(result.result() if isinstance(result, Future) else result)


async def _run_async(flow: EffectFlow, context: Context) -> Any:
    move = flow.__next__
    while True:
        try:
            step = move()
        except StopIteration as done:
            return done.value
        try:
            move = partial(flow.send, await _perform_async(step, context.async_client))
        except (SchemalessError, DidNotHappen) as error:
            move = partial(flow.throw, error)


async def _perform_async(step: EffectStep, client: AsyncClient) -> Any:
    match step:
        case ReadEntry():
            return await client.get_versions(step.row_key, step.column, **_newest(step))
        case PutEntry():
            return await client.put_cell(step.row_key, step.column, step.ref_key, step.body)
        case MakeCall():
            return _made(await waited_for(step.call()))


def _made(result: Any) -> Any:
    """Returns the result of a call. Raises DidNotHappen for work that hasn't begun: nobody would do it."""
    if is_lazy(result):
        raise DidNotHappen(
            f"the call of once() returned {type(result).__name__}, which is work that hasn't begun. In a sync function"
            " the call is sync, too"
        )
    return result


def _newest(step: ReadEntry) -> Any:
    return {"from_": step.first, "to": step.last, "order": "desc", "limit": 1, "read_from": "master"}


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
