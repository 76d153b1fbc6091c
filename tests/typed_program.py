"""A trigger program with every form that a user may write. mypy --strict must accept it: test_typed_programs.py."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

from schemaless import (
    Context,
    DidNotHappen,
    Park,
    ParkMode,
    Retry,
    RetryPolicy,
    Skip,
    Stop,
    TriggerCell,
    Where,
    trigger,
)
from schemaless.pytest_plugin import MakeTriggerKit
from schemaless.testing import SetAside, TriggerKit

POLICY = RetryPolicy(attempts=3, delay=0.5, backoff=2, max_delay=60, jitter=0.1, retry_on=(OSError, TimeoutError))


@trigger(column="BASE")
def plain(row_key: uuid.UUID) -> None:
    print(row_key.hex)


@trigger(column="BASE", retry=POLICY, park="row", max_age=3600, where='status == "done"')
def whole(cell: TriggerCell) -> None:
    if cell.body.get("fare") is None:
        raise Skip("no fare")
    if cell.ref_key > 3:
        raise Park("too many versions")


@trigger(column="STATUS", park=ParkMode.CELL, max_age=timedelta(days=1), name="again")
@trigger(column="BASE", where=[{"field": "n", "op": "gt", "value": 3}])
def with_context(cell: TriggerCell, context: Context) -> str:
    if context.attempt > 2:
        raise Stop(f"{context.program} of {context.datastore} can't do {cell.location}")
    raise Retry(1.5)


@trigger(column="BASE")
async def asynchronous(row_key: uuid.UUID) -> None:
    await asyncio.sleep(0)


@trigger(column="BASE")
async def asynchronous_with_context(cell: TriggerCell, context: Context) -> None:
    await asyncio.sleep(POLICY.delay_s(context.attempt, lambda: 0.5))


def holds(where: Where, cell: TriggerCell) -> bool:
    return where.holds(cell.body)


def called_in_a_test() -> str:
    plain(uuid.uuid4())
    return with_context.__name__


def charged(row_key: uuid.UUID) -> int:
    if row_key.int % 2:
        raise DidNotHappen("no such card")
    return 7


async def charged_later(row_key: uuid.UUID) -> int:
    return charged(row_key)


@trigger(column="BASE")
def once(cell: TriggerCell, context: Context) -> None:
    amount: int = context.once("charge", lambda: charged(cell.row_key), resolve=lambda: charged(cell.row_key))
    context.client.put(cell.row_key, "STATUS", {"amount": amount, "key": context.idempotency_key("charge")})


@trigger(column="BASE")
async def once_later(cell: TriggerCell, context: Context) -> None:
    amount: int = await context.once("charge", lambda: charged_later(cell.row_key))
    await context.async_client.put(cell.row_key, "STATUS", {"amount": amount})


def tested(trigger_kit: MakeTriggerKit) -> list[SetAside]:
    kit: TriggerKit = trigger_kit([whole, once], attempts_max=3)
    location: str | None = kit.put(uuid.uuid4(), "BASE", {"status": location_text(kit)}).location
    kit.fail_next(OSError(location), times=2, function="whole")
    kit.advance(60.0)
    kit.retry(kit.parked())
    return kit.waiting()


def location_text(kit: TriggerKit) -> str:
    return f"{kit.counts.called} {[call.error for call in kit.calls]}"
