"""LogTail: the logs of some shards as one endless run of cells. Keeps I3 on the reader's side: it proves that no cell
is missing and none comes twice, by the rule of schemaless/shard_cursor.py.

It uses long polls and not streams. One request waits for all shards. A request that failed is sent to the next host at
the same positions like any other, and no connection has to be watched for silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from schemaless.client.answers import LogPage, position_after
from schemaless.client.exchange import MSGPACK, ClientRequest, Flow, error_of_problem
from schemaless.client.requests import LogLocation, ReadFrom, encode, location_member
from schemaless.errors import Corrupt, Invalid, LocationGone, SchemalessError
from schemaless.found_cell import FoundCell
from schemaless.location import Location, is_lag
from schemaless.position import Position, parse_position
from schemaless.shapes import shape
from schemaless.shard_cursor import verify_next

SHARDS_MAX = 4096
LAGGING_PAUSE_S = 0.5
Shards = int | Iterable[int] | Mapping[int, LogLocation] | None
"""One shard, several shards, several shards each with its own location, or None for all of the datastore."""


class TailOptions(TypedDict, total=False):
    """Options of a tail. `columns` selects cells, `limit` is per shard and request, `wait_s` (at most 30)."""

    columns: Sequence[str]
    limit: int
    wait_s: float
    read_from: ReadFrom


class LogTail:
    """A tail of some shards. `locations` are those after the cells that were taken: a new tail continues from there.

    They are positions with digests. So a log that has another cell there is an error, and nothing of it is returned
    (I16).
    """

    def __init__(self, base: str, shards: Shards, location: LogLocation, options: TailOptions) -> None:
        self._base = base
        self._all = shards is None
        self._start = location
        self._options = options
        self._read_to: dict[int, LogLocation] = _starts(shards, location)
        self._served: set[int] = set()
        self._proven = False
        self._ready: deque[FoundCell] = deque()
        self._failure: SchemalessError | None = None
        self._delay_s = 0.0
        self.locations = dict(self._read_to)

    def take(self) -> FoundCell | None:
        """Returns the next cell that was fetched, or None."""
        if not self._ready:
            return None
        cell = self._ready.popleft()
        self.locations[cell.shard] = position_after(cell)
        if not self._ready:
            self.locations = dict(self._read_to)
        return cell

    def fetch(self) -> Flow[None]:
        """Sends one request, which brings cells, or none within the wait. Cells before an error can be taken first.

        Raises LocationGone for a location that can't be read after, Corrupt for a hole in the log, Unavailable.
        """
        if self._all and not self._read_to:
            response = yield ClientRequest("GET", f"{self._base}/shards")
            listed = response.good().read(_Listed).shards
            self._read_to = _starts([entry.shard for entry in listed], self._start)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        options = self._options
        # A shard that waits at its head is not compared before its next cell comes. So the first request doesn't wait.
        wait_s = options.get("wait_s", 5.0) if self._proven else 0.0
        wanted = {
            "locations": {str(shard): location_member(location) for shard, location in self._read_to.items()},
            "columns": list(options.get("columns", ())),
            "limit": options.get("limit", 100),
            "wait": wait_s,
        }
        read_from = options.get("read_from")
        response = yield ClientRequest(
            "POST",
            f"{self._base}/shards/cells",
            {} if read_from is None else {"read_from": read_from},
            {"content-type": MSGPACK},
            encode(wanted),
            delay_s=self._delay_s,
            wait_s=wait_s,
        )
        pages = response.good().read(_Pages).shards
        self._proven = True
        self._delay_s = 0.0
        for shard, page in pages.items():
            self._receive(int(shard), page)
        if not self._ready:
            self.locations = dict(self._read_to)

    def _receive(self, shard: int, shown: Mapping[str, Any]) -> None:
        problem = shown.get("problem")
        try:
            if problem is not None:
                raise error_of_problem(problem)
            page = msgspec.convert({**shown, "shard": shard}, shape(LogPage))
            check_dense(shard, self._read_to[shard], page, some=bool(self._options.get("columns")))
        except SchemalessError as error:
            if not self._may_pass(shard, error):
                error.args = (f"shard {shard}: {error}",)
                self._failure = error
            return
        self._ready.extend(page.cells)
        self._read_to[shard] = page.position
        self._served.add(shard)

    def _may_pass(self, shard: int, error: SchemalessError) -> bool:
        """True if waiting helps: a server is unreachable, or a host reads from a node that is behind this tail."""
        position = self._read_to[shard]
        if isinstance(error, LocationGone) and isinstance(position, Position) and shard in self._served:
            self._delay_s = LAGGING_PAUSE_S
            return is_lag(position.location, error)
        return error.retryable


def check_dense(shard: int, start: LogLocation, page: LogPage, *, some: bool) -> None:
    """Raises Corrupt unless the page continues where the last one ended. `some`: the page has only some columns."""
    if any(cell.shard != shard for cell in page.cells):
        raise Corrupt("a cell of another shard came")
    last = verify_next(_location(start, page), page.cells, are_all=not some)
    ends_at = page.location
    if ends_at < last or (not some and ends_at.added_id != last.added_id):
        raise Corrupt(f"the log continues after {ends_at}, but its last cell was {last}")


def _location(start: LogLocation, page: LogPage) -> Location:
    """Returns the location after which a page was asked for. Generation 0 is any."""
    if isinstance(start, Location | Position):
        return Location(start.generation, start.added_id)
    if start is None or isinstance(start, int):
        return Location(0, start or 0)
    if isinstance(start, str) and start != "end":
        generation, added_id, _ = parse_position(start)
        return Location(generation or 0, added_id)
    first = page.cells[0].added_id - 1 if page.cells else page.next.added_id  # a time, or the end: the page says where
    return Location(0, first)


def _starts(shards: Shards, location: LogLocation) -> dict[int, LogLocation]:
    if isinstance(shards, Mapping):
        starts = dict(shards)
    else:
        starts = dict.fromkeys([shards] if isinstance(shards, int) else shards or (), location)
    if len(starts) > SHARDS_MAX:
        raise Invalid("shards", f"one tail follows at most {SHARDS_MAX} shards: name some of them")
    if not starts and shards is not None:
        raise Invalid("shards", "names no shard")
    return starts


class _ListedShard(msgspec.Struct):
    shard: int


class _Listed(msgspec.Struct):
    shards: list[_ListedShard]


class _Pages(msgspec.Struct):
    shards: dict[str, dict[str, Any]]
