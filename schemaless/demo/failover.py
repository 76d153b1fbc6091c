"""A master that is killed for good while flights load: when another one is open, and whether the first comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemaless.client.client import Client
from schemaless.errors import Unavailable
from schemaless.stack import supervision

CLUSTER = "a"
REPLACED_WITHIN_S = 60.0
BACK_WITHIN_S = 180.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Failover:
    """The server that was lost, the one that took its place, after how many seconds and under which generation.
    `is_back`: the lost one follows it.
    """

    lost: str
    master: str
    seconds: float
    generation: int
    is_back: bool = False


class LostMaster:
    """Kills the master of a cluster of an embedded stack, holds it down until another one is open, and lets it run."""

    def __init__(self, client: Client, home: Path) -> None:
        self._client = client
        self._home = home

    def lose(self) -> Failover:
        """Raises Unavailable when no other master is open in time."""
        before = self._cluster()
        name = before["master"]["name"]
        pid = next(process.pid for process in supervision.processes(self._home) if process.name == name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        supervision.stop(self._home, name)
        lost_at = time.monotonic()
        after = self._until(
            lambda cluster: cluster["epoch"] > before["epoch"] and cluster["state"] == "healthy",
            REPLACED_WITHIN_S,
            f"no other master than {name} was opened",
        )
        seconds = time.monotonic() - lost_at
        supervision.start(self._home, name)
        return Failover(name, after["master"]["name"], seconds, after["epoch"])

    def back(self, lost: Failover) -> Failover:
        """Returns what is so once the server that was lost follows, or when that takes too long."""

        def follows(cluster: dict[str, Any]) -> bool:
            return lost.lost in [voter["name"] for voter in cluster["voters"]]

        is_back = False
        with suppress(Unavailable):
            self._until(follows, BACK_WITHIN_S, f"{lost.lost} doesn't follow")
            is_back = True
        self._client.order_topology("acknowledge", CLUSTER)
        return Failover(lost.lost, lost.master, lost.seconds, lost.generation, is_back)

    def _cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.document("/topology")["clusters"][CLUSTER]
        return found

    def _until(self, holds: Callable[[dict[str, Any]], bool], within_s: float, otherwise: str) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while True:
            with suppress(Unavailable):  # a host that restarts: the next look asks again
                if holds(cluster := self._cluster()):
                    return cluster
            if time.monotonic() > deadline:
                raise Unavailable(f"{otherwise} within {within_s:.0f} s: `schemaless topology history` says why")
            time.sleep(_PAUSE_S)
