"""LogTail: the logs of some shards as one run of cells without end. Keeps I3 on the reader's side: proves that nothing
is missing and nothing comes twice.

It asks by long polls and not by streams: one request waits for all shards, a request that failed is sent to the next
host at the same positions like any other, and nothing has to be found out about a connection that went quiet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from schemaless.client.answers import FoundCell, LogPage
from schemaless.client.call import MSGPACK, Call, Flow
from schemaless.client.problems import error_of, error_of_problem
from schemaless.client.requests import LogLocation, ReadFrom, encode, location_member
from schemaless.errors import Corrupt, Invalid, LocationGone, SchemalessError
from schemaless.location import Location, is_superseded, parse_location

SHARDS_MAX = 4096
LAGGING_PAUSE_S = 0.5
Shards = int | Iterable[int] | Mapping[int, LogLocation] | None
"""One shard, several, several each with its own location, or None: all of the datastore."""


class TailOptions(TypedDict, total=False):
    """`columns`: only cells of these. `limit`: of one shard and request. `wait_s`: of one request, at most 30."""

    columns: Sequence[str]
    limit: int
    wait_s: float
    read_from: ReadFrom


class LogTail:
    """`locations` is where each shard stands after the cells that were taken: a new tail goes on from there."""

    def __init__(self, base: str, shards: Shards, location: LogLocation, options: TailOptions) -> None:
        self._base = base
        self._all = shards is None
        self._start = location
        self._options = options
        self._read_to: dict[int, LogLocation] = _starts(shards, location)
        self._served: set[int] = set()
        self._ready: deque[FoundCell] = deque()
        self._failure: SchemalessError | None = None
        self._delay_s = 0.0
        self.locations = dict(self._read_to)

    def take(self) -> FoundCell | None:
        """The next cell, if one is at hand."""
        if not self._ready:
            return None
        cell = self._ready.popleft()
        self.locations[cell.shard] = Location(cell.generation, cell.added_id)
        if not self._ready:
            self.locations = dict(self._read_to)
        return cell

    def fetch(self) -> Flow[None]:
        """One request; it brings cells, or none within the wait. What came before an error can be taken first.

        Raises LocationGone for a location that can't be read from, Corrupt for a log that can't be, Unavailable.
        """
        if self._all and not self._read_to:
            self._read_to = yield from self._all_shards()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        pages = yield from self._ask()
        self._delay_s = 0.0
        for shard, page in pages.items():
            self._receive(int(shard), page)
        if not self._ready:
            self.locations = dict(self._read_to)

    def _all_shards(self) -> Flow[dict[int, LogLocation]]:
        answer = yield Call("GET", f"{self._base}/shards")
        if not answer.ok:
            raise error_of(answer)
        return _starts([entry.shard for entry in answer.read(_Listed).shards], self._start)

    def _ask(self) -> Flow[dict[str, dict[str, Any]]]:
        options = self._options
        wait_s = options.get("wait_s", 5.0)
        wanted = {
            "locations": {str(shard): location_member(location) for shard, location in self._read_to.items()},
            "columns": list(options.get("columns", ())),
            "limit": options.get("limit", 100),
            "wait": wait_s,
        }
        wish = options.get("read_from")
        answer = yield Call(
            "POST",
            f"{self._base}/shards/cells",
            {} if wish is None else {"read_from": wish},
            {"content-type": MSGPACK},
            encode(wanted),
            delay_s=self._delay_s,
            wait_s=wait_s,
        )
        if not answer.ok:
            raise error_of(answer)
        return answer.read(_Pages).shards

    def _receive(self, shard: int, shown: Mapping[str, Any]) -> None:
        problem = shown.get("problem")
        try:
            if problem is not None:
                raise error_of_problem(problem)
            page = msgspec.convert(shown, LogPage)
            check_dense(shard, self._read_to[shard], page, some=bool(self._options.get("columns")))
        except SchemalessError as error:
            if not self._passes(shard, error):
                error.args = (f"shard {shard}: {error}",)
                self._failure = error
            return
        self._ready.extend(page.cells)
        self._read_to[shard] = page.location
        self._served.add(shard)

    def _passes(self, shard: int, error: SchemalessError) -> bool:
        """Whether waiting helps: a server is away, or a host reads from a node that isn't as far as we are."""
        position = self._read_to[shard]
        if isinstance(error, LocationGone) and isinstance(position, Location) and shard in self._served:
            self._delay_s = LAGGING_PAUSE_S
            return not is_superseded(position, error)
        return error.retryable


def check_dense(shard: int, start: LogLocation, page: LogPage, *, some: bool) -> None:
    """Raises Corrupt unless the page goes on from where the last one ended. `some`: only cells of a few columns."""
    added_ids = [cell.added_id for cell in page.cells]
    last = _added_id(start, added_ids, page)
    for added_id in added_ids:
        if added_id <= last:
            raise Corrupt(f"after added_id {last} came {added_id}: a cell that was there before")
        if not some and added_id != last + 1:
            raise Corrupt(f"after added_id {last} came {added_id}: the cells between them are missing")
        last = added_id
    if page.next.added_id < last or (not some and page.next.added_id != last):
        raise Corrupt(f"the log goes on after added_id {page.next.added_id}, but ended at {last}")
    if any(cell.shard != shard for cell in page.cells):
        raise Corrupt("a cell of another shard came")


def _added_id(start: LogLocation, added_ids: Sequence[int], page: LogPage) -> int:
    """What comes first comes after it. A time or the end is known by what came."""
    if isinstance(start, Location):
        return start.added_id
    if start is None or isinstance(start, int):
        return start or 0
    if isinstance(start, str) and start != "end":
        return parse_location(start)[1]
    return added_ids[0] - 1 if added_ids else page.next.added_id


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
