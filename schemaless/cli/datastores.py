"""`schemaless datastore create|list|grant`, `buffer show|wait` and `conflicts list`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemaless.cli.calls import call_command
from schemaless.cli.output import add_group, print_json, print_table
from schemaless.cli.targets import JsonOption, Servers, api_command, recorded, servers
from schemaless.client.client import Client
from schemaless.contract import services
from schemaless.names import parked_topic_name
from schemaless.quantity import quantity
from schemaless.runtime.extras import Extra, needs
from schemaless.topology import Datastore, load_topology

SHARDS = 4096  # for a datastore that may grow over many servers
PARTITIONS = 64


def register(app: typer.Typer) -> None:
    commands: dict[str, Callable[..., None]] = {"create": create, "list": list_all, "grant": grant}
    add_group(app, "datastore", "Create and list datastores, and let services into Kafka for them.", commands)
    add_group(app, "buffer", "Show what waits for its home, or wait for it.", {"show": show_buffer, "wait": wait})
    add_group(app, "conflicts", "Show buffered cells that met another body at their home.", {"list": list_conflicts})


@needs("datastore create", Extra.KAFKA, Extra.MYSQL)
@recorded("datastore create")
def create(
    name: Annotated[str, typer.Argument(help="a-z, 0-9 and _")],
    shards: Annotated[int, typer.Option(min=1, help="how many shards; can't be changed later")] = SHARDS,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="partitions of the topic; must divide the shards; default: at most 64")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a datastore, or finish its creation. Its counts can't be changed later."""
    reached = servers()
    datastore = create_with_progress(reached, name, shards, partitions or partitions_of(shards))
    if as_json:
        print_json(_document(datastore))
        return
    size = f"{quantity(datastore.shards, 'shard')}, {quantity(datastore.partitions, 'partition')}"
    print(f"{datastore.name}: {size}, topic {datastore.topic}")


@needs("datastore list", Extra.KAFKA, Extra.MYSQL)
def list_all(as_json: JsonOption = False) -> None:
    """List the datastores."""
    found = servers().datastores()
    if as_json:
        print_json({"datastores": list(map(_document, found))})
        return
    rows = [(item.name, item.shards, item.partitions, item.topic, " ".join(item.placement)) for item in found]
    print_table(("datastore", "shards", "partitions", "topic", "clusters"), rows)


@needs("datastore grant", Extra.KAFKA, Extra.MYSQL)
@recorded("datastore grant")
def grant(
    name: Annotated[str, typer.Argument(help="name of the datastore")],
    copies: Annotated[
        list[str] | None,
        typer.Option(help="a trigger program whose parked cells are copied to a topic; may be given several times"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give the services' account of Kafka its rights on a datastore again, and those to copy parked cells."""
    from schemaless.bus.kafka_accounts import grant_copies, grant_on_datastore
    from schemaless.consume.trigger_program import require_program_name

    for program in copies or ():
        require_program_name(program)
    reached = servers()
    datastore = reached.datastore(name)
    granted = grant_on_datastore(reached.kafka, datastore.name)
    topics = [parked_topic_name(name, program) for program in copies or ()]
    for program in copies or ():
        grant_copies(reached.kafka, datastore, program)
    if as_json:
        print_json({"datastore": name, "granted": granted, "topics": topics})
        return
    print(f"{name}: the services' account has its rights" if granted else f"{name}: this Kafka asks nobody for rights")
    for topic in topics:
        print(f"{topic}: there for copies of parked cells")


def _document(datastore: Datastore) -> dict[str, Any]:
    return {
        "name": datastore.name,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "topic": datastore.topic,
        "placement": list(datastore.placement),
    }


@api_command
def list_conflicts(client: Client, as_json: bool) -> None:
    """List cells that were buffered while another body was stored at their home. An operator has to decide."""
    document = client.document("/conflicts")
    if as_json:
        print_json(document)
        return
    conflicts: list[dict[str, Any]] = document["conflicts"]
    columns = tuple(dict.fromkeys(name for conflict in conflicts for name in conflict)) or ("no conflicts",)
    rows = [[conflict.get(column) for column in columns] for conflict in conflicts]
    print_table(columns, [[value if isinstance(value, str) else json.dumps(value) for value in row] for row in rows])


def partitions_of(shards: int) -> int:
    """Returns as many partitions as divide the shards, and at most 64."""
    return max(count for count in range(1, PARTITIONS + 1) if shards % count == 0)


def create_with_progress(reached: Servers, name: str, shards: int, partitions: int) -> Datastore:
    """Creates a datastore while a progress bar on standard error counts its shards."""
    from schemaless.ops.datastores import create_datastore

    administrators = None if reached.admin_topology_file is None else load_topology(reached.admin_topology_file)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"shards of {name}", total=shards)
        return create_datastore(
            reached.topology,
            reached.kafka,
            name,
            shards,
            partitions,
            lambda made, total: bar.update(task, completed=made),
            administrators=administrators,
        )


@call_command(services.BUFFER)
def show_buffer(document: dict[str, Any]) -> None:
    """Show what waits in buffers for each home."""
    columns = ("rows", "bytes", "oldest_s", "rate")
    rows = [(home, *map(one.get, columns)) for home, one in document["homes"].items()]
    print_table(("home", "rows", "bytes", "oldest, s", "rows a second"), rows)
    for cluster, why in document["unknown"].items():
        print(f"cluster {cluster} doesn't say what it buffers: {why}")


@call_command(services.BUFFER_SYNC)
def wait(document: dict[str, Any]) -> None:
    """Wait until everything that is buffered now is readable at home. Exit status 1: not in time."""
    print(f"all of it is readable at home, after {document['waited_s']} s")
