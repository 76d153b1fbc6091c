"""What the cleaner found, as the API samples it for its metrics."""

from types import SimpleNamespace

from schemaless.errors import StorageUnavailable
from schemaless.facts.indexes import PassSamples
from schemaless.index.comparison import FaultCounts
from schemaless.storage.index_pass_table import MASTERS, IndexPass
from schemaless.storage.index_problem_table import IndexVersion

VERSION = IndexVersion("d", "by_owner", 1)


class Master:
    def __init__(self, ghosts):
        self.is_away = False
        self.found = {(VERSION, MASTERS): IndexPass(1, 1, FaultCounts(), FaultCounts(ghost=ghosts))}

    async def run(self, *arguments, **options):
        if self.is_away:
            raise StorageUnavailable("a server is away")
        return self.found


async def test_a_total_doesnt_fall_while_a_master_is_away():
    """Prometheus would take its return for new faults."""
    masters = {"a": Master(ghosts=4), "b": Master(ghosts=6)}
    topology = SimpleNamespace(clusters=masters)
    samples = PassSamples(SimpleNamespace(topology=topology, master=masters.get, minions=lambda cluster: []))
    seen = []
    for is_away in (True, False, True):
        masters["b"].is_away = is_away
        await samples.step()
        seen.append({key: found.total.ghost for key, found in samples.last.items()})
    assert seen == [{}, {(VERSION, MASTERS): 10}, {(VERSION, MASTERS): 10}]
