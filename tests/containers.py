"""The tests' servers in containers, by testcontainers: MySQL 9.7 and Kafka, where an engine and the images are there.

Gives what `schemaless/stack/local.py` gives, so a test sees no difference. Nothing here starts, or asks for an engine,
before a fixture wants a server.
"""

import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import docker
from docker.errors import DockerException
from testcontainers.community.kafka import KafkaContainer
from testcontainers.community.mysql import MySqlContainer
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from schemaless.stack import kafka_broker, local
from schemaless.stack.admin import REPLICATION_USER, answers, new_accounts, session
from schemaless.stack.container_files import mysql_option_file
from schemaless.stack.containers import (
    MYSQL_PORT,
    ROOT,
    ServerContainer,
    await_kafka,
    make_mysql_accounts,
)
from schemaless.stack.local import RunningTopology
from schemaless.stack.mysql_server import MASTER, MINION, PlannedServer, planned_servers
from schemaless.stack.plan import admin_document, free_ports, nodes_document, write_private_json
from schemaless.stack.programs import Flavour
from schemaless.topology import Role, parse_topology
from tests.waiting import until

MYSQL_IMAGE = "mysql:9.7"
KAFKA_IMAGE = "confluentinc/cp-kafka:8.3.0"
KAFKA_PORT = 9093
STOP_TIMEOUT_S = 30
NOT_THE_IMAGES = {  # addresses and storage are the image's own
    "controller.quorum.voters",
    "listeners",
    "advertised.listeners",
    "inter.broker.listener.name",
    "controller.listener.names",
    "listener.security.protocol.map",
    "process.roles",
    "node.id",
    "log.dirs",
}


def mysql_in_containers(flavour: Flavour) -> bool:
    """Whether the storage servers of this run are containers. The images are MySQL's, so never for MariaDB."""
    return flavour is Flavour.MYSQL and _chosen(MYSQL_IMAGE)


def kafka_in_container() -> bool:
    return _chosen(KAFKA_IMAGE)


class ContainerServer:
    """Handle of one server in a container, with the same verbs as `LocalServer`."""

    def __init__(self, name: str, container: DockerContainer, wait_ready) -> None:
        self.name = name
        self.container = container
        self._wait_ready = wait_ready

    @property
    def pid(self) -> int:
        return self._state()["Pid"]

    def alive(self) -> bool:
        return self._state()["Running"]

    def start(self, *, wait: bool = True) -> None:
        self._wrapped().start()
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        self._wait_ready()

    def kill(self) -> None:
        if self.alive():
            self._wrapped().kill(signal.SIGKILL)
            self._wrapped().wait(timeout=STOP_TIMEOUT_S)

    def terminate(self) -> None:
        if self.alive():
            self.cont()
            self._wrapped().stop(timeout=STOP_TIMEOUT_S)

    def stop(self) -> None:
        """By the engine's freezer, which returns when everything stands; SIGSTOP would be sent and not waited for."""
        if not self._state()["Paused"]:
            self._wrapped().pause()

    def cont(self) -> None:
        if self._state()["Paused"]:
            self._wrapped().unpause()

    def _state(self) -> dict:
        self._wrapped().reload()
        return self._wrapped().attrs["State"]

    def _wrapped(self):
        return self.container.get_wrapped_container()


@contextmanager
def containers_topology(
    folder: Path, clusters: Sequence[str] = ("a", "b"), minions: int = 1
) -> Iterator[RunningTopology]:
    """Storage clusters that replicate, gone at the end with their data. `descriptions` is empty: no files of theirs."""
    _without_ryuk_where_it_is_missing()
    accounts, root_password = new_accounts(), secrets.token_hex(16)
    roles = planned_servers(clusters, minions)
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        servers = [
            ServerContainer(role, "127.0.0.1", port) for role, port in zip(roles, free_ports(len(roles)), strict=True)
        ]
        made = [_mysql(server.planned, server.port, root_password, network, folder) for server in servers]
        with ThreadPoolExecutor(len(made)) as pool:
            started = [pool.submit(stack.enter_context, container) for container in made]
            for start in started:
                start.result()
        make_mysql_accounts(servers, root_password, accounts)
        for server in servers:
            if server.planned.role is Role.MINION:
                _attach(server, accounts)
        handles = {
            server.planned.name: ContainerServer(server.planned.name, container, _until_it_answers(server, accounts))
            for server, container in zip(servers, made, strict=True)
        }
        document = nodes_document(server.node(accounts) for server in servers)
        write_private_json(folder / "topology.json", document)
        administrators = parse_topology(admin_document(document, accounts))
        path = folder / "topology.json"
        yield RunningTopology(parse_topology(document), administrators, path, accounts, handles, {})


@contextmanager
def container_broker() -> Iterator[str]:
    """A Kafka broker with the embedded broker's settings; gives its bootstrap address."""
    _without_ryuk_where_it_is_missing()
    container = KafkaContainer(KAFKA_IMAGE, port=KAFKA_PORT).with_kraft()
    for name, value in _broker_settings():
        container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
    with container:
        bootstrap = container.get_bootstrap_server()
        await_kafka(bootstrap)
        yield bootstrap


def _mysql(role: PlannedServer, port: int, root_password: str, network: Network, folder: Path) -> MySqlContainer:
    options = folder / f"{role.role}.cnf"
    options.write_text(mysql_option_file(MINION if role.role is Role.MINION else MASTER))
    container = MySqlContainer(MYSQL_IMAGE, username=ROOT, password=root_password)
    container.with_env("MYSQL_INITDB_SKIP_TZINFO", "1").with_command(f"--server-id={role.server_id}")
    container.with_volume_mapping(str(options), "/etc/mysql/conf.d/schemaless.cnf", "ro")
    container.with_network(network).with_network_aliases(role.name)
    # Loopback, which with_bind_ports can't say; and fixed: the engine would choose another at the next start.
    container.ports[str(MYSQL_PORT)] = ("127.0.0.1", port)
    return container


def _attach(minion: ServerContainer, accounts) -> None:
    with session(minion.administrator(accounts)) as connected:
        connected.follow(f"{minion.planned.cluster}1", MYSQL_PORT, REPLICATION_USER, accounts.replication_password)
        local.start(connected)


def _until_it_answers(server: ServerContainer, accounts):
    return lambda: until(lambda: answers(server.administrator(accounts)), lambda: server.planned.name)


def _broker_settings() -> list[tuple[str, str]]:
    lines = [line.split("=", 1) for line in kafka_broker.PROPERTIES.splitlines() if not line.startswith("#")]
    return [(name, value) for name, value in lines if name not in NOT_THE_IMAGES]


def _chosen(image: str) -> bool:
    backend = os.environ.get("SCHEMALESS_TEST_BACKEND", "auto")
    return backend == "docker" or (backend == "auto" and _engine_has(image))


def _engine_has(image: str) -> bool:
    """An engine that answers isn't enough: one that can pull nothing would fail every test."""
    try:
        with closing(docker.from_env(timeout=3)) as client:
            client.images.get(image)
    except DockerException:
        return False
    return True


def _without_ryuk_where_it_is_missing() -> None:
    """Ryuk removes what a killed run leaves behind; without its image the run removes its own at the end."""
    if not _engine_has(testcontainers_config.ryuk_image):
        testcontainers_config.ryuk_disabled = True
