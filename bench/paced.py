"""Open-loop load: each put has its moment, whether or not earlier ones were answered. Some are followed by a query."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec

from bench.load import STALLED_AFTER_S, Connection
from bench.servers import DATASTORE
from bench.trips import Trip, get_request, put_request

ASKED_EVERY = 4  # puts: asking for each would be as much load as the puts are
CONNECTIONS = 24  # each has one request in flight; 24 in flight at 200 a second are 120 ms
PREFIX = f"/v1/{DATASTORE}"


@dataclass(frozen=True, slots=True)
class Put:
    """Moments are of the machine's monotonic clock, so other processes' moments can be set beside them.

    `indexed`: None where the index wasn't asked.
    """

    row_key: str
    sent: float
    acknowledged: float
    indexed: float | None


def put_paced(port: int, trips: Sequence[Trip], *, puts_per_s: float, index: str | None = None) -> list[Put]:
    """Puts every trip at its moment, and asks `index` for the entry of every fourth right after the answer.

    Raises AssertionError for an answer without the cell or the entry, TimeoutError when none comes any more.
    """
    calls = [
        _Calls(trip, put_request(trip, PREFIX), index if number % ASKED_EVERY == 0 else None)
        for number, trip in enumerate(trips)
    ]
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        connections = [Connection(port) for _ in range(CONNECTIONS)]
        for connection in connections:
            stack.enter_context(connection.socket)
            poll.register(connection.socket.fileno(), select.EPOLLIN)
        _drive(calls, connections, poll, puts_per_s)
    return [call.made for call in calls]


class _Calls:
    """The calls for one trip, one after the other on one connection."""

    def __init__(self, trip: Trip, request: bytes, index: str | None) -> None:
        self._trip = trip
        self._request = request
        self._index = index
        self._sent = self._acknowledged = 0.0
        self._indexed: float | None = None

    @property
    def made(self) -> Put:
        return Put(str(self._trip.row_key), self._sent, self._acknowledged, self._indexed)

    def begin(self, connection: Connection) -> None:
        self._sent = time.monotonic()
        connection.send(self._request)

    def receive(self, connection: Connection) -> bool:
        """Receives bytes, and returns whether they ended the last response."""
        answer = connection.receive()
        if answer is None:
            return False
        if not self._acknowledged:
            self._acknowledged = time.monotonic()
            assert answer.status == 201, f"{self._trip.row_key}: {answer}"
            if self._index is None:
                return True
            location = msgspec.json.decode(answer.body)["location"]
            driver = msgspec.json.decode(self._trip.json)["driver_uuid"]
            question = urlencode({"driver_uuid": driver, "after": location})
            connection.send(get_request(f"{PREFIX}/indexes/{self._index}/entries?{question}"))
            return False
        self._indexed = time.monotonic()
        entries = msgspec.json.decode(answer.body).get("entries", [])
        found = [entry["row_key"] for entry in entries]
        assert found == [str(self._trip.row_key)], f"entry of {self._trip.row_key} missing in {answer}"
        return True


def _drive(calls: Sequence[_Calls], connections: Sequence[Connection], poll: select.epoll, puts_per_s: float) -> None:
    by_number = {connection.socket.fileno(): connection for connection in connections}
    idle = deque(connections)
    waiting = deque(calls)
    in_flight: dict[Connection, _Calls] = {}
    due = time.monotonic() + 0.1
    while waiting or in_flight:
        wait_s = max(0.0, due - time.monotonic()) if waiting and idle else STALLED_AFTER_S
        events = poll.poll(wait_s)
        if not events and wait_s == STALLED_AFTER_S:
            raise TimeoutError(f"no answer for {STALLED_AFTER_S} s")
        for number, _ in events:
            connection = by_number[number]
            if in_flight[connection].receive(connection):
                del in_flight[connection]
                idle.append(connection)
        while waiting and idle and time.monotonic() >= due:
            connection = idle.popleft()
            in_flight[connection] = waiting.popleft()
            in_flight[connection].begin(connection)
            due += 1 / puts_per_s
