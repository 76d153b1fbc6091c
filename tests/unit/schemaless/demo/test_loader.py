"""The loader against answers from memory: what counts as stored, what is put again, what ends it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from schemaless import AsyncClient, Limits
from schemaless.cell import PutStatus
from schemaless.demo.loader import FLIGHTS, FlightCount, LoadCount, Loader, parse_flight, row_key_of_flight
from schemaless.errors import Conflict

ROW = {
    "year": "2013", "month": "1", "day": "1", "dep_time": "517", "sched_dep_time": "515", "dep_delay": "2",
    "arr_time": "830", "sched_arr_time": "819", "arr_delay": "11", "carrier": "UA", "flight": "1545",
    "tailnum": "N14228", "origin": "EWR", "dest": "IAH", "air_time": "227", "distance": "1400", "hour": "5",
    "minute": "15", "time_hour": "2013-01-01T10:00:00Z",
}  # fmt: skip
CANCELLED = ROW | {"flight": "7", "tailnum": "", "dep_time": "NA", "arr_time": "", "carrier": "HA"}

Judge = Callable[[dict[str, Any]], dict[str, Any]]


async def no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


def flights(count: int) -> list:
    return [parse_flight(ROW | {"flight": str(number)}) for number in range(count)]


def load(count: int, judge: Judge) -> tuple[LoadCount, list[tuple[str, str]]]:
    """What was counted, and every cell that arrived, in order."""
    arrived: list[tuple[str, str]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        cells = msgspec.msgpack.decode(request.content)["cells"]
        arrived.extend((cell["row_key"], cell["column_name"]) for cell in cells)
        return httpx.Response(200, json={"results": [judge(cell) for cell in cells]})

    async def run() -> LoadCount:
        transport = httpx.MockTransport(respond)
        async with AsyncClient(["http://one"], datastore="m", transport=transport, limits=Limits()) as client:
            return await Loader(client, lambda count: None, batch_flights=3, sleep=no_sleep).load(flights(count))

    return asyncio.run(run()), arrived


def stored(cell: dict[str, Any]) -> dict[str, Any]:
    return {"status": "stored", "copies": 2}


def test_a_flight_is_two_cells_of_one_row():
    """Schedule and route in BASE, departure and arrival in STATUS; numbers are numbers and NA is null."""
    flight, cancelled = parse_flight(ROW), parse_flight(CANCELLED)
    assert flight.row_key == row_key_of_flight("2013-01-01T10:00:00Z", "UA", "1545")
    assert flight.row_key.version == 5
    assert (flight.base["tailnum"], flight.base["distance"], flight.base["flight"]) == ("N14228", 1400, 1545)
    assert flight.status == {"dep_time": 517, "dep_delay": 2, "arr_time": 830, "arr_delay": 11, "air_time": 227}
    assert (cancelled.base["tailnum"], cancelled.status["dep_time"], cancelled.status["arr_time"]) == (None, None, None)
    count = FlightCount()
    for one in (flight, cancelled):
        count.take(one)
    assert (count.flights, count.with_tailnum, count.billed) == (2, 1, 1)
    assert FLIGHTS == 336_776


def test_every_status_comes_after_its_base():
    """Over several batches under way a flight's STATUS is put only after its BASE was stored."""
    count, arrived = load(20, stored)
    place = {key: position for position, key in enumerate(arrived)}
    assert count.by_status == Counter({PutStatus.STORED: 40})
    assert all(place[row, "BASE"] < place[row, "STATUS"] for row, _ in arrived)


def test_what_is_buffered_or_refused_for_now_is_put_until_it_is_stored():
    """A 202 and a 503 are no end; each cell is counted once, by the answer that ended it."""
    tries: Counter[tuple[str, str]] = Counter()

    def judge(cell: dict[str, Any]) -> dict[str, Any]:
        tries[cell["row_key"], cell["column_name"]] += 1
        number = tries[cell["row_key"], cell["column_name"]]
        if number == 1:
            return {"status": "buffered", "copies": 1}
        return {"status": "already_stored", "copies": 2} if number == 3 else {"status": "buffered", "copies": 1}

    count, _ = load(4, judge)
    assert count.by_status == Counter({PutStatus.ALREADY_STORED: 8})
    assert count.tried_again == 16
    assert set(tries.values()) == {3}


def test_a_status_waits_for_a_base_that_is_only_buffered():
    """As long as a BASE isn't readable at home its STATUS is not put."""
    seen: Counter[str] = Counter()

    def judge(cell: dict[str, Any]) -> dict[str, Any]:
        seen[cell["column_name"]] += 1
        if cell["column_name"] == "STATUS":
            assert seen["BASE"] == 5
        return {"status": "buffered", "copies": 1} if seen["BASE"] < 5 else stored(cell)

    count, arrived = load(1, judge)
    assert [column for _, column in arrived] == ["BASE"] * 5 + ["STATUS"]
    assert count.acknowledged == 2


def test_a_conflict_ends_the_load():
    """Putting again can't mend it, so it is told at once."""
    conflict = {"status": "conflict", "problem": {"status": 409, "detail": "another body"}}
    with pytest.raises(Conflict, match="another body"):
        load(2, lambda cell: conflict)
