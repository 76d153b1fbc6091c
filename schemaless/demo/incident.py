"""Incident: what goes wrong for billing on purpose, while a new datastore is loaded, and how it ends.

One flight's card is blocked, so billing parks it. And the card processor is down for a while, so billing's breaker
trips. The breaker recovers by itself. An operator's retry calls the parked flight again, when its card works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemaless.client.client import Client
from schemaless.client.programs import Program
from schemaless.demo.flights import BILLED_CARRIER, Flight
from schemaless.demo.progress import SEE_STATUS
from schemaless.errors import Unavailable

PROGRAM = "billing"
BLOCKED_FILE = "blocked.txt"  # of examples/card_processor.py
BEGINS_AT = 0.2
"""Which part of the cells is loaded when the card processor goes down."""
DOWN_AT_LEAST_S = 10.0
STEP_TIMEOUT_S = 120.0
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Outage:
    """How long the card processor was down, and how long billing was tripped after it had come back.

    `parked` counts the flights that were parked meanwhile.
    """

    cause: str
    parked: int
    tripped_after_s: float
    down_s: float
    recovered_after_s: float


@dataclass(frozen=True, slots=True)
class ParkedFlights:
    """What was parked at the end of the load, with the reason, and what a retry of it did."""

    parked: int
    reason: str
    done: int
    left: int


class Incident:
    """Belongs to one demo. `stop_processor` and `start_processor` are None where an operator runs the programs."""

    def __init__(
        self,
        client: Client,
        charges: Path,
        stop_processor: Callable[[], None] | None,
        start_processor: Callable[[], None] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._program: Program = client.program(PROGRAM)
        self._blocked = charges / BLOCKED_FILE
        self._stop = stop_processor
        self._start = start_processor
        self._clock = clock
        self._sleep = sleep

    def block_first(self, flights: Iterable[Flight]) -> Iterator[Flight]:
        """Yields the flights. Blocks the card of the first one that billing charges, before that is loaded."""
        is_blocked = False
        for flight in flights:
            if not is_blocked and flight.base["carrier"] == BILLED_CARRIER:
                self._blocked.parent.mkdir(parents=True, exist_ok=True)
                self._blocked.write_text(f"{flight.row_key}\n")
                is_blocked = True
            yield flight

    def outage(self) -> Outage | None:
        """Holds the card processor down until billing's breaker has tripped, and at least DOWN_AT_LEAST_S.

        Returns None where the processor can't be stopped from here. Raises Unavailable when the breaker doesn't trip or
        doesn't recover. The processor runs again in any case.
        """
        if self._stop is None or self._start is None:
            return None
        parked_before = self._program.status()["parked"]
        stopped_at = self._clock()
        self._stop()
        try:
            cause = self._wait_for("tripped")["reason"]
            tripped_at = self._clock()
            self._sleep(max(0.0, stopped_at + DOWN_AT_LEAST_S - tripped_at))
        finally:
            self._start()
        started_at = self._clock()
        parked = self._wait_for("running")["parked"] - parked_before
        return Outage(cause, parked, tripped_at - stopped_at, started_at - stopped_at, self._clock() - started_at)

    def replay(self) -> ParkedFlights:
        """Unblocks the card, and lets the parked flight be called again. Raises Unavailable after a time-out."""
        page = self._program.parked()
        reason = page["parked"][0]["error"].strip().splitlines()[-1] if page["parked"] else ""
        self._blocked.unlink(missing_ok=True)
        order = self._program.retry(filter={})
        job = self._until(lambda: self._program.job(order["job"]), lambda found: not found["pending"], "the retry")
        return ParkedFlights(page["count"], reason, job["done"], self._program.status()["parked"])

    def _wait_for(self, state: str) -> dict[str, Any]:
        return self._until(self._program.status, lambda found: found["state"] == state, f"billing isn't {state}, which")

    def _until(
        self, ask: Callable[[], dict[str, Any]], holds: Callable[[dict[str, Any]], bool], what: str
    ) -> dict[str, Any]:
        deadline = self._clock() + STEP_TIMEOUT_S
        while True:
            with suppress(Unavailable):  # somebody kills processes beside the demo
                if holds(found := ask()):
                    return found
            if self._clock() > deadline:
                raise Unavailable(f"{what} took more than {STEP_TIMEOUT_S:.0f} s", hint=SEE_STATUS)
            self._sleep(POLL_S)
