"""The demo, step by step: stack up, flights in, everything caught up, audit, answers. Every number is asserted.

Run again it writes nothing new: the same cells are already stored, and the audit is as clean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich.console import Console

from schemaless.audit.run import audit
from schemaless.cli.audit import print_findings
from schemaless.cli.datastores import create_with_progress
from schemaless.client.async_client import AsyncClient
from schemaless.client.client import Client
from schemaless.config import StackSettings
from schemaless.demo.board import Board
from schemaless.demo.catch_up import read_positions, wait_until_caught_up
from schemaless.demo.dataset import fetch_dataset, read_rows
from schemaless.demo.flight import CELLS, Flight, FlightCount, parse_flight
from schemaless.demo.loader import LoadCount, Loader
from schemaless.demo.programs import CONSUMERS, define_index, read_calls
from schemaless.demo.queries import show_queries
from schemaless.demo.report import Facts, lines_of, print_lines, print_rates
from schemaless.demo.site import Say, Site
from schemaless.errors import Unavailable
from schemaless.topology import Datastore, load_topology

DATASTORE = "flights"
SHARDS = 64
PARTITIONS = 8
WATCH_S = 1.0


def run_demo(settings: StackSettings, console: Console, open_site: Callable[[StackSettings, Say], Site]) -> bool:
    """Whether everything holds. The stack goes on running."""
    started = time.monotonic()
    archive = fetch_dataset(settings.cache)
    site = open_site(settings, console.print)
    datastore = _make_datastore(site)
    count = FlightCount()
    flights = (count.take(parse_flight(row)) for row in read_rows(archive))
    with Client(site.hosts, datastore=DATASTORE) as client:
        facts = _facts(site, datastore, client, console, flights, count)
        show_queries(console, client, datastore.shards)
    holds = print_lines(console, lines_of(facts))
    print_findings(facts.audit, console)
    print_rates(console, facts)
    console.print(f"all in {time.monotonic() - started:.0f} s; the stack goes on running")
    return holds


def _make_datastore(site: Site) -> Datastore:
    datastore = create_with_progress(load_topology(site.topology), site.kafka, DATASTORE, SHARDS, PARTITIONS)
    site.start_programs(DATASTORE)
    return datastore


def _facts(
    site: Site,
    datastore: Datastore,
    client: Client,
    console: Console,
    flights: Iterable[Flight],
    count: FlightCount,
) -> Facts:
    define_index(client)
    with Board(console, CELLS, CONSUMERS) as board:
        load = asyncio.run(_load(site.hosts, client, flights, board))
        loaded_at = time.monotonic()
        after_load = read_positions(client)
        wait_until_caught_up(client, set(CONSUMERS), board.show)
        caught_up_s = time.monotonic() - loaded_at
    console.print("auditing")
    report = audit(load_topology(site.topology), site.kafka, datastore)
    return Facts(count, load, after_load, caught_up_s, read_calls(site.calls), report)


async def _load(hosts: Sequence[str], client: Client, flights: Iterable[Flight], board: Board) -> LoadCount:
    async with AsyncClient(hosts, datastore=DATASTORE) as loading:
        watch = asyncio.create_task(_watch(client, board))
        try:
            return await Loader(loading, board.loaded).load(flights)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch


async def _watch(client: Client, board: Board) -> None:
    while True:
        with suppress(Unavailable):  # a host was killed: what the board shows is a little older then
            board.show(await asyncio.to_thread(read_positions, client))
        await asyncio.sleep(WATCH_S)
