"""The probe's process: a cell each period, its latencies as a log line and, with a port, for Prometheus."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from consumers.probe.probe import COLUMN, Latencies, Probe, ProbeCalls
from schemaless.bus.reader import ArrivalWatch
from schemaless.client.async_client import AsyncClient
from schemaless.config import ProbeSettings
from schemaless.consume.start_at import StartAt
from schemaless.consume.trigger_program import TriggerProgram
from schemaless.consume.trigger_worker import run_program
from schemaless.errors import SchemalessError
from schemaless.ops.datastores import Catalogue
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
                tasks.create_task(run_program(settings, self._storage, program, name, StartAt.END))
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


def probe_program(calls: ProbeCalls) -> TriggerProgram:
    """Returns a program with one trigger on the reserved column, in this process."""

    @trigger(column=COLUMN)
    async def arrived(cell: TriggerCell) -> None:
        calls.arrived(cell.ref_key)

    return TriggerProgram(PROGRAM, {COLUMN: triggers_of({"arrived": arrived})})
