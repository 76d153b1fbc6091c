"""/triggers: the programs that consume a datastore, their lag, why they wait, and orders to them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from api.http.asgi import Route
from api.http.request import Request
from api.http.response import RESPONSE_BYTES_MAX, Response, ok_response, views_within
from api.http.serving import Asked, serves
from api.index.passes import check_view
from api.read.reader import served_together
from api.routes.status import consumer_view, stalled
from api.triggers.control import IDS_MAX, ParkedOrders, TriggerControl, job_view
from api.triggers.parked_pages import BEFORE_ALL, BEHIND, PAGE_BYTES_MAX, ParkedCursor, ParkedPages
from api.views import counts_view, erasure_job_view, program_view, worker_view, workers_in_all
from schemaless.access import Scope
from schemaless.cell import parse_column_name, parse_row_key, parse_time
from schemaless.contract import programs
from schemaless.contract.parameters import FLAG, LIMIT, READ_FROM, Parameter, parse_flag
from schemaless.contract.programs import (
    HaltRequest,
    OrderedView,
    ParkedChoice,
    ParkedPageView,
    ParkedRequest,
    PausedView,
    RemovedView,
    ResumedView,
    SeekRequest,
    SoughtView,
)
from schemaless.errors import Invalid, NotFound, StorageUnavailable
from schemaless.facts.consumers import (
    ConsumerShard,
    ProgramSummary,
    in_all,
    is_program,
    read_consumer,
    read_consumers,
    read_summaries,
    read_workers,
    require_known,
    tripped,
)
from schemaless.location import INT64_MAX
from schemaless.names import INDEX_PREFIX, INDEXER
from schemaless.ops import erasures
from schemaless.ops.trigger_removal import consumer_of_program
from schemaless.quantity import quantity
from schemaless.storage import index_check_table, job_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import ask_masters, nobody_answers
from schemaless.storage.index_check_table import CheckProgress
from schemaless.storage.job_table import JobProgress
from schemaless.storage.operation import Operation
from schemaless.storage.parked_selection import ParkedFilter
from schemaless.storage.parked_table import Cause, Order
from schemaless.storage.trigger_order_table import latest
from schemaless.topology import Datastore

REASON_CHARACTERS_MAX = 300


def verify_reason(reason: str | None) -> None:
    """Raises Invalid."""
    if reason is not None and len(reason) > REASON_CHARACTERS_MAX:
        raise Invalid("reason", f"has at most {REASON_CHARACTERS_MAX} characters")


@serves(programs.LIST)
async def list_triggers(asked: Asked[None]) -> dict[str, Any]:
    return await programs_of(asked.state.storage, asked.datastore)


async def programs_of(storage: AsyncStorage, datastore: Datastore) -> dict[str, Any]:
    (consumers, unheard), workers, summaries = await asyncio.gather(
        read_consumers(storage, datastore),
        read_workers(storage, datastore),
        read_summaries(storage, datastore),
    )
    require_known(consumers, unheard)
    found = []
    for name, consumer in consumers.items():
        if is_program(name):
            own = [row for row in workers if row.consumer == name]
            seen = consumer_view(name, consumer, stalled(unheard, own, name))
            view = program_view(_view(seen), summaries.get(name, ProgramSummary()), own)
            found.append({**view, **workers_in_all(own)})
    return {"triggers": found, **unheard.document()}


@serves(programs.GET)
async def get_trigger(asked: Asked[None]) -> dict[str, Any]:
    return await program_of(asked.state.storage, asked.datastore, asked.path["program"])


async def program_of(storage: AsyncStorage, datastore: Datastore, program: str) -> dict[str, Any]:
    """Shows one program, with its shards and workers. Raises NotFound."""
    consumer = consumer_of_program(program)
    (shards, unheard), workers, summaries = await asyncio.gather(
        read_consumer(storage, datastore, consumer),
        read_workers(storage, datastore),
        read_summaries(storage, datastore),
    )
    if not shards:
        raise NotFound(f"no trigger program {program!r} has run here yet")
    own = [row for row in workers if row.consumer == consumer]
    summary = summaries.get(consumer, ProgramSummary())
    return {
        **program_view(_view(consumer_view(consumer, in_all(shards), stalled(unheard, own, consumer))), summary, own),
        **workers_in_all(own),
        "shards": [_shard_view(number, shard, summary) for number, shard in shards.items()],
        "workers": [worker_view(row) for row in own],
        **unheard.document(),
    }


def _control(asked: Asked[Any]) -> TriggerControl:
    return TriggerControl(asked.state.storage, asked.datastore, asked.path["program"])


@serves(programs.PAUSE)
async def pause_trigger(asked: Asked[HaltRequest]) -> PausedView:
    verify_reason(asked.payload.reason)
    control, shards, program = _control(asked), asked.payload.shards, asked.path["program"]
    if asked.payload.dry_run:
        return PausedView(program, shards, [], await control.would(shards, "paused"))
    return PausedView(program, shards, await control.pause(shards, asked.payload.reason))


@serves(programs.RESUME)
async def resume_trigger(asked: Asked[HaltRequest]) -> ResumedView:
    control, shards = _control(asked), asked.payload.shards
    return await (control.plan_resume(shards) if asked.payload.dry_run else control.resume(shards))


@serves(programs.SEEK)
async def seek_trigger(asked: Asked[SeekRequest]) -> SoughtView:
    order, control = asked.payload, _control(asked)
    to = [order.to] if isinstance(order.to, str) else order.to
    if not to:
        raise Invalid("to", "must be beginning, end, a time or a location")
    steps = await control.plan_seek(to, order.shards)
    if not order.dry_run:
        await control.seek([step for step, _ in steps])
    shown = [step for _, step in steps]
    again, passed = sum(step.again for step in shown), sum(step.passed for step in shown)
    return SoughtView(asked.path["program"], order.dry_run, again, passed, shown)


@serves(programs.REMOVE)
async def delete_trigger(asked: Asked[None]) -> RemovedView:
    removal = await _control(asked).remove()
    return RemovedView(removal.program, removal.checkpoints, removal.finished, removal.parked)


def _view(consumer: Mapping[str, object]) -> dict[str, object]:
    shown = ("state", "stall", "reason", "lag", "stopped")
    return {"program": consumer["name"], **{name: consumer[name] for name in shown}}


def _shard_view(number: int, shard: ConsumerShard, summary: ProgramSummary) -> dict[str, object]:
    is_paused = number in summary.orders.paused and shard.state == "running"
    seek = summary.orders.seeks.get(number)
    return {
        "shard": number,
        "generation": shard.location.generation,
        "added_id": shard.location.added_id,
        "lag": shard.lag,
        "state": "paused" if is_paused else shard.state,
        "reason": summary.orders.paused[number] if is_paused else shard.reason,
        "kills": shard.kills,
        "counts": counts_view(shard.counts),
        "counted_from": shard.counted_from,
        "seek": None if seek is None else str(seek.to.location),
    }


ROUTES = (list_triggers, get_trigger, delete_trigger, pause_trigger, resume_trigger, seek_trigger)


# /triggers/PROGRAM/parked: the cells that a program set aside, and orders for them.

RATE_MAX = 1_000_000
_TEXTS = ("trigger", "column", "row_key", "cause", "since")
_CAUSES = (*(cause.value for cause in Cause), BEHIND)


def _parse_choice(choice: ParkedChoice) -> ParkedFilter:
    """Raises Invalid. A cause `behind` is none of a record: then records are meant that hold their rows."""
    cause = None if choice.cause is None else _parse_cause(choice.cause, "cause")
    return ParkedFilter(
        _parse_trigger(choice.trigger, "trigger") if choice.trigger is not None else None,
        parse_column_name(choice.column, "column") if choice.column is not None else None,
        parse_row_key(choice.row_key) if choice.row_key is not None else None,
        None if cause in (None, BEHIND) else Cause(cause),
        parse_time(choice.since, "since") if choice.since is not None else None,
        only_held=cause == BEHIND,
        only_doubts=choice.doubt,
    )


async def list_parked(request: Request) -> Response:
    """Parked cells by shard and added_id, each followed by what waits behind it in its row. `count` counts the parked
    ones alone.
    """
    datastore = await request.datastore()
    query = request.query(*_PARAMETERS)
    limit, after, cause = LIMIT.of(query), CURSOR.of(query), query.get("cause")
    filters: dict[str, Any] = {name: query[name] for name in _TEXTS if name in query}
    wanted = _parse_choice(ParkedChoice(**filters, doubt=DOUBT.of(query)))
    control = TriggerControl(request.state.storage, datastore, request.path["program"])
    pages = ParkedPages(request.state.reader, datastore, control.consumer, READ_FROM.of(query))
    await request.read.reserve(PAGE_BYTES_MAX)
    behind = cause in (None, BEHIND) and not wanted.only_doubts
    page = await pages.read(wanted, after, limit, heads=cause != BEHIND, behind=behind)
    if not page.count and after == BEFORE_ALL:
        await control.require_known()
    form = request.response_format()
    views = await views_within(page.views, lambda one: one[1], form, RESPONSE_BYTES_MAX, request.read)
    following = page.following if len(views) == len(page.views) else page.views[len(views) - 1][0].cursor
    document = {
        "parked": views,
        "cursor": None if following is None else _cursor_text(following),
        "count": page.count,
    }
    return ok_response(form, document, *served_together(page.served).headers)


@serves(programs.RETRY)
async def retry_parked(asked: Asked[ParkedRequest]) -> OrderedView:
    return await _ordered(asked, Order.RETRY)


@serves(programs.DISCARD)
async def discard_parked(asked: Asked[ParkedRequest]) -> OrderedView:
    return await _ordered(asked, Order.DISCARD)


async def _ordered(asked: Asked[ParkedRequest], order: Order) -> OrderedView:
    payload, control = asked.payload, _control(asked)
    _verify(payload, order)
    orders = ParkedOrders(asked.state.storage, asked.datastore, control, asked.who)
    if payload.ids is not None:
        done = await orders.by_ids(order, payload.ids, payload.rate, payload.reason, dry_run=payload.dry_run)
    else:
        wanted = _parse_choice(payload.filter or ParkedChoice())
        done = await orders.by_filter(order, wanted, payload.rate, payload.reason, dry_run=payload.dry_run)
    job = None if done.job is None else f"{done.job:016x}"
    waits = await waits_for(asked.state.storage, asked.datastore, control)
    return OrderedView(done.matched, job, payload.dry_run, done.more, done.left_out, waits)


def _verify(asked: ParkedRequest, order: Order) -> None:
    if (asked.filter is None) == (asked.ids is None):
        raise Invalid("order", "needs a filter, which may be empty, or ids, and not both")
    if asked.ids is not None and not 1 <= len(asked.ids) <= IDS_MAX:
        raise Invalid("ids", f"has 1 to {IDS_MAX} ids")
    if asked.filter is not None and asked.filter.cause == BEHIND:
        raise Invalid("filter.cause", "what waits behind a parked cell can't be ordered: choose the parked cells")
    if asked.rate is not None and not 0.001 <= asked.rate <= RATE_MAX:
        raise Invalid("rate", f"is cells a second, from 0.001 to {RATE_MAX}")
    verify_reason(asked.reason)
    if order is Order.DISCARD and not (asked.reason or "").strip():
        raise Invalid("reason", "a discard needs a reason: those cells are never called")


async def waits_for(storage: AsyncStorage, datastore: Datastore, control: TriggerControl) -> str | None:
    """Returns why an order isn't carried out now, or None."""
    workers = await read_workers(storage, datastore)
    own = [row for row in workers if row.consumer == control.consumer]
    if not own:
        return "nobody runs it: start a worker of the program"
    program = latest((await control.orders()).values())
    if program.paused:
        return f"the program is paused: {program.reason or 'no reason was given'}. Resume it"
    if breakers := tripped(own):
        return f"the breaker of {len(breakers)} of {quantity(len(own), 'worker')} is open: {breakers[0]}"
    return None


def _parse_trigger(text: str, field: str) -> str:
    if not 1 <= len(text) <= 100:
        raise Invalid(field, "is the name of a function")
    return text


def _parse_cause(text: str, field: str) -> str:
    if text not in _CAUSES:
        raise Invalid(field, f"is one of {', '.join(_CAUSES)}")
    return text


def _cursor_text(cursor: ParkedCursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode().rstrip("=")


def _parse_cursor(text: str, field: str) -> ParkedCursor:
    try:
        data = base64.b64decode(text[:200] + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        cursor = msgspec.json.decode(data, type=ParkedCursor)
        if min(cursor.shard, cursor.head, cursor.after) < 0 or max(cursor.shard, cursor.head, cursor.after) > INT64_MAX:
            raise ValueError
    except (ValueError, msgspec.MsgspecError):
        raise Invalid(field, "is not a cursor of this API") from None
    return cursor


def _text(text: str, field: str) -> str:
    return text


TRIGGER: Parameter[str] = Parameter("trigger", _parse_trigger, "", "The function that failed.")
COLUMN: Parameter[str] = Parameter("column", _text, "", "The column of the parked cell.")
ROW_KEY: Parameter[str] = Parameter("row_key", _text, "", "The row.")
CAUSE: Parameter[str] = Parameter(
    "cause", _parse_cause, "", ", ".join(_CAUSES) + ".", {"type": "string", "enum": [*_CAUSES]}
)
SINCE: Parameter[str] = Parameter("since", _text, "", "Parked at that time or later, RFC 3339.")
CURSOR: Parameter[ParkedCursor] = Parameter(
    "cursor", _parse_cursor, BEFORE_ALL, "Of the page before: where this one begins."
)
DOUBT: Parameter[bool] = Parameter("doubt", parse_flag, False, "Only effects that may have happened or not.", FLAG)
_PARAMETERS = (TRIGGER, COLUMN, ROW_KEY, CAUSE, SINCE, DOUBT, LIMIT, CURSOR, READ_FROM)
PARKED_ROUTES = (
    Route("GET", "/triggers/{program}/parked", list_parked, Scope.READ, _PARAMETERS, answers={200: ParkedPageView}),
    retry_parked,
    discard_parked,
)


# /jobs: what became of what people ordered: retries and discards of parked cells, and checks of indexes.


@serves(programs.JOB)
async def get_job(asked: Asked[None]) -> dict[str, Any]:
    text, datastore, storage = asked.path["job"], asked.datastore, asked.state.storage
    if len(text) != 16 or not set(text) <= set("0123456789abcdef") or (number := int(text, 16)) > INT64_MAX:
        raise Invalid("job", "is the 16 hexadecimal digits that an order answered")
    answers = await ask_masters(storage, datastore.clusters, _job, datastore.name, number, tolerated=StorageUnavailable)
    parts = [part for part in answers.found.values() if part is not None]
    if not parts and answers.failures:
        raise nobody_answers(answers.failures.values(), "not every cluster answers")
    if not parts and (erasure := await erasures.report(storage, datastore, number, None)) is not None:
        return erasure_job_view(erasure) | {"unknown": {}}
    if not parts:
        raise NotFound(f"there is no job {text}: jobs are kept for {job_table.KEPT_DAYS} days")
    checks = [part for part in parts if isinstance(part, CheckProgress)]
    if checks:
        document = check_view(datastore, checks, await waits_for_indexer(storage, datastore))
    else:
        records = [part for part in parts if isinstance(part, JobProgress)]
        program = records[0].job.consumer.partition(":")[2]
        control = TriggerControl(storage, datastore, program)
        document = job_view(datastore, records, await waits_for(storage, datastore, control))
    return document | {"unknown": {name: "unreachable" for name in answers.failures}}


def _job(datastore: str, number: int) -> Operation[JobProgress | CheckProgress | None]:
    job = (yield from job_table.of_numbers(datastore, [number])).get(number)
    if job is None:
        return None
    if job.consumer.startswith(INDEX_PREFIX):
        return (yield from index_check_table.progress(job))
    return (yield from job_table.progress(datastore, job))


async def waits_for_indexer(storage: AsyncStorage, datastore: Datastore) -> str | None:
    """Returns why no check, build or removal of an index is carried out now, or None."""
    workers = await read_workers(storage, datastore)
    if any(row.consumer == INDEXER for row in workers):
        return None
    return (
        "no indexer runs: start one, with `python -m indexer`, or with `schemaless up indexer-0` in an embedded stack"
    )


JOB_ROUTES = (get_job,)
