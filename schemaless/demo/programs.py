"""The consumers of the flights' log: two indexes, two trigger programs, and the card processor that billing calls.

The stack supervises all of them, and they continue after `down` and `up`. Their logs of calls are in the stack's
folder, so the report's counts survive every kill.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from schemaless.client.client import Client, Program
from schemaless.demo.loader import BILLED_CARRIER, Flight
from schemaless.demo.progress import SEE_STATUS
from schemaless.error_text import error_summary
from schemaless.errors import Conflict, NotFound, Unavailable
from schemaless.names import index_consumer, trigger_consumer
from schemaless.stack import supervision
from schemaless.stack.endpoints import refresh_endpoints
from schemaless.stack.plan import StackPlan, free_ports
from schemaless.stack.supervision import ProcessRole, checkout_folder, service_environment

INDEX_FILE = "examples/flights_by_tailnum.yaml"
INDEX = index_consumer("flights_by_tailnum")
ADDED_INDEX_FILE = "examples/flights_by_dest.yaml"
ADDED_INDEX_NAME = "flights_by_dest"
"""The index that is made while the flights are loaded. Later its definition is changed to that of the next file."""
CHANGED_INDEX_FILE = "examples/flights_by_dest_and_carrier.yaml"
CHANGED_INDEX_KEEP = "10m"
CENSUS = trigger_consumer("census")
BILLING = trigger_consumer("billing")
CARD_PROCESSOR = "card-processor"
CHARGES = "charges"
"""The folder of the card processor, in the one of all calls."""
EFFECTS_COLUMN = "billing.once"
INDEX_TIMEOUT_S = 120.0
INDEX_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class CallLog:
    """`census` counts calls by the location of the cell, `charges` successful ones by row key. `bills` are the cells
    of billing that were acknowledged, as (row key, ref_key).
    """

    census: Counter[str]
    charges: Counter[str]
    bills: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class IndexChange:
    """The number of the version of the added index that answers. `seconds` is None where it was changed before."""

    number: int
    seconds: float | None = None
    kept_until: str | None = None


def consumers_of(added_index: int) -> dict[str, str]:
    """Returns the labels of the demo's consumers. `added_index` is the number of that index's version."""
    added = index_consumer(ADDED_INDEX_NAME, added_index)
    return {INDEX: "index", added: "added index", CENSUS: "census", BILLING: "billing"}


def define_index(client: Client, file: str = INDEX_FILE) -> None:
    """Creates an index. Does nothing if it exists."""
    document = _definition(file)
    client.index(document["name"]).define(document)


def add_index(client: Client) -> None:
    """Creates the added index, unless it exists, perhaps changed already."""
    with suppress(Conflict):
        define_index(client, ADDED_INDEX_FILE)


def number_of_added_index(client: Client) -> int:
    """Returns the number of the version that answers, and 1 before there is one."""
    try:
        number: int = client.index(ADDED_INDEX_NAME).status()["number"]
    except NotFound:
        return 1
    return number


def change_index(client: Client) -> IndexChange:
    """Changes the definition of the added index, and waits until the new version answers. Does nothing a second time.

    Raises Unavailable when it doesn't answer within INDEX_TIMEOUT_S.
    """
    index, began = client.index(ADDED_INDEX_NAME), time.monotonic()
    before = number_of_added_index(client)
    index.define(_definition(CHANGED_INDEX_FILE), change=True, keep=CHANGED_INDEX_KEEP)
    while (changed := index.status())["number"] == before:
        states = [version["state"] for version in changed["versions"] if version["role"] == "change"]
        if not states:
            return IndexChange(before)
        if time.monotonic() - began > INDEX_TIMEOUT_S:
            raise Unavailable(
                f"the change of {ADDED_INDEX_NAME} was still {states[0]} after {INDEX_TIMEOUT_S:.0f} s", hint=SEE_STATUS
            )
        time.sleep(INDEX_POLL_S)
    kept_until = next((version["kept_until"] for version in changed["versions"] if version["role"] == "kept"), None)
    return IndexChange(changed["number"], time.monotonic() - began, kept_until)


def _definition(file: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((checkout_folder() / file).read_text())
    return document


def wait_for_index(client: Client, name: str) -> None:
    """Waits until an index answers queries. Raises Unavailable when it isn't active within INDEX_TIMEOUT_S."""
    deadline = time.monotonic() + INDEX_TIMEOUT_S
    while (state := client.document(f"/indexes/{name}")["state"]) != "active":
        if time.monotonic() > deadline:
            raise Unavailable(f"index {name} was still {state} after {INDEX_TIMEOUT_S:.0f} s", hint=SEE_STATUS)
        time.sleep(INDEX_POLL_S)


def start_programs(plan: StackPlan, datastore: str) -> None:
    """Adds the missing programs to the embedded stack's supervisor and to endpoints.json."""
    folder = calls_folder(plan.home)
    (port,) = free_ports(1)
    billing = {
        "BILLING_DIR": str(folder / "bills"),
        "BILLING_CARRIER": BILLED_CARRIER,
        "CARD_PROCESSOR": f"http://127.0.0.1:{port}",
        "SCHEMALESS_DATASTORE": datastore,
    }
    processor = ["examples.card_processor", "--port", str(port), "--charges", str(folder / CHARGES)]
    programs: dict[str, tuple[list[str], dict[str, str]]] = {
        CARD_PROCESSOR: (processor, {}),
        f"{datastore}-census": (
            ["consumers", "examples.census", "--datastore", datastore],
            {"CENSUS_DIR": str(folder / "census")},
        ),
        f"{datastore}-billing": (["consumers", "examples.billing", "--datastore", datastore], billing),
    }
    known = {process.name for process in supervision.processes(plan.home)}
    for name, (arguments, env) in programs.items():
        if name not in known:
            argv = [sys.executable, "-m", *arguments]
            supervision.add_program(plan.home, name, ProcessRole.CONSUMERS, argv, service_environment(plan) | env)
    refresh_endpoints(plan.home)


def count_effects(client: Client, calls: CallLog) -> int:
    """Returns the number of cells that billing wrote about its charges: intents, and what became of them."""
    rows = {row_key for row_key, _ in calls.bills}
    return sum(len(client.get_versions(row_key, EFFECTS_COLUMN, limit=100).cells) for row_key in rows)


def calls_folder(home: Path) -> Path:
    """Returns the folder where the programs of a stack with this home log their calls."""
    return home / "demo"


def read_calls(folder: Path) -> CallLog:
    """Reads the programs' logs. The last line of a killed process may be torn, and is skipped."""

    def lines(name: str) -> Iterator[list[str]]:
        for path in sorted((folder / name).glob("*.tsv")):
            with path.open() as file:
                yield from (line.rstrip("\n").split("\t") for line in file if line.endswith("\n"))

    census = Counter(line[2] for line in lines("census"))
    charges = Counter(line[0] for line in lines(CHARGES))
    bills = frozenset((line[0], line[1]) for line in lines("bills"))
    return CallLog(census, charges, bills)


# Incident: what goes wrong for billing on purpose, while a new datastore is loaded, and how it ends.
#
# One flight's card is blocked, so billing parks it. And the card processor is down for a while, so billing's breaker
# trips. The breaker recovers by itself. An operator's retry calls the parked flight again, when its card works.

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
        reason = error_summary(page["parked"][0]["error"]) if page["parked"] else ""
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
