"""`schemaless tailer seek`: from where shards are published next, when nothing but an operator can tell (I7)."""

from __future__ import annotations

from typing import Annotated

import typer

from schemaless.bus.partition_log import PartitionLog
from schemaless.bus.topics import ensure_topics
from schemaless.cli_targets import servers
from schemaless.datastores import list_datastores
from schemaless.errors import Invalid, NotFound
from schemaless.location import FIRST_GENERATION, Location, parse_location
from schemaless.topology import Datastore, load_topology

TIMEOUT_S = 20.0  # somebody watches: rather late than failed


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The processes that bring the log to Kafka.", no_args_is_help=True)
    group.command("seek")(seek)
    group.callback()(lambda: None)  # a group of one command stays a group
    app.add_typer(group, name="tailer")


def seek(
    datastore: str,
    location: Annotated[str, typer.Argument(help="the last published one: ADDED_ID or GENERATION:ADDED_ID; 0: none")],
    shard: Annotated[int | None, typer.Option(help="default: every shard")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be written")] = False,
) -> None:
    """Publish again from behind a location. Cells before it that the topic lacks stay missing, others come twice."""
    reached = servers()
    found = list_datastores(load_topology(reached.topology)).get(datastore)
    if found is None:
        raise NotFound(f"there is no datastore {datastore!r}")
    if shard is not None and not 0 <= shard < found.shards:
        raise Invalid("shard", f"must be from 0 to {found.shards - 1}")
    generation, added_id = parse_location(location, "location")
    published = Location(FIRST_GENERATION if generation is None else generation, added_id)
    for partition, shards in _by_partition(found, shard).items():
        print(f"partition {partition}: shards {', '.join(map(str, shards))} go on after {published}")
        if not dry_run:
            _seek(reached.kafka, found, partition, dict.fromkeys(shards, published))


def _by_partition(datastore: Datastore, shard: int | None) -> dict[int, list[int]]:
    if shard is not None:
        return {datastore.partition(shard): [shard]}
    return {partition: list(datastore.shards_of_partition(partition)) for partition in range(datastore.partitions)}


def _seek(kafka: str, datastore: Datastore, partition: int, locations: dict[int, Location]) -> None:
    ensure_topics(kafka, datastore)
    log = PartitionLog(kafka, datastore, partition, transaction_timeout_s=TIMEOUT_S)
    try:
        log.seek(locations)
    finally:
        log.close()
