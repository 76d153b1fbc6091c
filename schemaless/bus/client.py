"""What every Kafka client of ours shares: its settings, and the translation of its errors into ours (I15)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._metadata import ClusterMetadata

from schemaless.errors import BusRefuses, BusUnavailable, Fenced, Misconfigured, SchemalessError, TopicMissing
from schemaless.runtime.kafka_access import (
    NO_RIGHT_ON_GROUP,
    NO_RIGHT_ON_TOPIC,
    WRONG_PASSWORD,
    KafkaAccount,
    access_of,
    keep_account,
    note_refusal,
    require_account,
    require_certificate_of,
)

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,  # idle so long that the broker forgot the producer
}
NOT_KNOWN_YET = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._UNKNOWN_PARTITION,  # the client's own metadata was cut short: seen on a starved machine
    KafkaError.NOT_COORDINATOR,  # of a group, on a broker that has just started
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""Errors of a partition or a group whose broker was chosen just now: the question may be repeated."""

METADATA_AGE_MAX_MS = 3_000
"""How old what a client knows of topics may be: one that was deleted and made anew, or got partitions, is noticed."""

_FIRST_REQUEST_S = 1.0
_BROKER = re.compile(r"://(.+?)/")  # in the text of an error

_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
_NOT_FITTING = {
    KafkaError._INVALID_ARG,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,  # the group's members assign partitions in another way
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
}
REFUSALS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: NO_RIGHT_ON_TOPIC,
    KafkaError.GROUP_AUTHORIZATION_FAILED: NO_RIGHT_ON_GROUP,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the account has no ACL with Write on this transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the account is no administrator of Kafka",
    KafkaError.SASL_AUTHENTICATION_FAILED: WRONG_PASSWORD,
    KafkaError._AUTHENTICATION: WRONG_PASSWORD,
}
"""What an account lacks, by the error of the broker that refuses it."""


def client_settings(bootstrap: str) -> dict[str, Any]:
    """Returns the settings of any client. librdkafka logs nothing itself, because we raise and log its errors.

    It must not log through a Python logger either. Its lines are handed over in the same calls as a fatal error, and a
    line that follows the error turns it into a SystemError (seen on 2.16.1 when a flush was fenced).

    Raises BusUnavailable for a broker's certificate that is refused, Misconfigured for an account that can't be read.
    """
    access = access_of(bootstrap)
    account, tls = access.account, access.tls
    protocol = ("SASL_" if account else "") + ("SSL" if tls else "PLAINTEXT")
    settings: dict[str, Any] = {"security.protocol": protocol}
    if account is not None:
        settings |= {
            "sasl.mechanism": account.mechanism,
            "sasl.username": account.user,
            "sasl.password": account.password,
        }
    if tls is not None:
        require_certificate_of(bootstrap, tls)
        settings |= {"ssl.ca.location": tls.ca, "ssl.endpoint.identification.algorithm": "https"}
    return {
        **settings,
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.max.ms": 500,  # soon back after the broker is
        # The client's own times are minutes. What it has to notice here is noticed within a session of the group.
        "topic.metadata.refresh.interval.ms": METADATA_AGE_MAX_MS,
        "metadata.recovery.rebootstrap.trigger.ms": 10_000,
        "coordinator.query.interval.ms": 10_000,
        "socket.connection.setup.timeout.ms": 5_000,
        "socket.timeout.ms": 10_000,
        "log_level": 0,
        "enable.metrics.push": False,  # nobody asks for them, and a tailer has a client for each partition
    }


C = TypeVar("C", Consumer, Producer, AdminClient)


def open_client(kind: type[C], bootstrap: str, settings: Mapping[str, Any] | None = None) -> C:
    """Returns a client with `settings` beside those of every client. While it lives, it takes up the account of a file
    that is replaced.

    Raises what `client_settings` does.
    """
    access = access_of(bootstrap)
    ours = {**client_settings(bootstrap), **(settings or {})}
    if access.account is None or access.account_file is None:
        return kind(ours)
    client = _KEPT.get(kind, kind)(ours)
    keep_account(access.account_file, client, access.account, _take_account)
    return cast(C, client)


class _KeptConsumer(Consumer):
    """Takes up another account in the thread that polls, before these calls. A call of another thread starves while it
    does, and in a callback, which may not make these calls, it ends the process (2.16.1).
    """

    next_account: KafkaAccount | None = None

    def poll(self, *arguments: Any, **options: Any) -> Any:
        return self._taken_up().poll(*arguments, **options)

    def consume(self, *arguments: Any, **options: Any) -> Any:
        return self._taken_up().consume(*arguments, **options)

    def list_topics(self, *arguments: Any, **options: Any) -> Any:
        return self._taken_up().list_topics(*arguments, **options)

    def get_watermark_offsets(self, *arguments: Any, **options: Any) -> Any:
        return self._taken_up().get_watermark_offsets(*arguments, **options)

    def _taken_up(self) -> Any:
        account, self.next_account = self.next_account, None
        if account is not None:
            self.set_sasl_credentials(account.user, account.password)
        return super()


class _KeptProducer(Producer):
    """One to which a weak reference can be made, as to the other two."""


_KEPT: Mapping[Any, Any] = {Consumer: _KeptConsumer, Producer: _KeptProducer}


def _take_account(client: Any, account: KafkaAccount) -> None:
    if isinstance(client, _KeptConsumer):
        client.next_account = account
        return
    with suppress(RuntimeError):  # it was closed
        client.set_sasl_credentials(account.user, account.password)


def refuses_account(error: SchemalessError) -> bool:
    """Whether an error is about the account itself, not about a right. A client that lives takes up another one."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and REFUSALS.get(cause.args[0].code()) == WRONG_PASSWORD


class AccountsHeard:
    """What brokers said last of the account of a client, whose `error_cb` is `note`.

    The client itself goes on trying, and then only says that no broker can be reached.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.refusal: str | None = None

    def note(self, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTHENTICATION:
            found = _BROKER.search(error.str())
            self.refusal = note_refusal(found[1] if found else self._bootstrap, _user_of(self._bootstrap))
        elif error.code() != KafkaError._ALL_BROKERS_DOWN:  # which follows either
            self.refusal = None


def _user_of(bootstrap: str) -> str:
    try:
        account = access_of(bootstrap).account
    except Misconfigured:  # its file may just be replaced
        account = None
    return "" if account is None else account.user


def metadata_of(
    client: Consumer | AdminClient, bootstrap: str, doing: str, timeout_s: float, topic: str | None = None
) -> ClusterMetadata:
    """Returns what a client's first request brings: the brokers, and all topics or one.

    Raises what `translated` does. Kafka's clients only say that no broker can be reached where the account is why. So
    where the answer doesn't come soon, brokers are asked for that, and BusRefuses is raised.
    """
    first_s = min(_FIRST_REQUEST_S, timeout_s)
    with suppress(KafkaException):
        return client.list_topics(topic, timeout=first_s)
    require_let_in = _asked_beside(bootstrap)
    require_let_in()
    try:
        return client.list_topics(topic, timeout=max(timeout_s - first_s, first_s))
    except KafkaException as error:
        require_let_in()  # brokers that stood still at first may have refused the account meanwhile
        raise translate(error.args[0], doing) from error


def _asked_beside(bootstrap: str) -> Callable[[], None]:
    """Returns what raises BusRefuses if a broker asks for an account and there is none, or if one refused its name or
    password since this call.
    """
    access = access_of(bootstrap)
    if access.account is None:
        return partial(require_account, bootstrap, None if access.tls is None else access.tls.context())
    whose, errors = f"Kafka at {bootstrap}, account {access.account.user!r}", list[KafkaError]()
    settings: dict[str, Any] = {**client_settings(bootstrap), "error_cb": errors.append}
    client = AdminClient(settings)

    def require() -> None:
        with suppress(KafkaException):
            client.list_topics(timeout=_FIRST_REQUEST_S)
        client.poll(0)  # calls error_cb
        for error in errors:
            if error.code() == KafkaError._AUTHENTICATION:
                raise translate(error, whose)

    return require


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns the client's errors into ours. `doing` says in their text what was attempted."""
    try:
        yield
    except KafkaException as error:
        raise translate(error.args[0], doing) from error
    except BufferError as error:
        raise BusUnavailable(f"{doing}: the producer's queue is full") from error


def translate(error: KafkaError, doing: str) -> SchemalessError:
    """Returns our error for one of the client's. An unknown one is BusUnavailable."""
    said = error.str().strip()  # where that names only the request, the name of the error follows
    text = f"{doing}: {f'{said} {error.name()}' if said.endswith(':') else said or error.name()}"
    if error.code() in _FENCED:
        return Fenced(text)
    if error.code() in _NOT_FITTING:
        return Misconfigured(text)
    if (lacking := REFUSALS.get(error.code())) is not None:
        return BusRefuses(f"{text}: {lacking}")
    if error.code() in _MISSING:
        return TopicMissing(text)
    return BusUnavailable(text)
