"""Sets up a stack in containers, in two steps that docker-compose.yml runs at each start. Both may be repeated.

`accounts` makes accounts in MySQL and Kafka and their files, once the servers answer. Then the controller appoints
masters and lets minions follow. `datastore` waits for the masters, and makes the first datastore and the services'
token. Later starts wait for no server that is away, because the API is needed to promote another one. A server's host
is the name of its service: a1, a2, a3 for cluster a (mysql_server.py).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemaless.bus import kafka_accounts
from schemaless.bus.kafka_accounts import KafkaUser, account_file
from schemaless.config import ContainerAccountsSettings, ContainerDatastoreSettings
from schemaless.errors import BusUnavailable, Misconfigured, SchemalessError, StorageUnavailable
from schemaless.ops.tokens import issue_for_services
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress, read_account
from schemaless.runtime.tls import write_private_text
from schemaless.stack import kafka_broker
from schemaless.stack.admin import ADMIN_USER, SERVICE_USER, Accounts, account_statements, answers, session
from schemaless.stack.endpoints import await_masters
from schemaless.stack.mysql_server import PlannedServer, planned_servers
from schemaless.stack.plan import (
    CLUSTERS,
    MINIONS,
    admin_document,
    create_default_datastore,
    known_datastores,
    nodes_document,
    write_private_json,
)
from schemaless.stack.programs import Flavour
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.topology import Node, Topology, load_topology

MYSQL_PORT = 3306
ROOT = "root"
READY_TIMEOUT_S = 180.0
"""A server's first start makes its files."""
STARTED_AGAIN_S = 30.0
TOKEN = "services"
TOKEN_FILE = "token"

# Only of a server that never held anything of ours: what its image wrote at the first start (root's password) differs
# from server to server, and a minion that met its master's would stop there.
FORGET_HISTORY = "RESET BINARY LOGS AND GTIDS"


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """One MySQL server, and where it is reached from here. Among themselves the servers use these names and 3306."""

    planned: PlannedServer
    host: str
    port: int = MYSQL_PORT

    def administrator(self, accounts: Accounts) -> Node:
        return self.known_to(ADMIN_USER, accounts.admin_password)

    def node(self, accounts: Accounts) -> Node:
        return self.known_to(SERVICE_USER, accounts.service_password)

    def known_to(self, user: str, password: str) -> Node:
        """Returns the server as an account reaches it."""
        return Node(self.planned.name, self.planned.cluster, self.host, self.port, user, password)


def make_accounts(settings: ContainerAccountsSettings) -> None:
    """Raises StorageUnavailable when a server is away at the first start, BusUnavailable when Kafka is, and
    Misconfigured when one refuses us.
    """
    planned = planned_servers(CLUSTERS, MINIONS, controlled=True)
    servers = [ServerContainer(one, one.name) for one in planned]
    accounts = Accounts(
        admin_password=settings.admin_password.get_secret_value(),
        service_password=settings.service_password.get_secret_value(),
        reader_password=settings.reader_password.get_secret_value(),
        replication_password=settings.replication_password.get_secret_value(),
    )
    patience_s = STARTED_AGAIN_S if settings.topology.exists() else READY_TIMEOUT_S
    away = make_mysql_accounts(servers, settings.root_password.get_secret_value(), accounts, patience_s)
    if away and not settings.topology.exists():
        raise StorageUnavailable(f"{' and '.join(away)} didn't answer within {patience_s:.0f} s")
    for name in away:
        print(f"{name} doesn't answer, and is left as it is: `topology show` says what becomes of it")
    document = with_added(nodes_document(server.node(accounts) for server in servers), settings.topology)
    write_private_json(settings.topology, document)
    write_private_json(settings.admin_topology, admin_document(document, accounts))
    kafka_administrator = KafkaAccount(KafkaUser.ADMIN, settings.kafka_password.get_secret_value())
    kafka_accounts.write_account(account_file(settings.admin_topology.parent, KafkaUser.ADMIN), kafka_administrator)
    kafka = KafkaAddress(settings.kafka, KafkaAccess(kafka_administrator))
    await_kafka(kafka)
    let_into_kafka(kafka, settings.topology.parent, known_datastores(load_topology(settings.topology)))


def with_added(document: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns a topology document with the servers that somebody added to the file since (docs/growth.md). They have
    the account of the first servers, whose password may have been rotated.
    """
    if file.exists():
        first = [entry for entries in document["clusters"].values() for entry in entries]
        names = {entry["name"] for entry in first}
        account = {key: first[0][key] for key in ("user", "password")}
        for cluster, entries in json.loads(file.read_bytes())["clusters"].items():
            added = [entry | account for entry in entries if entry["name"] not in names]
            if added:
                document["clusters"][cluster] = [*document["clusters"].get(cluster, ()), *added]
    return document


def make_datastore(settings: ContainerDatastoreSettings) -> None:
    """Does nothing once it has succeeded. Raises Unavailable while a cluster has no open master."""
    token_file = settings.topology.with_name(TOKEN_FILE)
    if token_file.exists():
        return
    topology = load_topology(settings.topology)
    await_masters(topology, "`docker compose logs controller`")
    administrator = read_account(account_file(settings.admin_topology.parent, KafkaUser.ADMIN))
    kafka = KafkaAddress(settings.kafka, KafkaAccess(administrator))
    create_default_datastore(topology, kafka, load_topology(settings.admin_topology))
    asyncio.run(keep_token(topology, token_file))


async def keep_token(topology: Topology, file: Path) -> None:
    """Makes the token of the services at the first start. The API listens beyond loopback, so it needs one."""
    async with AsyncStorage(topology) as storage:
        issued = await issue_for_services(storage, TOKEN)
    write_private_text(file, issued.secret + "\n")


def let_into_kafka(kafka: KafkaAddress, folder: Path, datastores: Iterable[str] = ()) -> None:
    """Makes the accounts of services and readers, and a file of each. A file that is there keeps its password."""
    for user in (KafkaUser.TAILER, KafkaUser.SERVICE, KafkaUser.READER):
        file = account_file(folder, user)
        account = read_account(file) if file.exists() else KafkaAccount(user, secrets.token_hex(16))
        kafka_accounts.let_in(kafka, account)
        kafka_accounts.write_account(file, account)
    kafka_accounts.grant(kafka, datastores)


def make_mysql_accounts(
    servers: Sequence[ServerContainer], root_password: str, accounts: Accounts, patience_s: float = READY_TIMEOUT_S
) -> list[str]:
    """Returns who doesn't answer. Raises Misconfigured for a server that lets nobody in."""
    with ThreadPoolExecutor(len(servers)) as pool:
        made = list(pool.map(lambda server: _make_accounts(server, root_password, accounts, patience_s), servers))
    return [server.planned.name for server, is_made in zip(servers, made, strict=True) if not is_made]


def _make_accounts(server: ServerContainer, root_password: str, accounts: Accounts, patience_s: float) -> bool:
    """Leaves exactly our four accounts, unless the server doesn't answer. Each server makes its own, so none of it goes
    into the binary log.
    """
    administrator = _administrator(server, root_password, accounts, patience_s)
    if administrator is None:
        return False
    with session(administrator) as connected:
        if administrator.user == ROOT and not connected.query("SHOW DATABASES LIKE 'schemaless'"):
            connected.query(FORGET_HISTORY)
        connected.query("SET SESSION sql_log_bin = 0")
        for statement in account_statements(Flavour.MYSQL, accounts):
            connected.query(statement)
    return True


def await_kafka(bootstrap: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not kafka_broker.answers(bootstrap):
        if time.monotonic() > deadline:
            raise BusUnavailable(
                f"Kafka at {bootstrap} does not answer after {READY_TIMEOUT_S:.0f} s, or doesn't let us in: is this the"
                " password of its first start? docs/compose.md says what becomes of a volume without accounts"
            )
        time.sleep(0.2)


def _administrator(server: ServerContainer, root_password: str, accounts: Accounts, patience_s: float) -> Node | None:
    """Returns root before the accounts are complete, ours afterwards, and None for a server that doesn't answer. Root
    goes last, so one always works.
    """
    candidates = (server.known_to(ROOT, root_password), server.administrator(accounts))
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for node in candidates:
            if answers(node):
                return node
        time.sleep(0.5)
    try:
        socket.create_connection((server.host, server.port), timeout=5).close()
    except OSError:
        return None
    raise Misconfigured(
        f"{server.planned.name} lets neither {ROOT} nor {ADMIN_USER} in: are these the passwords of its first start?"
        " Volumes of a release without that account have to be made anew"
    )


def main(step: str) -> None:
    try:
        if step == "accounts":
            make_accounts(ContainerAccountsSettings())  # type: ignore[call-arg]  # from the environment
        else:
            make_datastore(ContainerDatastoreSettings())  # type: ignore[call-arg]
    except SchemalessError as error:
        sys.exit(f"error: {error} ({error.hint})")
    print(f"{step}: done")


if __name__ == "__main__":
    main(sys.argv[1])
