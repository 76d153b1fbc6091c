"""Trigger programs whose rows wait: slow calls beside each other, many parked cells, and an outage.

All on one worker process. Parked cells are compared in turns: two programs run the same code, and one of them has
parked its cells of another column before.
"""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.calls import publish, rate_of, running_program
from bench.figures import Comparison, Figure, Values, at_least, at_most, percentile
from bench.filling import fill_ours
from bench.scale import Scale
from bench.servers import BenchStack, cpu_seconds, service
from schemaless.cell import CellKey, ColumnName, RefKey, RowKey
from schemaless.codec import encode_body
from schemaless.sharding import shard_of
from schemaless.stack.local import LocalServer
from schemaless.storage import entity_table, parked_selection, worker_table
from schemaless.storage.entity_table import ShardCell
from schemaless.storage.pymysql_driver import SyncStorage

ROWS = 1_000
PARALLEL = "8"
LIVE_S = 5.0
PACED_PER_S, FED_PER_S = 200, 500
OUTAGE_S = 10.0
TIMEOUT_S = 120.0
SOURCE = "waiting_triggers.py"


def measure(stack: BenchStack, scale: Scale) -> list[Comparison | Figure]:
    with service(stack, "tailer", ["tailer"]):
        return [*_slow_calls(stack, scale), *_parked_cells(stack, scale), *_outage(stack)]


def _slow_calls(stack: BenchStack, scale: Scale) -> Iterator[Figure]:
    publish(stack, _cells(stack, "BASE", scale.cells_called // 5, rows=ROWS))
    for program, bar in (("waits_50", 2_000), ("waits_5", 6_000)):
        rates, cpu = [], []
        for number in range(scale.drains):
            settings = {"SCHEMALESS_CONSUMERS_PARALLEL": PARALLEL}
            with running_program(stack, f"{program}_{number}", start="beginning", source=SOURCE, **settings) as (
                finished,
                worker,
            ):
                _wait(lambda finished=finished: finished() > 0)  # type: ignore[misc]
                before, count = cpu_seconds(worker), finished()
                rates.append(rate_of(finished, stack.cells()))
                cpu.append((cpu_seconds(worker) - before) / (stack.cells() - count) * 1e6)
        what = f"async calls of {program.removeprefix('waits_')} ms over {ROWS:,} rows"
        yield Figure(what, "calls/s", Values(tuple(rates)), at_least(bar))
        yield Figure("and CPU a call", "µs", Values(tuple(cpu)), at_most(1e6 / bar))


def _parked_cells(stack: BenchStack, scale: Scale) -> Iterator[Comparison | Figure]:
    """CPU a call while cells come as fast as they can, and how late calls are at a fixed pace."""
    publish(stack, _cells(stack, "PARKED", scale.cells_parked))
    programs = ("with_parked", "without_parked")
    for program in programs:
        with running_program(stack, program, start="beginning", source=SOURCE) as (finished, _):
            _wait(lambda finished=finished: finished() >= stack.cells())  # type: ignore[misc]
    cpu: dict[str, list[float]] = {program: [] for program in programs}
    late: dict[str, list[float]] = {program: [] for program in programs}
    for number in range(2 * scale.drains):
        for program in programs if number % 2 else reversed(programs):
            with running_program(stack, program, start="end", source=SOURCE) as (finished, worker):
                cpu[program].append(_cpu_a_call(stack, finished, worker, scale.cells_called // 2))
                late[program].append(_p99(stack, finished, worker))
    parked = _parked(stack, "with_parked")
    yield Comparison(
        f"CPU a call with {parked:,} parked cells", "µs", *(Values(tuple(cpu[one])) for one in programs), at_most(1.05)
    )
    yield Comparison(
        f"stored → called, p99, at {PACED_PER_S} cells/s, with {parked:,} parked cells", "ms",
        *(Values(tuple(late[one])) for one in programs),
    )  # fmt: skip


def _cpu_a_call(stack: BenchStack, finished: Callable[[], int], worker: LocalServer, cells: int) -> float:
    fill_ours(stack, _cells(stack, "BASE", stack.datastore.shards))  # it has begun when these are finished
    _wait(lambda: finished() >= stack.cells())
    before = cpu_seconds(worker)
    fill_ours(stack, _cells(stack, "BASE", cells))
    _wait(lambda: finished() >= stack.cells())
    return (cpu_seconds(worker) - before) / cells * 1e6


def _p99(stack: BenchStack, finished: Callable[[], int], worker: LocalServer) -> float:
    with _feeding(stack, "STAMP", PACED_PER_S):
        time.sleep(LIVE_S)
        said = len(worker.log.read_text())
        time.sleep(2 * LIVE_S)
    _wait(lambda: finished() >= stack.cells())
    late = [float(text) for text in re.findall(r"late ([\d.]+)", worker.log.read_text()[said:])]
    return 1000 * percentile(late, 99)


def _outage(stack: BenchStack) -> Iterator[Figure]:
    down = stack.folder / "down"
    with (
        running_program(stack, "fails", start="end", source=SOURCE) as (finished, worker),
        _feeding(stack, "BASE", FED_PER_S),
    ):
        time.sleep(2 * LIVE_S)
        down.touch()
        _wait(lambda: _is_tripped(stack, "fails"))
        at_trip, calls = _parked(stack, "fails"), _failed(worker)
        time.sleep(OUTAGE_S)
        parked = _parked(stack, "fails")
        down.unlink()
        began_at, before = time.monotonic(), finished()
        while (count := finished()) - before < FED_PER_S / 2:  # half a second's cells: it has begun to call them all
            assert time.monotonic() < began_at + TIMEOUT_S, count
            time.sleep(0.05)
        recovered_s = time.monotonic() - began_at
        _wait(lambda: finished() >= stack.cells() - FED_PER_S)
    yield Figure("100 % of calls fail: parked before the trip", "cells", Values((at_trip,)))
    yield Figure("and after the trip", "cells", Values((parked - at_trip,)), at_most(0))
    yield Figure("most calls of a row until the trip is seen", "calls", Values((max(calls.values()),)), at_most(3))
    yield Figure("from the recovery to half a second's cells", "s", Values((recovered_s,)), at_most(5))


def _cells(stack: BenchStack, column: str, count: int, rows: int | None = None) -> Iterator[ShardCell]:
    """Returns cells in rows of their own, or of so many rows with many versions each."""
    body = encode_body({"carrier": "HA", "flight": 17, "fare": {"amount": 12.5, "currency": "USD"}})
    draw = random.Random(f"{column} {stack.cells()}")
    keys = [RowKey(uuid.UUID(int=draw.getrandbits(128), version=4).bytes) for _ in range(rows or count)]
    for number in range(count):
        row_key = keys[number % len(keys)]
        key = CellKey(row_key, ColumnName(column), RefKey(1 + number // len(keys)))
        yield ShardCell(key, body, shard_of(row_key, stack.datastore.shards))


@contextmanager
def _feeding(stack: BenchStack, column: str, per_s: int) -> Iterator[None]:
    """Writes cells at a steady pace, each in a transaction of its own."""
    over = threading.Event()

    def feed() -> None:
        cells = _cells(stack, column, int(per_s * TIMEOUT_S))
        began_at = time.monotonic()
        with SyncStorage(stack.topology) as storage:
            for number, cell in enumerate(cells):
                if over.wait(max(0.0, began_at + number / per_s - time.monotonic())):
                    return
                storage.master(stack.datastore.home(cell.shard)).run(entity_table.put_cells, stack.datastore, [cell])

    thread = threading.Thread(target=feed, name="feed")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _failed(worker: LocalServer) -> Counter[str]:
    return Counter(re.findall(r"failed (\S+)", worker.log.read_text()))


def _parked(stack: BenchStack, program: str) -> int:
    with SyncStorage(stack.topology) as storage:
        found = [
            storage.master(cluster).run(parked_selection.summaries, stack.datastore.name)
            for cluster in stack.datastore.clusters
        ]
    return sum(part[f"trigger:{program}"].parked for part in found if f"trigger:{program}" in part)


def _is_tripped(stack: BenchStack, program: str) -> bool:
    with SyncStorage(stack.topology) as storage:
        rows = storage.master(stack.datastore.clusters[0]).run(worker_table.of_datastore, stack.datastore.name)
    return any(row.report.tripped is not None for row in rows if row.consumer == f"trigger:{program}")


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it doesn't hold within {TIMEOUT_S:.0f} s")
        time.sleep(0.1)
