"""/indexes: creates and shows secondary indexes, and orders what becomes of them (schemaless/index/catalogue.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from api.http.asgi import Route
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.serving import NEVER_KEPT, Asked, serves
from api.index.passes import (
    ITEM_BYTES_MAX,
    ProblemCursor,
    cleaner_view,
    cursor_text,
    order_check,
    problems_page,
    read_cursor,
)
from api.routes.triggers import waits_for_indexer
from api.state import ApiState
from api.views import waiting_view
from schemaless.access import Scope
from schemaless.cell import RowKey, created_at_text, parse_row_key
from schemaless.contract import indexes
from schemaless.contract.indexes import (
    CHANGE,
    CHECKED_VERSION,
    DROPPED,
    HOLD,
    KEEP,
    VERSION,
    CheckOrderedView,
    IndexCheckRequest,
    MisfitsView,
    SwitchRequest,
    ThrottleRequest,
    WouldView,
    parse_keep,
)
from schemaless.contract.parameters import DRY_RUN, LIMIT, Parameter
from schemaless.errors import Invalid, StorageUnavailable
from schemaless.facts.consumers import in_all, read_consumer, read_workers, waiting_shards
from schemaless.facts.indexes import count_problems, counts_or_none, kept_writes, read_passes
from schemaless.facts.servers import read_standstills
from schemaless.index.catalogue import (
    Change,
    ChangeOrder,
    build_progress,
    create_index,
    drop_index,
    find_versions,
    order_index,
    paused,
    read_versions,
    resumed,
    throttled,
    version_of,
    version_to_order,
)
from schemaless.index.check import complete_definition
from schemaless.index.comparison import FIRST_ROW, LAST_ROW, CheckRequest
from schemaless.index.definition import parse_definition, parse_index_name
from schemaless.index.switch import answers_queries, drop_version, switch_index, target_of
from schemaless.index.versions import IndexVersions, NamedIndex, VersionRole
from schemaless.names import INDEXER, index_table_name
from schemaless.sharding import shard_of
from schemaless.storage import index_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import all_masters
from schemaless.storage.index_definition_table import DefinedIndex, IndexState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.worker_table import WorkerRow
from schemaless.topology import Datastore

KEEP_S = 3600  # how long a change keeps the version that answered before, and its cursors, if it doesn't say
Limits = Mapping[str, float | None]
_WORKED_ON = frozenset({IndexState.BUILDING, IndexState.DELETING})
"""States in which indexers have something to do that has an end."""


@serves(indexes.PUT)
async def put_index(asked: Asked[Any]) -> tuple[int, dict[str, Any]]:
    change = None
    if asked.of(CHANGE):
        keep_s = asked.of(KEEP)
        change = Change(KEEP_S if keep_s is None else keep_s, asked.of(HOLD))
    elif unused := asked.query.keys() - {"change"}:
        raise Invalid(sorted(unused)[0], "is for a change of an index: ask with change=true, or --change")
    name, document = parse_index_name(asked.path["name"]), asked.payload
    definition = parse_definition({"name": name, **document} if isinstance(document, dict) else document)
    if definition.name != name:
        raise Invalid("definition.name", f"is {definition.name!r}, the path says {name!r}")
    new = await create_index(asked.state.storage, asked.datastore, definition, change=change)
    return 201 if new else 200, await index_of(asked.state, asked.datastore, name)


@serves(indexes.GET)
async def get_index(asked: Asked[None]) -> dict[str, Any]:
    return await index_of(asked.state, asked.datastore, asked.path["name"])


@serves(indexes.LIST)
async def get_indexes(asked: Asked[None]) -> dict[str, Any]:
    return await indexes_of(asked.state, asked.datastore)


async def indexes_of(state: ApiState, datastore: Datastore) -> dict[str, Any]:
    storage = state.storage
    versions = await read_versions(storage, datastore)
    problems = await counts_or_none(storage, datastore)
    found = versions.indexes().values()
    idle = await _idle(storage, datastore, found)
    views = await asyncio.gather(*(_view(state, datastore, named, versions, problems, idle) for named in found))
    return {"indexes": views}


@serves(indexes.DROP)
async def delete_index(asked: Asked[None]) -> tuple[int, dict[str, Any]]:
    number, name = asked.of(DROPPED), asked.path["name"]
    if asked.of(DRY_RUN):
        return 200, await _would_drop(asked, number)
    if number is None:
        await drop_index(asked.state.storage, asked.datastore, name)
    else:
        await drop_version(asked.state.storage, asked.datastore, name, number)
    return 202, await _changed(asked)


@serves(indexes.PAUSE)
async def pause_one(asked: Asked[None]) -> dict[str, Any]:
    return await _ordered(asked, paused)


@serves(indexes.RESUME)
async def resume_one(asked: Asked[None]) -> dict[str, Any]:
    return await _ordered(asked, resumed)


@serves(indexes.THROTTLE)
async def throttle_one(asked: Asked[ThrottleRequest]) -> dict[str, Any]:
    limits = {name: value for name, value in msgspec.structs.asdict(asked.payload).items() if value is not UNSET}
    if not limits:
        raise Invalid("throttle", f"give at least one of {', '.join(asked.payload.__struct_fields__)}")
    if limits.get("cells_per_s") == 0:
        limits["cells_per_s"] = None
    return await _ordered(asked, throttled(limits), limits)


@serves(indexes.SWITCH)
async def switch_one(asked: Asked[SwitchRequest]) -> dict[str, Any]:
    wanted, name = asked.payload, asked.path["name"]
    if wanted.back and wanted.version is not None:
        raise Invalid("back", "give back or version, not both")
    keep_s = None if wanted.keep is None else parse_keep(wanted.keep, "keep")
    storage = asked.state.storage
    if asked.of(DRY_RUN):
        target = target_of(await find_versions(storage, asked.datastore, name), wanted.version, back=wanted.back)
        return await _would(asked, [target], VersionRole.ANSWERS)
    try:
        await switch_index(storage, asked.datastore, name, wanted.version, back=wanted.back, keep_s=keep_s)
    finally:
        asked.state.index_catalogue.forget(asked.datastore, name)
    return await index_of(asked.state, asked.datastore, name)


async def get_problems(request: Request) -> Response:
    """Values that don't fit the types of the index, and are null there. `count` is their exact number."""
    datastore = await request.datastore()
    query = request.query(VERSION, LIMIT, CURSOR)
    limit, storage = LIMIT.of(query), request.state.storage
    named, number = (
        (await read_versions(storage, datastore)).of(datastore.name, request.path["name"]),
        VERSION.of(query),
    )
    index = (named.meant if number is None else version_of(named, number)).definition
    cursor = CURSOR.of(query)
    after = ProblemCursor(index.number) if cursor is None else read_cursor(cursor, index)
    await request.read.reserve(limit * ITEM_BYTES_MAX)
    shown, following = await problems_page(storage, datastore, index, after, limit)
    counts = await count_problems(storage, datastore)
    document = {
        "problems": shown,
        "count": counts.get(IndexVersion(datastore.name, index.name, index.number), 0),
        "cursor": None if following is None else cursor_text(following),
    }
    return ok_response(request.response_format(), document, NEVER_KEPT)


async def _ordered(asked: Asked[Any], change: ChangeOrder, limits: Limits | None = None) -> dict[str, Any]:
    storage, datastore, name, number = asked.state.storage, asked.datastore, asked.path["name"], asked.of(VERSION)
    if not asked.of(DRY_RUN):
        await order_index(storage, datastore, name, number, change)
        return await _changed(asked)
    index = version_to_order(await find_versions(storage, datastore, name), number)
    return await _would(asked, [index], replace(index, order=change(index.order)).state, limits=limits or UNSET)


async def _would_drop(asked: Asked[Any], number: int | None) -> dict[str, Any]:
    storage, datastore = asked.state.storage, asked.datastore
    named = await find_versions(storage, datastore, asked.path["name"])
    going = list(named.versions) if number is None else [version_of(named, number)]
    if number is not None and named.role(going[0]) is VersionRole.ANSWERS:
        raise answers_queries(going[0])
    tables = [index_table_name(index.name, index.number) for index in going]
    counts = await all_masters(storage, datastore.clusters, index_table.entries_about, datastore, tables)
    return await _would(asked, going, "deleted", entries=sum(counts.values()))


async def _would(asked: Asked[Any], going: Sequence[DefinedIndex], becomes: str, **more: Any) -> dict[str, Any]:
    """Shows an index as it is, and what an order would touch."""
    workers = await read_workers(asked.state.storage, asked.datastore)
    indexers = sum(row.consumer == INDEXER for row in workers)
    numbers = [index.number for index in going]
    would = WouldView(becomes, asked.datastore.shards, indexers, numbers, **more)
    return await index_of(asked.state, asked.datastore, asked.path["name"]) | {"would": would}


async def _changed(asked: Asked[Any]) -> dict[str, Any]:
    name = asked.path["name"]
    asked.state.index_catalogue.forget(asked.datastore, name)
    return await index_of(asked.state, asked.datastore, name)


async def index_of(state: ApiState, datastore: Datastore, name: str) -> dict[str, Any]:
    """Shows one index, and how many cells it is behind."""
    storage = state.storage
    versions = await read_versions(storage, datastore)
    problems = await counts_or_none(storage, datastore)
    named = versions.of(datastore.name, name)
    idle = await _idle(storage, datastore, [named])
    view = await _view(state, datastore, named, versions, problems, idle, lags=True)
    answering = named.answering
    if answering.is_complete:
        passes = await read_passes(storage, datastore)
        version = IndexVersion(datastore.name, answering.name, answering.number)
        view["cleaner"] = None if passes is None else cleaner_view(storage, datastore, passes, version)
    return view


async def _idle(storage: AsyncStorage, datastore: Datastore, indexes: Iterable[NamedIndex]) -> str | None:
    """Returns what builds and removals of these indexes wait for: an indexer, or who holds a lock on a master. None if
    nothing is known, or none is built or deleted.
    """
    if not _WORKED_ON & {index.state for named in indexes for index in named.versions}:
        return None
    if (waits := await waits_for_indexer(storage, datastore)) is not None:
        return waits
    found = await read_standstills(storage, datastore)
    return next((f"on {cluster}, {standstill.why}" for cluster, standstill in found.items()), None)


async def _view(
    state: ApiState,
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
    workers = await read_workers(state.storage, datastore) if lags else None
    views = await asyncio.gather(
        *(_version_view(state, datastore, named, index, waits, problems, workers) for index in named.versions)
    )
    answering = views[named.versions.index(named.answering)]
    own = {name: value for name, value in answering.items() if name not in ("role", "kept_until", "switch")}
    return {"name": named.answering.name, **own, "versions": views}


async def _version_view(
    state: ApiState,
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
        "progress": await progress_view(state, datastore, index),
        "problems": None if problems is None else problems.get(version, 0),
        "switch": "manual" if index.switch.by_hand else "automatic",
        "kept_until": None if until is None else created_at_text(until),
        "definition": index.definition.document(),
    }
    if workers is not None and index.is_complete:
        consumer = index.definition.consumer
        shards, unheard = await read_consumer(state.storage, datastore, consumer)
        view["lag"] = None if unheard.clusters else in_all(shards).lag
        view["waiting_shards"] = waiting_view(waiting_shards(workers, consumer))
        if named.role(index) is VersionRole.KEPT:
            counts = await kept_writes(state.storage, datastore)
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


async def progress_view(state: ApiState, datastore: Datastore, index: DefinedIndex) -> dict[str, Any] | None:
    """Returns how far an index is that was never complete, in cells. `total` is null while its tables are being made.

    Returns None for an index that was complete, or is dropped. All is null while a master is away.
    """
    if not index.is_being_built:
        state.build_eta.forget(datastore.name, index.definition.consumer)
        return None
    try:
        progress = await build_progress(state.storage, datastore, index)
    except StorageUnavailable:
        return {"done": None, "total": None, "eta_s": None}
    eta_s = state.build_eta.seconds(datastore.name, index.definition.consumer, progress)
    if index.state is not IndexState.BUILDING:
        eta_s = None
        state.build_eta.forget(datastore.name, index.definition.consumer)
    return {"done": progress.done, "total": progress.total, "eta_s": eta_s}


CURSOR: Parameter[str | None] = Parameter(
    "cursor", lambda text, field: text, None, "Of the page before: where this one begins."
)

ROUTES = (
    get_indexes,
    get_index,
    put_index,
    delete_index,
    pause_one,
    resume_one,
    throttle_one,
    Route(
        "GET",
        "/indexes/{name}/problems",
        get_problems,
        Scope.READ,
        (VERSION, LIMIT, CURSOR),
        answers={200: MisfitsView},
    ),
    switch_one,
)


# /indexes/NAME/verify and repair: jobs of the indexers, which compare an index with its cells.

ROW_KEYS_MAX = 100
ROWS_PER_S_MAX = 1_000_000


def _requests(asked: IndexCheckRequest, datastore: Datastore, *, repairs: bool) -> dict[int, CheckRequest]:
    """Returns what is asked of each shard. Raises Invalid."""
    if asked.rows_per_s is not None and not 0 <= asked.rows_per_s <= ROWS_PER_S_MAX:
        raise Invalid("rows_per_s", f"is rows and entries a second up to {ROWS_PER_S_MAX}, or 0 for no bound")
    if asked.row_keys is not None:
        if asked.shards is not None or asked.first is not None or asked.last is not None:
            raise Invalid("row_keys", "can't be combined with shards, from and to")
        if not asked.row_keys or len(asked.row_keys) > ROW_KEYS_MAX:
            raise Invalid("row_keys", f"is a list of 1 to {ROW_KEYS_MAX} row keys")
        by_shard: dict[int, list[RowKey]] = {}
        for row_key in sorted({_row_key(text, "row_keys") for text in asked.row_keys}):
            by_shard.setdefault(shard_of(row_key, datastore.shards), []).append(row_key)
        return {
            shard: CheckRequest(repairs, asked.minions, asked.rows_per_s, row_keys=tuple(row_keys))
            for shard, row_keys in by_shard.items()
        }
    shards = range(datastore.shards) if asked.shards is None else sorted(set(asked.shards))
    if not shards or not 0 <= shards[0] <= shards[-1] < datastore.shards:
        raise Invalid("shards", f"is a list of numbers from 0 to {datastore.shards - 1}")
    request = CheckRequest(
        repairs,
        asked.minions,
        asked.rows_per_s,
        FIRST_ROW if asked.first is None else _row_key(asked.first, "from"),
        LAST_ROW if asked.last is None else _row_key(asked.last, "to"),
    )
    if request.first > request.last:
        raise Invalid("from", "is above to, so it is no row")
    return dict.fromkeys(shards, request)


def _row_key(text: str, field: str) -> RowKey:
    try:
        return parse_row_key(text)
    except Invalid as error:
        raise Invalid(field, f"{text[:100]!r} {error.why}") from None


@serves(indexes.VERIFY)
async def verify_index(asked: Asked[IndexCheckRequest]) -> tuple[int, CheckOrderedView]:
    return await _order_check(asked, repairs=False)


@serves(indexes.REPAIR)
async def repair_index(asked: Asked[IndexCheckRequest]) -> tuple[int, CheckOrderedView]:
    return await _order_check(asked, repairs=True)


async def _order_check(asked: Asked[IndexCheckRequest], *, repairs: bool) -> tuple[int, CheckOrderedView]:
    storage, datastore = asked.state.storage, asked.datastore
    requests = _requests(asked.payload, datastore, repairs=repairs)
    definition = await complete_definition(storage, datastore, asked.path["name"], asked.of(CHECKED_VERSION))
    waits = await waits_for_indexer(storage, datastore)
    if asked.of(DRY_RUN):
        return 200, CheckOrderedView(None, len(requests), waits)
    job = await order_check(storage, datastore, definition, requests, asked.who)
    return 202, CheckOrderedView(f"{job:016x}", len(requests), waits)


CHECK_ROUTES = (verify_index, repair_index)
