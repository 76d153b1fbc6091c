"""/ui: the page for people, whose files are beside api/ui/live.py, and what only it asks for."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from api.follow.log_pages import HEADERS, problem_event
from api.http.asgi import Route
from api.http.content import EVENTS, JSON
from api.http.request import Request
from api.http.response import (
    Header,
    Response,
    Send,
    ok_response,
    problem_of,
    problem_response,
    send_response,
    stream_response,
)
from api.http.serving import NEVER_KEPT
from api.routes.indexes import index_of, indexes_of
from api.routes.log import parse_shard
from api.routes.status import status_of
from api.routes.topology import topology_of
from api.routes.triggers import program_of, programs_of
from api.state import ApiState
from api.ui import live
from schemaless.access import ALL_DATASTORES, Scope, Token
from schemaless.cell import created_at_text
from schemaless.contract.cells import TimeText, View
from schemaless.contract.parameters import Parameter
from schemaless.errors import Invalid, NotFound, SchemalessError, StorageUnavailable
from schemaless.facts.consumers import CheckpointsReport, consumer_shards, read_consumers, read_workers
from schemaless.facts.servers import STATUS_TIMEOUT_S
from schemaless.location import GenerationStart
from schemaless.ops.tokens import anybody
from schemaless.storage import checkpoint_table, consumer_summary, shard_head
from schemaless.storage.checkpoint_table import Checkpoint
from schemaless.storage.failover import ask_clusters, nobody_answers
from schemaless.storage.operation import Operation
from schemaless.storage.shard_head import Head
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore

_FOLDER = Path(live.__file__).parent / "files"
_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript",
    ".css": b"text/css",
    ".svg": b"image/svg+xml",
}
_HEADERS: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
        b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class _PageFile(msgspec.Struct, frozen=True):
    body: bytes
    headers: tuple[Header, ...]
    etag: bytes


def _page_file(path: Path) -> _PageFile:
    body = path.read_bytes()
    etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode()
    return _PageFile(body, (*_HEADERS, (b"content-type", _KINDS[path.suffix]), (b"etag", etag)), etag)


_FILES: Mapping[str, _PageFile] = {path.name: _page_file(path) for path in _FOLDER.iterdir()}


async def get_page(request: Request) -> Response:
    """The page for people. It needs no token by itself, and asks for one before it shows anything."""
    return _served(request, _FILES["index.html"])


async def get_page_file(request: Request) -> Response:
    """A file that the page loads."""
    try:
        return _served(request, _FILES[request.path["file"]])
    except KeyError:
        raise NotFound("the page has no such file") from None


def _served(request: Request, file: _PageFile) -> Response:
    if request.header(b"if-none-match") == file.etag:
        return Response(304, b"", file.headers)
    return Response(200, file.body, file.headers)


class SessionView(View, frozen=True):
    """What the caller's token may see and do: its scope in each datastore. `everywhere` is true for an administrator of
    all datastores, who may change a master. `expires_at` is null where no token is needed.
    """

    token: str
    datastores: dict[str, Scope]
    everywhere: bool
    expires_at: TimeText | None

    example: ClassVar[Any] = {
        "token": "ada",
        "datastores": {"mezzanine": "read"},
        "everywhere": False,
        "expires_at": None,
    }


async def get_session(request: Request) -> Response:
    """Who the caller is: the name of the token, when it ends, and its scope in each datastore that it reaches."""
    request.query()
    state, ends_at = request.state, None
    tokens: Sequence[Token] = (anybody(),)
    if request.token is not None:
        tokens = await state.admission.grants(request.header(b"authorization"))
        ends_at = created_at_text(request.token.ends_at)
    names = await state.catalogue.all()
    scopes = {name: one.scope for one in reversed(tokens) for name in names if one.reaches(name)}  # the widest counts
    everywhere = any(one.scope is Scope.ADMIN and one.reaches(ALL_DATASTORES) for one in tokens)
    view = SessionView(tokens[0].name, dict(sorted(scopes.items())), everywhere, ends_at)
    return ok_response(request.response_format(), view, NEVER_KEPT)


# The pictures: what /ui/events/{datastore} sends again and again.

Document = Mapping[str, Any]


async def follow_picture(request: Request) -> Response:
    """A picture of the datastore every two seconds, as server-sent events, for the page.

    Pages that watch the same share one look at the servers. A picture that can't be had is an event `problem`.
    """
    datastore = await request.datastore()
    query = request.query(VIEW, OF)
    view, of = VIEW.of(query), OF.of(query)
    if view == "shard":
        parse_shard(datastore, of)
    ask = partial(_present, request.state, datastore, partial(_PICTURES[view], request.state, datastore, of))
    what = (datastore.name, view, of if view in _OF_ONE else None)
    return stream_response(partial(_send_pictures, request, datastore, what, ask))


async def _send_pictures(
    request: Request, datastore: Datastore, what: tuple[Any, ...], ask: Callable[[], Awaitable[Document]], send: Send
) -> None:
    request.follows()
    state = request.state
    try:
        with (
            state.followers.follow(datastore, (), request.token) as follower,
            state.open_pages.watching(what, partial(_event, ask), follower) as picture,
        ):
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

            async def send_on() -> None:
                if picture.event:
                    follower.wake()  # other pages have it already
                while not follower.is_released:
                    event = picture.event if await follower.woken(state.settings.heartbeat_s) else b": alive\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    await asyncio.sleep(0)  # what is written in one pass of the loop is sent at its end
                    await send({"type": "http.response.body", "body": b"", "more_body": True})

            if not request.headers_only:
                await request.unless_hung_up(send_on())
            await send({"type": "http.response.body", "body": b""})
    except SchemalessError as error:
        await send_response(problem_response(error), send)


async def _event(ask: Callable[[], Awaitable[Document]]) -> bytes:
    try:
        return b"event: picture\ndata: %b\n\n" % JSON.encode({"at": time.time(), **await ask()})
    except SchemalessError as error:
        return problem_event(error)


async def _present(state: ApiState, datastore: Datastore, ask: Callable[[], Awaitable[Document]]) -> Document:
    """Returns a picture of a datastore that is there. Raises NotFound for one that was dropped while pages are open."""
    with suppress(StorageUnavailable):  # then nobody says that it is gone
        if datastore.name not in await state.catalogue.all():
            raise NotFound(f"there is no datastore {datastore.name!r} any more: it was dropped")
    return await ask()


async def _overview(state: ApiState, datastore: Datastore, of: str) -> Document:
    status, topology, triggers, indexes = await asyncio.gather(
        _part(status_of(state, datastore)),
        _part(topology_of(state, datastore)),
        _part(programs_of(state.storage, datastore)),
        _part(indexes_of(state, datastore)),
    )
    return {
        "status": status,
        "topology": topology,
        "triggers": triggers,
        "indexes": indexes,
        "breakers": [name for name in state.storage.nodes if not state.read_breaker.has_answered(name)],
        "history": state.history.columns(datastore.name),
    }


async def _part(work: Awaitable[Document]) -> Document:
    """Returns a part of a picture. One that can't be had says why, and takes nothing from the others."""
    try:
        return await work
    except SchemalessError as error:
        return {"problem": problem_of(error)["detail"]}


async def _shards(state: ApiState, datastore: Datastore, of: str) -> Document:
    """Returns heads and lags of all shards as lists, because 4096 objects would be most of the work."""
    storage, name = state.storage, datastore.name
    answers, (consumers, _), workers = await asyncio.gather(
        ask_clusters(storage, datastore.clusters, _shards_report, name, timeout_s=STATUS_TIMEOUT_S),
        read_consumers(storage, datastore),
        read_workers(storage, datastore),
    )
    heads: list[int | None] = [None] * datastore.shards
    lags = [0] * datastore.shards
    for found, behind in answers.found.values():
        for head in found:
            heads[head.shard] = head.added_id
        for number, lag in behind.items():
            lags[number] = lag
    faults: dict[int, str] = {shard: why for shard, why in _failing(workers)}
    for consumer, one in consumers.items():
        faults |= {number: f"{consumer} has stopped: {reason}" for number, reason in one.stopped.items()}
    return {
        "heads": heads,
        "lags": lags,
        "faults": {str(number): why for number, why in sorted(faults.items())},
        "placement": datastore.homes,
        "unknown": {cluster: str(problem_of(error)["detail"]) for cluster, error in answers.failures.items()},
    }


def _shards_report(datastore: str) -> Operation[tuple[Sequence[Head], Mapping[int, int]]]:
    behind = yield from consumer_summary.lags(datastore)
    return (yield from shard_head.heads_at_home(datastore)), behind


def _failing(workers: Sequence[WorkerRow]) -> Iterator[tuple[int, str]]:
    for row in workers:
        for waiting in (*row.report.failing_shards, *row.report.refused, *row.report.unconfirmed):
            yield waiting.shard, f"{waiting.consumer} doesn't continue: {waiting.reason}"


async def _one_shard(state: ApiState, datastore: Datastore, of: str) -> Document:
    """Returns a shard's head, its generations, and how far its consumers are."""
    shard = parse_shard(datastore, of)
    answers = await ask_clusters(
        state.storage, [datastore.home(shard)], _shard_report, datastore.name, shard, timeout_s=STATUS_TIMEOUT_S
    )
    if answers.failures:
        raise nobody_answers(answers.failures.values())
    ((head, starts, checkpoints),) = answers.found.values()
    consumers = {
        one.consumer: consumer_shards([CheckpointsReport({shard: head.added_id}, [one], {shard: starts})])[shard]
        for one in checkpoints
    }
    return {
        "shard": shard,
        "cluster": datastore.home(shard),
        "generation": head.generation,
        "head": head.added_id,
        "last_created_at": created_at_text(head.last_created_at),
        "generations": [{"generation": one.generation, "starts_at": one.starts_at} for one in starts],
        "consumers": [
            {"consumer": name, "location": str(one.location), "lag": one.lag, "state": one.state, "reason": one.reason}
            for name, one in consumers.items()
        ],
    }


def _shard_report(
    datastore: str, shard: int
) -> Operation[tuple[Head, Sequence[GenerationStart], Sequence[Checkpoint]]]:
    checkpoints = yield from checkpoint_table.of_shard(datastore, shard)
    head, starts = yield from shard_head.history(datastore, shard)  # last: a lag may be too high, never too low
    return head, starts, checkpoints


async def _one_program(state: ApiState, datastore: Datastore, of: str) -> Document:
    return await program_of(state.storage, datastore, of)


_OF_ONE = {"shard": _one_shard, "index": index_of, "trigger": _one_program}
_PICTURES: Mapping[str, Callable[[ApiState, Datastore, str], Awaitable[Document]]] = {
    "overview": _overview,
    "shards": _shards,
    **_OF_ONE,
}


def _parse_view(text: str, field: str) -> str:
    if text not in _PICTURES:
        raise Invalid(field, f"is one of {', '.join(_PICTURES)}")
    return text


VIEW: Parameter[str] = Parameter(
    "view", _parse_view, "overview", f"{', '.join(_PICTURES)}.", {"type": "string", "enum": [*_PICTURES]}
)
OF: Parameter[str] = Parameter(
    "of",
    lambda text, field: text,
    "",
    "Of what, for the views of one: a shard's number, or the name of an index or a program.",
)
_TEXT = "text/html"

ROUTES = (
    Route("GET", "/ui", get_page, Scope.READ, answers={200: None, 304: None}, text={_TEXT: "<!doctype html>"}),
    Route(
        "GET",
        "/ui/files/{file}",
        get_page_file,
        Scope.READ,
        answers={200: None, 304: None},
        text={"text/javascript": "export {}"},
    ),
    Route("GET", "/ui/session", get_session, Scope.READ, answers={200: SessionView}),
    Route(
        "GET",
        "/ui/events/{datastore}",
        follow_picture,
        Scope.READ,
        (VIEW, OF),
        answers={200: None},
        text={EVENTS: "event: picture\ndata: {}\n"},
    ),
)
