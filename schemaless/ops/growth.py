"""Clusters and servers that come and go: what is asked of a server before it joins, what a new cluster gets, and the
order that keeps other orders away meanwhile.

The topology's files say which servers there are. Whoever changes them does it in this order: services learn of a server
before the controller does, and forget it after the controller did.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from schemaless.errors import Misconfigured, NotFound, SchemalessError, StateConflict, Unavailable
from schemaless.runtime.tls import write_private_text
from schemaless.storage import (
    appointment_table,
    index_definition_table,
    placement_table,
    schema,
    shard_head,
    shard_log,
    shard_move_table,
    tailer_order_table,
    token_table,
)
from schemaless.storage.admin_session import AdminSession
from schemaless.storage.appointment_table import REPLACED_AFTER_S, OrderKind, OrderState, TopologyOrder
from schemaless.storage.everywhere import after, together
from schemaless.storage.failover import run_on_all
from schemaless.storage.operation import query
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.server_settings import faults_of
from schemaless.topology import Appointment, Node, Role, Topology, load_topology

CLOCK_DIFFERENCE_MAX_S = 5.0
JOINED_TIMEOUT_S = 60.0
LEARNED_S = 2.0
"""Processes look at their file twice a second."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_POLL_S = 0.2
_SYSTEM = ("information_schema", "mysql", "performance_schema", "sys", "test")
SAME_SETTINGS = (
    "log_bin",
    "gtid_mode",
    "enforce_gtid_consistency",
    "gtid_strict_mode",
    "log_slave_updates",
    "log_replica_updates",
    "binlog_format",
    "lower_case_table_names",
    "character_set_server",
    "max_allowed_packet",
    "skip_slave_start",
    "skip_replica_start",
)
"""Settings that a server needs as the present servers have them."""


def verify_name(what: str, name: str) -> None:
    """Raises Misconfigured for a name that servers and files can't have."""
    if not _NAME.fullmatch(name):
        raise Misconfigured(
            f"a {what} can't be called {name!r}: take a letter of a-z, and then at most 31 of a-z, 0-9, -"
        )


def verify_new_cluster(topology: Topology, name: str) -> None:
    """Raises Misconfigured for a name that is taken, or comes before those of the present clusters.

    The first cluster decides where two writers come at once, so it has to stay the same one.
    """
    verify_name("cluster", name)
    if name in topology.clusters:
        raise Misconfigured(f"there is a cluster {name!r} already: take another name")
    if name < (first := min(topology.clusters)):
        raise Misconfigured(
            f"{name!r} comes before {first!r} in the alphabet, and the first cluster has to stay {first}"
        )


def verify_new_node(topology: Topology, cluster: str, name: str) -> None:
    """Raises NotFound or Misconfigured."""
    verify_name("server", name)
    if cluster not in topology.clusters:
        raise NotFound(f"there is no storage cluster {cluster!r}: there are {', '.join(topology.clusters)}")
    if (taken := topology.nodes.get(name)) is not None:
        raise Misconfigured(f"cluster {taken.cluster} has a server {name!r} already: take another name")


def cluster_of(topology: Topology, name: str) -> str:
    """Returns the cluster of a server. Raises NotFound."""
    if name not in topology.nodes:
        raise NotFound(f"there is no server {name!r}: there are {', '.join(topology.nodes)}")
    return topology.nodes[name].cluster


def verify_removable(topology: Topology, name: str, *, last: bool) -> None:
    """Raises StateConflict for a master, and for the last voter of its cluster unless that was said."""
    cluster = cluster_of(topology, name)
    with SyncStorage(topology) as storage:
        if storage.master(cluster).node.name == name:
            raise StateConflict(f"{name} is the master of {cluster}: `schemaless topology switch {cluster}` first")
        known = storage.appointments.get(cluster)
    if known is not None and not last and set(known.voters) == {name}:
        raise StateConflict(
            f"{name} is the last voter of {cluster}: without it nothing can be promoted, and nobody can say what a"
            " master lost. Add another server first, or give --last"
        )


class GrowthOrder:
    """An order that a command carries out itself, noted on every master so that no other one is given meanwhile.

    `again`: it continues one of the same caller that was killed. Raises StateConflict while there is another order.
    """

    def __init__(self, storage: SyncStorage, kind: OrderKind, cluster: str, node: str | None, actor: str) -> None:
        self._masters = [master for master in storage.masters if not storage.has_no_master(master.node.cluster)]
        orders = together(run_on_all(self._masters, appointment_table.orders).at_least_one())
        present = orders.get(cluster)
        number = after(present.changed_at if present is not None else 0)
        self._order = TopologyOrder(cluster, kind, node, (), actor, OrderState.OPEN, "", f"{number:x}", number)
        self.again = False
        for other in orders.values():
            is_open = other.state is OrderState.OPEN
            if is_open and other.cluster == cluster and other.is_again(self._order):
                self.again = True
            elif self._excludes(other):
                raise StateConflict(f"{other.said}, and that isn't settled yet: wait until it is")

    def __enter__(self) -> None:
        """Raises StorageUnavailable when a master is away, and StateConflict where two began at once."""
        for master in self._masters:
            master.run(appointment_table.put_order, self._order)
        for other in together(run_on_all(self._masters, appointment_table.orders).at_least_one()).values():
            if other.cluster != self._order.cluster and self._excludes(other):
                error = StateConflict(f"{other.said} at the same time: run the same command again")
                self._settle(OrderState.REFUSED, error)
                raise error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """What was ended, or waited in vain, may be continued: its order stays open."""
        if error is None or (isinstance(error, SchemalessError) and not isinstance(error, Unavailable)):
            self._settle(OrderState.DONE if error is None else OrderState.REFUSED, error)

    def _excludes(self, other: TopologyOrder) -> bool:
        is_young = self._order.changed_at - other.changed_at < REPLACED_AFTER_S * 1e6
        return other.state is OrderState.OPEN and is_young

    def _settle(self, state: OrderState, error: BaseException | None) -> None:
        told = (self._order, state, str(error or ""), after(self._order.changed_at))
        run_on_all(self._masters, appointment_table.settle_order, *told)


def bring_up(storage: SyncStorage, nodes: Sequence[Node], account: Node) -> None:
    """Writes to a new cluster the tables, and what all clusters have. It may be repeated.

    `nodes` are its servers. The master is written to, or the first one before there is a master. It is done with an
    administrator's account, because that one is read-only until a controller opens it. All masters of `storage` are
    read. Raises StorageUnavailable when one is away.
    """
    storage.look()
    known = storage.appointments.get(nodes[0].cluster)
    service = next(node for node in nodes if known is None or node.name == known.master)
    administrator = service.as_known_to(account)
    with closing(SyncNode(administrator)) as new, closing(SyncNode(service)) as own:
        to = own.run(schema.current_account)
        new.run(schema.create_server_tables)
        for master in storage.masters:
            if master.node.cluster == service.cluster:
                continue
            ready = master.run(schema.datastores)
            for name, datastore in master.run(lambda: schema.datastores(ready=False)).items():
                new.run(schema.install, datastore.installation)
                new.run(schema.insert_datastore, datastore)
                new.run(schema.grant_datastore, datastore, to)  # any cluster may get shards of it
                if name in ready:
                    new.run(schema.set_ready, name)
                for index in master.run(index_definition_table.all_of, name):
                    new.run(index_definition_table.bring_to, name, index)
                    if until := master.run(index_definition_table.build_until, name, index.name, index.number):
                        new.run(index_definition_table.begin_build, name, index.name, index.number, until)
            if moved := master.run(placement_table.TABLE.rows):
                new.run(placement_table.write, moved)
            if tokens := master.run(token_table.all_rows):
                new.run(token_table.put, tokens.values())
            for name, command in master.run(tailer_order_table.all_of).items():
                new.run(tailer_order_table.put, name, command)


class Joining:
    """A server that is to join, beside a server of the same kind that is there: both with an administrator's account.

    `faults` are sentences, each of which says what to do. Raises StorageUnavailable when one of them doesn't answer.
    """

    def __init__(self, service: Node, session: AdminSession, peer: AdminSession) -> None:
        self._service, self._session, self._peer = service, session, peer
        self.name = service.name

    def faults(self, replication: Node | None) -> Iterator[str]:
        """Yields what keeps the server from joining. `replication` is the server with the account of replication."""
        yield from self._kind()
        yield from self._settings()
        yield from self._clock()
        for node, what in ((self._service, "services"), (replication, "replication")):
            if node is not None:
                try:
                    with closing(SyncNode(node)) as own:
                        own.run(query, "SELECT 1", again_on=())
                except SchemalessError as error:
                    yield f"the account {node.user} of {what} can't log in to {self.name}: {error}"

    def contents(self, *, as_cluster: bool, is_first: bool) -> Iterator[str]:
        """Yields what a server holds that it must not hold, or lacks.

        A minion is empty, or a copy of another one. The first server of a new cluster may have tables of ours, from a
        command that was killed, and no shard.
        """
        held, cluster = self._holds(), self._service.cluster
        if as_cluster:
            if held and not (is_first and held == ["schemaless"] and not self._shards()):
                yield f"{self.name} isn't empty: it has {', '.join(held)}. Take an empty server"
        elif "schemaless" not in held:
            if held:
                yield f"{self.name} isn't empty: it has {', '.join(held)}. Take an empty server, or a copy of a minion"
            elif self._begins_late():
                yield (
                    f"{self.name} is empty, and {self._peer.node.name} hasn't its whole log any more: make"
                    f" {self.name} a copy of a minion of {cluster} first (docs/growth.md)"
                )
        elif foreign := self._foreign():
            yield (
                f"{self.name} has {foreign} otherwise than {self._peer.node.name}: take an empty server, or a copy of a"
                f" minion of {cluster}"
            )

    def _foreign(self) -> str:
        """Returns what the server has and its master doesn't, '' if nothing: a datastore, or a shard's newest cell."""
        with closing(SyncNode(self._session.node)) as own, closing(SyncNode(self._peer.node)) as peer:
            there = peer.run(lambda: schema.datastores(ready=False))
            for name, datastore in own.run(lambda: schema.datastores(ready=False)).items():
                if there.get(name) != datastore:
                    return f"the datastore {name}"
                left = own.run(shard_move_table.left, name)  # their cells may be dropped
                heads = [head for head in own.run(shard_head.heads, name) if head.shard not in left]
                ends = {head.shard: head.added_id for head in heads if head.added_id}
                mine, others = (node.run(shard_log.digests, datastore, ends) if ends else {} for node in (own, peer))
                for shard in ends:
                    if mine[shard] != others[shard]:
                        return f"shard {shard} of {name}"
        return ""

    def _holds(self) -> list[str]:
        """Returns the databases of the server that its installation didn't make."""
        shown = self._session.query("SELECT schema_name AS name FROM information_schema.schemata")
        return sorted(str(row["name"]) for row in shown if row["name"].lower() not in _SYSTEM)

    def _shards(self) -> int:
        """Returns how many shards the server has."""
        if "schemaless" not in self._holds():
            return 0
        (row,) = self._session.query(
            "SELECT COUNT(*) AS found FROM information_schema.tables"
            " WHERE table_schema = 'schemaless' AND table_name = 'shard_head'"
        )
        return (
            self._session.query("SELECT COUNT(*) AS found FROM schemaless.shard_head")[0]["found"]
            if row["found"]
            else 0
        )

    def _begins_late(self) -> bool:
        """Returns whether the peer's log begins later than its history: who is empty can't follow it from the start."""
        first, *_ = self._peer.query("SHOW BINARY LOGS")
        return not str(first["Log_name"]).endswith(".000001")

    def _kind(self) -> Iterator[str]:
        one, other = (str(each.query("SELECT VERSION() AS it")[0]["it"]) for each in (self._session, self._peer))
        kinds = ["MariaDB" if each.mariadb else "MySQL" for each in (self._session, self._peer)]
        peer = self._peer.node.name
        if kinds[0] != kinds[1]:
            yield f"{self.name} is {kinds[0]} and {peer} is {kinds[1]}: all servers are of one kind"
        elif one.split(".")[:2] != other.split(".")[:2]:
            yield f"{self.name} has version {one} and {peer} has {other}: install the same one"

    def _settings(self) -> Iterator[str]:
        question = "SHOW GLOBAL VARIABLES"
        mine, others = (
            {str(row["Variable_name"]): str(row["Value"]) for row in each.query(question)}
            for each in (self._session, self._peer)
        )
        for name in SAME_SETTINGS:
            if mine.get(name) != others.get(name):
                yield f"{name} is {mine.get(name)} on {self.name}, and {others.get(name)} on {self._peer.node.name}"
        for fault in faults_of(Role.MINION, mine):
            yield f"on {self.name} {fault}"

    def _clock(self) -> Iterator[str]:
        question = "SELECT UNIX_TIMESTAMP(SYSDATE(6)) AS it"
        ahead_s = float(self._session.query(question)[0]["it"]) - float(self._peer.query(question)[0]["it"])
        if abs(ahead_s) > CLOCK_DIFFERENCE_MAX_S:
            yield (
                f"the clock of {self.name} is {ahead_s:+.0f} s from that of {self._peer.node.name}: let both follow one"
                " time server"
            )


def verify_joining(administrators: Topology, present: SyncStorage, nodes: Sequence[Node], *, as_cluster: bool) -> None:
    """Raises Misconfigured with all that keeps servers from joining, `as_cluster` or the cluster that they name.

    They have the accounts of the servers that are there.
    """
    master = present.master(min(present.topology.clusters) if as_cluster else nodes[0].cluster).node
    account = administrators.nodes[master.name]
    faults: list[str] = []
    with ExitStack() as stack:
        peer = stack.enter_context(AdminSession(account))
        for node in nodes:
            if node.name in administrators.nodes:  # it has joined, and what it has is its own
                continue
            administrator = node.as_known_to(account)
            try:
                session = stack.enter_context(AdminSession(administrator))
            except SchemalessError as error:
                where = f"{node.host}:{node.port}"
                faults.append(f"{node.name} can't be used at {where} ({error}): start it, or correct its address")
                continue
            if (replication := administrators.replication) is not None:
                administrator = replace(node, user=replication.user, password=replication.password, file=None)
            joining = Joining(node, session, peer)
            faults += joining.faults(administrator if replication is not None else None)
            faults += joining.contents(as_cluster=as_cluster, is_first=node is nodes[0])
        faults += _shared_ids(present, nodes, account)
    if faults:
        raise Misconfigured("; ".join(faults), hint="nothing was changed: correct that, and run the command again")


def _shared_ids(present: SyncStorage, nodes: Sequence[Node], account: Node) -> Iterator[str]:
    """Yields which servers have one server_id, and which clusters of MariaDB one gtid_domain_id, or two. Servers that
    don't answer aren't asked here.
    """
    found: dict[int, str] = {}
    domains: dict[int, str] = {}
    names = {node.name for node in nodes}
    for node in (*(one for one in present.topology.nodes.values() if one.name not in names), *nodes):
        with (
            suppress(SchemalessError),
            AdminSession(node.as_known_to(account)) as one,
        ):
            if one.mariadb:
                domain = one.query("SELECT @@gtid_domain_id AS it")[0]["it"]
                own = {number for number, cluster in domains.items() if cluster == node.cluster}
                if node.name in names and (domains.get(domain, node.cluster) != node.cluster or own - {domain}):
                    whose = f"{own.pop()}, as its cluster has" if own else "one of its cluster's own"
                    yield f"{node.name} has the gtid_domain_id {domain}: give it {whose}"
                domains.setdefault(domain, node.cluster)
            number = one.query("SELECT @@server_id AS it")[0]["it"]
            if number in found and node.name in names:
                yield f"{node.name} has the server_id {number} of {found[number]}: give it one of its own"
            found.setdefault(number, node.name)


def read_nodes(path: Path, cluster: str, name: str | None = None) -> list[Node]:
    """Returns the servers of a cluster in a file of the topology's form, or the one of this name. Raises Misconfigured
    for a file that is none, and NotFound.
    """
    found = load_topology(path).clusters.get(cluster)
    nodes = [] if found is None else [node for node in found.nodes if name in (None, node.name)]
    if not nodes:
        what = f"server {name} in cluster {cluster}" if name else f"cluster {cluster}"
        raise NotFound(f"{path} has no {what}")
    return nodes


def add_to_file(path: Path, source: Path, nodes: Sequence[Node], account: Node | None = None) -> bool:
    """Adds servers to a topology's file as the other file describes them, or with the account of another server.
    Returns whether they were added: False where they are there.
    """
    document, described = (json.loads(file.read_bytes()) for file in (path, source))
    own = document["clusters"].setdefault(nodes[0].cluster, [])
    there = {entry["name"] for entry in own}
    more = {} if account is None else {"user": account.user, "password": account.password}
    names = {node.name for node in nodes} - there
    own += [entry | more for entry in described["clusters"][nodes[0].cluster] if entry["name"] in names]
    if names:
        write_private_text(path, json.dumps(document, indent=2) + "\n")
    return bool(names)


def remove_from_file(path: Path, node: str) -> None:
    """Takes a server out of a topology's file."""
    document = json.loads(path.read_bytes())
    for cluster, entries in document["clusters"].items():
        document["clusters"][cluster] = [entry for entry in entries if entry["name"] != node]
    write_private_text(path, json.dumps(document, indent=2) + "\n")


class FileSite(NamedTuple):
    """Servers that somebody else starts and stops. `services` and `administrators` are the topology's files of this
    machine, and `source` describes new servers in the same form.
    """

    services: Path
    administrators: Path
    source: Path | None

    def check_cluster(self, name: str) -> None:
        """Raises Misconfigured with what keeps the servers of the new cluster from joining."""
        self._check(read_nodes(self._described, name), as_cluster=True)

    def check_node(self, cluster: str, name: str) -> None:
        """Raises Misconfigured with what keeps the server from joining."""
        self._check(read_nodes(self._described, cluster, name), as_cluster=False)

    def add_cluster(self, name: str) -> str:
        """The first call checks the servers, and writes the services' file. The second one lets the controller know
        them, when that file is on every machine.
        """
        nodes = read_nodes(self._described, name)
        account = self._check(nodes, as_cluster=True)

        def bring() -> None:
            with SyncStorage(load_topology(self.services)) as storage:
                bring_up(storage, nodes, account)

        bring()
        if add_to_file(self.services, self._described, nodes):
            return self._copy_first(f"cluster {name}")
        add_to_file(self.administrators, self._described, nodes, account)
        await_open(load_topology(self.services), name)
        bring()
        return f"cluster {name} is open"

    def add_node(self, cluster: str, name: str) -> str:
        """Works in two calls as `add_cluster` does."""
        nodes = read_nodes(self._described, cluster, name)
        account = self._check(nodes, as_cluster=False)
        if add_to_file(self.services, self._described, nodes):
            return self._copy_first(name)
        add_to_file(self.administrators, self._described, nodes, account)
        await_voter(load_topology(self.services), load_topology(self.administrators).nodes[name])
        return f"{name} is a voter of {cluster}"

    def remove_node(self, cluster: str, name: str, *, delete: bool) -> str:
        """The controller forgets the server, and then the services. Somebody else deletes its data."""
        if delete:
            raise Misconfigured(f"the data of {name} is on its own machine: leave out --delete, and delete it there")
        remove_from_file(self.administrators, name)
        await_no_voter(load_topology(self.services), cluster, name)
        remove_from_file(self.services, name)
        return f"{name} is no voter any more: copy {self.services} to every machine with a service, and stop {name}"

    @property
    def _described(self) -> Path:
        if self.source is None:
            raise Misconfigured("which servers are to be added: name a file in the form of topology.json by --nodes")
        return self.source

    def _check(self, nodes: Sequence[Node], *, as_cluster: bool) -> Node:
        """Returns a present server with the administrators' account."""
        administrators, services = load_topology(self.administrators), load_topology(self.services)
        for node in nodes:
            if services.nodes.get(node.name, node) != node:
                raise Misconfigured(f"{self.source} describes {node.name} otherwise than {self.services}: correct one")
        with SyncStorage(services) as storage:
            account = administrators.nodes[storage.master(min(administrators.clusters)).node.name]
            verify_joining(administrators, storage, nodes, as_cluster=as_cluster)
        return account

    def _copy_first(self, what: str) -> str:
        return (
            f"{self.services} has {what} now, and the controller doesn't use it yet: copy that file to every machine"
            " with a service, and run the same command again"
        )


def await_open(topology: Topology, cluster: str) -> None:
    """Returns when a new cluster takes writes, and every process knows it."""
    _await_appointed(topology, cluster, f"cluster {cluster} is open", lambda known: True)
    time.sleep(LEARNED_S)


def await_voter(topology: Topology, administrator: Node) -> None:
    """Returns when a server, here with the administrators' account, is a voter and receives: it votes before that."""
    name, cluster = administrator.name, administrator.cluster
    _await_appointed(topology, cluster, f"{name} is a voter of {cluster}", lambda known: name in known.voters)

    def receives() -> bool:
        with AdminSession(administrator) as session:
            replication = session.replication()
            return replication is not None and replication.healthy

    _await(receives, f"{name} receives from its master")


def await_no_voter(topology: Topology, cluster: str, name: str) -> None:
    """Raises StateConflict where the server has become the master meanwhile."""

    def is_out(known: Appointment) -> bool:
        if known.master == name:
            raise StateConflict(
                f"{name} is the master of {cluster} now: put it back into the controller's file, and then `schemaless"
                f" topology switch {cluster}` before you remove it"
            )
        return name not in known.voters

    _await_appointed(topology, cluster, f"{name} is no voter of {cluster}", is_out)


def _await_appointed(topology: Topology, cluster: str, done: str, holds: Callable[[Appointment], bool]) -> None:
    """Waits until the controller's decision about a cluster is as wanted."""
    with SyncStorage(topology) as storage:

        def decided() -> bool:
            storage.look()
            known = storage.appointments.get(cluster)
            return known is not None and known.is_open and holds(known)

        _await(decided, done)


def _await(holds: Callable[[], bool], done: str) -> None:
    """Raises Unavailable after a minute."""
    deadline = time.monotonic() + JOINED_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise Unavailable(
                f"after {JOINED_TIMEOUT_S:.0f} s it isn't so that {done}: `schemaless topology show` says why. Run the"
                " same command again",
                hint="a controller has to run, and has to read the changed file",
            )
        time.sleep(_POLL_S)
