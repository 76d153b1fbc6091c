"""Debezium's MariaDB connector, run by a standalone Kafka Connect worker: the peer of the tailer.

It gets what its manual asks for: full row images, its topics made beforehand, a heap of 2 GiB. Exactly-once, which
ours has and standalone Connect has not, is not asked of it. Jars: `deploy/install-servers debezium`.
"""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from bench import plain_tier
from bench.servers import BenchStack
from schemaless.stack.local import LocalServer
from schemaless.stack.plan import free_ports
from schemaless.stack.programs import ServerProgramMissing, cache_folder, find_program

FOLDER = "debezium-3.5.0"
CONNECTOR = "peer"
READY_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 300.0
POLL_S = 0.1
HISTORY_TOPIC = "peer-schema-history"
OFFSETS_FILE = "connect.offsets"
SAVED_OFFSETS_FILE = "saved.offsets"

WORKER = {
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
    "offset.flush.interval.ms": "1000",
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings on top of the defaults."""

    name: str
    connector: Mapping[str, str] = field(default_factory=dict)
    worker: Mapping[str, str] = field(default_factory=dict)


DEFAULTS = Tuning("defaults")
TUNED = Tuning(
    "tuned",
    {
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "snapshot.fetch.size": "10240",
        "snapshot.max.threads": "4",
    },
    {"producer.linger.ms": "20", "producer.batch.size": str(512 << 10)},
)
QUICK_POLL = Tuning("poll.interval.ms=10", {"poll.interval.ms": "10"})


class Peer:
    """One connector over all shards of a stack of one cluster. Each shard has the topic `{prefix}.{database}.entity`.

    `saved_at`: how many records its topics held when its position was saved.
    """

    def __init__(self, stack: BenchStack, prefix: str, tuning: Tuning) -> None:
        self._stack = stack
        self._prefix = prefix
        self._tuning = tuning
        self.folder = stack.folder / prefix
        self.folder.mkdir(exist_ok=True)
        self.saved_at = 0
        self._admin = AdminClient({"bootstrap.servers": stack.kafka})
        databases = [stack.datastore.database(shard) for shard in range(stack.datastore.shards)]
        self.topics = [f"{prefix}.{database}.entity" for database in databases]
        self._databases = databases
        self._make_topics()

    @contextmanager
    def running(self, *, wait: bool = True) -> Iterator[LocalServer]:
        """The worker's process, `wait`: once its connector runs. Stopped in order at the end."""
        (port,) = free_ports(1)
        arguments = [self._write("worker", self._worker(port)), self._write("connector", self._connector())]
        heap = ("-Xms256m", "-Xmx2g", "-XX:+UseG1GC")
        argv = [find_program("java"), *heap, "-cp", f"{_jars()}/worker/*"]
        argv += ["org.apache.kafka.connect.cli.ConnectStandalone", *arguments]
        process = LocalServer(self._prefix, argv, self.folder / "worker.log", lambda me: _wait_running(me, port))
        process.start(wait=wait)
        try:
            yield process
            _check_running(process, port)
        finally:
            process.terminate()

    def records(self) -> int:
        """How many the topics hold."""
        asked = {TopicPartition(topic, 0): OffsetSpec.latest() for topic in self.topics}  # type: ignore[no-untyped-call]
        return sum(answer.result(30).offset for answer in self._admin.list_offsets(asked).values())

    def wait_for(self, cells: int) -> None:
        """Returns when the topics hold so many records. Raises TimeoutError."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.records() < cells:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.records()} of {cells} rows came: {self.folder}")
            time.sleep(POLL_S)

    def save_position(self) -> None:
        """Where the stopped connector stands, so that what follows can be read again and again."""
        self.saved_at = self.records()
        shutil.copy(self.folder / OFFSETS_FILE, self.folder / SAVED_OFFSETS_FILE)

    def restore_position(self) -> None:
        shutil.copy(self.folder / SAVED_OFFSETS_FILE, self.folder / OFFSETS_FILE)

    def _make_topics(self) -> None:
        wanted = [NewTopic(name, 1, 1) for name in (*self.topics, self._prefix, f"{self._prefix}-{HISTORY_TOPIC}")]
        for created in self._admin.create_topics(wanted).values():
            created.result(30)
        while not self._have_leaders():
            time.sleep(POLL_S)

    def _have_leaders(self) -> bool:
        try:
            self.records()
        except KafkaException:
            return False
        return True

    def _worker(self, port: int) -> dict[str, str]:
        return {
            **WORKER,
            **self._tuning.worker,
            "bootstrap.servers": self._stack.kafka,
            "listeners": f"http://127.0.0.1:{port}",
            "plugin.path": str(_jars() / "plugins"),
            "offset.storage.file.filename": str(self.folder / OFFSETS_FILE),
        }

    def _connector(self) -> dict[str, str]:
        (cluster,) = self._stack.administrators.clusters.values()
        master = cluster.nodes[0]
        return {
            "name": CONNECTOR,
            "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
            "tasks.max": "1",
            "database.hostname": master.host,
            "database.port": str(master.port),
            "database.user": master.user,
            "database.password": master.password,
            "database.server.id": "54001",
            "topic.prefix": self._prefix,
            "database.include.list": ",".join(self._databases),
            "table.include.list": ",".join(f"{database}.entity" for database in self._databases),
            "schema.history.internal.kafka.bootstrap.servers": self._stack.kafka,
            "schema.history.internal.kafka.topic": f"{self._prefix}-{HISTORY_TOPIC}",
            **self._tuning.connector,
        }

    def _write(self, name: str, settings: Mapping[str, str]) -> str:
        path = self.folder / f"{name}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        return str(path)


def drain_rate(peer: Peer, cells: int) -> float:
    """Lets it run until so many more records are in its topics: how many a second, from the first seen to the last.

    Raises TimeoutError.
    """
    before = peer.records()
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    first: tuple[float, int] | None = None
    with peer.running(wait=False):
        while time.monotonic() < deadline:
            count = peer.records() - before
            now = time.monotonic()
            if count and first is None:
                first = now, count
            if first is not None and count >= cells:
                return (count - first[1]) / (now - first[0])
            time.sleep(POLL_S)
    raise TimeoutError(f"{peer.records() - before} of {cells} rows came in {DRAIN_TIMEOUT_S:.0f} s: {peer.folder}")


def full_row_images(stack: BenchStack) -> None:
    """Logs full row images, as Debezium demands. An INSERT is logged whole either way."""
    for cluster in stack.administrators.clusters.values():
        with plain_tier.connect(cluster.nodes[0]) as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL binlog_row_image = FULL")


def _jars() -> Path:
    folder = cache_folder() / FOLDER
    if not (folder / "plugins" / "connector").is_dir():
        raise ServerProgramMissing(f"Debezium is not in {folder}: deploy/install-servers debezium")
    return folder


def _wait_running(process: LocalServer, port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while _task_state(port) != "RUNNING":
        if time.monotonic() > deadline or not process.alive():
            raise TimeoutError(f"the connector does not run; its log: {process.log}")
        time.sleep(POLL_S)


def _check_running(process: LocalServer, port: int) -> None:
    """The worker outlives a dead task, so its being alive says nothing."""
    state = _task_state(port)
    assert state == "RUNNING", f"the connector's task is {state}; its log: {process.log}"


def _task_state(port: int) -> str | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", f"/connectors/{CONNECTOR}/status")
        tasks = json.loads(connection.getresponse().read()).get("tasks", [])
    except (OSError, ValueError):
        return None
    finally:
        connection.close()
    return tasks[0]["state"] if tasks else None
