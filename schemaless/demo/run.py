"""The demo, step by step: stack up, flights in, an incident, caught up, audit, answers. Every number is asserted.

A second run writes nothing new: the same cells are already stored, and the audit is as clean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from schemaless.audit.run import audit
from schemaless.cli.audit import print_findings
from schemaless.cli.datastores import create_with_progress
from schemaless.cli.targets import Servers, servers, servers_of, stack_token
from schemaless.client.async_client import AsyncClient
from schemaless.client.client import Client
from schemaless.client.transport import settings_of
from schemaless.config import StackSettings
from schemaless.demo.flights import CELLS, Flight, FlightCount, fetch_dataset, parse_flight, read_rows
from schemaless.demo.incident import BEGINS_AT, Incident, Outage
from schemaless.demo.loader import LoadCount, Loader
from schemaless.demo.planted_damage import damage_and_repair
from schemaless.demo.programs import (
    ADDED_INDEX_NAME,
    CARD_PROCESSOR,
    CHARGES,
    IndexChange,
    add_index,
    calls_folder,
    change_index,
    consumers_of,
    count_effects,
    define_index,
    number_of_added_index,
    read_calls,
    start_programs,
    wait_for_index,
)
from schemaless.demo.progress import Board, read_positions, wait_until_caught_up
from schemaless.demo.queries import show_queries
from schemaless.demo.report import Facts, lines_of, print_lines, print_rates
from schemaless.errors import Misconfigured, SchemalessError, Unavailable
from schemaless.stack import embedded, supervision
from schemaless.stack.plan import home_folder, require_plan

DATASTORE = "flights"
SHARDS = 64
PARTITIONS = 8
WATCH_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Site:
    """The stack that the demo runs on. `calls` is the folder where the programs log their calls.

    `start_programs` takes the datastore's name. `stop_processor` and `start_processor` are about the card processor.
    """

    hosts: Sequence[str]
    servers: Servers
    calls: Path
    start_programs: Callable[[str], None]
    token: str | None = None
    stop_processor: Callable[[], None] | None = None
    start_processor: Callable[[], None] | None = None


def embedded_site(settings: StackSettings, say: Say) -> Site:
    """Starts the embedded stack. Raises what `embedded.up` raises."""
    embedded.up(settings, say=say)
    plan = require_plan(home_folder(settings))
    return Site(
        plan.api_urls(),
        servers_of(plan),
        calls_folder(plan.home),
        partial(start_programs, plan),
        stack_token(),
        partial(supervision.stop, plan.home, CARD_PROCESSOR),
        partial(supervision.start, plan.home, CARD_PROCESSOR),
    )


def running_site(settings: StackSettings, say: Say) -> Site:
    """Returns the stack that the environment names. Its operator runs the programs, too. Raises Misconfigured."""
    reached = servers()
    hosts = settings_of().hosts
    if not hosts:
        raise Misconfigured("no API is known: set SCHEMALESS_HOSTS")
    say(f"on the stack at {', '.join(hosts)}")
    return Site(hosts, reached, calls_folder(home_folder(settings)), lambda datastore: None)


def run_demo(settings: StackSettings, console: Console, open_site: Callable[[StackSettings, Say], Site]) -> bool:
    """Runs the demo, and returns whether every line of its report holds. The stack stays up."""
    started = time.monotonic()
    archive = fetch_dataset(settings.cache)
    site = open_site(settings, console.print)
    datastore = create_with_progress(site.servers, DATASTORE, SHARDS, PARTITIONS)
    site.start_programs(DATASTORE)
    count = FlightCount()
    flights: Iterable[Flight] = (count.take(parse_flight(row)) for row in read_rows(archive))
    with Client(site.hosts, datastore=DATASTORE, token=site.token) as client:
        define_index(client)
        incident = None
        if read_positions(client).head == 0:  # a second load calls no program
            incident = Incident(client, site.calls / CHARGES, site.stop_processor, site.start_processor)
            flights = incident.block_first(flights)
        consumers = consumers_of(number_of_added_index(client))
        with Board(console, CELLS, consumers) as board:
            load, outage = asyncio.run(_load(site, client, flights, board, incident))
            loaded_at = time.monotonic()
            after_load = read_positions(client)
            wait_until_caught_up(client, set(consumers), board.show)
            caught_up_s = time.monotonic() - loaded_at
            replay = None
            if incident is not None:
                replay = incident.replay()
                wait_until_caught_up(client, set(consumers), board.show)
        add_index(client)  # where a load had been ended before it was made
        wait_for_index(client, ADDED_INDEX_NAME)
        change = _change(console, client)
        console.print("damaging three entries of the added index")
        damage = damage_and_repair(site.servers.topology, datastore, ADDED_INDEX_NAME)
        console.print("auditing")
        report = audit(site.servers.topology, site.servers.kafka, datastore)
        calls = read_calls(site.calls)
        effects = count_effects(client, calls)
        facts = Facts(count, load, after_load, caught_up_s, calls, effects, report, damage, change, outage, replay)
        show_queries(console, client, datastore.shards)
    holds = print_lines(console, lines_of(facts))
    print_findings(facts.audit, console)
    print_rates(console, facts)
    console.print(f"all in {time.monotonic() - started:.0f} s; the stack stays up")
    return holds


def _change(console: Console, client: Client) -> IndexChange:
    """Changes the added index, and tells how it went."""
    console.print(f"changing the definition of {ADDED_INDEX_NAME}: a new version is built beside the one that answers")
    change = change_index(client)
    if change.seconds is None:
        console.print(f"it was changed before: version {change.number} answers")
    else:
        console.print(
            f"version {change.number} is built, compared with a sample of its cells, and answers after"
            f" {change.seconds:.1f} s. The one before is kept until {change.kept_until}"
        )
    return change


async def _load(
    site: Site, client: Client, flights: Iterable[Flight], board: Board, incident: Incident | None
) -> tuple[LoadCount, Outage | None]:
    """Loads the flights. Meanwhile an index is made, and where there is an incident, the card processor is down."""
    loaded = 0
    begins = asyncio.Event()

    def progress(count: int) -> None:
        nonlocal loaded
        board.loaded(count)
        loaded += count
        if loaded >= BEGINS_AT * CELLS:
            begins.set()

    async def watch() -> None:
        while True:
            with suppress(Unavailable):  # a host was killed: the board shows older positions until the next pass
                board.show(await asyncio.to_thread(read_positions, client))
            await asyncio.sleep(WATCH_S)

    async def go_wrong() -> Outage | None:
        await begins.wait()
        await asyncio.to_thread(add_index, client)
        return None if incident is None else await asyncio.to_thread(incident.outage)

    async with AsyncClient(site.hosts, datastore=DATASTORE, token=site.token) as loading:
        watching = asyncio.create_task(watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                outage = tasks.create_task(go_wrong())
                load = tasks.create_task(Loader(loading, progress).load(flights))
        except* SchemalessError as failed:
            raise failed.exceptions[0] from None
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    return load.result(), outage.result()
