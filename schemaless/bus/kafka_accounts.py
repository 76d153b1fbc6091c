"""Kafka's accounts, and what each may do (I17). Only the tailers write cells, so a record in the topic is theirs. Only
they join their group, so nobody keeps a partition from being published.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from schemaless.errors import SchemalessError
from schemaless.names import indexer_group, parked_topic_name, trigger_group
from schemaless.runtime.kafka_access import KafkaAccount
from schemaless.runtime.tls import write_private_text
from schemaless.topology import Datastore

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

_TIMEOUT_S = 20.0
_ITERATIONS = 4096  # Kafka's own default: the passwords are random
OURS = "schemaless."
"""What the names of our topics and groups begin with."""


class KafkaUser(StrEnum):
    """Who has an account. An administrator may do everything, and makes datastores."""

    ADMIN = "admin"
    TAILER = "tailer"
    SERVICE = "schemaless"
    READER = "reader"


@dataclass(frozen=True, slots=True)
class KafkaAccounts:
    """The passwords by user. They are letters and digits only, so they need no quoting anywhere."""

    passwords: Mapping[str, str] = field(repr=False)

    def account(self, user: KafkaUser) -> KafkaAccount:
        return KafkaAccount(user.value, self.passwords[user])


def new_kafka_accounts() -> KafkaAccounts:
    return KafkaAccounts({user.value: secrets.token_hex(16) for user in KafkaUser})


def account_file(folder: Path, user: KafkaUser) -> Path:
    """Where an account is kept for SCHEMALESS_KAFKA_ACCOUNT."""
    return folder / f"kafka-account.{user}.json"


def write_account(file: Path, account: KafkaAccount) -> None:
    """Only the owner can read the file."""
    write_private_text(file, msgspec.json.format(msgspec.json.encode(account)).decode() + "\n")


def let_in(bootstrap: str, account: KafkaAccount) -> None:
    """Makes an account, or gives it this password. Raises BusUnavailable, or Misconfigured for who may not."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._scram import (  # mypy sees no export of them
        ScramCredentialInfo,
        ScramMechanism,
        UserScramCredentialUpsertion,
    )

    from schemaless.bus.client import open_client, translated

    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
    upsertion = UserScramCredentialUpsertion(account.user, credential, account.password.encode())
    admin = open_client(AdminClient, bootstrap)  # kept: a request dies with its client
    with translated("making an account in Kafka"):
        for made in admin.alter_user_scram_credentials([upsertion], request_timeout=_TIMEOUT_S).values():
            made.result(_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _Right:
    """One right: an account may, or may not, do something with what has this name, or a name that begins with it."""

    user: KafkaUser
    kind: str
    name: str
    may: str
    prefix: bool = True
    denied: bool = False


_READS = ("READ", "DESCRIBE_CONFIGS")
_WRITES = (*_READS, "WRITE", "CREATE", "ALTER_CONFIGS")
_RIGHTS = [
    *(_Right(KafkaUser.TAILER, "TOPIC", OURS, may) for may in _WRITES),
    *(_Right(KafkaUser.SERVICE, "TOPIC", OURS, may) for may in _READS),
    *(_Right(KafkaUser.READER, "TOPIC", OURS, may) for may in _READS),
    _Right(KafkaUser.TAILER, "GROUP", OURS, "READ"),
    _Right(KafkaUser.TAILER, "TRANSACTIONAL_ID", OURS, "WRITE"),
    _Right(KafkaUser.SERVICE, "GROUP", OURS, "DESCRIBE"),
    _Right(KafkaUser.READER, "GROUP", "*", "READ", prefix=False),
    # A member is given partitions. In the tailers' group a reader would keep these from being published.
    _Right(KafkaUser.READER, "GROUP", OURS, "READ", denied=True),
]


def grant(bootstrap: str, datastores: Iterable[str] = ()) -> None:
    """Gives each account its rights, also those on these datastores. It may be repeated.

    Raises BusUnavailable, or BusRefuses for who may not.
    """
    from confluent_kafka.admin import AdminClient

    from schemaless.bus.client import open_client

    admin = open_client(AdminClient, bootstrap)  # kept: a request dies with its client
    _create(admin, [*_RIGHTS, *(right for name in datastores for right in _rights_on(name))])


def grant_on_datastore(bootstrap: str, datastore: str) -> bool:
    """Lets the services' account into the groups of a datastore's indexers and trigger programs. It may be repeated.

    Returns False where Kafka asks nobody for rights. Raises BusUnavailable, or BusRefuses for who may not.
    """
    return _grant_if_asked(bootstrap, _rights_on(datastore))


def grant_copies(bootstrap: str, datastore: Datastore, program: str) -> bool:
    """Makes the topic of a program's parked cells, and lets the services' account write it. It may be repeated.

    Returns and raises as `grant_on_datastore`.
    """
    from schemaless.bus.topics import ensure_topic

    topic = parked_topic_name(datastore.name, program)
    ensure_topic(bootstrap, topic, datastore.partitions, timeout_s=_TIMEOUT_S)
    return _grant_if_asked(bootstrap, [_Right(KafkaUser.SERVICE, "TOPIC", topic, "WRITE", prefix=False)])


def _rights_on(datastore: str) -> list[_Right]:
    return [
        _Right(KafkaUser.SERVICE, "GROUP", indexer_group(datastore), "READ", prefix=False),
        _Right(KafkaUser.SERVICE, "GROUP", trigger_group(datastore, ""), "READ"),
    ]


def _grant_if_asked(bootstrap: str, rights: Sequence[_Right]) -> bool:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient

    from schemaless.bus.client import open_client

    admin = open_client(AdminClient, bootstrap)
    try:
        _create(admin, rights)
    except SchemalessError as error:
        cause = error.__cause__
        if isinstance(cause, KafkaException) and cause.args[0].code() == KafkaError.SECURITY_DISABLED:
            return False
        raise
    return True


def _create(admin: AdminClient, rights: Sequence[_Right]) -> None:
    from confluent_kafka.admin._acl import AclBinding  # mypy sees no export of it

    from schemaless.bus.client import translated

    bindings = [
        AclBinding(
            right.kind,
            right.name,
            "PREFIXED" if right.prefix else "LITERAL",
            f"User:{right.user}",
            "*",
            right.may,
            "DENY" if right.denied else "ALLOW",
        )
        for right in rights
    ]
    with translated("granting rights in Kafka"):
        made = admin.create_acls(bindings, request_timeout=_TIMEOUT_S)
        for done in made.values():
            done.result(_TIMEOUT_S)
