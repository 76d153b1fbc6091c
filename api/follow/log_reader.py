"""LogReader: pages of a shard's log, for anybody who follows it without Kafka. What a page says is in docs/http.md."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.batching import chunks
from schemaless.cell import StoredCell
from schemaless.location import GenerationStart, Location, generation_at, verify_location
from schemaless.storage import entity_table, shard_head
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

READ_CHUNK_CELLS = 100  # of a megabyte at most: bounds what is held before the page's own bound is noticed


class Since(msgspec.Struct, frozen=True):
    """A time in microseconds since the epoch: the first cell that is not older, or the head."""

    created_at: int


class AfterLocation(msgspec.Struct, frozen=True):
    """No generation: the present one."""

    generation: int | None
    added_id: int


class End(msgspec.Struct, frozen=True):
    """The head, as the node that answers shows it."""


Start = AfterLocation | Since | End
BEGINNING = AfterLocation(None, 0)


class PageRequest(msgspec.Struct, frozen=True):
    """What one page is asked for; no columns: all of them."""

    start: Start
    limit: int
    columns: tuple[str, ...] = ()


class ShardLogPage(msgspec.Struct, frozen=True):
    """Of what comes after `after`. `examined` is the last added_id looked at, whether or not its cell is in `cells`."""

    cells: Sequence[StoredCell]
    after: int
    examined: int
    head: int
    starts: Sequence[GenerationStart]

    def cut(self, count: int) -> ShardLogPage:
        """The page with its first `count` cells only: they are all that was examined, then."""
        if count == len(self.cells):
            return self
        examined = self.cells[count].added_id - 1
        return msgspec.structs.replace(self, cells=self.cells[:count], examined=examined)

    @property
    def next(self) -> Location:
        return Location(generation_at(self.examined, self.starts), self.examined)

    @property
    def position(self) -> Location:
        """As `next`, but in the generation of the cell that comes after it: where a follower stands."""
        return Location(generation_at(self.examined + 1, self.starts), self.examined)

    @property
    def pending(self) -> int:
        return self.head - self.examined


def read_page(
    datastore: Datastore, shard: int, wanted: PageRequest, examined_max: int, bytes_max: int
) -> Operation[ShardLogPage]:
    """A page as one node shows it. Raises LocationGone."""
    head, starts = yield from shard_head.history(datastore.name, shard)
    after = yield from _resolve(datastore, shard, wanted.start, starts, head.added_id)
    until = min(head.added_id, after + examined_max)
    cells: list[StoredCell] = []
    for limit in map(len, chunks(range(wanted.limit), count_max=READ_CHUNK_CELLS)):
        reached = cells[-1].added_id if cells else after
        if reached >= until or _stored_bytes(cells) >= bytes_max:
            break
        chunk = yield from entity_table.read_after(datastore, shard, reached, limit, wanted.columns, until)
        cells += chunk
        if len(chunk) < limit:
            return ShardLogPage(cells, after, until, head.added_id, starts)
    return ShardLogPage(cells, after, cells[-1].added_id if cells else after, head.added_id, starts)


def _resolve(
    datastore: Datastore, shard: int, start: Start, starts: Sequence[GenerationStart], head: int
) -> Operation[int]:
    if isinstance(start, End):
        return head
    if isinstance(start, AfterLocation):
        return verify_location(start.generation, start.added_id, starts, head)
    first = yield from entity_table.first_since(datastore, shard, start.created_at, head)
    return first - 1


def _stored_bytes(cells: Sequence[StoredCell]) -> int:
    return sum(len(cell.body) for cell in cells)
