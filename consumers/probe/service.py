"""The probe's process: a cell each period, its latencies as a log line and, with a port, for Prometheus."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from enum import StrEnum
from typing import TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from schemaless.bus.reader import ArrivalWatch
from schemaless.cell import ColumnName, RowKey, StoredCell
from schemaless.client.answers import PutAnswer
from schemaless.client.async_client import AsyncClient
from schemaless.config import ConsumerSettings, ProbeSettings
from schemaless.consume.start_at import StartAt
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.consume.trigger_worker import run_program
from schemaless.errors import SchemalessError
from schemaless.ops.datastores import Catalogue
from schemaless.record import Record, decoded
from schemaless.sharding import shard_of
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Datastore
from schemaless.triggers.decorator import TriggerCell, trigger, triggers_of

log = structlog.get_logger()

PROGRAM = "schemaless_probe"


class ProbeService:
    """Probes one datastore in each period."""

    def __init__(self, settings: ProbeSettings, storage: AsyncStorage, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._storage = storage
        self._metrics = ProbeMetrics(registry)

    async def run(self, name: str, *, triggered: bool) -> None:
        """Probes until it is cancelled. The trigger may miss the first cells, because it joins its group meanwhile."""
        datastore = await Catalogue(self._storage).datastore(name)
        settings = self._settings
        calls = ProbeCalls() if triggered else None
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(AsyncClient(datastore=name))
            arrivals = opened.enter_context(ArrivalWatch(settings.kafka, datastore.topic))
            tasks = await opened.enter_async_context(asyncio.TaskGroup())
            if calls is not None:
                program = probe_program(calls)
                tasks.create_task(run_program(program_settings(settings), self._storage, program, name, StartAt.END))
            tasks.create_task(
                self._probe(datastore, Probe(datastore, client, arrivals, calls, settings.stage_timeout_s))
            )

    async def _probe(self, datastore: Datastore, probe: Probe) -> None:
        while True:
            try:
                latencies = await probe.step()
            except SchemalessError as error:
                log.warning("the probe could not write", datastore=datastore.name, error=str(error))
                self._metrics.failed(datastore.name)
            else:
                shown = {f"{stage}_ms": None if s is None else round(s * 1000, 1) for stage, s in latencies.items()}
                log.info("probe", each=True, datastore=datastore.name, **shown)
                self._metrics.seen(datastore.name, latencies)
            await asyncio.sleep(self._settings.period_s)


class ProbeMetrics:
    """Shows `schemaless_probe_seconds{datastore, stage}` of the last cell, and counts misses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Gauge(
            "schemaless_probe_seconds", "From put to stage.", ["datastore", "stage"], registry=registry
        )
        self._missed = Counter(
            "schemaless_probe_missed", "Not seen in time.", ["datastore", "stage"], registry=registry
        )

    def seen(self, datastore: str, latencies: Latencies) -> None:
        for stage, seconds in latencies.items():
            if seconds is None:
                self._missed.labels(datastore, stage).inc()
            else:
                self._seconds.labels(datastore, stage).set(seconds)

    def failed(self, datastore: str) -> None:
        self._missed.labels(datastore, "acknowledged").inc()


def program_settings(settings: ProbeSettings) -> ConsumerSettings:
    """Returns the settings of the probe's own program: the defaults. The environment's are those of other programs."""
    return ConsumerSettings.model_construct(**dict(settings))


def probe_program(calls: ProbeCalls) -> TriggerProgram:
    """Returns a program with one trigger on the reserved column, in this process."""

    @trigger(column=COLUMN)
    async def arrived(cell: TriggerCell) -> None:
        calls.arrived(cell.ref_key)

    return TriggerProgram(PROGRAM, {COLUMN: triggers_of({"arrived": arrived})})


# The probe writes one cell and measures when it was acknowledged, and seen in the log, the topic, an index, a trigger.
#
# It looks from outside, as users do. What it writes are cells like any others.

T = TypeVar("T")

COLUMN = ColumnName("schemaless.probe")
INDEX = "schemaless_probe"
ROWS = 64
"""Row keys that are used one after the other, so that most shards, and all partitions, are probed."""

_NAMESPACE = uuid.UUID("5c0e6a1e-0000-5000-8000-70726f626500")


class Stage(StrEnum):
    """The stages of a cell, in their order."""

    ACKNOWLEDGED = "acknowledged"
    LOGGED = "logged"
    PUBLISHED = "published"
    INDEXED = "indexed"
    TRIGGERED = "triggered"


Latencies = Mapping[Stage, float | None]
"""Seconds since the put was sent, None for a stage that was not seen in time. Stages without a watcher are missing."""


class ProbeCalls:
    """The calls of the probe's trigger. It knows the one that is expected."""

    def __init__(self) -> None:
        self._ref_key = -1
        self._arrived = asyncio.Event()

    def expect(self, ref_key: int) -> None:
        self._ref_key = ref_key
        self._arrived.clear()

    def arrived(self, ref_key: int) -> None:
        if ref_key == self._ref_key:
            self._arrived.set()

    async def wait(self) -> bool:
        return await self._arrived.wait()


class Probe:
    """Each `step` writes and watches one cell. Without `calls` it waits for no trigger."""

    def __init__(
        self,
        datastore: Datastore,
        client: AsyncClient,
        arrivals: ArrivalWatch,
        calls: ProbeCalls | None,
        timeout_s: float,
    ) -> None:
        self._datastore = datastore
        self._client = client
        self._arrivals = arrivals
        self._arrivals_thread = ThreadPoolExecutor(1, thread_name_prefix="arrivals")
        self._calls = calls
        self._timeout_s = timeout_s

    async def step(self) -> Latencies:
        """Returns the latencies of one cell. Raises what the put raises."""
        ref_key = time.time_ns() // 1000
        row_key = uuid.uuid5(_NAMESPACE, str(ref_key % ROWS))
        indexes = await self._client.indexes()
        indexed = any(index["name"] == INDEX and index["state"] == "active" for index in indexes)
        # Listening starts here, so that nothing is missed that comes before the put is answered.
        partition = self._datastore.partition(shard_of(RowKey(row_key.bytes), self._datastore.shards))
        await self._in_thread(lambda: self._arrivals.begin(partition))
        if self._calls is not None:
            self._calls.expect(ref_key)
        began = time.perf_counter()
        answer = await self._client.put_cell(row_key, COLUMN, ref_key, {"row": str(row_key), "sent_us": ref_key})
        acknowledged = time.perf_counter() - began
        published = self._in_thread(lambda: self._arrivals.wait(_is(row_key, ref_key), self._timeout_s))
        seen = {Stage.LOGGED: self._logged(answer), Stage.PUBLISHED: published}
        if indexed:
            seen[Stage.INDEXED] = self._indexed(answer)
        if self._calls is not None:
            seen[Stage.TRIGGERED] = self._calls.wait()
        latencies = await asyncio.gather(*(self._timed(began, each) for each in seen.values()))
        return {Stage.ACKNOWLEDGED: acknowledged, **dict(zip(seen, latencies, strict=True))}

    async def _timed(self, began: float, seen: Awaitable[bool]) -> float | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return time.perf_counter() - began if await seen else None
        except (TimeoutError, SchemalessError):
            return None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._arrivals_thread, call)

    async def _logged(self, answer: PutAnswer) -> bool:
        """Returns whether the cell is in the log. A buffered cell has no place there yet."""
        if answer.added_id is None:
            return False
        page = await self._client.get_cells_for_shard(answer.shard, answer.added_id - 1, 1)
        return any(cell.added_id == answer.added_id for cell in page.cells)

    async def _indexed(self, answer: PutAnswer) -> bool:
        wait_s = round(min(30.0, self._timeout_s))
        found = await self._client.index(INDEX).query(row=answer.row_key, after=answer.location, wait=wait_s)
        return answer.location is not None and len(found.entries) > 0


def _is(row_key: uuid.UUID, ref_key: int) -> Callable[[Record], bool]:
    def is_wanted(record: Record) -> bool:
        cell = decoded(record)
        return isinstance(cell, StoredCell) and (cell.row_key, cell.ref_key) == (row_key.bytes, ref_key)

    return is_wanted
