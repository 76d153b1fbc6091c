"""Settings: frozen values that are read from the environment once. No other module reads it.

A setting of one service has the service in its name: SCHEMALESS_API_BODY_BYTES_MAX. A setting without one is shared:
SCHEMALESS_KAFKA. Units stand last. Each field is required, or its comment says why its default is what it is.
Services find the servers' passwords in the topology file, which only its owner can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from schemaless.errors import Misconfigured
from schemaless.runtime import loopback
from schemaless.topology import Role


def _split_at_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_at_commas)]
"""Comma-separated in the environment."""


def shared(variable: str, default: Any = ...) -> Any:
    """Returns a field that every service reads from the same variable. Without a default it is required."""
    return Field(default, validation_alias=variable)


class Settings(BaseSettings):
    """Base of all settings.

    Reading them raises Misconfigured with the name of a variable that is missing or malformed.
    """

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore", populate_by_name=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = variable_of(type(self), str(first["loc"][0]))
            raise Misconfigured(f"{name}: {first['msg'].removeprefix('Value error, ')}") from error

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_path(cls, value: Any, field: ValidationInfo) -> Any:
        """An empty path would be the present folder."""
        kind = cls.model_fields[str(field.field_name)].annotation
        if value == "" and Path in (kind, *get_args(kind)):
            raise ValueError("is empty: it has to name a file or a folder, or not to be set")
        return value


class KafkaSettings(Settings):
    """How Kafka lets in every client of a process, whichever service or command it is."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_KAFKA_")

    # A JSON file with user, password and mechanism, which only its owner can read. Without one, no account is used.
    account: Path | None = None
    ca: Path | None = None  # A PEM file with the CAs that sign the brokers' certificates: Kafka is then encrypted.


class StackSettings(Settings):
    """Where the embedded stack keeps everything."""

    # The folder of the embedded stack, under the checkout by default, so that it is removed with it.
    home: Path = Path(".schemaless")
    cache: Path = Path("~/.cache/schemaless")  # Where downloaded server programs are kept, for all checkouts of a user.
    # The kind of server of a new stack. It is mariadb by default, because Debian packages it.
    mysql_flavour: Literal["mariadb", "mysql"] | None = None
    # The first of fourteen ports of a new stack. By default, free ports are picked and kept.
    first_port: int | None = None
    # Whether a new stack takes 8000, 8001 and 9092 where they are free and no other stack of this user has them.
    usual_ports: bool = True
    # Whether Kafka of a new stack refuses a client without an account. endpoints.json then has a reader's.
    kafka_accounts: bool = False
    # The longest that `up` warms a broker which it has just started. 0 leaves the broker cold, as tests do.
    warm_up_s: float = Field(default=4.0, ge=0.0)


class ContainerDatastoreSettings(Settings):
    """What makes the first datastore of a stack in containers: docker-compose.yml passes it."""

    topology: Path  # The path of the topology file, which the services read.
    kafka: str  # Bootstrap servers of Kafka: host:port[,host:port].
    # The path of the topology file with the administrators' account, which no service reads but the controller.
    admin_topology: Path


class ContainerAccountsSettings(ContainerDatastoreSettings):
    """What makes the accounts of a stack in containers: docker-compose.yml passes it from .env."""

    root_password: SecretStr  # The password that the MySQL image gave to root. It is of no use afterwards.
    admin_password: SecretStr  # The password of the administrators' MySQL account, which creates datastores.
    service_password: SecretStr  # The password of the services' MySQL account, which the operator keeps.
    reader_password: SecretStr  # The password of the MySQL account that may only read.
    replication_password: SecretStr  # The password of the MySQL account that minions replicate with.
    kafka_password: SecretStr  # The password of Kafka's administrators. The broker's first start makes that account.


class LogFormat(StrEnum):
    """The form of a service's log."""

    TEXT = "text"
    JSON = "json"


class ServiceSettings(Settings):
    """Settings that every service has. They are shared: the API and the tailer read the same variables."""

    topology: Path = shared("SCHEMALESS_TOPOLOGY")  # The path of the topology file, which the services read.
    kafka: str = shared("SCHEMALESS_KAFKA")  # Bootstrap servers of Kafka: host:port[,host:port].
    # The least level that is logged: debug, info, warning or error.
    log_level: str = shared("SCHEMALESS_LOG_LEVEL", "info")
    # The share of puts whose way is traced, from 0 to 1. It needs the extra `traces` (docs/traces.md).
    traces: Annotated[float, Field(ge=0, le=1)] = shared("SCHEMALESS_TRACES", 0.0)
    # The form of a line of the log: text for people, json for collectors.
    log_format: LogFormat = shared("SCHEMALESS_LOG_FORMAT", LogFormat.TEXT)
    # Whether masters are written to whose settings may lose what they acknowledged, when their machine crashes.
    lossy_masters: bool = shared("SCHEMALESS_MYSQL_LOSSY_MASTERS", False)
    # Connections of a process to each MySQL server, at least 3. The API divides them between writes, reads and probes.
    connections_max: Annotated[int, Field(ge=4)] = shared("SCHEMALESS_MYSQL_CONNECTIONS_MAX", 16)


class MeasuredSettings(ServiceSettings):
    """Settings of the services beside the API, which serve their metrics on a port of their own."""

    # The port at which this process serves /metrics. By default it serves none, and 0 takes any free port.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = shared("SCHEMALESS_METRICS_PORT", None)
    # The address at which services beside the API serve /metrics, loopback by default.
    metrics_host: str = shared("SCHEMALESS_METRICS_HOST", "127.0.0.1")
    # A file with the token that scrapers send, which only its owner can read. Outside loopback it is required.
    metrics_token_file: Path | None = shared("SCHEMALESS_METRICS_TOKEN_FILE", None)


class ApiSettings(ServiceSettings):
    """The write/read tier."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_API_")

    host: str = "127.0.0.1"  # The address that the API listens on, loopback by default.
    port: int = 8000  # The port that the API listens on.
    tls_certificate: Path | None = None  # The API's certificate and its chain, a PEM file: the API then serves HTTPS.
    tls_key: Path | None = None  # The key of that certificate. By default it is in the same file.
    # Names that requests may call the API by in Host, beside loopback's and its own address. * allows any.
    hosts: Names = ()
    origins: Names = ()  # Origins of web pages that may write, like https://console.example. Others may not.
    # Paths that need no token when access is on. /metrics, /docs and /openapi.json may be added.
    public_paths: Names = ("/healthz", "/readyz")
    # OIDC issuer whose JWTs are taken beside tokens, like https://login.example. Without one, none is.
    oidc_issuer: str | None = None
    oidc_audience: str | None = None  # The name of this API at the issuer: every JWT must be meant for it.
    # The claim of a JWT with what its caller may do: words like schemaless:trips:write, with * for all datastores.
    oidc_claim: str = "scope"
    # Requests that one token, or one address without one, may send to a process in a second. More get a 429. Behind a
    # proxy an address has no rate.
    requests_per_second_max: float | None = Field(default=None, gt=0)
    # Time for a write to one master that is slow. One that says nothing is given up before, and its puts are buffered.
    write_timeout_s: float = 1.25
    # Durable copies that a put needs, 1 or 2. Fewer in time are a 503, also where one exists (I5).
    min_copies: int = Field(default=1, ge=1, le=2)
    read_timeout_s: float = 2.0  # Time for a read from one node. Then the next node is asked.
    # Concurrent requests of a process. One more gets a 503, so memory stays bounded. One token may have half of them.
    requests_max: int = 1000
    # Streams and long polls of a process, which don't count as requests. One more gets a 503. One token may have half.
    followers_max: int = 1000
    heartbeat_s: float = 10.0  # How long a stream may be silent before it sends a heartbeat.
    # How long a process serves after SIGTERM, with /readyz at 503, so that load balancers take it out. SIGINT skips it.
    drain_s: float = Field(default=5.0, ge=0)
    behind_proxy: bool = False  # Whether clients come through a proxy: then an address has no limits of its own.
    keep_alive_s: int = 75  # How long an idle connection is kept. Clients and load balancers should close theirs first.
    # The largest body of a cell, as sent. The topic's messages are made for a MiB.
    body_bytes_max: int = Field(default=1 << 20, gt=0, le=1 << 20)


class ControllerMode(StrEnum):
    AUTOMATIC = "automatic"
    MANUAL = "manual"


class CleanerSettings(MeasuredSettings):
    """The buffer cleaners."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_CLEANER_")


class ControllerSettings(MeasuredSettings):
    """The controllers, which say who is master."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_CONTROLLER_")

    # The servers with an administrators' account, and the account of replication.
    admin_topology: Path = Field(validation_alias="SCHEMALESS_ADMIN_TOPOLOGY")
    # automatic: a dead master is replaced. manual: it is said, and `schemaless topology promote` does it.
    mode: ControllerMode = ControllerMode.MANUAL
    # A command that makes a server anew whose tail is kept. It gets two more words: the server, and a minion to copy.
    # By default a person does it.
    remake_command: str | None = None


class TailerSettings(MeasuredSettings):
    """The tailers."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_TAILER_")

    read_from: Role = Role.MASTER  # master, the freshest, or minion: any minion, so that masters only write.
    # Time for one step of a transaction. The next owner ends the one of a killed tailer.
    transaction_timeout_s: float = 5.0
    # How long the partitions of a killed tailer wait for another one. Kafka allows no less by default.
    session_timeout_s: float = 6.0
    datastores: Names = ()  # The datastores to tail, separated by commas. By default, all of the catalogue.


class TransportKind(StrEnum):
    """What connects indexers and trigger programs with Kafka."""

    FAUST = "faust"
    PLAIN = "plain"


class BreakerMode(StrEnum):
    """What a worker does while what its functions call is down."""

    PROBE = "probe"  # it tries a call now and then, and goes on by itself after the first one that succeeds
    STOP = "stop"  # it stops the shards until a person resumes them
    OFF = "off"  # nothing: cells are parked after their attempts


HANG_LIMIT_S = 30.0
"""Of every service. Only trigger programs, which run functions of others, may have another one."""


class FollowerSettings(MeasuredSettings):
    """What indexers and trigger programs have in common."""

    # faust, or plain: a loop around confluent-kafka. All members of a group need the same.
    transport: TransportKind = TransportKind.FAUST
    session_timeout_s: float = 10.0  # How long the partitions of a killed process wait for another one.


class IndexerSettings(FollowerSettings):
    """The indexers."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_INDEXER_")

    datastores: Names = ()  # The datastores to index, separated by commas. By default, all of the catalogue.
    # Rows that the index cleaner compares with their entries a second, a tenth while cells come in. 0 turns it off.
    cleaner_rows_per_s: int = Field(default=1200, ge=0)


class ConsumerSettings(FollowerSettings):
    """Trigger programs."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_CONSUMERS_")

    # Failed calls until a cell is parked, of functions without a policy. 20 take about two minutes.
    attempts_max: int = Field(default=20, ge=1, le=1000)
    attempt_timeout_s: float = 60.0  # Time for an async call. A sync call can't be cancelled.
    # How long a call may take until its process ends and is started again. A call that takes a tenth of it is logged.
    call_limit_s: float = 600.0
    # How many processes the call of one cell may end until it is parked. The first one isn't counted: many cells were
    # in flight then.
    kills_max: int = Field(default=3, ge=2)
    retry_delay_s: float = 0.1  # Delay after the first failed call, doubled from attempt to attempt.
    retry_delay_max_s: float = 10.0  # The longest delay after a failed call.
    parallel: int = Field(default=1, ge=1, le=1000)  # How many rows of a shard are called at once.
    # Whether parked cells are also copied to the topic schemaless.DATASTORE.PROGRAM.parked.
    parked_topic: bool = False
    # What happens when what a function calls is down: probe, stop (until a person resumes the shards), or off.
    breaker: BreakerMode = BreakerMode.PROBE
    # How long an event loop may be blocked before its process ends and is restarted.
    hang_limit_s: float = HANG_LIMIT_S


class ProbeSettings(MeasuredSettings):
    """The probe, which runs only where somebody starts it. It finds the API as every client does."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_PROBE_")

    period_s: float = 10.0  # How often a cell is written. Each stays for ever, which makes 8,640 a day.
    stage_timeout_s: float = 30.0  # A stage that takes longer counts as missed.


class ClientSettings(Settings):
    """Defaults of `Client()` and of the command line."""

    hosts: Names = ()  # Addresses of the API, separated by commas. The command line defaults to the embedded stack's.
    token: SecretStr | None = None  # The bearer token that the client sends.
    # A PEM file with the CAs that sign the API's certificate. By default, those of the system.
    ca: Path | None = None
    # A file with the token, which only its owner can read. It counts when SCHEMALESS_TOKEN isn't set.
    token_file: Path | None = None
    # The profile whose hosts and token are used. It goes before SCHEMALESS_HOSTS and SCHEMALESS_TOKEN.
    profile: str | None = None
    profiles: Path = Path("~/.config/schemaless/profiles.toml")  # The file of profiles, which only its owner can read.


class OperatorSettings(Settings):
    """Where an operator's commands find the servers. The embedded stack's are the default."""

    topology: Path | None = None  # The path of the topology file. By default, the embedded stack's.
    # The path of the topology file with the administrators' MySQL account: `datastore create` grants with it what
    # services need. By default, the embedded stack's. Without one, their account must have these rights already.
    admin_topology: Path | None = None
    kafka: str | None = None  # Bootstrap servers of Kafka. By default, the embedded stack's.


S = TypeVar("S", bound=Settings)


def read_settings(kind: type[S], given: Mapping[str, Any] | None = None) -> S:
    """Returns settings from the environment. Those that are `given` go before it. Raises Misconfigured."""
    return kind(**(given or {}))


def reach_loopback() -> None:
    """Takes loopback out of what HTTP_PROXY and its like are for, here and in processes that are started from here.

    Libraries read these variables at each request, or when their client is made.
    """
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if "*" not in known:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join((known, *loopback.NAMES)).lstrip(",")


def program_version() -> str:
    """Returns the version of this program."""
    try:
        return version("schemaless-store")
    except PackageNotFoundError:  # run from a folder that nobody installed
        return "unknown"


def variable_of(kind: type[Settings], field: str) -> str:
    """Returns the environment variable of a field, which may be named by its alias."""
    alias = kind.model_fields[field].validation_alias if field in kind.model_fields else field
    return str(alias or f"{kind.model_config['env_prefix']}{field}".upper())
