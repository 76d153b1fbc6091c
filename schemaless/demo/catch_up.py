"""Catching up: how far index and trigger programs are behind the heads, and waiting for them within bounds.

Asks /status, as anybody could; the audit afterwards proves what this only shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemaless.client.client import Client
from schemaless.errors import SchemalessError, Unavailable

TURN_S = 0.5
STALL_TIMEOUT_S = 120.0


class ProgramStopped(SchemalessError):
    hint = "the program's log tells more: `schemaless status --json` names it"


@dataclass(frozen=True, slots=True)
class Positions:
    """`head`: cells of all shards. `lags`: by consumer, how many of them it has still to finish."""

    head: int = 0
    buffered: int = 0
    lags: Mapping[str, int] = field(default_factory=dict)

    def lag(self, consumer: str) -> int:
        return self.lags.get(consumer, self.head)

    def caught_up(self, consumers: set[str]) -> bool:
        return self.head > 0 and self.buffered == 0 and not any(map(self.lag, consumers))


def read_positions(client: Client) -> Positions:
    """Raises ProgramStopped with the reason of the first shard that stopped."""
    status = client.document("/status")
    consumers = {consumer["consumer"]: consumer for consumer in status["consumers"]}
    for consumer in consumers.values():
        _require_running(consumer)
    lags = {name: consumer["lag"] for name, consumer in consumers.items()}
    return Positions(status["heads_sum"], status["buffered"], lags)


def wait_until_caught_up(client: Client, consumers: set[str], show: Callable[[Positions], None]) -> Positions:
    """Until each consumer has finished every cell and no buffer holds one.

    Raises Unavailable when nothing moves for STALL_TIMEOUT_S.
    """
    before: Positions | None = None
    moved_at = time.monotonic()
    while not (now := read_positions(client)).caught_up(consumers):
        show(now)
        if now != before:
            before, moved_at = now, time.monotonic()
        elif time.monotonic() - moved_at > STALL_TIMEOUT_S:
            raise Unavailable(f"nothing moved for {STALL_TIMEOUT_S:.0f} s; still to be done: {_behind(now, consumers)}")
        time.sleep(TURN_S)
    show(now)
    return now


def _behind(positions: Positions, consumers: set[str]) -> str:
    lags = {consumer: positions.lag(consumer) for consumer in sorted(consumers)} | {"buffers": positions.buffered}
    return ", ".join(f"{name} {lag}" for name, lag in lags.items() if lag)


def _require_running(consumer: Mapping[str, Any]) -> None:
    for shard in consumer["shards"]:
        if shard["state"] == "stopped":
            raise ProgramStopped(f"{consumer['consumer']} stopped in shard {shard['shard']}: {shard['reason']}")
