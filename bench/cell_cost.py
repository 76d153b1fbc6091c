"""CPU time of the tailer for a published cell, with a short backlog and with a long one. It may not grow."""

from __future__ import annotations

import time

from confluent_kafka import Consumer

from bench.cells_log import committed_reader, renew_topics, watch_drain
from bench.drain import backlog
from bench.figures import Comparison, Values, at_most
from bench.filling import fill_ours
from bench.scale import Scale
from bench.servers import BenchStack, cpu_seconds, service
from schemaless.ops.tailers import set_paused
from schemaless.storage.pymysql_driver import SyncStorage

PART_CELLS = 500_000  # made in memory at once
OPENED_TIMEOUT_S = 30.0
SETTLE_S = 2.0


def measure(stack: BenchStack, scale: Scale) -> list[Comparison]:
    fill_ours(stack, backlog(scale.cost_cells_few, stack.datastore.shards))
    few = [_microseconds(stack, scale.cost_cells_few) for _ in range(scale.drains)]
    _fill_more(stack, scale.cost_cells_many - scale.cost_cells_few)
    many = [_microseconds(stack, scale.cost_cells_many) for _ in range(scale.drains)]
    what = f"CPU time of a published cell, {scale.cost_cells_many:,} cells beside {scale.cost_cells_few:,}"
    return [Comparison(what, "µs", Values(tuple(many)), Values(tuple(few)), at_most(1.2))]


def _fill_more(stack: BenchStack, cells: int) -> None:
    for seed, done in enumerate(range(0, cells, PART_CELLS), start=5):
        fill_ours(stack, backlog(min(PART_CELLS, cells - done), stack.datastore.shards, seed=seed))


def _microseconds(stack: BenchStack, cells: int) -> float:
    """Returns microseconds a cell. The tailer starts while the datastore is paused, so its start doesn't count."""
    datastore = stack.datastore
    renew_topics(stack.kafka, datastore)
    _set_paused(stack, True)
    with (
        committed_reader(stack.kafka, [datastore.progress_topic], datastore.partitions) as reader,
        service(stack, "tailer", ["tailer"]) as tailer,
    ):
        _wait_until_opened(reader, datastore.shards)
        before = cpu_seconds(tailer)
        _set_paused(stack, False)
        watch_drain(reader, cells)
        return (cpu_seconds(tailer) - before) / cells * 1e6


def _wait_until_opened(progress_reader: Consumer, shards: int) -> None:
    """With its progress gone, every shard gets a record when its partition is opened."""
    opened: set[object] = set()
    while len(opened) < shards:
        message = progress_reader.poll(OPENED_TIMEOUT_S)
        assert message is not None, f"{len(opened)} of {shards} shards were opened within {OPENED_TIMEOUT_S} s"
        if not message.error():
            opened.add(message.key())
    time.sleep(SETTLE_S)


def _set_paused(stack: BenchStack, paused: bool) -> None:
    with SyncStorage(stack.topology) as storage:
        set_paused(storage, stack.datastore.name, paused)
