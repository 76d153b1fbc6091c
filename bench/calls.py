"""Calls of trigger functions a second: from history, live, and of functions that block, beside a stock Faust agent.

The agent does nothing with each event and acknowledges it. Ours proves for each cell that it is the next one, and
stores checkpoints in MySQL. `live` means that the worker runs while the cells are written and published, so that rate
is bounded by what else works on the machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.cells_log import committed_reader, watch_drain
from bench.drain import backlog
from bench.figures import Comparison, Figure, Values, at_least
from bench.filling import fill_ours
from bench.noop_trigger import CALL_S
from bench.scale import Scale
from bench.servers import BenchStack, service
from schemaless.cell import ColumnName
from schemaless.stack.local import LocalServer
from schemaless.storage.consumer_summary import summaries
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.pymysql_driver import SyncStorage

THREADS = 16  # of a worker, for sync functions
SLOW_CELLS = 12_000
TIMEOUT_S = 300.0

Sample = tuple[float, int]
"""When so many were finished."""


def measure(stack: BenchStack, scale: Scale) -> list[Comparison | Figure]:
    cells = scale.cells_called
    history, live, agent = [], [], []
    with service(stack, "tailer", ["tailer"]):
        for number in range(scale.drains):
            publish(stack, backlog(cells, stack.datastore.shards, seed=10 + 2 * number))
            with running_program(stack, f"history{number}", start="beginning") as (finished, _):
                history.append(rate_of(finished, stack.cells()))
            with running_program(stack, f"live{number}", start="end") as (finished, _):
                time.sleep(5.0)
                before = finished()
                fill_ours(stack, backlog(cells, stack.datastore.shards, seed=11 + 2 * number))
                live.append(rate_of(finished, before + cells, after=before))
            agent.append(_agent_rate(stack, stack.cells()))
        with running_program(stack, "slow", start="end") as (finished, _):
            time.sleep(5.0)
            before = finished()
            fill_ours(stack, _slow(SLOW_CELLS, stack.datastore.shards))
            slow = rate_of(finished, before + SLOW_CELLS, after=before)
    return [
        Comparison("no-op calls, live", "calls/s", Values(tuple(live)), Values(tuple(agent)), at_least(3)),
        Figure("no-op calls, history", "calls/s", Values(tuple(history)), at_least(70_000)),
        Comparison(
            f"sync calls of {CALL_S * 1000:.0f} ms beside {THREADS} threads that do nothing else",
            "calls/s",
            Values((slow,)),
            Values((THREADS / CALL_S,)),
            at_least(0.9),
        ),
    ]


def _slow(count: int, shards: int) -> Iterator[ShardCell]:
    for cell in backlog(count, shards, seed=3):
        key = msgspec.structs.replace(cell.key, column_name=ColumnName("SLOW"))
        yield msgspec.structs.replace(cell, key=key)


def publish(stack: BenchStack, cells: Iterator[ShardCell]) -> None:
    """Writes cells, and returns when the tailer has published all."""
    fill_ours(stack, cells)
    datastore = stack.datastore
    with committed_reader(stack.kafka, [datastore.progress_topic], datastore.partitions) as reader:
        watch_drain(reader, stack.cells())


@contextmanager
def running_program(
    stack: BenchStack, program: str, *, start: str, source: str = "noop_trigger.py", **settings: str
) -> Iterator[tuple[Callable[[], int], LocalServer]]:
    """Runs a file of this folder under a name of its own.

    Yields a function that returns how many cells are finished, and the worker.
    """
    module = stack.folder / f"{program}.py"
    module.write_text(Path(__file__).with_name(source).read_text())
    arguments = ["consumers", program, "--datastore", stack.datastore.name, "--from", start]
    environment = {"PYTHONPATH": str(stack.folder), **settings}
    with SyncStorage(stack.topology) as storage, service(stack, program, arguments, environment) as worker:

        def finished() -> int:
            found = [
                row
                for cluster in stack.datastore.clusters
                for row in storage.master(cluster).run(summaries, stack.datastore.name)
                if row.consumer == f"trigger:{program}"
            ]
            return stack.cells() - sum(row.lag for row in found) if sum(row.shards for row in found) else 0

        yield finished, worker


def rate_of(finished: Callable[[], int], until: int, after: int = 0) -> float:
    """Returns cells a second, from the first that are finished after `after` to the last. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    first: Sample | None = None
    while time.monotonic() < deadline:
        now, count = time.monotonic(), finished()
        if first is None and count > after:
            first = (now, count)
        if first is not None and count >= until:
            return (count - first[1]) / max(0.001, now - first[0])
        time.sleep(0.02)
    raise TimeoutError(f"{finished()} of {until} cells were finished in {TIMEOUT_S:.0f} s")


def _agent_rate(stack: BenchStack, until: int) -> float:
    settings = {"BENCH_KAFKA": stack.kafka, "BENCH_TOPIC": stack.datastore.topic}
    arguments = ["bench.stock_agent", "--datadir", str(stack.folder / "faust"), "worker", "--without-web"]
    with service(stack, "agent", arguments, settings) as agent:
        samples = _samples(agent)
        deadline = time.monotonic() + 60
        while len(samples) < 20:  # four seconds of them
            if time.monotonic() > deadline:
                raise TimeoutError(f"the agent finished {samples[-1:]} of {until} events")
            time.sleep(0.2)
            samples = _samples(agent)
    (began, first), (ended, last) = samples[0], samples[-1]
    return (last - first) / (ended - began)


def _samples(agent: LocalServer) -> list[Sample]:
    found = re.findall(r"finished (\d+) ([\d.]+)", agent.log.read_text())  # Faust puts a prefix before what is printed
    return [(float(moment), int(count)) for count, moment in found]
