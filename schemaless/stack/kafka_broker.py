"""One Kafka broker on this machine (KRaft, broker and controller in one): its folder and command line.

Owns the settings that the log needs of a broker: nothing expires, topics are made on purpose only, no transaction is
left without its end by the broker alone (I7), messages are as large as the largest body.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemaless.bus.kafka_accounts import KafkaAccounts, KafkaUser
from schemaless.errors import BusRefuses, BusUnavailable
from schemaless.runtime.kafka_access import SCRAM, KafkaAccess, KafkaAddress
from schemaless.runtime.tls import Tls, write_private_text
from schemaless.stack.programs import SEE_LOG, find_kafka_jars, find_program

FORMAT_TIMEOUT_S = 60
READY_TIMEOUT_S = 180.0  # a broker on a busy machine has taken more than a minute

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
# One node: every internal topic has one copy, and few partitions start sooner.
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
# History is kept; a topic that wants less says so itself.
log.retention.ms=-1
log.retention.bytes=-1
log.segment.bytes=268435456
log.cleaner.dedupe.buffer.size=33554432
auto.create.topics.enable=false
# A body is 1 MiB at most; the rest is room for a batch's envelope.
message.max.bytes=4194304
replica.fetch.max.bytes=4194304
# A killed broker is let in again only when its old session has ended. Yet no shorter than Kafka's own 9 s: a broker
# that stands still for longer is put out, and what its transactions still owe (markers) is left out then: it has no
# other broker to lead their partitions meanwhile. Tailers end them (docs/exactly-once.md), which takes them seconds.
broker.session.timeout.ms=9000
broker.heartbeat.interval.ms=500
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
# The next owner of a partition ends its predecessor's transaction. The broker itself must not do so while it waits to
# be let in again, for the same reason.
transaction.abort.timed.out.transaction.cleanup.interval.ms=60000
"""

ACCOUNTS = """\
# Nobody gets in without an account. Those of people and services are SCRAM's. Broker and controller know each other by
# a password of their own, because a controller can't look up SCRAM's accounts.
listeners=CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=CLIENT://127.0.0.1:{port}
inter.broker.listener.name=CLIENT
listener.security.protocol.map=CLIENT:{protocol},CONTROLLER:SASL_PLAINTEXT
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
sasl.mechanism.controller.protocol=PLAIN
listener.name.client.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required username="admin" password="{admin}";
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required \
username="admin" password="{admin}" user_admin="{admin}";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin
allow.everyone.if.no.acl.found=false
"""

TLS = """\
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={ca}
"""

LOGGING = """\
status=error
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{ISO8601} %p %m (%c)%n
# Both print pages at each start that nobody reads.
logger.config.name=org.apache.kafka.common.config
logger.config.level=warn
logger.state.name=state.change.logger
logger.state.level=warn
rootLogger.level=info
rootLogger.appenderRef.console.ref=console
"""


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """PEM files: the CA, and the broker's key (PKCS #8) and certificate in one file."""

    ca: Path
    keystore: Path


@dataclass(frozen=True, slots=True)
class KafkaBroker:
    """Description of the broker. `folder` holds everything of it."""

    folder: Path
    port: int
    controller_port: int
    log: Path
    accounts: KafkaAccounts | None = None
    """With accounts, whoever has none is refused."""
    tls: BrokerTls | None = None
    """With accounts only. Clients then have to encrypt."""

    @property
    def bootstrap(self) -> str:
        """Returns the address for administrators."""
        return self.address_for(KafkaUser.ADMIN)

    def address_for(self, user: KafkaUser) -> str:
        """Returns the address, with that account if there are any."""
        account = None if self.accounts is None else self.accounts.account(user)
        tls = None if self.tls is None else Tls(str(self.tls.ca))
        return KafkaAddress(f"127.0.0.1:{self.port}", KafkaAccess(account, tls))

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def properties(self) -> Path:
        return self.folder / "server.properties"

    def argv(self) -> list[str]:
        """Command line that runs the broker in the foreground, its log on stdout."""
        return [
            *_java(self.folder, "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
            "kafka.Kafka",
            str(self.properties),
        ]


def prepare(broker: KafkaBroker) -> None:
    """Make folder, settings and formatted storage. Cut-off storage carries another name and is made again."""
    broker.folder.mkdir(parents=True, exist_ok=True)
    (broker.folder / "log4j2.properties").write_text(LOGGING)
    if not broker.data.is_dir():
        fresh = broker.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        _write_properties(broker, fresh)
        _format(broker)
        fresh.rename(broker.data)
    _write_properties(broker, broker.data)


def wait_ready(
    broker: KafkaBroker, *, alive: Callable[[], bool] = lambda: True, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Returns once the broker calls itself alive. Raises BusUnavailable when it has ended or is late, and BusRefuses
    for an account that it refuses.
    """
    deadline = time.monotonic() + timeout_s
    while not _is_alive(broker.bootstrap):
        if not alive():
            raise BusUnavailable(f"the Kafka broker ended while starting; its log: {broker.log}", hint=SEE_LOG)
        if time.monotonic() > deadline:
            raise BusUnavailable(
                f"the Kafka broker does not answer after {timeout_s:.0f} s: {broker.log}", hint=SEE_LOG
            )
        time.sleep(0.1)


def answers(bootstrap: str, timeout_s: float = 1.0) -> bool:
    """True if a broker is reachable there, is part of its cluster, and lets us in."""
    try:
        return _is_alive(bootstrap, timeout_s)
    except BusRefuses:
        return False


def _is_alive(bootstrap: str, timeout_s: float = 1.0) -> bool:
    from confluent_kafka.admin import AdminClient

    from schemaless.bus.client import client_settings, metadata_of

    # Refused connections while it starts are expected: no log lines about them.
    client = AdminClient({**client_settings(bootstrap), "reconnect.backoff.max.ms": 100})
    try:
        return bool(metadata_of(client, bootstrap, "asking for brokers", timeout_s).brokers)
    except BusUnavailable:
        return False


def _write_properties(broker: KafkaBroker, data: Path) -> None:
    text = PROPERTIES.format(port=broker.port, controller_port=broker.controller_port, data=data)
    if broker.accounts is not None:
        own = ACCOUNTS.format(
            port=broker.port,
            controller_port=broker.controller_port,
            admin=broker.accounts.passwords[KafkaUser.ADMIN],
            protocol="SASL_SSL" if broker.tls else "SASL_PLAINTEXT",
        )
        if broker.tls is not None:
            own += TLS.format(ca=broker.tls.ca, keystore=broker.tls.keystore)
        text = with_settings(text, own)
    write_private_text(broker.properties, text)


def with_settings(properties: str, own: str) -> str:
    """Returns properties in which some have other values, or are new."""
    replaced = {line.split("=")[0] for line in own.splitlines()}
    return "".join(f"{line}\n" for line in properties.splitlines() if line.split("=")[0] not in replaced) + own


def _format(broker: KafkaBroker) -> None:
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode().replace("-", "A")  # no option-like id
    java, *arguments = _java(broker.folder, "-Xmx128m", "-XX:TieredStopAtLevel=1")
    arguments += ["kafka.tools.StorageTool", "format", "--cluster-id", cluster_id, "--config", str(broker.properties)]
    for user, password in (broker.accounts.passwords if broker.accounts else {}).items():
        arguments += ["--add-scram", f"{SCRAM}=[name={user},password={password}]"]
    # Java reads them from a file: everybody on the machine sees the arguments of a process, and these have passwords.
    file = broker.folder / "format.arguments"
    write_private_text(file, "\n".join(json.dumps(argument, ensure_ascii=False) for argument in arguments))
    try:
        argv = [java, f"@{file}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)
    finally:
        file.unlink()
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BusUnavailable(f"Kafka's storage could not be formatted: {lines[-1] if lines else done.returncode}")


def _java(folder: Path, *options: str) -> list[str]:
    logging = f"-Dlog4j2.configurationFile={(folder / 'log4j2.properties').as_uri()}"  # it takes a URI
    return [find_program("java"), *options, logging, "-cp", f"{find_kafka_jars()}/*"]
