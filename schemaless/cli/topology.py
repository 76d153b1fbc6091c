"""`schemaless topology`: the servers and their masters, what controllers did, and orders to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, TypeVarTuple

import typer

from schemaless.cell import created_at_text
from schemaless.cli import growth, moves
from schemaless.cli.calls import call_command
from schemaless.cli.output import add_group, print_json, print_table
from schemaless.cli.targets import JsonOption, servers
from schemaless.contract import services
from schemaless.errors import NotFound, SchemalessError, StorageUnavailable
from schemaless.runtime.extras import Extra, needs
from schemaless.topology import Node, Role

if TYPE_CHECKING:
    from schemaless.storage.appointment_table import ClusterState, Step
    from schemaless.storage.operation import Operation
    from schemaless.storage.pymysql_driver import SyncNode

T = TypeVar("T")
Args = TypeVarTuple("Args")
ASKED = "order it?"


def register(app: typer.Typer) -> None:
    commands: dict[str, Callable[..., None]] = {
        "show": show,
        "history": history,
        "switch": switch,
        "promote": promote,
        "open": open_master,
        "acknowledge": acknowledge,
        "rejoin": rejoin,
        "add-cluster": growth.add_cluster,
        "add-node": growth.add_node,
        "remove-node": growth.remove_node,
        "move-shard": moves.move_shard,
        "moves": moves.list_moves,
        "move-throttle": moves.move_throttle,
        "move-follow": moves.move_follow,
        "reverse": moves.move_reverse,
        "complete": moves.move_complete,
        "move-cancel": moves.move_cancel,
    }
    add_group(
        app, "topology", "Show storage clusters and their servers, add some, change masters, and move shards.", commands
    )


@needs("topology show", Extra.MYSQL)
def show(as_json: JsonOption = False) -> None:
    """Show clusters, their masters, minions and voters, and what a controller makes of them. No passwords are shown."""
    from schemaless.storage import appointment_table
    from schemaless.storage.everywhere import together
    from schemaless.storage.pymysql_driver import SyncStorage

    def address(node: Node) -> dict[str, Any]:
        return {"name": node.name, "host": node.host, "port": node.port}

    with SyncStorage(servers().topology) as storage:
        masters = {master.node.cluster: master.node for master in storage.masters}
        minions = {name: [minion.node for minion in storage.others(name)] for name in masters}
        appointments = storage.appointments
        said: dict[str, ClusterState] = {}
        with suppress(StorageUnavailable):  # the file and the appointments are shown all the same
            said = together(_answers(storage.nodes.values(), appointment_table.states))
        clusters: dict[str, dict[str, Any]] = {
            name: {
                "epoch": storage.epoch(name),
                "state": storage.state(name),
                "master": address(master),
                "minions": list(map(address, minions[name])),
                "voters": list(appointments[name].voters) if name in appointments else [],
                "controller": _said(said[name]) if name in said else None,
            }
            for name, master in masters.items()
        }
    if as_json:
        print_json({"clusters": clusters})
        return
    rows = []
    for name, shown in clusters.items():
        nodes = [(Role.MASTER, masters[name]), *((Role.MINION, minion) for minion in minions[name])]
        for role, node in nodes:
            votes = "yes" if node.name in shown["voters"] else "no"
            one = next((one for one in said[name].nodes if one.name == node.name), None) if name in said else None
            word = ("-", "") if one is None else (one.state, one.why)
            where = (role, node.name, votes, f"{node.host}:{node.port}")
            state = said[name].state if name in said else shown["state"]
            rows.append((name, shown["epoch"], state, *where, *word))
    print_table(("cluster", "epoch", "state", "role", "node", "voter", "address", "is", "why"), rows)
    for name, state in said.items():
        why = f", because {state.why}" if state.why else ""
        print(f"{name} is {state.state}{why}: so {state.controller} said at {created_at_text(state.changed_at)}")


def _said(state: ClusterState) -> dict[str, Any]:
    """Shows what a controller makes of a cluster and of each of its servers, and when it said so last."""
    nodes = {one.name: {"state": one.state, "why": one.why} for one in state.nodes}
    at = created_at_text(state.changed_at)
    return {"state": state.state, "why": state.why, "controller": state.controller, "at": at, "nodes": nodes}


@needs("topology history", Extra.MYSQL)
def history(
    cluster: Annotated[str, typer.Argument(help="a storage cluster; default: all")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="how many steps of a cluster at most")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show what controllers did, step by step, newest last. Every server that answers is asked."""
    from schemaless.storage.pymysql_driver import SyncStorage

    topology = servers().topology
    if cluster and cluster not in topology.clusters:
        raise NotFound(f"there is no storage cluster {cluster!r}: there are {', '.join(topology.clusters)}")
    with SyncStorage(topology) as storage:
        clusters = [cluster] if cluster else list(topology.clusters)
        found = [step for name in clusters for step in _steps(storage.nodes.values(), name, limit)]
    found.sort(key=lambda step: step.at)
    columns = ("at", "cluster", "epoch", "step", "told")
    rows = [(created_at_text(step.at), step.cluster, step.ballot.epoch, step.step, step.told) for step in found]
    if as_json:
        print_json({"steps": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_table(columns, rows)


def _steps(nodes: Collection[SyncNode], cluster: str, limit: int) -> list[Step]:
    """Returns the last steps of a cluster, in order. A server knows those during which it was reached."""
    from schemaless.storage import appointment_table

    known = {step for answer in _answers(nodes, appointment_table.steps, cluster, limit) for step in answer}
    return sorted(known, key=lambda step: (step.at, step.step))[-limit:]


def _answers(nodes: Collection[SyncNode], operation: Callable[[*Args], Operation[T]], *args: *Args) -> list[T]:
    """Asks all servers at once, and returns what those say that answer. Raises StorageUnavailable when none does."""
    from schemaless.storage.failover import nobody_answers

    failures: list[SchemalessError] = []

    def ask(node: SyncNode) -> list[T]:
        try:
            return [node.run(operation, *args, again_on=())]
        except SchemalessError as error:
            failures.append(error)
            return []

    with ThreadPoolExecutor(len(nodes)) as pool:
        found = [answer for answers in pool.map(ask, nodes) for answer in answers]
    if not found:
        raise nobody_answers(failures)
    return found


@call_command(services.TOPOLOGY_ORDER, ASKED, ("without", "fenced"), order="switch")
def switch(document: dict[str, Any]) -> None:
    """Make a minion the master, and the master a minion. Nothing is lost, and writes wait for less than a second."""
    _print(document)


@call_command(services.TOPOLOGY_ORDER, ASKED, order="promote")
def promote(document: dict[str, Any]) -> None:
    """Make a minion the master in place of one that is dead. A new generation begins in its shards."""
    _print(document)


@call_command(services.TOPOLOGY_ORDER, ASKED, ("without", "fenced", "node"), order="open")
def open_master(document: dict[str, Any]) -> None:
    """Open a master that started again, without waiting for minions that don't answer."""
    _print(document)


@call_command(services.TOPOLOGY_ORDER, ASKED, ("without", "fenced", "node"), order="acknowledge")
def acknowledge(document: dict[str, Any]) -> None:
    """Say that you looked at an automatic promotion. Then the next one may happen automatically, too."""
    _print(document)


@call_command(services.TOPOLOGY_ORDER, ASKED, ("without", "fenced"), order="rejoin")
def rejoin(document: dict[str, Any]) -> None:
    """Make a minion that doesn't follow anew, from another one. What only it has is kept and put again first."""
    _print(document)


def _print(document: dict[str, Any]) -> None:
    print(document["told"])
    for voter in document["voters"]:
        print(f"voter {voter['name']}: {voter['lag_s']} s behind")
