"""`schemaless datastore create|list`, `topology show`, `conflicts list`: how they are shown, to people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from schemaless.cli.targets import DEFAULT_DATASTORE, DatastoreOption, HostsOption, JsonOption, open_client, servers
from schemaless.extras import Extra, needs
from schemaless.topology import Datastore, Node, StorageCluster, Topology, load_topology

SHARDS = 4096  # of a datastore that may grow over many servers


def register(app: typer.Typer) -> None:
    _group(app, "datastore", "Make and list datastores.", {"create": create, "list": list_all})
    _group(app, "topology", "Storage clusters and their servers.", {"show": show_topology})
    _group(app, "conflicts", "Buffered cells that met another body at home.", {"list": list_conflicts})


@needs("datastore create", Extra.KAFKA, Extra.MYSQL)
def create(
    name: Annotated[str, typer.Argument(help="a-z, 0-9 and _")],
    shards: Annotated[int, typer.Option(min=1, help="fixed for ever")] = SHARDS,
    partitions: Annotated[int, typer.Option(min=1, help="of the topic; must divide the shards")] = 64,
) -> None:
    """Make a datastore, or finish making one; its counts can't be changed later."""
    reached = servers()
    datastore = create_with_progress(load_topology(reached.topology), reached.kafka, name, shards, partitions)
    print(f"{datastore.name}: {datastore.shards} shards, {datastore.partitions} partitions, topic {datastore.topic}")


@needs("datastore list", Extra.KAFKA, Extra.MYSQL)
def list_all(as_json: JsonOption = False) -> None:
    """Datastores of the topology."""
    from schemaless.ops.datastores import list_datastores

    found = list_datastores(load_topology(servers().topology)).values()
    if as_json:
        _print_json({"datastores": [_datastore(datastore) for datastore in found]})
        return
    rows = [(item.name, item.shards, item.partitions, item.topic, " ".join(item.placement)) for item in found]
    _print_table(("datastore", "shards", "partitions", "topic", "clusters"), rows)


def show_topology(as_json: JsonOption = False) -> None:
    """Clusters, their masters and minions; never a password."""
    topology = load_topology(servers().topology)
    if as_json:
        _print_json({"clusters": {name: _cluster(cluster) for name, cluster in topology.clusters.items()}})
        return
    nodes = [node for cluster in topology.clusters.values() for node in cluster.nodes]
    rows = [(node.cluster, node.role, node.name, f"{node.host}:{node.port}") for node in nodes]
    _print_table(("cluster", "role", "node", "address"), rows)


def list_conflicts(
    datastore: DatastoreOption = DEFAULT_DATASTORE, hosts: HostsOption = "", as_json: JsonOption = False
) -> None:
    """Cells that were buffered while another body stood at their home: somebody has to decide."""
    with open_client(hosts, datastore) as client:
        document = client.document("/conflicts")
    if as_json:
        _print_json(document)
        return
    conflicts: list[dict[str, Any]] = document["conflicts"]
    columns = tuple(conflicts[0]) if conflicts else ("no conflicts",)
    _print_table(columns, [[_text(conflict.get(column)) for column in columns] for conflict in conflicts])


def create_with_progress(topology: Topology, kafka: str, name: str, shards: int, partitions: int) -> Datastore:
    """Make a datastore while a bar on standard error shows its shards."""
    from schemaless.ops.datastores import create_datastore

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"shards of {name}", total=shards)
        return create_datastore(
            topology, kafka, name, shards, partitions, lambda made, total: bar.update(task, completed=made)
        )


def _group(app: typer.Typer, name: str, text: str, commands: dict[str, Any]) -> None:
    group = typer.Typer(help=text, no_args_is_help=True)
    for command, function in commands.items():
        group.command(command)(function)
    app.add_typer(group, name=name)


def _datastore(datastore: Datastore) -> dict[str, Any]:
    return {
        "name": datastore.name,
        "shards": datastore.shards,
        "partitions": datastore.partitions,
        "topic": datastore.topic,
        "placement": list(datastore.placement),
    }


def _cluster(cluster: StorageCluster) -> dict[str, Any]:
    return {"master": _node(cluster.master), "minions": [_node(node) for node in cluster.minions]}


def _node(node: Node) -> dict[str, Any]:
    return {"name": node.name, "host": node.host, "port": node.port}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
