"""Sets up the servers of a stack in containers: accounts, replication, topology file, first datastore, token.

Run once by docker-compose.yml, after the servers answer and before any service starts. Each step may be repeated.
A server's host is the name of its service: CLUSTER-master, CLUSTER-minion-N (mysql_server.py).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from schemaless.bus import kafka_accounts
from schemaless.bus.kafka_accounts import KafkaUser, account_file
from schemaless.config import ContainerSettings
from schemaless.errors import BusUnavailable, Misconfigured, SchemalessError, StorageUnavailable
from schemaless.ops.tokens import issue_for_services
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress, read_account
from schemaless.runtime.private_file import write_private_text
from schemaless.stack import kafka_broker, replication
from schemaless.stack.admin import (
    ADMIN_USER,
    SERVICE_USER,
    Accounts,
    ServerAddress,
    account_statements,
    answers,
    session,
)
from schemaless.stack.mysql_server import ServerRole, server_roles
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
from schemaless.topology import Node, Role, Topology, load_topology

MYSQL_PORT = 3306
ROOT = "root"
READY_TIMEOUT_S = 60.0
TOKEN = "services"
TOKEN_FILE = "token"
CATCH_UP_TIMEOUT_S = 5  # less than a connection waits for an answer

# Only of a server that never held anything of ours: what its image wrote at the first start (root's password) differs
# from server to server, and a minion that met its master's would stop there.
FORGET_HISTORY = "RESET BINARY LOGS AND GTIDS"

# Not in the option file: the image's first start makes root's account, and would be refused.
KEEP_READ_ONLY = "SET PERSIST super_read_only = ON"
LET_ACCOUNTS_BE_MADE = "SET GLOBAL super_read_only = OFF"


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """One MySQL server, and where it is reached from here. Among themselves the servers use role names and 3306."""

    role: ServerRole
    host: str
    port: int = MYSQL_PORT

    def address(self, user: str, password: str) -> ServerAddress:
        return ServerAddress(None, user, password, self.host, self.port)

    def administrator(self, accounts: Accounts) -> ServerAddress:
        return self.address(ADMIN_USER, accounts.admin_password)

    def node(self, accounts: Accounts) -> Node:
        role, password = self.role, accounts.service_password
        return Node(role.name, role.cluster, role.role, self.host, self.port, SERVICE_USER, password)


def set_up(settings: ContainerSettings) -> None:
    """Raises StorageUnavailable or BusUnavailable when a server is away, Misconfigured when it refuses us."""
    servers = [ServerContainer(role, host=role.name) for role in server_roles(CLUSTERS, MINIONS)]
    accounts = Accounts(
        admin_password=settings.admin_password.get_secret_value(),
        service_password=settings.service_password.get_secret_value(),
        reader_password=settings.reader_password.get_secret_value(),
        replication_password=settings.replication_password.get_secret_value(),
    )
    set_up_servers(servers, settings.root_password.get_secret_value(), accounts)
    document = nodes_document(server.node(accounts) for server in servers)
    write_private_json(settings.topology, document)
    write_private_json(settings.admin_topology, admin_document(document, accounts))
    kafka_administrator = KafkaAccount(KafkaUser.ADMIN, settings.kafka_password.get_secret_value())
    kafka_accounts.write_account(account_file(settings.admin_topology.parent, KafkaUser.ADMIN), kafka_administrator)
    kafka = KafkaAddress(settings.kafka, KafkaAccess(kafka_administrator))
    await_kafka(kafka)
    topology = load_topology(settings.topology)
    let_into_kafka(kafka, settings.topology.parent, known_datastores(topology))
    create_default_datastore(topology, kafka, load_topology(settings.admin_topology))
    token_file = settings.topology.with_name(TOKEN_FILE)
    if not token_file.exists():
        asyncio.run(keep_token(topology, token_file))
    prove_replication(servers, accounts)


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


def set_up_servers(servers: Sequence[ServerContainer], root_password: str, accounts: Accounts) -> None:
    """Accounts on all, then every minion attached to its master."""
    minions = [server for server in servers if server.role.role is Role.MINION]
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: _make_accounts(server, root_password, accounts), servers))
        list(pool.map(lambda server: _attach(server, accounts), minions))


def prove_replication(servers: Sequence[ServerContainer], accounts: Accounts) -> None:
    """A minion that runs may stop at its next transaction: let it come to where its master is now, or try.

    Raises StorageUnavailable with the reason of one that stopped. One that is only late is no failure.
    """
    masters = {server.role.cluster: server for server in servers if server.role.role is Role.MASTER}
    for minion in servers:
        if minion.role.role is Role.MINION:
            _follow(minion, _history(masters[minion.role.cluster], accounts), accounts)


def _make_accounts(server: ServerContainer, root_password: str, accounts: Accounts) -> None:
    """Leave exactly our four accounts. Each server makes its own, so none of it goes into the binary log."""
    administrator = _administrator(server, root_password, accounts)
    with session(administrator) as connected:
        if administrator.user == ROOT and not connected.query("SHOW DATABASES LIKE 'schemaless'"):
            connected.query(FORGET_HISTORY)
        connected.query("SET SESSION sql_log_bin = 0")
        if server.role.role is Role.MINION:
            connected.query(LET_ACCOUNTS_BE_MADE)
        for statement in account_statements(Flavour.MYSQL, accounts):
            connected.query(statement)
    if server.role.role is Role.MINION:
        with session(server.administrator(accounts)) as connected:  # root is gone
            connected.query(KEEP_READ_ONLY)


def _attach(minion: ServerContainer, accounts: Accounts) -> None:
    """Attached before: only starts it, should somebody have stopped it."""
    master = f"{minion.role.cluster}-master"
    with session(minion.administrator(accounts)) as connected:
        if not replication.is_attached(connected, Flavour.MYSQL):
            replication.name_master(connected, Flavour.MYSQL, master, MYSQL_PORT, accounts)
        replication.start(connected, Flavour.MYSQL, minion.role.name)


def _history(server: ServerContainer, accounts: Accounts) -> str:
    """The transactions that a server has executed, as a GTID set."""
    with session(server.administrator(accounts)) as connected:
        return str(connected.query("SELECT @@GLOBAL.gtid_executed AS executed")[0]["executed"])


def _follow(minion: ServerContainer, history: str, accounts: Accounts) -> None:
    with session(minion.administrator(accounts)) as connected:
        connected.query(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{history}', {CATCH_UP_TIMEOUT_S})")
        status = replication.status(connected, Flavour.MYSQL)
    if status is None or not status.healthy:
        raise StorageUnavailable(f"minion {minion.role.name} stopped replicating: {status and status.error}")


def await_kafka(bootstrap: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not kafka_broker.answers(bootstrap):
        if time.monotonic() > deadline:
            raise BusUnavailable(
                f"Kafka at {bootstrap} does not answer after {READY_TIMEOUT_S:.0f} s, or doesn't let us in: is this the"
                " password of its first start? docs/compose.md says what becomes of a volume without accounts"
            )
        time.sleep(0.2)


def _administrator(server: ServerContainer, root_password: str, accounts: Accounts) -> ServerAddress:
    """Returns root before the accounts are complete, ours afterwards. Root goes last, so one always works."""
    candidates = (server.address(ROOT, root_password), server.administrator(accounts))
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        for address in candidates:
            if answers(address):
                return address
        time.sleep(0.5)
    raise Misconfigured(
        f"{server.role.name} lets neither {ROOT} nor {ADMIN_USER} in: are these the passwords of its first start?"
        " Volumes of a release without that account have to be made anew"
    )


def main() -> None:
    try:
        set_up(ContainerSettings())  # type: ignore[call-arg]  # from the environment
    except SchemalessError as error:
        sys.exit(f"error: {error} ({error.hint})")
    print("the servers are set up")


if __name__ == "__main__":
    main()
