"""`schemaless topology add-cluster`, `add-node` and `remove-node`: servers come and go while everything runs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schemaless.cli.output import print_json, print_notice
from schemaless.cli.targets import JsonOption, Servers, recorded, servers, user_name
from schemaless.config import OperatorSettings, StackSettings
from schemaless.errors import Misconfigured
from schemaless.runtime.extras import Extra, needs
from schemaless.stack.plan import home_folder
from schemaless.topology import Topology, load_topology

if TYPE_CHECKING:
    from schemaless.ops.growth import FileSite
    from schemaless.stack.growth import StackSite
    from schemaless.storage.appointment_table import OrderKind

NodesOption = Annotated[
    Path | None, typer.Option("--nodes", help="a file like topology.json with the new servers; not for the stack")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="only check, and say what would be done")]
NodeArgument = Annotated[str, typer.Argument(help="name of the server")]


@needs("topology add-cluster", Extra.KAFKA, Extra.MYSQL)
@recorded("topology add-cluster")
def add_cluster(
    name: Annotated[str, typer.Argument(help="name of the new cluster")],
    nodes: NodesOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add a storage cluster. New datastores place shards on it, and puts may be buffered there at once."""
    from schemaless.ops.growth import verify_name, verify_new_cluster
    from schemaless.storage.appointment_table import OrderKind

    reached = servers()
    site = _site(reached, nodes)
    verify_name("cluster", name)
    told = _carried_out(
        (reached, OrderKind.ADD_CLUSTER, name, None),
        verify=lambda present: verify_new_cluster(present, name),
        would=_checked(dry_run, lambda: site.check_cluster(name), f"cluster {name} would be opened as a new one"),
        act=lambda: site.add_cluster(name),
    )
    print_json({"told": told}) if as_json else print(told)


@needs("topology add-node", Extra.KAFKA, Extra.MYSQL)
@recorded("topology add-node")
def add_node(
    cluster: Annotated[str, typer.Argument(help="a storage cluster")],
    node: NodeArgument,
    nodes: NodesOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add a minion to a cluster. It is a voter once the controller lets it follow the master."""
    from schemaless.ops.growth import verify_name, verify_new_node
    from schemaless.storage.appointment_table import OrderKind

    reached = servers()
    site = _site(reached, nodes)
    verify_name("server", node)
    told = _carried_out(
        (reached, OrderKind.ADD_NODE, cluster, node),
        verify=lambda present: verify_new_node(present, cluster, node),
        would=_checked(dry_run, lambda: site.check_node(cluster, node), f"{node} would be a voter of {cluster}"),
        act=lambda: site.add_node(cluster, node),
    )
    print_json({"told": told}) if as_json else print(told)


@needs("topology remove-node", Extra.KAFKA, Extra.MYSQL)
@recorded("topology remove-node")
def remove_node(
    node: NodeArgument,
    last: Annotated[bool, typer.Option("--last", help="also if nothing can be promoted then")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="delete its data in the embedded stack")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a minion. It is no voter first, and then no server of its cluster any more."""
    from schemaless.ops.growth import cluster_of, verify_removable
    from schemaless.storage.appointment_table import OrderKind

    reached = servers()
    site = _site(reached, None)
    cluster = cluster_of(reached.topology, node)
    verify_removable(reached.topology, node, last=last)

    def remove() -> str:
        verify_removable(reached.topology, node, last=last)  # again: nobody gives another order now
        return site.remove_node(cluster, node, delete=delete)

    told = _carried_out(
        (reached, OrderKind.REMOVE_NODE, cluster, node),
        verify=lambda present: None,
        would=_checked(dry_run, lambda: None, f"{node} would be no voter of {cluster} any more, and be stopped"),
        act=remove,
    )
    print_json({"told": told}) if as_json else print(told)


def _site(reached: Servers, source: Path | None) -> FileSite | StackSite:
    """Returns who changes servers: the embedded stack, or files that an operator copies. Raises Misconfigured."""
    from schemaless.ops.growth import FileSite
    from schemaless.stack.growth import StackSite

    if OperatorSettings().topology is None:
        if source is not None:
            raise Misconfigured("the embedded stack starts its servers itself: leave out --nodes")
        return StackSite(home_folder(StackSettings()), print_notice)
    if reached.admin_topology_file is None:
        raise Misconfigured(
            "an administrator's account is needed: set SCHEMALESS_ADMIN_TOPOLOGY to the controller's file"
        )
    return FileSite(reached.topology_file, reached.admin_topology_file, source)


def _checked(dry_run: bool, check: Callable[[], None], would: str) -> Callable[[], str] | None:
    """Returns what a dry run does: it checks, and says what would be done. None without a dry run."""

    def checked() -> str:
        check()
        return f"{would}: nothing was changed"

    return checked if dry_run else None


def _carried_out(
    wanted: tuple[Servers, OrderKind, str, str | None],
    *,
    verify: Callable[[Topology], None],
    would: Callable[[], str] | None,
    act: Callable[[], str],
) -> str:
    """Carries an order out, and returns what came of it. `verify` refuses a name by the controller's file, unless the
    same command was killed before.
    """
    from schemaless.ops.growth import GrowthOrder
    from schemaless.storage.pymysql_driver import SyncStorage

    reached, kind, cluster, node = wanted
    with SyncStorage(reached.topology) as storage:
        order = GrowthOrder(storage, kind, cluster, node, f"{user_name()}@{socket.gethostname()}"[:200])
        if not order.again:
            verify(load_topology(reached.admin_topology_file or reached.topology_file))
        if would is not None:
            return would()
        with order:
            return act()
