"""`schemaless tailer seek`: from where shards are published next, when nothing but an operator can tell (I7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from schemaless.cli.targets import named_datastore, servers
from schemaless.errors import Invalid, StorageUnavailable
from schemaless.extras import Extra, needs
from schemaless.location import BEGINNING, FIRST_GENERATION, Location, parse_location
from schemaless.topology import Datastore, Topology, load_topology

TIMEOUT_S = 20.0  # somebody watches: rather late than failed


@needs("tailer seek", Extra.KAFKA, Extra.MYSQL)
def seek(
    datastore: str,
    location: Annotated[str, typer.Argument(help="the last published one: ADDED_ID or GENERATION:ADDED_ID; 0: none")],
    shard: Annotated[int | None, typer.Option(help="default: every shard")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be written")] = False,
) -> None:
    """Publish again from behind a location. Cells before it that the topic lacks stay missing, others come twice."""
    from schemaless.bus.publish_status import read_publication
    from schemaless.ops.tailer_status import read_heads
    from schemaless.storage.pymysql_driver import SyncStorage

    reached = servers()
    topology = load_topology(reached.topology)
    found = named_datastore(topology, datastore)
    if shard is not None and not 0 <= shard < found.shards:
        raise Invalid("shard", f"must be from 0 to {found.shards - 1}")
    generation, added_id = parse_location(location, "location")
    published = Location(FIRST_GENERATION if generation is None else generation, added_id)
    with SyncStorage(topology) as storage:
        heads = read_heads(storage, found)
    moved = dict.fromkeys(range(found.shards) if shard is None else [shard], published)
    _refuse_past_heads(moved, heads)
    before = read_publication(reached.kafka, found).locations
    for each, to in moved.items():
        print(_consequence(each, before.get(each), to, heads.get(each)))
    if not dry_run:
        _seek(reached.kafka, found, moved)
        _tell(topology, found)


def _tell(topology: Topology, datastore: Datastore) -> None:
    """What was moved counts at once, for whoever publishes next; an idle tailer has to be told."""
    from schemaless.ops.tailer_control import announce_seek
    from schemaless.storage.pymysql_driver import SyncStorage

    try:
        with SyncStorage(topology) as storage:
            announce_seek(storage, datastore.name)
    except StorageUnavailable as error:
        print(f"tailers notice when they publish next: {error}")


def _refuse_past_heads(moved: Mapping[int, Location], heads: Mapping[int, Location]) -> None:
    """Raises Invalid for what its master doesn't have: a tailer would refuse the shard from then on."""
    for shard, location in moved.items():
        head = heads.get(shard)
        if head is not None and location > head:
            raise Invalid("location", f"{location} is past the head of shard {shard}, {head}")


def _consequence(shard: int, before: Location | None, to: Location, head: Location | None) -> str:
    start = before or BEGINNING
    again = max(0, (start if head is None else min(start, head)).added_id - to.added_id)
    never = max(0, to.added_id - start.added_id)
    return f"shard {shard}: {before or 'no progress'} → {to}: {again} cells come again, {never} never come"


def _seek(kafka: str, datastore: Datastore, locations: Mapping[int, Location]) -> None:
    """Partition by partition: each one at once, with all of its shards."""
    from schemaless.bus.partition_log import PartitionLog
    from schemaless.bus.topics import ensure_topics

    ensure_topics(kafka, datastore)
    for partition in sorted({datastore.partition(shard) for shard in locations}):
        log = PartitionLog(kafka, datastore, partition, transaction_timeout_s=TIMEOUT_S)
        try:
            log.seek({shard: to for shard, to in locations.items() if datastore.partition(shard) == partition})
        finally:
            log.close()
