"""Cost of one API process beside many storage servers: what grows with the servers, and what with the shards."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import msgspec

from bench.figures import Figure, Values
from bench.idle import memory_mib
from bench.load import run_load
from bench.scale import Scale
from bench.servers import api_process, cpu_seconds, storage_stack
from bench.trips import TripMaker, put_request
from schemaless.stack.local import LocalServer

CONNECTIONS = 64
PUTS = 2_000
SETTLE_S = 5.0
MINIONS = 2
SIZES = ((2, 64), (16, 64), (16, 1024))
"""Clusters of three servers, and shards."""

SMALL = (
    "innodb-buffer-pool-size=32M\nperformance-schema=off\nloose-innodb-log-file-size=16M\n"
    "loose-innodb-redo-log-capacity=16M\n"
)
"""Option lines that let 48 servers fit a machine: what is measured is the process beside them."""


class Cost(msgspec.Struct, frozen=True):
    """Of one API process, idle after puts to all clusters. CPU is in percent of a core. `files` are open ones, which
    connections are.
    """

    cpu_percent: float
    memory_mib: float
    threads: int
    files: int


def measure(folder: Path, scale: Scale) -> list[Figure]:
    rows = []
    for clusters, shards in SIZES:
        cost = _cost(folder / f"{clusters}-{shards}", clusters, shards, scale)
        what = f"{clusters} clusters of {MINIONS + 1} servers, {shards} shards"
        rows += [
            Figure(f"{what}: CPU, idle", "% of a core", Values((cost.cpu_percent,))),
            Figure(f"{what}: resident memory", "MiB", Values((cost.memory_mib,))),
            Figure(f"{what}: threads", "", Values((cost.threads,))),
            Figure(f"{what}: open files", "", Values((cost.files,))),
        ]
    return rows


def _cost(folder: Path, clusters: int, shards: int, scale: Scale) -> Cost:
    folder.mkdir()
    names = [f"c{number}" for number in range(clusters)]
    trips = TripMaker(seed=clusters * shards)
    with (
        storage_stack(folder, names, minions=MINIONS, shards=shards, options=SMALL) as stack,
        api_process(stack) as (api, port),
    ):
        requests = [put_request(trip, stack.prefix) for trip in trips.make(PUTS)]
        run_load(port, requests, connections=CONNECTIONS, seconds=60.0).expect(201)
        time.sleep(SETTLE_S)
        return _idle(api, scale.idle_s)


def _idle(api: LocalServer, seconds: float) -> Cost:
    used, began = cpu_seconds(api), time.monotonic()
    time.sleep(seconds)
    percent = 100 * (cpu_seconds(api) - used) / (time.monotonic() - began)
    found = re.search(r"Threads:\s+(\d+)", Path(f"/proc/{api.pid}/status").read_text())
    assert found, "a process has threads"
    return Cost(percent, memory_mib(api), int(found[1]), len(os.listdir(f"/proc/{api.pid}/fd")))
