"""Configuration: frozen values, read once, here and nowhere else. Each field is required or says why its default is so.

Every variable begins with SCHEMALESS_; units stand last in a name. Services find their secrets in the topology file,
which only its owner can read, or in SCHEMALESS_TOKEN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from schemaless.topology import Role


class StackSettings(BaseSettings):
    """Where the embedded stack keeps everything."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore")

    home: Path = Path(".schemaless")  # one folder under the checkout: removed with it
    cache: Path = Path("~/.cache/schemaless")  # server programs, shared by all checkouts of a user
    mysql_flavour: Literal["mariadb", "mysql"] | None = None  # a new stack takes mariadb: Debian has it in its packages
    first_port: int | None = None  # None: free ports are picked at the first start, and kept


class ContainerSettings(BaseSettings):
    """What sets up a stack in containers, once: docker-compose.yml passes it from .env."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore")

    topology: Path  # required: where the topology file is written for the services
    kafka: str  # required: bootstrap servers
    root_password: SecretStr  # required: what the MySQL image gave to root; of no use afterwards
    service_password: SecretStr  # required, as the next two: kept by whoever runs the stack
    reader_password: SecretStr
    replication_password: SecretStr


class ServiceSettings(BaseSettings):
    """What every server process needs."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore")

    topology: Path  # required: the topology file
    kafka: str  # required: bootstrap servers, host:port[,host:port]
    log_level: str = "info"
    connect_timeout_s: float = 1.0  # a server on a healthy network answers in milliseconds
    statement_timeout_s: float = 10.0  # long enough for a batch of 16 MiB
    connections_max: int = 16  # for each node and process


class ApiSettings(ServiceSettings):
    """The write/read tier."""

    host: str = "127.0.0.1"  # loopback unless told
    port: int = 8000
    write_timeout_s: float = 1.25  # of one master, a little more for MBs: 3 s for a put whose home and secondary hang
    min_copies: int = Field(default=1, ge=1, le=2)  # 2: no secondary reachable in time is a 503 (I5)
    breaker_open_s: float = 1.0  # how long a failing node is left alone before the next try
    read_timeout_s: float = 2.0  # of one node; then the next one is asked, and the breaker opens unless it is only slow
    probe_timeout_s: float = 1.0  # of each server, when /status asks them all
    calls_max: int = 1000  # in hand at once; more get 503, so memory stays bounded
    followers_max: int = 1000  # streams and long polls in one process, which calls_max doesn't count; more get 503
    follow_poll_s: float = 0.03  # one small query per cluster and turn, only while somebody follows
    follow_bytes_max: int = 256 << 10  # one page of a stream: what a slow reader holds
    heartbeat_s: float = 10.0  # of a stream that has nothing else to say
    payload_bytes_max: int = 128 << 20  # of all long payloads in hand together
    payload_timeout_s: float = 30.0  # for a slow line; a connection that sends nothing holds a call no longer
    keep_alive_s: int = 75  # longer than clients and load balancers keep idle connections, so that they close first
    log_examined_max: int = 20_000  # added_ids that one page of a log looks at when few columns are asked for
    answer_bytes_max: int = 16 << 20  # a page ends before it; what can't be paged is a 413
    body_bytes_max: int = 1 << 20  # as sent
    batch_bytes_max: int = 16 << 20


class CleanerSettings(ServiceSettings):
    """The buffer cleaners."""

    turn_s: float = 0.2  # pause after a turn that found nothing to do
    grace_s: float = 1.0  # a younger buffer row is hardly on a minion yet: looking it up is wasted
    rescue_grace_s: float = 2.0  # a younger one is likely still under way to its home; written twice it changes nothing
    node_timeout_s: float = 1.5  # of one question to a node: a hung one must not keep the others' rows waiting
    batch_rows_max: int = 1000


class TailerSettings(ServiceSettings):
    """The tailers."""

    poll_s: float = 0.005  # one small query per server and turn; see docs for what an idle turn costs
    idle_poll_s: float = 0.05  # after a second without news; what it costs is in docs/operating-the-log.md
    tail_from: Role = Role.MASTER  # freshest; minion: any minion, so that masters only write
    tail_lag_max_s: float = 5.0  # a minion further behind is read only while nothing better answers
    batch_cells_max: int = 5000  # cells of one Kafka transaction: 2000 drain a fifth slower, 8000 no faster
    batch_bytes_max: int = 8 << 20  # bounds memory when bodies are large
    batches_max: int = 4  # in hand at once, whatever the number of partitions: memory again
    transaction_timeout_s: float = 5.0  # of one step; a killed tailer's transaction is ended by the next owner
    session_timeout_s: float = 6.0  # Kafka's least by default
    datastores: Annotated[tuple[str, ...], NoDecode] = ()  # comma-separated; none named: all of the catalogue

    @field_validator("datastores", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_at_commas(value)


class ConsumerSettings(ServiceSettings):
    """Indexers and trigger programs."""

    batch_cells_max: int = 1000  # of one index transaction, or of one shard's run of calls
    session_timeout_s: float = 10.0  # how long the partitions of a killed process wait for another one
    hang_limit_s: float = 30.0  # an event loop that stands still so long ends its process; the supervisor restarts it
    attempts_max: int = 20  # of one call of a trigger, about two minutes: longer than any restart. Then its shard stops
    attempt_timeout_s: float = 60.0  # of an async call; a sync one can not be cut off
    retry_delay_s: float = 0.1  # doubled from attempt to attempt
    retry_delay_max_s: float = 10.0
    datastores: Annotated[tuple[str, ...], NoDecode] = ()  # of the indexer, comma-separated; none named: all

    @field_validator("datastores", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_at_commas(value)


class ProbeSettings(ConsumerSettings):
    """The probe, which runs only where somebody starts it. It finds the API as every client does."""

    probe_period_s: float = 10.0  # each cell stays for ever: 8,640 a day
    probe_timeout_s: float = 30.0  # a stage that takes longer counts as missed
    probe_metrics_port: int | None = None  # on loopback; None: only log lines


class ClientSettings(BaseSettings):
    """Defaults of `Client()` and of the command line."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore")

    hosts: Annotated[tuple[str, ...], NoDecode] = ()  # comma-separated
    token: SecretStr | None = None

    @field_validator("hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_at_commas(value)


class OperatorSettings(BaseSettings):
    """Where an operator's commands find the servers; what isn't set is the embedded stack's."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore")

    topology: Path | None = None
    kafka: str | None = None


def split_at_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
