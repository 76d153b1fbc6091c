"""Sets up the servers of a stack in containers: accounts, replication, topology file, first datastore.

Run once by docker-compose.yml, after the servers answer and before any service starts; every step may be run again.
A server's host is the name of its service: CLUSTER-master, CLUSTER-minion-N (layout.py).
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import compress

from schemaless.config import ContainerSettings
from schemaless.errors import BusUnavailable, Misconfigured, SchemalessError, StorageUnavailable
from schemaless.stack import kafka_broker, replication
from schemaless.stack.accounts import SERVICE_USER, Accounts, account_statements
from schemaless.stack.admin import ServerAddress, Session, answers, session
from schemaless.stack.default_datastore import create_default_datastore
from schemaless.stack.layout import ServerRole, server_roles
from schemaless.stack.plan import CLUSTERS, MINIONS
from schemaless.stack.programs import Flavour
from schemaless.stack.topology_file import nodes_document, write_private_json
from schemaless.topology import Node, Role, load_topology

MYSQL_PORT = 3306
ROOT = "root"
READY_TIMEOUT_S = 60.0
CATCH_UP_TIMEOUT_S = 5  # less than a connection waits for an answer

# Only of a server that never held anything of ours: what its image wrote at the first start (root's password) differs
# from server to server, and a minion that met its master's would stop there.
FORGET_HISTORY = "RESET BINARY LOGS AND GTIDS"


def set_up(settings: ContainerSettings) -> None:
    """Raises StorageUnavailable or BusUnavailable when a server is away, Misconfigured when it refuses us."""
    roles = server_roles(CLUSTERS, MINIONS)
    accounts = Accounts(
        service_password=settings.service_password.get_secret_value(),
        reader_password=settings.reader_password.get_secret_value(),
        replication_password=settings.replication_password.get_secret_value(),
    )
    masters = {role.cluster: role for role in roles if role.role is Role.MASTER}
    minions = [role for role in roles if role.role is Role.MINION]
    root_password = settings.root_password.get_secret_value()
    with ThreadPoolExecutor(len(roles)) as pool:
        list(pool.map(lambda role: make_accounts(role, root_password, accounts), roles))
        attached = list(pool.map(lambda role: attach_minion(role, accounts), minions))
    write_private_json(settings.topology, nodes_document(_node(role, accounts) for role in roles))
    await_kafka(settings.kafka)
    create_default_datastore(load_topology(settings.topology), settings.kafka)
    for minion in compress(minions, attached):
        prove_replication(minion, masters[minion.cluster], accounts)


def make_accounts(role: ServerRole, root_password: str, accounts: Accounts) -> None:
    """Leave exactly our three accounts. Each server makes its own, so none of it goes into the binary log."""
    administrator = _administrator(role.name, root_password, accounts)
    with session(administrator) as connected:
        if administrator.user == ROOT and not connected.query("SHOW DATABASES LIKE 'schemaless'"):
            connected.query(FORGET_HISTORY)
        connected.query("SET SESSION sql_log_bin = 0")
        for statement in account_statements(Flavour.MYSQL, accounts):
            connected.query(statement)


def attach_minion(role: ServerRole, accounts: Accounts) -> bool:
    """Returns whether it is new. Attached before: only starts it, should somebody have stopped it."""
    with session(_service(role.name, accounts)) as connected:
        is_new = not replication.is_attached(connected, Flavour.MYSQL)
        if is_new:
            replication.name_master(connected, Flavour.MYSQL, f"{role.cluster}-master", MYSQL_PORT, accounts)
        replication.start(connected, Flavour.MYSQL, role.name)
        return is_new


def prove_replication(minion: ServerRole, master: ServerRole, accounts: Accounts) -> None:
    """A minion that runs may stop at the next transaction, so wait until it has all that its master has now."""
    history = _history(master, accounts)
    with session(_service(minion.name, accounts)) as connected:
        waited = connected.query(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{history}', {CATCH_UP_TIMEOUT_S}) AS late")
        if waited[0]["late"]:
            raise StorageUnavailable(f"{minion.name} is behind {master.name}: {_why(connected)}")


def await_kafka(bootstrap: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not kafka_broker.answers(bootstrap):
        if time.monotonic() > deadline:
            raise BusUnavailable(f"Kafka at {bootstrap} does not answer after {READY_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def _history(role: ServerRole, accounts: Accounts) -> str:
    """The transactions that a server has executed, as a GTID set."""
    with session(_service(role.name, accounts)) as connected:
        return str(connected.query("SELECT @@GLOBAL.gtid_executed AS executed")[0]["executed"])


def _why(connected: Session) -> str:
    status = replication.status(connected, Flavour.MYSQL)
    return (status.error or f"{status.lag_s} s of lag") if status else "it was never attached"


def _administrator(host: str, root_password: str, accounts: Accounts) -> ServerAddress:
    """Root before the accounts are whole; ours afterwards. Root goes last, so one of them always works."""
    root = ServerAddress(None, ROOT, root_password, host, MYSQL_PORT)
    ours = _service(host, accounts)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        for address in (root, ours):
            if answers(address):
                return address
        time.sleep(0.5)
    raise Misconfigured(f"{host} lets neither root nor {SERVICE_USER} in: are these the passwords of its first start?")


def _service(host: str, accounts: Accounts) -> ServerAddress:
    return ServerAddress(None, SERVICE_USER, accounts.service_password, host, MYSQL_PORT)


def _node(role: ServerRole, accounts: Accounts) -> Node:
    return Node(role.name, role.cluster, role.role, role.name, MYSQL_PORT, SERVICE_USER, accounts.service_password)


def main() -> None:
    try:
        set_up(ContainerSettings())  # type: ignore[call-arg]  # from the environment
    except SchemalessError as error:
        sys.exit(f"error: {error} ({error.hint})")
    print("the servers are set up")


if __name__ == "__main__":
    main()
