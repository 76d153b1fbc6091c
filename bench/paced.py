"""Open-loop load: each put has its moment, whether or not earlier ones were answered; after some an index is asked."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from bench.servers import DATASTORE
from bench.trips import COLUMN, Trip

ASKED_EVERY = 4  # puts: asking for each would be as much load as the puts are
THREADS = 24  # each has one put under way; 24 in flight at 200 a second are 120 ms
TIMEOUT_S = 15.0


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
    """Puts every trip at its moment, and asks `index` for the entry of every fourth right after the answer."""
    begin = time.monotonic() + 0.1

    def work(thread: int) -> list[Put]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        done = []
        for number in range(thread, len(trips), THREADS):
            time.sleep(max(0.0, begin + number / puts_per_s - time.monotonic()))
            done.append(_put_and_ask(connection, trips[number], index if number % ASKED_EVERY == 0 else None))
        connection.close()
        return done

    with ThreadPoolExecutor(THREADS) as pool:
        return [put for done in pool.map(work, range(THREADS)) for put in done]


def _put_and_ask(connection: http.client.HTTPConnection, trip: Trip, index: str | None) -> Put:
    sent = time.monotonic()
    path = f"/v1/{DATASTORE}/cells/{trip.row_key}/{COLUMN}/{trip.ref_key}"
    answer = _call(connection, "PUT", path, trip.json, 201)
    acknowledged = time.monotonic()
    if index is None:
        return Put(str(trip.row_key), sent, acknowledged, None)
    _ask(connection, trip, index, answer["location"])
    return Put(str(trip.row_key), sent, acknowledged, time.monotonic())


def _ask(connection: http.client.HTTPConnection, trip: Trip, index: str, location: str) -> None:
    """Raises AssertionError for an answer without the entry."""
    question = urlencode({"driver_uuid": json.loads(trip.json)["driver_uuid"], "after": location})
    found = _call(connection, "GET", f"/v1/{DATASTORE}/indexes/{index}/entries?{question}", None, 200)
    assert [entry["row_key"] for entry in found["entries"]] == [str(trip.row_key)], f"entry missing in {found}"


def _call(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, status: int
) -> dict[str, Any]:
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    assert response.status == status, f"{method} {path}: {response.status} {text!r}"
    return json.loads(text)  # type: ignore[no-any-return]
