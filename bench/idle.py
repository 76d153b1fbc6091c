"""Cost of an idle tailer: CPU, memory and queries to MySQL, with few shards and with many.

And how soon it is back at work: cells put one by one, each after more than a second of silence, until a committed
reader has them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from confluent_kafka import Consumer

from bench.cells_log import committed_reader
from bench.drain import backlog
from bench.figures import Comparison, Figure, Values, at_most
from bench.scale import SHARDS, Scale
from bench.servers import BenchStack, cpu_seconds, service
from schemaless.stack.local import LocalServer
from schemaless.storage.entity_table import put_cells
from schemaless.storage.operation import Operation, query
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Datastore

SETTLE_S = 10.0  # a tailer opens its logs and reads all heads once
SILENCE_S = 1.5
TIMEOUT_S = 30.0


class Idle(msgspec.Struct, frozen=True):
    cpu_percent: float
    memory_mib: float
    questions_per_s: float


def measure(stack: BenchStack, few: Idle, scale: Scale) -> list[Comparison | Figure]:
    """Measures many shards, beside the figures of few."""
    with _settled(stack) as tailer:
        ours = _idle(stack, tailer, scale.idle_s)
        awake = _awakenings(stack, scale.awakenings)
    shards = f"{stack.datastore.shards} shards"
    return [
        Figure(f"idle, {shards}: CPU", "% of a core", Values((ours.cpu_percent,)), at_most(3)),
        Figure(f"idle, {shards}: resident memory", "MiB", Values((ours.memory_mib,)), at_most(100)),
        Comparison(
            f"idle, {shards} beside {SHARDS}: questions to MySQL",
            "/s",
            Values((ours.questions_per_s,)),
            Values((few.questions_per_s,)),
            at_most(1.1),
        ),
        Figure(f"idle, {SHARDS} shards: CPU", "% of a core", Values((few.cpu_percent,))),
        Figure("put into silence → record visible", "ms", Values(tuple(awake))),
    ]


def measure_idle(stack: BenchStack, scale: Scale) -> Idle:
    with _settled(stack) as tailer:
        return _idle(stack, tailer, scale.idle_s)


@contextmanager
def _settled(stack: BenchStack) -> Iterator[LocalServer]:
    with service(stack, "tailer", ["tailer"]) as tailer:
        time.sleep(SETTLE_S)
        yield tailer


def _idle(stack: BenchStack, tailer: LocalServer, seconds: float) -> Idle:
    with SyncStorage(stack.topology) as storage:
        asked, used, began = _questions(storage), cpu_seconds(tailer), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        return Idle(
            100 * (cpu_seconds(tailer) - used) / elapsed,
            memory_mib(tailer),
            (_questions(storage) - asked) / elapsed,
        )


def _questions(storage: SyncStorage) -> int:
    def operation() -> Operation[int]:
        rows = yield from query("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(rows[0][1])

    return sum(storage.master(cluster).run(operation) for cluster in storage.topology.clusters)


def memory_mib(process: LocalServer) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found, "a process has resident memory"
    return int(found[1]) / 1024


def _awakenings(stack: BenchStack, count: int) -> list[float]:
    """In milliseconds."""
    datastore = stack.datastore
    with (
        committed_reader(stack.kafka, [datastore.topic], datastore.partitions) as reader,
        SyncStorage(stack.topology) as storage,
    ):
        reader.poll(1.0)  # connected before there is anything to see
        return [_awakening(storage, datastore, reader, number) for number in range(count)]


def _awakening(storage: SyncStorage, datastore: Datastore, reader: Consumer, number: int) -> float:
    time.sleep(SILENCE_S)
    (cell,) = backlog(1, datastore.shards, seed=1000 + number)
    storage.master(datastore.home(cell.shard)).run(put_cells, datastore, [cell])
    began = time.perf_counter()
    while (message := reader.poll(TIMEOUT_S)) is not None and message.error():
        continue
    assert message is not None, f"the cell was not published within {TIMEOUT_S} s"
    return (time.perf_counter() - began) * 1000
