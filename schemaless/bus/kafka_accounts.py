"""Kafka's accounts, and what each may do. Only the tailers write cells, so a record in the topic is theirs (I17)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from schemaless.runtime.kafka_access import KafkaAccount
from schemaless.runtime.private_file import write_private_text

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
        return KafkaAccount(user, self.passwords[user])


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

    from schemaless.bus.client import client_settings, translated

    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
    upsertion = UserScramCredentialUpsertion(account.user, credential, account.password.encode())
    admin = AdminClient(client_settings(bootstrap))  # kept: a request dies with its client
    with translated("making an account in Kafka"):
        for made in admin.alter_user_scram_credentials([upsertion], request_timeout=_TIMEOUT_S).values():
            made.result(_TIMEOUT_S)


_READS = ("READ", "DESCRIBE_CONFIGS")
_WRITES = (*_READS, "WRITE", "CREATE", "ALTER_CONFIGS")
_ON_TOPICS = {KafkaUser.TAILER: _WRITES, KafkaUser.SERVICE: _READS, KafkaUser.READER: _READS}


def grant(bootstrap: str) -> None:
    """Gives each account its rights. It may be repeated. Raises BusUnavailable, or Misconfigured for who may not."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType  # mypy sees no export of them
    from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

    from schemaless.bus.client import client_settings, translated

    def rule(
        user: KafkaUser,
        kind: ResourceType,
        name: str,
        may: str,
        permission: AclPermissionType = AclPermissionType.ALLOW,
    ) -> AclBinding:
        pattern = ResourcePatternType.PREFIXED if name == OURS else ResourcePatternType.LITERAL
        return AclBinding(kind, name, pattern, f"User:{user}", "*", AclOperation[may], permission)

    wanted = []
    for user, operations in _ON_TOPICS.items():
        for may in operations:
            wanted.append(rule(user, ResourceType.TOPIC, OURS, may))
        wanted.append(rule(user, ResourceType.GROUP, "*", "READ"))
    wanted.append(rule(KafkaUser.TAILER, ResourceType.TRANSACTIONAL_ID, "*", "WRITE"))
    # A member is given partitions. In the tailers' group a reader would keep these from being published.
    wanted.append(rule(KafkaUser.READER, ResourceType.GROUP, OURS, "READ", AclPermissionType.DENY))
    admin = AdminClient(client_settings(bootstrap))  # kept: a request dies with its client
    with translated("granting rights in Kafka"):
        for made in admin.create_acls(wanted, request_timeout=_TIMEOUT_S).values():
            made.result(_TIMEOUT_S)
