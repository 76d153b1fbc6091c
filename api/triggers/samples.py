"""TriggerSamples: what became of the cells of each trigger program, for metrics. They are read as the status is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.status.workers import read_workers
from api.triggers.summary import ProgramSummary, is_program, read_summaries
from schemaless.errors import SchemalessError
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.pace import sample_forever
from schemaless.storage.asyncmy_driver import AsyncStorage

SAMPLE_PERIOD_S = 10.0


class ProgramSample(msgspec.Struct, frozen=True):
    """One program over all clusters that answered. `tripped` counts the workers whose breaker is open.

    `failing` counts the cells whose function failed, and that are called again.
    """

    summary: ProgramSummary
    workers: int
    tripped: int
    failing: int


class TriggerSamples:
    """The last sample of each program, by (datastore, program). The sums leave out a cluster that doesn't answer."""

    def __init__(self, storage: AsyncStorage, catalogue: Catalogue, *, timeout_s: float) -> None:
        self.programs: Mapping[tuple[str, str], ProgramSample] = {}
        self._storage = storage
        self._catalogue = catalogue
        self._timeout_s = timeout_s

    async def run(self) -> None:
        await sample_forever(self.step, SAMPLE_PERIOD_S)

    async def step(self) -> None:
        found: dict[tuple[str, str], ProgramSample] = {}
        try:
            datastores = await self._catalogue.readable()
        except SchemalessError:
            return  # the sums of before are nearer to the truth than none
        for datastore in datastores.values():
            summaries = await read_summaries(self._storage, datastore, self._timeout_s)
            workers = await read_workers(self._storage, datastore, self._timeout_s) if summaries else []
            for name, summary in summaries.items():
                own = [row.report for row in workers if row.consumer == name]
                tripped = sum(report.tripped is not None for report in own)
                failing = sum(report.erred_count for report in own)
                if is_program(name):
                    found[datastore.name, name.partition(":")[2]] = ProgramSample(summary, len(own), tripped, failing)
        self.programs = found
