"""Settings: frozen values that are read from the environment once. No other module reads it.

A setting of one service has the service in its name: SCHEMALESS_API_BODY_BYTES_MAX. A setting without one is shared:
SCHEMALESS_KAFKA. Units stand last. Each field is required, or its comment says why its default is what it is.
Services find the servers' passwords in the topology file, which only its owner can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from schemaless.errors import Misconfigured
from schemaless.topology import Role


def _split_at_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_at_commas)]
"""Comma-separated in the environment."""


def shared(variable: str, default: Any = ...) -> Any:
    """Returns a field that every service reads from the same variable. Without a default it is required."""
    return Field(default, validation_alias=variable)


class Settings(BaseSettings):
    """Base of all settings. Reading them raises Misconfigured where a variable still has an old name."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_", frozen=True, extra="ignore", populate_by_name=True)

    def __init__(self, **values: Any) -> None:
        refuse_old_names(os.environ)
        super().__init__(**values)


class StackSettings(Settings):
    """Where the embedded stack keeps everything."""

    home: Path = Path(".schemaless")  # one folder under the checkout: removed with it
    cache: Path = Path("~/.cache/schemaless")  # server programs, shared by all checkouts of a user
    mysql_flavour: Literal["mariadb", "mysql"] | None = None  # a new stack takes mariadb: Debian has it in its packages
    first_port: int | None = None  # None: free ports are picked at the first start, and kept


class ContainerSettings(Settings):
    """What sets up a stack in containers, once: docker-compose.yml passes it from .env."""

    topology: Path  # required: where the topology file is written for the services
    kafka: str  # required: bootstrap servers
    root_password: SecretStr  # required: what the MySQL image gave to root; of no use afterwards
    service_password: SecretStr  # required, as the next two: kept by whoever runs the stack
    reader_password: SecretStr
    replication_password: SecretStr


class ServiceSettings(Settings):
    """Settings that every service has. They are shared: the API and the tailer read the same variables."""

    topology: Path = shared("SCHEMALESS_TOPOLOGY")  # required: the topology file
    kafka: str = shared("SCHEMALESS_KAFKA")  # required: bootstrap servers, host:port[,host:port]
    log_level: str = shared("SCHEMALESS_LOG_LEVEL", "info")
    connect_timeout_s: float = shared("SCHEMALESS_MYSQL_CONNECT_TIMEOUT_S", 1.0)  # a healthy network needs milliseconds
    statement_timeout_s: float = shared("SCHEMALESS_MYSQL_STATEMENT_TIMEOUT_S", 10.0)  # enough for a batch of 16 MiB
    connections_max: int = shared("SCHEMALESS_MYSQL_CONNECTIONS_MAX", 16)  # for each node and process


class ApiSettings(ServiceSettings):
    """The write/read tier."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_API_")

    host: str = "127.0.0.1"  # loopback unless told otherwise
    port: int = 8000
    write_timeout_s: float = 1.25  # of one master; a put meets its 3 s when its home and its secondary hang
    min_copies: int = Field(default=1, ge=1, le=2)  # 2: no secondary reachable in time is a 503 (I5)
    breaker_open_s: float = 1.0  # how long the circuit breaker of a failing master stays open
    read_timeout_s: float = 2.0  # of one node; then the next node is asked
    status_timeout_s: float = 1.0  # of each server, when /status asks them all
    requests_max: int = 1000  # in flight at once; more get 503, so memory stays bounded
    followers_max: int = 1000  # streams and long polls in one process, which requests_max doesn't count; more get 503
    follow_poll_s: float = 0.03  # one small query per cluster and poll, only while somebody follows
    follow_bytes_max: int = 256 << 10  # one page of a stream: what a slow reader holds
    heartbeat_s: float = 10.0  # of a stream that has nothing else to send
    payload_bytes_max: int = 128 << 20  # of all long payloads in flight together
    payload_timeout_s: float = 30.0  # for a slow line; a connection that sends nothing holds a request no longer
    keep_alive_s: int = 75  # longer than clients and load balancers keep idle connections, so that they close first
    log_examined_max: int = 20_000  # added_ids that one page of a log examines when few columns are asked for
    response_bytes_max: int = 16 << 20  # a page ends before it; what has no pages is a 413
    body_bytes_max: int = 1 << 20  # of one cell, as sent
    batch_bytes_max: int = 16 << 20  # of one HTTP batch


class CleanerSettings(ServiceSettings):
    """The buffer cleaners."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_CLEANER_")

    pass_pause_s: float = 0.2  # after a pass that found nothing to do
    grace_s: float = 1.0  # a younger buffer row is hardly on a minion yet: looking it up is wasted
    rescue_grace_s: float = 2.0  # a younger row is likely still on its way home; writing it twice changes nothing
    node_timeout_s: float = 1.5  # of one query to a node: a hung node must not keep the rows of others waiting
    batch_rows_max: int = 1000


class TailerSettings(ServiceSettings):
    """The tailers."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_TAILER_")

    poll_s: float = 0.005  # one small query per server and poll; docs/operating-the-log.md has what an idle poll costs
    idle_poll_s: float = 0.05  # after a second without news
    read_from: Role = Role.MASTER  # the freshest; minion: any minion, so that masters only write
    lag_max_s: float = 5.0  # a minion further behind is read only while nothing better answers
    transaction_cells_max: int = 5000  # cells of one Kafka transaction: 2000 drain a fifth slower, 8000 no faster
    transaction_bytes_max: int = 8 << 20  # bounds memory when bodies are large
    transactions_max: int = 4  # in flight at once, whatever the number of partitions: memory again
    transaction_timeout_s: float = 5.0  # of one step; the next owner ends the transaction of a killed tailer
    session_timeout_s: float = 6.0  # Kafka's least by default
    datastores: Names = ()  # comma-separated; none named: all of the catalogue


class FollowerSettings(ServiceSettings):
    """What indexers and trigger programs have in common."""

    batch_cells_max: int = 1000  # of one index transaction, or of one shard's run of calls
    session_timeout_s: float = 10.0  # how long the partitions of a killed process wait for another one
    hang_limit_s: float = 30.0  # an event loop that stands still so long ends its process; the supervisor restarts it


class IndexerSettings(FollowerSettings):
    """The indexers."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_INDEXER_")

    datastores: Names = ()  # comma-separated; none named: all of the catalogue


class ConsumerSettings(FollowerSettings):
    """Trigger programs."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_CONSUMERS_")

    attempts_max: int = 20  # of one call, about two minutes: longer than any restart. Then its shard stops
    attempt_timeout_s: float = 60.0  # of an async call; a sync call can't be cut off
    retry_delay_s: float = 0.1  # doubled from attempt to attempt
    retry_delay_max_s: float = 10.0


class ProbeSettings(ConsumerSettings):
    """The probe, which runs only where somebody starts it. It finds the API as every client does."""

    model_config = SettingsConfigDict(env_prefix="SCHEMALESS_PROBE_")

    period_s: float = 10.0  # each cell stays for ever: 8,640 a day
    stage_timeout_s: float = 30.0  # a stage that takes longer counts as missed
    metrics_port: int | None = None  # on loopback; None: only log lines


class ClientSettings(Settings):
    """Defaults of `Client()` and of the command line."""

    hosts: Names = ()  # comma-separated
    token: SecretStr | None = None


class OperatorSettings(Settings):
    """Where an operator's commands find the servers; what isn't set is the embedded stack's."""

    topology: Path | None = None
    kafka: str | None = None


S = TypeVar("S", bound=Settings)


def read_settings(kind: type[S]) -> S:
    """Returns settings from the environment.

    Raises Misconfigured with the name of the variable when one is missing, malformed or has an old name.
    """
    try:
        return kind()
    except ValidationError as error:
        first = error.errors()[0]
        raise Misconfigured(f"{variable_of(kind, str(first['loc'][0]))}: {first['msg']}") from error


def variable_of(kind: type[Settings], field: str) -> str:
    """Returns the environment variable of a field, which may be named by its alias."""
    alias = kind.model_fields[field].validation_alias if field in kind.model_fields else field
    return str(alias or f"{kind.model_config['env_prefix']}{field}".upper())


def refuse_old_names(environment: Mapping[str, str]) -> None:
    """Raises Misconfigured for a variable that has another name now: a bound that an operator set must not vanish."""
    for name in environment.keys() & RENAMED.keys():
        raise Misconfigured(f"{name} has another name now: {RENAMED[name]}")


RENAMED = {
    "SCHEMALESS_ANSWER_BYTES_MAX": "SCHEMALESS_API_RESPONSE_BYTES_MAX",
    "SCHEMALESS_ATTEMPTS_MAX": "SCHEMALESS_CONSUMERS_ATTEMPTS_MAX",
    "SCHEMALESS_ATTEMPT_TIMEOUT_S": "SCHEMALESS_CONSUMERS_ATTEMPT_TIMEOUT_S",
    "SCHEMALESS_BATCHES_MAX": "SCHEMALESS_TAILER_TRANSACTIONS_MAX",
    "SCHEMALESS_BATCH_BYTES_MAX": "SCHEMALESS_API_BATCH_BYTES_MAX or SCHEMALESS_TAILER_TRANSACTION_BYTES_MAX",
    "SCHEMALESS_BATCH_CELLS_MAX": "SCHEMALESS_TAILER_TRANSACTION_CELLS_MAX or SCHEMALESS_INDEXER_BATCH_CELLS_MAX or "
    "SCHEMALESS_CONSUMERS_BATCH_CELLS_MAX",
    "SCHEMALESS_BATCH_ROWS_MAX": "SCHEMALESS_CLEANER_BATCH_ROWS_MAX",
    "SCHEMALESS_BODY_BYTES_MAX": "SCHEMALESS_API_BODY_BYTES_MAX",
    "SCHEMALESS_BREAKER_OPEN_S": "SCHEMALESS_API_BREAKER_OPEN_S",
    "SCHEMALESS_CALLS_MAX": "SCHEMALESS_API_REQUESTS_MAX",
    "SCHEMALESS_CONNECTIONS_MAX": "SCHEMALESS_MYSQL_CONNECTIONS_MAX",
    "SCHEMALESS_CONNECT_TIMEOUT_S": "SCHEMALESS_MYSQL_CONNECT_TIMEOUT_S",
    "SCHEMALESS_DATASTORES": "SCHEMALESS_TAILER_DATASTORES or SCHEMALESS_INDEXER_DATASTORES",
    "SCHEMALESS_FOLLOWERS_MAX": "SCHEMALESS_API_FOLLOWERS_MAX",
    "SCHEMALESS_FOLLOW_BYTES_MAX": "SCHEMALESS_API_FOLLOW_BYTES_MAX",
    "SCHEMALESS_FOLLOW_POLL_S": "SCHEMALESS_API_FOLLOW_POLL_S",
    "SCHEMALESS_GRACE_S": "SCHEMALESS_CLEANER_GRACE_S",
    "SCHEMALESS_HANG_LIMIT_S": "SCHEMALESS_INDEXER_HANG_LIMIT_S or SCHEMALESS_CONSUMERS_HANG_LIMIT_S",
    "SCHEMALESS_HEARTBEAT_S": "SCHEMALESS_API_HEARTBEAT_S",
    "SCHEMALESS_HOST": "SCHEMALESS_API_HOST",
    "SCHEMALESS_IDLE_POLL_S": "SCHEMALESS_TAILER_IDLE_POLL_S",
    "SCHEMALESS_KEEP_ALIVE_S": "SCHEMALESS_API_KEEP_ALIVE_S",
    "SCHEMALESS_LOG_EXAMINED_MAX": "SCHEMALESS_API_LOG_EXAMINED_MAX",
    "SCHEMALESS_MIN_COPIES": "SCHEMALESS_API_MIN_COPIES",
    "SCHEMALESS_NODE_TIMEOUT_S": "SCHEMALESS_CLEANER_NODE_TIMEOUT_S",
    "SCHEMALESS_PAYLOAD_BYTES_MAX": "SCHEMALESS_API_PAYLOAD_BYTES_MAX",
    "SCHEMALESS_PAYLOAD_TIMEOUT_S": "SCHEMALESS_API_PAYLOAD_TIMEOUT_S",
    "SCHEMALESS_POLL_S": "SCHEMALESS_TAILER_POLL_S",
    "SCHEMALESS_PORT": "SCHEMALESS_API_PORT",
    "SCHEMALESS_PROBE_TIMEOUT_S": "SCHEMALESS_PROBE_STAGE_TIMEOUT_S or SCHEMALESS_API_STATUS_TIMEOUT_S",
    "SCHEMALESS_READ_TIMEOUT_S": "SCHEMALESS_API_READ_TIMEOUT_S",
    "SCHEMALESS_RESCUE_GRACE_S": "SCHEMALESS_CLEANER_RESCUE_GRACE_S",
    "SCHEMALESS_RETRY_DELAY_MAX_S": "SCHEMALESS_CONSUMERS_RETRY_DELAY_MAX_S",
    "SCHEMALESS_RETRY_DELAY_S": "SCHEMALESS_CONSUMERS_RETRY_DELAY_S",
    "SCHEMALESS_SESSION_TIMEOUT_S": "SCHEMALESS_TAILER_SESSION_TIMEOUT_S or SCHEMALESS_INDEXER_SESSION_TIMEOUT_S or "
    "SCHEMALESS_CONSUMERS_SESSION_TIMEOUT_S",
    "SCHEMALESS_STATEMENT_TIMEOUT_S": "SCHEMALESS_MYSQL_STATEMENT_TIMEOUT_S",
    "SCHEMALESS_TAIL_FROM": "SCHEMALESS_TAILER_READ_FROM",
    "SCHEMALESS_TAIL_LAG_MAX_S": "SCHEMALESS_TAILER_LAG_MAX_S",
    "SCHEMALESS_TRANSACTION_TIMEOUT_S": "SCHEMALESS_TAILER_TRANSACTION_TIMEOUT_S",
    "SCHEMALESS_TURN_S": "SCHEMALESS_CLEANER_PASS_PAUSE_S",
    "SCHEMALESS_WRITE_TIMEOUT_S": "SCHEMALESS_API_WRITE_TIMEOUT_S",
}
"""Present names by old name. One old name may have set unlike things, and then has several."""
