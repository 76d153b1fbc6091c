"""ApiState: what the handlers of one process share. The app's lifespan opens and closes it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from api.access.admission import Admission
from api.access.issuer import Issuer
from api.access.known_tokens import REFRESH_S, KnownTokens
from api.explain.explainer import Explainer
from api.follow.followers import FollowedHeads, Followers
from api.http.budget import PAYLOAD_BYTES_MAX, READ_BYTES_MAX, PayloadBudget, ReadBudget, RequestsInFlight
from api.index.entry_reader import CheckpointWaiter, EntryReader, Overlays
from api.index.freshness import BuildEta, IndexCatalogue, IndexFreshness
from api.index.passes import QueuedRepairs
from api.metrics import Metrics
from api.read.reader import ReadBreaker, Reader
from api.read.unsettled import CellReader, Unsettled
from api.ui.live import OpenPages, SampleHistory
from api.write.put import CellWriter
from schemaless.config import ApiSettings
from schemaless.facts.consumers import Programs, sample_programs
from schemaless.facts.indexes import Counts, PassSamples, sample_problems
from schemaless.facts.servers import Backlog, read_backlogs
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.pace import Sampled
from schemaless.storage import shard_head
from schemaless.storage.asyncmy_driver import AsyncStorage, shares_of
from schemaless.storage.everywhere import for_each_cluster
from schemaless.storage.replica_lag import ReplicaLag
from schemaless.storage.shard_head import Moved
from schemaless.topology import Topology

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ApiState:
    settings: ApiSettings
    storage: AsyncStorage
    catalogue: Catalogue
    reader: Reader
    cell_reader: CellReader
    entry_reader: EntryReader
    read_breaker: ReadBreaker
    lag: ReplicaLag
    backlogs: Sampled[list[Backlog]]
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
    history: SampleHistory
    open_pages: OpenPages = field(default_factory=OpenPages)
    draining: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def opened_state(
    settings: ApiSettings, topology: Topology, issuer: Issuer | None = None
) -> AsyncIterator[ApiState]:
    """Opens the pools and the watches. A server that is unreachable doesn't keep it from opening."""
    async with AsyncStorage(
        topology, shares=shares_of(settings.connections_max), lossy_masters=settings.lossy_masters
    ) as storage:
        read_breaker, in_flight = ReadBreaker(), RequestsInFlight()
        lag = ReplicaLag(storage, timeout_s=settings.read_timeout_s, on_sample=read_breaker.sampled)
        reader = Reader(storage, read_breaker, lag, timeout_s=settings.read_timeout_s)
        metrics, tokens, catalogue = Metrics(), KnownTokens(storage), Catalogue(storage)
        unsettled = Unsettled(storage, catalogue, read_breaker.has_answered)
        told = (time.monotonic, lag.latest_created_at, metrics.put_stage, unsettled.note, unsettled.may_have)
        writer = CellWriter(storage, settings, *told)
        backlogs = Sampled[list[Backlog]](lambda: read_backlogs(storage), 5.0, [])
        problems = Sampled[Counts](lambda: sample_problems(storage), 5.0, {})
        programs = Sampled[Programs](lambda: sample_programs(storage, catalogue), 10.0, {})
        passes, repairs = PassSamples(storage), QueuedRepairs(storage)
        history = SampleHistory(storage, lag, read_breaker, backlogs, programs)
        metrics.watch_problems(problems)
        metrics.watch_passes(passes)
        metrics.watch_programs(programs)
        watches = _Watches(reader)
        followers = Followers(watches, in_flight, followers_max=settings.followers_max)
        await asyncio.gather(lag.step(), tokens.refresh())
        sampled = (lag, repairs, backlogs, problems, passes, programs, unsettled, history)
        async with in_background(
            *(each.run() for each in (*sampled, *([issuer.keys] if issuer else ()))),
            _watch_tokens(tokens, followers, admission := Admission(settings, tokens, issuer)),
            _watch_moves(followers),
            for_each_cluster(storage, lambda name: watches[name].run()),
        ):
            state = ApiState(
                settings=settings,
                storage=storage,
                catalogue=catalogue,
                index_catalogue=IndexCatalogue(storage),
                index_freshness=IndexFreshness(reader),
                index_repairs=repairs,
                build_eta=BuildEta(),
                reader=reader,
                cell_reader=CellReader(reader, unsettled),
                entry_reader=EntryReader(reader, CheckpointWaiter(reader), Overlays(reader), passes.differing),
                writer=writer,
                read_breaker=read_breaker,
                lag=lag,
                backlogs=backlogs,
                metrics=metrics,
                payload_budget=PayloadBudget(PAYLOAD_BYTES_MAX),
                read_budget=ReadBudget(READ_BYTES_MAX, wait_s=settings.read_timeout_s),
                in_flight=in_flight,
                followers=followers,
                tokens=tokens,
                admission=admission,
                explainer=Explainer(reader, wait_s=settings.read_timeout_s),
                history=history,
            )
            metrics.watch_api(state)
            yield state
            await writer.close()


MOVES_LOOK_S = 0.1


async def _watch_tokens(tokens: KnownTokens, followers: Followers, admission: Admission) -> None:
    """Reads the tokens again and again, and ends the requests that follow a log with a token that isn't valid."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await tokens.refresh()
        followers.release_unless(admission.hold)


async def _watch_moves(followers: Followers) -> None:
    """Lets requests that follow a log learn where shards moved to, as soon as this process knows it."""
    while True:
        await asyncio.sleep(MOVES_LOOK_S)
        followers.follow_moves()


class _Watches(dict[str, FollowedHeads]):
    """The watch of each cluster, made when somebody first asks for it: clusters may come later."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def __missing__(self, cluster: str) -> FollowedHeads:
        async def ask(seen: Mapping[str, Moved], watched: Mapping[str, Collection[int]]) -> dict[str, Moved]:
            moved, _ = await self._reader.read(cluster, shard_head.moved_since, seen, watched)
            return moved

        watch = self[cluster] = FollowedHeads(ask)
        return watch


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
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
