"""/triggers: the programs that consume a datastore, their lag, why they wait, and orders to them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from api.http.content import decode
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.program_views import (
    PausedView,
    ProgramDetailsView,
    ProgramsView,
    RemovedView,
    ResumedView,
    SoughtView,
)
from api.routes.status import NEVER_KEPT, consumer_view
from api.status.consumers import ConsumerShard, in_all, read_consumer, read_consumers, require_known
from api.status.workers import read_workers, worker_view, workers_in_all
from api.triggers.control import SeekStep, TriggerControl
from api.triggers.summary import ProgramSummary, counts_view, is_program, program_view, read_summaries
from schemaless.access import Scope
from schemaless.errors import Invalid, NotFound
from schemaless.ops.trigger_removal import consumer_of_program

PAYLOAD_BYTES_MAX = 256 << 10
REASON_CHARACTERS_MAX = 300


class HaltRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What is paused or resumed: some shards, or without `shards` the whole program."""

    shards: list[int] = []
    reason: str | None = None

    example: ClassVar[Any] = {"shards": [12], "reason": "the card processor is away"}


class SeekRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`to` is beginning, end, an RFC 3339 time, SHARD:GENERATION:ADDED_ID, or several of those."""

    to: str | list[str]
    shards: list[int] = []
    dry_run: bool = False

    example: ClassVar[Any] = {"to": "2026-01-31T08:00:00Z", "dry_run": True}


async def list_triggers(request: Request) -> Response:
    """Programs with their state, lag, parked cells and counts."""
    datastore = await request.datastore()
    request.query()
    state = request.state
    timeout_s = state.settings.status_timeout_s
    (consumers, unheard), workers, summaries = await asyncio.gather(
        read_consumers(state.storage, datastore, timeout_s),
        read_workers(state.storage, datastore, timeout_s),
        read_summaries(state.storage, datastore, timeout_s),
    )
    require_known(consumers, unheard)
    programs = []
    for name, consumer in consumers.items():
        if is_program(name):
            own = [row for row in workers if row.consumer == name]
            view = program_view(_view(consumer_view(name, consumer)), summaries.get(name, ProgramSummary()), own)
            programs.append({**view, **workers_in_all(own)})
    return ok_response(request.response_format(), {"triggers": programs, **unheard.document()}, NEVER_KEPT)


async def get_trigger(request: Request) -> Response:
    """One program, shard by shard."""
    datastore = await request.datastore()
    request.query()
    program = request.path["program"]
    state, consumer, timeout_s = request.state, consumer_of_program(program), request.state.settings.status_timeout_s
    (shards, unheard), workers, summaries = await asyncio.gather(
        read_consumer(state.storage, datastore, consumer, timeout_s),
        read_workers(state.storage, datastore, timeout_s),
        read_summaries(state.storage, datastore, timeout_s),
    )
    if not shards:
        raise NotFound(f"no trigger program {program!r} has run here yet")
    own = [row for row in workers if row.consumer == consumer]
    summary = summaries.get(consumer, ProgramSummary())
    document = {
        **program_view(_view(consumer_view(consumer, in_all(shards))), summary, own),
        **workers_in_all(own),
        "shards": [_shard_view(number, shard, summary) for number, shard in shards.items()],
        "workers": [worker_view(row) for row in own],
        **unheard.document(),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def pause_trigger(request: Request) -> Response:
    """Calls nothing of the program, or of some shards, until it is resumed. Workers obey within two seconds."""
    control, asked = await _controlled(request)
    unreached = await control.pause(asked.shards, _reason(asked.reason))
    document = {"program": request.path["program"], "shards": asked.shards, "unreached": unreached}
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def resume_trigger(request: Request) -> Response:
    """Lets what was paused, or had stopped, run again."""
    control, asked = await _controlled(request)
    done = await control.resume(asked.shards)
    document = {"program": request.path["program"], **msgspec.structs.asdict(done)}
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def seek_trigger(request: Request) -> Response:
    """Orders that checkpoints go to a location. Says by shard how many cells come again or are passed over."""
    control = await _control(request)
    asked = decode(await request.payload(PAYLOAD_BYTES_MAX), request.request_format().decoder(SeekRequest), "seek")
    to = [asked.to] if isinstance(asked.to, str) else asked.to
    if not to:
        raise Invalid("to", "must be beginning, end, a time or a location")
    steps = await control.plan_seek(to, asked.shards)
    if not asked.dry_run:
        await control.seek(steps)
    document = {
        "program": request.path["program"],
        "dry_run": asked.dry_run,
        "again": sum(step.again for step in steps),
        "passed": sum(step.passed for step in steps),
        "shards": [_step_view(step) for step in steps],
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def delete_trigger(request: Request) -> Response:
    """Removes a program that no worker runs: its checkpoints, parked cells, jobs and orders."""
    control = await _control(request)
    removal = await control.remove()
    document = {
        "program": removal.program,
        "checkpoints": removal.checkpoints,
        "finished": removal.finished,
        "parked": removal.parked,
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def _control(request: Request) -> TriggerControl:
    datastore = await request.datastore()
    request.query()
    return TriggerControl(request.state.storage, datastore, request.path["program"])


async def _controlled(request: Request) -> tuple[TriggerControl, HaltRequest]:
    """Returns the program and the payload, which may be left out."""
    control = await _control(request)
    payload = await request.payload(PAYLOAD_BYTES_MAX)
    asked = decode(payload, request.request_format().decoder(HaltRequest), "order") if payload else HaltRequest()
    return control, asked


def _reason(text: str | None) -> str | None:
    if text is not None and len(text) > REASON_CHARACTERS_MAX:
        raise Invalid("reason", f"has at most {REASON_CHARACTERS_MAX} characters")
    return text


def _view(consumer: Mapping[str, object]) -> dict[str, object]:
    return {"program": consumer["name"], **{name: consumer[name] for name in ("state", "reason", "lag", "stopped")}}


def _shard_view(number: int, shard: ConsumerShard, summary: ProgramSummary) -> dict[str, object]:
    is_paused = number in summary.paused and shard.state == "running"
    seek = summary.seeks.get(number)
    return {
        "shard": number,
        "generation": shard.location.generation,
        "added_id": shard.location.added_id,
        "lag": shard.lag,
        "state": "paused" if is_paused else shard.state,
        "reason": summary.paused[number] if is_paused else shard.reason,
        "kills": shard.kills,
        "counts": counts_view(shard.counts),
        "counted_from": shard.counted_from,
        "seek": None if seek is None else str(seek.to.location),
    }


def _step_view(step: SeekStep) -> dict[str, Any]:
    return {
        "shard": step.to.shard,
        "from": None if step.before is None else str(step.before),
        "to": str(step.to.location),
        "again": step.again,
        "passed": step.passed,
        "stopped": step.is_stopped,
    }


ROUTES: Sequence[Route] = (
    Route("GET", "/triggers", list_triggers, Scope.READ, answers={200: ProgramsView}),
    Route("GET", "/triggers/{program}", get_trigger, Scope.READ, answers={200: ProgramDetailsView}),
    Route("DELETE", "/triggers/{program}", delete_trigger, Scope.ADMIN, answers={200: RemovedView}, problems=(409,)),
    Route(
        "POST",
        "/triggers/{program}/pause",
        pause_trigger,
        Scope.ADMIN,
        payload=HaltRequest,
        optional=True,
        answers={200: PausedView},
    ),
    Route(
        "POST",
        "/triggers/{program}/resume",
        resume_trigger,
        Scope.ADMIN,
        payload=HaltRequest,
        optional=True,
        answers={200: ResumedView},
    ),
    Route(
        "POST", "/triggers/{program}/seek", seek_trigger, Scope.ADMIN, payload=SeekRequest, answers={200: SoughtView}
    ),
)
