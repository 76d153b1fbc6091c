"""The demo's incident: it waits for what billing shows, ends the outage in any case, and says what was parked."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemaless import Client
from schemaless.demo.loader import Flight
from schemaless.demo.programs import BLOCKED_FILE, DOWN_AT_LEAST_S, STEP_TIMEOUT_S, Incident
from schemaless.errors import Unavailable

JOB = "00000000000000ff"


class Billing:
    """Billing's part of the API, and its card processor. It trips four seconds after the processor has stopped."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.folder = folder
        self.down_since: float | None = None
        self.trips_after_s = 4.0
        self.parked = 1
        self.asked_while_blocked: bool | None = None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stop(self) -> None:
        self.down_since = self.now

    def start(self) -> None:
        self.down_since = None

    def respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/parked/retry"):
            self.asked_while_blocked = (self.folder / BLOCKED_FILE).exists()
            self.parked = 0
            return httpx.Response(202, json={"job": JOB})
        if request.url.path.endswith(f"/jobs/{JOB}"):
            return httpx.Response(200, json={"pending": 0, "done": 1, "failed": 0})
        if request.url.path.endswith("/parked"):
            return httpx.Response(200, json={"count": 1, "parked": [{"error": "Traceback\nPark: CARD BLOCKED\n"}]})
        tripped = self.down_since is not None and self.now - self.down_since > self.trips_after_s
        state = {"state": "tripped", "reason": "it is down"} if tripped else {"state": "running", "reason": None}
        return httpx.Response(200, json={**state, "parked": self.parked})


@pytest.fixture
def billing(tmp_path: Path) -> Billing:
    return Billing(tmp_path)


@pytest.fixture
def incident(billing: Billing):
    transport = httpx.MockTransport(billing.respond)
    with Client(["http://one"], datastore="flights", transport=transport) as client:
        yield Incident(client, billing.folder, billing.stop, billing.start, clock=billing.clock, sleep=billing.sleep)


def flight(carrier: str) -> Flight:
    base: dict[str, Any] = {"carrier": carrier}
    return Flight(uuid.uuid4(), base, {})


def test_the_first_flight_that_is_billed_is_blocked_before_it_is_loaded(incident: Incident, billing: Billing):
    """Flights of other carriers, and later ones, aren't."""
    flights = [flight("UA"), flight("HA"), flight("HA")]
    for given in incident.block_first(flights):
        if given is flights[1]:
            assert (billing.folder / BLOCKED_FILE).read_text().split() == [str(given.row_key)]
    assert (billing.folder / BLOCKED_FILE).read_text().split() == [str(flights[1].row_key)]


def test_the_outage_lasts_until_the_breaker_has_tripped_and_ends_when_billing_runs(
    incident: Incident, billing: Billing
):
    """What was parked before it doesn't count."""
    outage = incident.outage()
    assert outage is not None
    assert (outage.cause, outage.parked) == ("it is down", 0)
    assert outage.tripped_after_s > billing.trips_after_s
    assert outage.down_s >= DOWN_AT_LEAST_S
    assert billing.down_since is None


def test_a_breaker_that_never_trips_is_told_and_the_processor_runs_again(incident: Incident, billing: Billing):
    """Waiting has a bound."""
    billing.trips_after_s = 10 * STEP_TIMEOUT_S
    with pytest.raises(Unavailable, match="billing isn't tripped"):
        incident.outage()
    assert billing.down_since is None


def test_an_operator_s_stack_has_no_outage(billing: Billing, client_without_control: Callable[[], Incident]):
    """Its processor isn't ours to stop."""
    assert client_without_control().outage() is None


@pytest.fixture
def client_without_control(billing: Billing):
    with Client(["http://one"], datastore="flights", transport=httpx.MockTransport(billing.respond)) as client:
        yield lambda: Incident(client, billing.folder, None, None)


def test_the_retry_comes_after_the_card_works_again(incident: Incident, billing: Billing):
    """What was parked is told with its reason."""
    (billing.folder / BLOCKED_FILE).write_text("a trip\n")
    replay = incident.replay()
    assert (replay.parked, replay.reason, replay.done, replay.left) == (1, "Park: CARD BLOCKED", 1, 0)
    assert billing.asked_while_blocked is False
