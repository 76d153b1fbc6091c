"""The demo, step by step: stack up, flights in, an incident, caught up, audit, answers. Every number is asserted.

A second run writes nothing new: the same cells are already stored, and the audit is as clean.
"""

from __future__ import annotations

import asyncio
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from schemaless.audit.run import audit
from schemaless.cli.audit import print_findings
from schemaless.cli.datastores import create_with_progress
from schemaless.cli.targets import Servers, servers, servers_of, stack_token
from schemaless.client.answers import Entry
from schemaless.client.async_client import AsyncClient
from schemaless.client.client import Client
from schemaless.client.transport import settings_of
from schemaless.config import StackSettings
from schemaless.demo.failover import Failover, LostMaster
from schemaless.demo.growth import Growth, NewCluster
from schemaless.demo.loader import (
    CELLS,
    NAMESPACE,
    STATUS,
    Flight,
    FlightCount,
    Loader,
    fetch_dataset,
    parse_flight,
    read_rows,
    row_key_of_flight,
)
from schemaless.demo.programs import (
    ADDED_INDEX_NAME,
    BEGINS_AT,
    CARD_PROCESSOR,
    CHARGES,
    Incident,
    IndexChange,
    Outage,
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
from schemaless.demo.report import (
    ErasedPassenger,
    Facts,
    Loaded,
    damage_and_repair,
    lines_of,
    print_lines,
    print_rates,
)
from schemaless.errors import CellMissing, Misconfigured, SchemalessError, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.sharding import shard_of_text
from schemaless.stack import embedded, supervision
from schemaless.stack.plan import home_folder, require_plan
from schemaless.topology import load_topology

DATASTORE = "flights"
SHARDS = 64
PARTITIONS = 8
WATCH_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Site:
    """The stack that the demo runs on. `calls` is the folder where the programs log their calls.

    `start_programs` takes the datastore's name. `stop_processor` and `start_processor` are about the card processor.
    `home` is the folder of an embedded stack, whose servers may be killed.
    """

    hosts: Sequence[str]
    servers: Servers
    calls: Path
    start_programs: Callable[[str], None]
    token: str | None = None
    stop_processor: Callable[[], None] | None = None
    start_processor: Callable[[], None] | None = None
    home: Path | None = None


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
        plan.home,
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
        incident, losing, growing = None, None, None
        if read_positions(client).head == 0:  # a second load calls no program
            incident = Incident(client, site.calls / CHARGES, site.stop_processor, site.start_processor)
            flights = incident.block_first(flights)
            if site.home is not None:
                losing = LostMaster(client, site.home)
                growing = NewCluster(site.home, datastore, console.print)
        consumers = consumers_of(number_of_added_index(client))
        with Board(console, CELLS, consumers) as board:
            told = asyncio.run(_load(site, client, flights, board, Events(incident, losing, growing)))
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
        topology = load_topology(site.servers.topology_file)  # a cluster was added
        damage = damage_and_repair(topology, datastore, ADDED_INDEX_NAME)
        erased = erase_passenger(console, client)
        console.print("auditing")
        report = audit(topology, site.servers.kafka, datastore)
        calls = read_calls(site.calls)
        effects = count_effects(client, calls)
        show_queries(console, client, datastore.shards)
        facts = Facts(count, told, after_load, caught_up_s, calls, effects, report, damage, change, erased, replay)
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


@dataclass(frozen=True, slots=True)
class Events:
    """What happens while flights load, one after the other."""

    incident: Incident | None
    losing: LostMaster | None
    growing: NewCluster | None

    def run(self, tried_again: Callable[[], int]) -> tuple[Failover | None, Outage | None, Growth | None]:
        failover = None if self.losing is None else self.losing.lose()
        outage = None if self.incident is None else self.incident.outage()
        if self.losing is not None and failover is not None:
            failover = self.losing.back(failover)
        return failover, outage, None if self.growing is None else self.growing.grow(tried_again)


async def _load(site: Site, client: Client, flights: Iterable[Flight], board: Board, events: Events) -> Loaded:
    """Loads the flights. Meanwhile an index is made, and on a first run a master and the card processor are lost, and
    a cluster is added.
    """
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

    async def happen() -> tuple[Failover | None, Outage | None, Growth | None]:
        await begins.wait()
        await asyncio.to_thread(add_index, client)
        return await asyncio.to_thread(events.run, lambda: loader.count.tried_again)

    async with AsyncClient(site.hosts, datastore=DATASTORE, token=site.token) as loading:
        loader = Loader(loading, progress)
        watching = asyncio.create_task(watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                happened = tasks.create_task(happen())
                load = tasks.create_task(loader.load(flights))
        except* SchemalessError as failed:
            raise failed.exceptions[0] from None
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    return Loaded(load.result(), *happened.result())


# A passenger is erased for good, and the report says place by place where the body is gone and where it isn't yet.

PASSENGER = "PASSENGER"
PASSENGER_ROW = uuid.uuid5(NAMESPACE, "a passenger")
ERASED_WITHIN_S = 60.0
ERASED_POLL_S = 0.2


def erase_passenger(console: Console, client: Client) -> ErasedPassenger:
    """Writes a version of a passenger's row, erases it, and prints the report."""
    client.put(PASSENGER_ROW, PASSENGER, body={"name": "Ada Lovelace", "flight": " ".join(FIRST_FLIGHT)})
    began = time.monotonic()
    order = client.erase(PASSENGER_ROW, reason="the demo shows how")
    ordered_s = time.monotonic() - began
    while (report := client.erasure(order["erasure"]))["state"] == "running":
        if time.monotonic() - began > ERASED_WITHIN_S:
            break
        time.sleep(ERASED_POLL_S)
    seconds = time.monotonic() - began
    title = f"what came of erasing the row of a passenger: {report['state']}"
    table = Table("place", "found", "removed", "remains until", "not searched", title=title, title_justify="left")
    for place in report["places"]:
        counts = str(place["found"]), str(place["removed"])
        table.add_row(place["place"], *counts, place.get("remains_until", ""), place.get("not_searched", ""))
    console.print(table)
    versions = client.get_versions(PASSENGER_ROW, PASSENGER, limit=1000).cells
    left = sum(not cell.is_erased for cell in versions)
    return ErasedPassenger(len(versions), left, report["state"] == "complete", ordered_s, seconds)


# Sample queries of the loaded datastore over HTTP, which the demo shows beside its audit.

INDEX = "flights_by_tailnum"
TAILNUM = "N14228"
JANUARY = (datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 2, 1, tzinfo=UTC))
FIRST_FLIGHT = ("2013-01-01T10:00:00Z", "UA", "1545")
LOG_CELLS = 5
BODY_CHARACTERS = 64


def show_queries(console: Console, client: Client, shards: int) -> list[Entry]:
    """Asks and prints, and returns the flights of TAILNUM in January. Raises CellMissing for a missing flight."""
    begin, end = JANUARY
    index = client.index(INDEX)
    entries = list(index.query(tailnum=TAILNUM, time_hour__gte=begin, time_hour__lt=end, order="time_hour", limit=1000))
    title = f"flights of tail number {TAILNUM} in January, by index {INDEX}"
    table = Table("time_hour", "flight", "from", "to", "row key", title=title, title_justify="left")
    for entry in entries:
        fields = entry.fields
        flight = f"{fields['carrier']} {fields['flight']}"
        table.add_row(str(fields["time_hour"]), flight, fields["origin"], fields["dest"], str(entry.row_key))
    console.print(table)
    row_key = row_key_of_flight(*FIRST_FLIGHT)
    status = client.get_cell_latest(row_key, STATUS)
    if not status:
        raise CellMissing(f"flight {' '.join(FIRST_FLIGHT)} has no {STATUS}")
    console.print(_cells_table(f"latest STATUS of {' '.join(FIRST_FLIGHT)}", [status]))
    shard = shard_of_text(str(row_key), shards)
    page = client.get_cells_for_shard(shard, 0, LOG_CELLS)
    console.print(_cells_table(f"the first {LOG_CELLS} cells of shard {shard}, of {page.head:,}", page))
    return entries


def _cells_table(title: str, cells: Iterable[FoundCell]) -> Table:
    table = Table("location", "row key", "column", "ref_key", "body", title=title, title_justify="left")
    for cell in cells:
        location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
        body = ", ".join(f"{name} {value}" for name, value in cell.body.items())
        shown = textwrap.shorten(body, BODY_CHARACTERS, placeholder=" …")
        table.add_row(location, str(cell.row_key), cell.column_name, str(cell.ref_key), shown)
    return table
