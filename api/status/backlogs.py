"""Backlogs: what the buffers of all clusters hold and homes refuse, sampled so that readiness and metrics know it.

A backlog that doesn't shrink is one whose oldest row is older than a bound. Age is what grows when nothing is
confirmed, whatever the traffic, and it falls as soon as the oldest rows go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemaless.errors import SchemalessError
from schemaless.runtime.pace import sample_forever
from schemaless.storage import buffer_table, refusal_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import Waiting
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.refusal_table import Refused

SAMPLE_PERIOD_S = 5.0


class Sample(msgspec.Struct, frozen=True):
    """What one secondary buffers, by (datastore, home)."""

    waiting: Mapping[tuple[str, str], Waiting] = {}
    refused: Mapping[tuple[str, str], Refused] = {}


class Backlogs:
    """The last sample of each secondary, by the cluster's name. One that doesn't answer has none."""

    def __init__(self, storage: AsyncStorage, *, timeout_s: float, age_max_s: float) -> None:
        self.samples: Mapping[str, Sample] = {}
        self._storage = storage
        self._timeout_s = timeout_s
        self._age_max_s = age_max_s

    async def run(self) -> None:
        await sample_forever(self.step, SAMPLE_PERIOD_S)

    async def step(self) -> None:
        """Asks every master once, all of them concurrently."""
        questions = {
            cluster: self._storage.master(cluster).run(_sample, timeout_s=self._timeout_s)
            for cluster in self._storage.topology.clusters
        }
        self.samples = (await answers_of_all(questions, tolerated=SchemalessError)).found

    def details(self) -> list[dict[str, Any]]:
        """Returns the backlogs that don't shrink, and those with cells that their home refuses."""
        return [
            {
                "datastore": datastore,
                "secondary": secondary,
                "home": home,
                "rows": waiting.rows,
                "oldest_s": round(waiting.oldest_s, 3),
                "refused": refused.cells if refused else 0,
            }
            for secondary, sample in self.samples.items()
            for (datastore, home), waiting in sample.waiting.items()
            if (refused := sample.refused.get((datastore, home))) or waiting.oldest_s > self._age_max_s
        ]


def _sample() -> Operation[Sample]:
    waiting = yield from buffer_table.waiting()
    return Sample(waiting, (yield from refusal_table.refused()) if waiting else {})
