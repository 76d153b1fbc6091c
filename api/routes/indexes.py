"""/indexes: creates and shows secondary indexes, and orders what becomes of them (schemaless/index/catalogue.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from api.http.content import decode
from api.http.parameters import FLAG, LIMIT, Parameter, integer_schema, parse_flag, parse_int
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.index.passes import cleaner_view, kept_writes, read_passes
from api.index.problems import (
    ITEM_BYTES_MAX,
    ProblemCursor,
    count_problems,
    counts_or_none,
    cursor_text,
    problems_page,
    read_cursor,
)
from api.openapi.index_views import Definition, IndexesView, IndexView, MisfitsView
from api.routes.jobs import waits_for_indexer
from api.routes.status import NEVER_KEPT
from api.status.consumers import in_all, read_consumer
from api.status.workers import read_workers, waiting_shards
from schemaless.access import Scope, parse_lifetime
from schemaless.cell import created_at_text
from schemaless.errors import Invalid, StorageUnavailable
from schemaless.index.catalogue import (
    Change,
    build_progress,
    create_index,
    drop_index,
    pause_index,
    read_versions,
    resume_index,
    throttle_index,
    version_of,
)
from schemaless.index.definition import NUMBER_MAX, parse_definition, parse_index_name
from schemaless.index.switch import drop_version, switch_index
from schemaless.index.versions import IndexVersions, NamedIndex, VersionRole
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore

DEFINITION_BYTES_MAX = 64 << 10
CELLS_MAX = 10**9
COMMIT_S_MIN, COMMIT_S_MAX = 0.001, 3600.0
BUSY_SHARE_MIN = 0.001
_ORDER_BYTES_MAX = 1 << 10
_WORKED_ON = frozenset({IndexState.BUILDING, IndexState.DELETING})
"""States in which indexers have something to do that has an end."""


def _parse_keep(text: str, field: str) -> int:
    """Returns seconds. Raises Invalid."""
    return 0 if text in ("0", "0s") else parse_lifetime(text, field)


_VERSION: Parameter[int | None] = Parameter(
    "version",
    lambda text, field: parse_int(text, field, 1, NUMBER_MAX),
    None,
    "The number of a version. Without it: the change, or else the version that answers.",
    integer_schema(1, NUMBER_MAX),
)
_DROPPED: Parameter[int | None] = Parameter(
    "version",
    _VERSION.parse,
    None,
    "Drops this version only: a change that is given up, or one that is kept.",
    integer_schema(1, NUMBER_MAX),
)
_CHANGE: Parameter[bool] = Parameter(
    "change",
    parse_flag,
    False,
    "true: an index with another definition gets a new version, beside the present one.",
    FLAG,
)
_HOLD: Parameter[bool] = Parameter(
    "hold",
    parse_flag,
    False,
    "true: the new version waits for `switch`. By default it answers once it is complete.",
    FLAG,
)
_KEEP: Parameter[int | None] = Parameter(
    "keep", _parse_keep, None, "How long the version before is kept after the switch, such as 30m, 12h or 0s."
)


async def put_index(request: Request) -> Response:
    """Creates an index, which is built from all cells. The same definition again changes nothing.

    With `change`, another definition becomes a new version, which is built beside the present one and then answers.
    """
    datastore = await request.datastore()
    query = request.query(_CHANGE, _HOLD, _KEEP)
    change = None
    if _CHANGE.of(query):
        keep_s = _KEEP.of(query)
        change = Change(request.state.settings.index_keep_s if keep_s is None else keep_s, _HOLD.of(query))
    elif unused := query.keys() - {"change"}:
        raise Invalid(sorted(unused)[0], "is for a change of an index: ask with change=true, or --change")
    name = parse_index_name(request.path["name"])
    document = request.request_format().parse(await request.payload(DEFINITION_BYTES_MAX))
    definition = parse_definition({"name": name, **document} if isinstance(document, dict) else document)
    if definition.name != name:
        raise Invalid("definition.name", f"is {definition.name!r}, the path says {name!r}")
    indexes_max = request.state.settings.indexes_max
    new = await create_index(request.state.storage, datastore, definition, indexes_max, change)
    return await _shown(request, datastore, name, status=201 if new else 200)


async def get_index(request: Request) -> Response:
    """Definition and state, with progress while it is building, why it failed, and how far it is behind.

    These are of the version that answers. `versions` has all of them: a change, and one that is kept after a switch.
    """
    datastore = await request.datastore()
    request.query()
    return await _shown(request, datastore, request.path["name"])


async def get_indexes(request: Request) -> Response:
    """All indexes of a datastore, by name."""
    datastore = await request.datastore()
    request.query()
    versions = await read_versions(request.state.storage, datastore)
    problems = await counts_or_none(request.state.storage, datastore, request.state.settings.status_timeout_s)
    indexes = versions.indexes().values()
    idle = await _idle(request, datastore, indexes)
    views = await asyncio.gather(*(_view(request, datastore, named, versions, problems, idle) for named in indexes))
    return ok_response(request.response_format(), {"indexes": views}, NEVER_KEPT)


async def delete_index(request: Request) -> Response:
    """Drops an index in whatever state it is, or one version. Indexers delete its tables."""
    datastore = await request.datastore()
    number, name = _DROPPED.of(request.query(_DROPPED)), request.path["name"]
    if number is None:
        await drop_index(request.state.storage, datastore, name)
    else:
        await drop_version(request.state.storage, datastore, name, number)
    request.state.index_catalogue.forget(datastore, name)
    return await _shown(request, datastore, name, status=202)


async def pause_one(request: Request) -> Response:
    """Lets no indexer work on an index. It answers queries on, if it was complete, with what it has."""
    return await _ordered(request, pause_index)


async def resume_one(request: Request) -> Response:
    """Lets indexers work on an index again that was paused, or that has failed."""
    return await _ordered(request, resume_index)


def _within(least: float, most: float) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"minimum": least, "maximum": most})


class ThrottleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What each indexer process may take of the servers for an index. What isn't given stays as it is.

    `cells_per_s`: how many cells a second it delivers. 0 and null: no bound. The others bound a build, and null means
    that the settings of the processes count again.
    """

    cells_per_s: Annotated[int, _within(0, CELLS_MAX)] | UnsetType | None = UNSET
    build_lag_cells_max: Annotated[int, _within(0, CELLS_MAX)] | UnsetType | None = UNSET
    build_commit_max_s: Annotated[float, _within(COMMIT_S_MIN, COMMIT_S_MAX)] | UnsetType | None = UNSET
    build_busy_share: Annotated[float, _within(BUSY_SHARE_MIN, 1)] | UnsetType | None = UNSET

    example: ClassVar[Any] = {"cells_per_s": 500, "build_busy_share": 0.05}

    def limits(self) -> dict[str, float | None]:
        """Returns the limits that are given, at least one, by name. Raises Invalid."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if not given:
            raise Invalid("throttle", f"give at least one of {', '.join(self.__struct_fields__)}")
        for name, value in given.items():
            least, most = _LIMITS[name]
            if value is not None and not least <= value <= most:
                raise Invalid(name, f"must be from {least:g} to {most:g}{_LIMITS_SAY.get(name, '')}")
        return given | ({"cells_per_s": None} if given.get("cells_per_s") == 0 else {})


_LIMITS = {
    "cells_per_s": (0, CELLS_MAX),
    "build_lag_cells_max": (0, CELLS_MAX),
    "build_commit_max_s": (COMMIT_S_MIN, COMMIT_S_MAX),
    "build_busy_share": (BUSY_SHARE_MIN, 1),
}
_LIMITS_SAY = {"cells_per_s": ", 0 for no bound", "build_lag_cells_max": ", 0 to wait for no minion"}


async def throttle_one(request: Request) -> Response:
    """Bounds what each indexer process may take of the servers for an index, while it runs."""
    document = decode(
        await request.payload(_ORDER_BYTES_MAX), request.request_format().decoder(ThrottleRequest), "throttle"
    )
    limits = document.limits()
    return await _ordered(
        request, lambda storage, datastore, name, number: throttle_index(storage, datastore, name, limits, number)
    )


async def get_problems(request: Request) -> Response:
    """Values that don't fit the types of the index, and are null there. `count` is their exact number."""
    datastore = await request.datastore()
    query = request.query(_VERSION, LIMIT, CURSOR)
    limit, storage, timeout_s = LIMIT.of(query), request.state.storage, request.state.settings.status_timeout_s
    named, number = (
        (await read_versions(storage, datastore)).of(datastore.name, request.path["name"]),
        _VERSION.of(query),
    )
    index = (named.meant if number is None else version_of(named, number)).definition
    cursor = CURSOR.of(query)
    after = ProblemCursor(index.number) if cursor is None else read_cursor(cursor, index)
    await request.read.reserve(limit * ITEM_BYTES_MAX)
    shown, following = await problems_page(storage, datastore, index, after, limit)
    counts = await count_problems(storage, datastore, timeout_s)
    document = {
        "problems": shown,
        "count": counts.get(IndexVersion(datastore.name, index.name, index.number), 0),
        "cursor": None if following is None else cursor_text(following),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


class SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Which version shall answer: the newest, the one before with `back`, or `version`."""

    version: int | None = None
    back: bool = False
    keep: str | None = None

    example: ClassVar[Any] = {"version": 2, "keep": "12h"}


async def switch_one(request: Request) -> Response:
    """Lets another version answer: the newest one, with `back` the one before, or the `version` with a number.

    The version that answered until now is kept for `keep`, such as 30m. Switching to the one that answers is harmless.
    """
    datastore, name = await request.datastore(), request.path["name"]
    request.query()
    wanted = decode(await request.payload(_ORDER_BYTES_MAX), request.request_format().decoder(SwitchRequest), "switch")
    if wanted.back and wanted.version is not None:
        raise Invalid("back", "give back or version, not both")
    keep_s = None if wanted.keep is None else _parse_keep(wanted.keep, "keep")
    storage = request.state.storage
    try:
        await switch_index(storage, datastore, name, wanted.version, back=wanted.back, keep_s=keep_s)
    finally:
        request.state.index_catalogue.forget(datastore, name)
    return await _shown(request, datastore, name)


async def _ordered(
    request: Request, order: Callable[[AsyncStorage, Datastore, str, int | None], Awaitable[DefinedIndex]]
) -> Response:
    datastore = await request.datastore()
    number = _VERSION.of(request.query(_VERSION))
    index = await order(request.state.storage, datastore, request.path["name"], number)
    request.state.index_catalogue.forget(datastore, index.name)
    return await _shown(request, datastore, index.name)


async def _shown(request: Request, datastore: Datastore, name: str, status: int = 200) -> Response:
    """Shows one index, and how many cells it is behind."""
    versions = await read_versions(request.state.storage, datastore)
    timeout_s = request.state.settings.status_timeout_s
    problems = await counts_or_none(request.state.storage, datastore, timeout_s)
    named = versions.of(datastore.name, name)
    idle = await _idle(request, datastore, [named])
    view = await _view(request, datastore, named, versions, problems, idle, lags=True)
    answering = named.answering
    if answering.is_complete:
        passes = await read_passes(request.state.storage, datastore, timeout_s)
        version = IndexVersion(datastore.name, answering.name, answering.number)
        view["cleaner"] = None if passes is None else cleaner_view(request.state.storage, datastore, passes, version)
    return ok_response(request.response_format(), view, NEVER_KEPT, status=status)


async def _idle(request: Request, datastore: Datastore, indexes: Iterable[NamedIndex]) -> str | None:
    """Returns why nobody works on indexes that are built or deleted, None if somebody does or there are none."""
    states = {index.state for named in indexes for index in named.versions}
    return await waits_for_indexer(request, datastore) if states & _WORKED_ON else None


async def _view(
    request: Request,
    datastore: Datastore,
    named: NamedIndex,
    known: IndexVersions,
    problems: Mapping[IndexVersion, int] | None,
    idle: str | None,
    *,
    lags: bool = False,
) -> dict[str, Any]:
    """Shows an index as the version that answers, with all versions below that.

    `problems` are None if a cluster doesn't answer. `lags`: how far each version is behind, too.
    """
    waits = f"bring {', '.join(known.away)} back: it goes on by itself then" if known.away else idle
    state = request.state
    workers = await read_workers(state.storage, datastore, state.settings.status_timeout_s) if lags else None
    views = await asyncio.gather(
        *(_version_view(request, datastore, named, index, waits, problems, workers) for index in named.versions)
    )
    answering = views[named.versions.index(named.answering)]
    own = {name: value for name, value in answering.items() if name not in ("role", "kept_until", "switch")}
    return {"name": named.answering.name, **own, "versions": views}


async def _version_view(
    request: Request,
    datastore: Datastore,
    named: NamedIndex,
    index: DefinedIndex,
    waits: str | None,
    problems: Mapping[IndexVersion, int] | None,
    workers: Sequence[WorkerRow] | None,
) -> dict[str, Any]:
    """Shows one version, with `workers` how far it is behind, too. `waits`: what builds and removals wait for."""
    until = named.kept_until(index)
    version = IndexVersion(datastore.name, index.name, index.number)
    view = {
        "number": index.number,
        "role": named.role(index),
        "state": index.state,
        "reason": index.order.reason,
        "what_to_do": _what_to_do(named, index, waits),
        **msgspec.structs.asdict(index.order.limits),
        "progress": await progress_view(request, datastore, index),
        "problems": None if problems is None else problems.get(version, 0),
        "switch": "manual" if index.switch.by_hand else "automatic",
        "kept_until": None if until is None else created_at_text(until),
        "definition": index.definition.document(),
    }
    if workers is not None and index.is_complete:
        timeout_s = request.state.settings.status_timeout_s
        shards, unheard = await read_consumer(request.state.storage, datastore, index.definition.consumer, timeout_s)
        view["lag"] = None if unheard.clusters else in_all(shards).lag
        view["waiting_shards"] = waiting_shards(workers, index.definition.consumer)
        if named.role(index) is VersionRole.KEPT:
            counts = await kept_writes(request.state.storage, datastore, timeout_s)
            view["kept_writes"] = None if counts is None else counts.get(version, 0)
    return view


def _what_to_do(named: NamedIndex, index: DefinedIndex, waits: str | None) -> str | None:
    """Returns what a person should do or wait for, None if nothing."""
    which = index.name if index == named.meant else f"{index.name} --version {index.number}"
    if index.state is IndexState.FAILED:
        return f"correct what the reason names, then `schemaless index resume {which}`, or drop it"
    if index.state is IndexState.PAUSED:
        return f"`schemaless index resume {which}` lets it go on from where it is"
    if waits is not None and index.state in _WORKED_ON:
        return waits
    role = named.role(index)
    if role is VersionRole.CHANGE and index.is_complete and index.switch.by_hand:
        return f"`schemaless index switch {index.name}` lets it answer"
    if role is VersionRole.KEPT:
        return (
            f"`schemaless index switch {index.name} --version {index.number}` lets it answer again. It is written like"
            f" any index until it goes: `schemaless index drop {index.name} --version {index.number}` ends that"
        )
    return None


async def progress_view(request: Request, datastore: Datastore, index: DefinedIndex) -> dict[str, Any] | None:
    """Returns how far an index is that was never complete, in cells. `total` is null while its tables are being made.

    Returns None for an index that was complete, or is dropped. All is null while a master is away.
    """
    if not index.is_being_built:
        request.state.build_eta.forget(datastore.name, index.definition.consumer)
        return None
    try:
        progress = await build_progress(request.state.storage, datastore, index)
    except StorageUnavailable:
        return {"done": None, "total": None, "eta_s": None}
    eta_s = request.state.build_eta.seconds(datastore.name, index.definition.consumer, progress)
    if index.state is not IndexState.BUILDING:
        eta_s = None
        request.state.build_eta.forget(datastore.name, index.definition.consumer)
    return {"done": progress.done, "total": progress.total, "eta_s": eta_s}


CURSOR: Parameter[str | None] = Parameter(
    "cursor", lambda text, field: text, None, "Of the page before: where this one begins."
)
_ONE = {200: IndexView}

ROUTES = (
    Route("GET", "/indexes", get_indexes, Scope.READ, answers={200: IndexesView}),
    Route("GET", "/indexes/{name}", get_index, Scope.READ, answers=_ONE),
    Route(
        "PUT",
        "/indexes/{name}",
        put_index,
        Scope.ADMIN,
        (_CHANGE, _HOLD, _KEEP),
        payload=Definition,
        answers={201: IndexView, 200: IndexView},
        problems=(409,),
    ),
    Route(
        "DELETE", "/indexes/{name}", delete_index, Scope.ADMIN, (_DROPPED,), answers={202: IndexView}, problems=(409,)
    ),
    Route("POST", "/indexes/{name}/pause", pause_one, Scope.ADMIN, (_VERSION,), answers=_ONE, problems=(409,)),
    Route("POST", "/indexes/{name}/resume", resume_one, Scope.ADMIN, (_VERSION,), answers=_ONE, problems=(409,)),
    Route(
        "POST",
        "/indexes/{name}/throttle",
        throttle_one,
        Scope.ADMIN,
        (_VERSION,),
        payload=ThrottleRequest,
        answers=_ONE,
        problems=(409,),
    ),
    Route(
        "GET",
        "/indexes/{name}/problems",
        get_problems,
        Scope.READ,
        (_VERSION, LIMIT, CURSOR),
        answers={200: MisfitsView},
    ),
    Route(
        "POST", "/indexes/{name}/switch", switch_one, Scope.ADMIN, payload=SwitchRequest, answers=_ONE, problems=(409,)
    ),
)
