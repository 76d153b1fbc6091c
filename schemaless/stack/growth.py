"""Clusters and servers are added to a running embedded stack, and minions removed.

Each command begins where one that was killed ended. A server is in the plan once its data is whole, and then `up`
starts it, too.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from schemaless.errors import Misconfigured, NotFound, StateConflict
from schemaless.ops.growth import LEARNED_S, await_no_voter, await_open, await_voter, bring_up
from schemaless.stack import mysql_server, supervision
from schemaless.stack.embedded import FIRST_START_BYTES, DiskFull, one_at_a_time, prepare_servers
from schemaless.stack.endpoints import refresh_endpoints
from schemaless.stack.mysql_server import MySQLServer, PlannedServer, verify_socket
from schemaless.stack.plan import (
    MINIONS,
    StackPlan,
    first_servers,
    keep_plan,
    keep_servers,
    require_plan,
)
from schemaless.stack.remake import copy_data, verify_room
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.topology import Topology, load_topology

Say = Callable[[str], None]


class StackSite(NamedTuple):
    """The servers of an embedded stack that runs."""

    home: Path
    say: Say

    def check_cluster(self, name: str) -> None:
        """Raises Misconfigured where no servers can be made."""
        plan = require_plan(self.home)
        _verify_disk(plan, len(_new_cluster(plan, name)))

    def check_node(self, cluster: str, name: str) -> None:
        """Raises Misconfigured or StateConflict where no server can be made."""
        plan = require_plan(self.home)
        _new_node(plan, cluster, name)
        verify_room(plan, _donor(plan, cluster))

    def add_cluster(self, name: str) -> str:
        """Makes and starts a master and minions. Returns when the cluster is open and has what all clusters have."""
        with one_at_a_time(self.home, self.say):
            plan = require_plan(self.home)
            own = [one for one in plan.planned if one.cluster == name]
            if not own:
                own = _new_cluster(plan, name)
                _verify_disk(plan, len(own))
                self.say(f"making {', '.join(one.name for one in own)}")
                plan = _made(plan, own)
            self.say(f"starting {', '.join(one.name for one in own)}")
            servers = _started(plan, own)

            def bring() -> None:
                nodes = [plan.node(server) for server in servers]
                with SyncStorage(load_topology(plan.topology_file)) as storage:
                    bring_up(storage, nodes, plan.administrator(servers[0]))

            bring()
            self.say(f"the controller opens {name}")
            await_open(_join(plan, own), name)
            bring()  # what was written before everybody knew the cluster
            refresh_endpoints(self.home)
        return f"cluster {name} is open"

    def add_node(self, cluster: str, name: str) -> str:
        """Makes a copy of a minion and starts it, and returns when it is a voter."""
        with one_at_a_time(self.home, self.say):
            plan = require_plan(self.home)
            if name not in {one.name for one in plan.planned}:
                plan = _copied(plan, _new_node(plan, cluster, name), self.say)
            self.say(f"starting {name}")
            own = [one for one in plan.planned if one.name == name]
            (server,) = _started(plan, own)
            self.say(f"the controller lets {name} follow")
            await_voter(_join(plan, own), plan.administrator(server))
            refresh_endpoints(self.home)
        return f"{name} is a voter of {cluster}"

    def remove_node(self, cluster: str, name: str, *, delete: bool) -> str:
        """Takes a minion out of the voters and out of the stack, and ends it. Its folder stays, unless `delete`."""
        with one_at_a_time(self.home, self.say):
            plan = require_plan(self.home)
            ports = {other: port for other, port in plan.ports.items() if other != name}
            rest = replace(plan, planned=[one for one in plan.planned if one.name != name], ports=ports)
            self.say(f"the controller leaves {name} out")
            rest.write_admin_topology(_known(rest))
            await_no_voter(load_topology(plan.topology_file), cluster, name)
            keep_servers(rest)  # before it is stopped: `up` doesn't start it any more
            self.say(f"stopping {name}")
            with suppress(NotFound):
                supervision.remove_program(self.home, name)
            folder = plan.home / "mysql" / name
            kept = folder.with_name(f"{name}.removed-{int(time.time())}")
            with suppress(FileNotFoundError):
                shutil.rmtree(folder) if delete else folder.rename(kept)
            rest.write_topology(_known(rest))  # last: a repeated command looks for it there
            refresh_endpoints(self.home)
        return f"{name} is removed" + ("" if delete else f": its data is in {kept}")


def _new_cluster(plan: StackPlan, name: str) -> list[PlannedServer]:
    number = 1 + max(one.cluster_id for one in plan.planned)
    own = [PlannedServer(f"{name}{n + 1}", name, None, _server_id(plan), number) for n in range(MINIONS + 1)]
    if taken := {one.name for one in own} & plan.ports.keys():
        raise Misconfigured(f"{', '.join(sorted(taken))} would be its servers, and is taken: take another name")
    for one in own:
        verify_socket(plan.run, one.name)
    return own


def _new_node(plan: StackPlan, cluster: str, name: str) -> PlannedServer:
    if name in plan.ports:
        raise Misconfigured(f"{name} is another process of this stack: take another name")
    verify_socket(plan.run, name)
    cluster_id = next(one.cluster_id for one in plan.planned if one.cluster == cluster)
    return PlannedServer(name, cluster, None, _server_id(plan), cluster_id)


def _server_id(plan: StackPlan) -> int:
    """Returns one that no server ever had: a copy of a server has the promises of that server's number."""
    return 1000 + secrets.randbelow(1 << 30)


def _verify_disk(plan: StackPlan, servers: int) -> None:
    needed = FIRST_START_BYTES * servers // len(first_servers())
    if (free := shutil.disk_usage(plan.home).free) < needed:
        raise DiskFull(f"{servers} servers need {needed >> 20} MiB, and {plan.home} has {free >> 20} MiB free")


def _servers(plan: StackPlan, planned: Sequence[PlannedServer]) -> list[MySQLServer]:
    names = {one.name for one in planned}
    return [server for server in plan.servers() if server.name in names]


def _made(plan: StackPlan, own: Sequence[PlannedServer]) -> StackPlan:
    """Makes empty servers with the present accounts of others, and then writes the plan that has them."""
    plan = replace(plan, accounts=plan.accounts_of(plan.servers()[0]))
    keep_plan(plan)  # a repeated command finds them there: no topology has the cluster yet
    plan = plan.with_servers([*plan.planned, *own])
    servers = _servers(plan, own)
    for server in servers:
        shutil.rmtree(server.folder, ignore_errors=True)  # of a command that was killed before it wrote the plan
    prepare_servers(plan, servers)
    keep_servers(plan)
    return plan


def _copied(plan: StackPlan, one: PlannedServer, say: Say) -> StackPlan:
    """Makes a server whose data is that of a minion, and then writes the plan that has it."""
    plan = plan.with_servers([*plan.planned, one])
    (server,) = _servers(plan, [one])
    if server.folder.exists():  # of a command that was killed while the donor was down
        for other in _servers(plan, [each for each in plan.planned if each.cluster == one.cluster and each != one]):
            supervision.start(plan.home, other.name)
            mysql_server.wait_ready(other, plan.administrator(other))
    donor = _donor(plan, one.cluster)
    verify_room(plan, donor)
    shutil.rmtree(server.folder, ignore_errors=True)
    server.folder.mkdir(parents=True)
    fresh = server.folder / "data.new"
    with ExitStack() as afterwards:
        afterwards.callback(mysql_server.wait_ready, donor, plan.administrator(donor))
        afterwards.callback(supervision.start, plan.home, donor.name)
        supervision.stop_all(plan.home, [donor.name])
        say(f"copying {donor.name}, which is down meanwhile")
        with SyncStorage(load_topology(plan.topology_file)) as storage:
            if storage.master(one.cluster).node.name == donor.name:
                raise StateConflict(f"{donor.name} became the master: run the same command again")
        copy_data(donor, fresh)
    fresh.rename(server.data)
    mysql_server.prepare(server, server.folder)
    keep_servers(plan)
    return plan


def _donor(plan: StackPlan, cluster: str) -> MySQLServer:
    with SyncStorage(load_topology(plan.topology_file)) as storage:
        minions = [minion.node.name for minion in storage.minions(cluster)]
    if not minions:
        raise StateConflict(f"{cluster} has no minion to copy, and a master isn't stopped for a copy")
    return next(server for server in plan.servers() if server.name == minions[-1])


def _started(plan: StackPlan, own: Sequence[PlannedServer]) -> list[MySQLServer]:
    servers = _servers(plan, own)
    for server in servers:
        supervision.start_new(plan, supervision.server_program(plan, server))
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: mysql_server.wait_ready(server, plan.administrator(server)), servers))
    return servers


def _known(plan: StackPlan, own: Sequence[PlannedServer] = ()) -> list[MySQLServer]:
    """Returns the servers that services know, with those that a command adds. Others may be half made."""
    names = load_topology(plan.topology_file).nodes.keys() | {one.name for one in own}
    return [server for server in plan.servers() if server.name in names]


def _join(plan: StackPlan, own: Sequence[PlannedServer]) -> Topology:
    """Writes the services' file, and when they have read it the controller's."""
    plan.write_topology(_known(plan, own))
    time.sleep(LEARNED_S)
    plan.write_admin_topology(_known(plan, own))
    return load_topology(plan.topology_file)
