"""LocalStack: where the embedded stack of SCHEMALESS_HOME serves, for programs that were told of no other servers.

`schemaless up` writes endpoints.json, and `down` removes it. Clients, the probe and users' programs find the stack
by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemaless.config import OperatorSettings, StackSettings
from schemaless.errors import Misconfigured
from schemaless.runtime.kafka_access import KafkaAccess, KafkaAccount, KafkaAddress
from schemaless.runtime.private_file import read_private_text


class _Endpoints(msgspec.Struct, frozen=True):
    api: list[str]
    kafka: str
    kafka_account: KafkaAccount | None = None


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack: the addresses of its API and of Kafka. `home` is its folder."""

    home: Path
    api: list[str]
    kafka: str

    @property
    def topology_file(self) -> Path:
        return self.home / "topology.json"

    def token(self) -> str | None:
        """Returns the token of the stack's own programs, None while access is off."""
        kept = read_private_text(self.home / "token")
        return kept and kept.strip()


def local_stack() -> LocalStack | None:
    """Returns the stack that runs, None if there is none. Raises Misconfigured for a damaged file."""
    home = StackSettings().home.expanduser().absolute()
    file = home / "endpoints.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Endpoints)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise Misconfigured(f"{file} can't be read: {error}") from error
    return LocalStack(home, found.api, KafkaAddress(found.kafka, KafkaAccess(found.kafka_account)))


def kafka_address(given: str | None = None) -> str:
    """Returns the given address, else that of SCHEMALESS_KAFKA, else the embedded stack's. Raises Misconfigured."""
    if found := given or OperatorSettings().kafka:
        return found
    stack = local_stack()
    if stack is None:
        raise Misconfigured("no Kafka is known: name its address, set SCHEMALESS_KAFKA, or run `schemaless up`")
    return stack.kafka
