"""ApiState: what the handlers of one process share. The app's lifespan opens and closes it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from api.access.admission import Admission
from api.access.issuer import Issuer, IssuerKeys, fetch_over, verified_audience
from api.access.known_tokens import REFRESH_S, KnownTokens
from api.explain.explainer import Explainer
from api.follow.followers import Followers
from api.follow.head_watch import FollowedHeads
from api.http.budget import PayloadBudget, ReadBudget, RequestsInFlight
from api.index.checkpoint_waiter import CheckpointWaiter
from api.index.definition_cache import BuildEta, IndexCatalogue
from api.index.entry_reader import EntryReader
from api.index.freshness import IndexFreshness
from api.index.overlay import Overlays
from api.index.passes import PassSamples
from api.index.problems import ProblemSamples
from api.index.repairs import QueuedRepairs
from api.metrics import Metrics
from api.read.read_breaker import ReadBreaker
from api.read.reader import Reader
from api.read.replica_lag import ReplicaLag
from api.status.backlogs import Backlogs
from api.triggers.samples import TriggerSamples
from api.write.put import CellWriter
from schemaless.config import ApiSettings
from schemaless.ops.datastores import Catalogue
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage, shares_of
from schemaless.storage.shard_head import Moved
from schemaless.topology import Topology

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ApiState:
    settings: ApiSettings
    storage: AsyncStorage
    catalogue: Catalogue
    reader: Reader
    entry_reader: EntryReader
    read_breaker: ReadBreaker
    lag: ReplicaLag
    backlogs: Backlogs
    metrics: Metrics
    payload_budget: PayloadBudget
    read_budget: ReadBudget
    writer: CellWriter
    build_eta: BuildEta
    index_catalogue: IndexCatalogue
    index_freshness: IndexFreshness
    index_repairs: QueuedRepairs
    in_flight: RequestsInFlight
    followers: Followers
    tokens: KnownTokens
    admission: Admission
    explainer: Explainer


@asynccontextmanager
async def opened_state(settings: ApiSettings, topology: Topology) -> AsyncIterator[ApiState]:
    """Opens the pools and the watches. A server that is unreachable doesn't keep it from opening."""
    async with AsyncStorage(
        topology,
        shares=shares_of(settings.connections_max),
        connect_timeout_s=settings.connect_timeout_s,
        timeout_s=settings.statement_timeout_s,
        lossy_masters=settings.lossy_masters,
    ) as storage:
        read_breaker, in_flight = ReadBreaker(), RequestsInFlight()
        lag = ReplicaLag(storage, timeout_s=settings.read_timeout_s, on_sample=read_breaker.sampled)
        reader = Reader(storage, read_breaker, lag, timeout_s=settings.read_timeout_s)
        metrics, tokens, catalogue = Metrics(), KnownTokens(storage), Catalogue(storage)
        writer = CellWriter(storage, settings, latest=lag.latest_created_at, observe=metrics.put_stage)
        timeout_s = settings.status_timeout_s
        metrics.watch_backlogs(backlogs := Backlogs(storage, timeout_s=timeout_s, age_max_s=settings.backlog_age_max_s))
        metrics.watch_problems(problem_samples := ProblemSamples(storage, timeout_s=timeout_s))
        metrics.watch_passes(pass_samples := PassSamples(storage, timeout_s=timeout_s))
        metrics.watch_triggers(trigger_samples := TriggerSamples(storage, catalogue, timeout_s=timeout_s))
        metrics.watch(storage, read_breaker, lag, writer.counts, writer.held_shards)
        watches = {name: _head_watch(reader, name, settings) for name in topology.clusters}
        metrics.watch_repairs(repairs := QueuedRepairs(storage))
        metrics.watch_followers(followers := Followers(watches, in_flight, followers_max=settings.followers_max))
        await asyncio.gather(lag.step(), tokens.refresh())
        async with (
            _issuer_of(settings) as issuer,
            _in_background(
                *(each.run() for each in (lag, repairs, backlogs, problem_samples, pass_samples, trigger_samples)),
                _watch_tokens(tokens, followers, admission := Admission(settings, tokens, issuer)),
                *(watch.run() for watch in watches.values()),
            ),
        ):
            yield ApiState(
                settings=settings,
                storage=storage,
                catalogue=catalogue,
                index_catalogue=IndexCatalogue(storage),
                index_freshness=IndexFreshness(reader),
                index_repairs=repairs,
                build_eta=BuildEta(),
                reader=reader,
                entry_reader=EntryReader(reader, CheckpointWaiter(reader), Overlays(reader), pass_samples.differing),
                writer=writer,
                read_breaker=read_breaker,
                lag=lag,
                backlogs=backlogs,
                metrics=metrics,
                payload_budget=PayloadBudget(
                    settings.payload_bytes_max,
                    arriving_max=settings.payloads_max,
                    caller_arriving_max=settings.caller_payloads_max,
                ),
                read_budget=ReadBudget(settings.read_bytes_max, wait_s=settings.read_timeout_s),
                in_flight=in_flight,
                followers=followers,
                tokens=tokens,
                admission=admission,
                explainer=Explainer(reader, wait_s=settings.read_timeout_s),
            )
            await writer.close()


@asynccontextmanager
async def _issuer_of(settings: ApiSettings) -> AsyncIterator[Issuer | None]:
    """Reads the keys of the issuer of JWTs, if one is configured, and keeps reading them."""
    if settings.oidc_issuer is None:
        yield None
        return
    audience = verified_audience(settings.oidc_issuer, settings.oidc_audience)
    async with httpx.AsyncClient() as client:
        keys = IssuerKeys(settings.oidc_issuer, fetch_over(client))
        async with _in_background(keys.run()):
            yield Issuer(settings.oidc_issuer, audience, settings.oidc_claim, keys)


async def _watch_tokens(tokens: KnownTokens, followers: Followers, admission: Admission) -> None:
    """Reads the tokens again and again, and ends the requests that follow a log with a token that isn't valid."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await tokens.refresh()
        followers.release_unless(admission.hold)


def _head_watch(reader: Reader, cluster: str, settings: ApiSettings) -> FollowedHeads:
    async def ask(seen: Mapping[str, Moved], watched: Mapping[str, Collection[int]]) -> dict[str, Moved]:
        moved, _ = await reader.read(cluster, shard_head.moved_since, seen, watched)
        return moved

    return FollowedHeads(ask, poll_s=settings.follow_poll_s)


@asynccontextmanager
async def _in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    for task in tasks:
        task.add_done_callback(_end_process_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_process_if_failed(task: asyncio.Task[None]) -> None:
    """Ends the process, which the supervisor starts again.

    Without samples the read breaker never closes, and without a watch followers hear nothing.
    """
    if not task.cancelled() and task.exception() is not None:
        log.error("a watch over the nodes failed; the process ends and is started again", exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)
