"""The port of followers to Kafka. A transport makes this process a member of a group, and hands over what it reads.

There are two. `schemaless/bus/faust_transport.py` is the default. `schemaless/bus/plain_transport.py` is a loop around
confluent-kafka. One contract suite holds both to the same promises (tests/integration/bus/test_transports.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from schemaless.config import FollowerSettings, TransportKind
from schemaless.errors import Misconfigured
from schemaless.record import Record


class Receiver(Protocol):
    """`schemaless.consume.host.ConsumerHost`."""

    async def assigned(self, partitions: Iterable[int], kept: Collection[int] = ()) -> None:
        """Takes these partitions and no others. Nobody else had those of `kept` since they were revoked here."""

    async def revoked(self, partitions: Iterable[int]) -> None: ...

    def take(self, partition: int, records: Sequence[Record]) -> None:
        """Takes records, in order. What comes of them is its own affair: nothing rests on acknowledgements."""


class Transport(Protocol):
    """A member of a group. It hears a partition from the moment on at which it is assigned."""

    async def run(self) -> None:
        """Runs until it is cancelled. Raises BusUnavailable, Fenced or Misconfigured, which has to end the process."""

    def is_alive(self) -> bool:
        """Whether the group can't have given our partitions away without our knowing."""

    @property
    def kafka_answers(self) -> bool:
        """Whether Kafka answers this process, with or without partitions."""

    @property
    def refusal(self) -> str | None:
        """Which broker refuses this process's account, where that is why Kafka doesn't answer."""

    async def confirm(self, partitions: Collection[int]) -> None:
        """Returns when the group has said that these partitions are ours. Raises BusUnavailable or Fenced (I10)."""


def refused(group: str, why: object) -> Misconfigured:
    """Returns the error of a process whose way of assigning partitions the members of its group don't know."""
    return Misconfigured(
        f"group {group} refuses this process: {why}. All members of a group need the same transport: stop the others"
        " first, or set SCHEMALESS_INDEXER_TRANSPORT or SCHEMALESS_CONSUMERS_TRANSPORT to theirs"
    )


def transport_of(
    settings: FollowerSettings, group: str, topic: str, receiver: Receiver, read_pause_s: float | None = None
) -> Transport:
    """Returns the transport that the settings name, which is not started yet.

    `read_pause_s` is the least time between two reads, by default a few milliseconds. A record that comes alone comes
    at once.
    """
    session_timeout_s = settings.session_timeout_s
    if settings.transport is TransportKind.PLAIN:
        from schemaless.bus.plain_transport import PlainTransport  # one of the two is loaded

        return PlainTransport(
            settings.kafka, group, topic, receiver, session_timeout_s=session_timeout_s, read_pause_s=read_pause_s
        )
    from schemaless.bus.faust_transport import FaustTransport

    return FaustTransport(
        settings.kafka, group, topic, receiver, session_timeout_s=session_timeout_s, read_pause_s=read_pause_s
    )
