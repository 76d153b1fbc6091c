"""EntryReader: the pages of all nodes that a query of an index needs, and with `after` such that include that put.

every node shows that the index has reached the put    the pages are the answer
it hasn't, and the cells that it lacks are few         they are evaluated with the query (the overlay)
they are many, or can't be evaluated                   the query waits for the index, as long as it may
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from api.http.budget import Steps
from api.index.search import (
    DAMAGED_MAX,
    Behind,
    IndexQuery,
    ManyDamaged,
    MinionsDiffer,
    NodeAnswer,
    find_entries,
    places_by_cluster,
    unreadable_view,
)
from api.read.reader import Reader, Served, said_by
from schemaless.cell import ColumnName, RowKey, StoredCell
from schemaless.codec import Body, decode_packed, inflate_body
from schemaless.errors import Corrupt, LocationGone, SchemalessError, StorageUnavailable, Unavailable
from schemaless.index.definition import IndexDefinition
from schemaless.index.entry import entries_for
from schemaless.index.values import Value
from schemaless.location import Location, ShardLocation, is_lag, verify_location
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import checkpoint_table, entity_table, shard_head, shard_log
from schemaless.storage.index_definition_table import DefinedIndex, RunState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_select import (
    ENTRY_BYTES,
    PAGE_BYTES_MAX,
    NodePage,
    Operator,
    Selection,
    Term,
    cursor_key,
    order_key,
)
from schemaless.storage.index_table import FoundEntry
from schemaless.storage.operation import Operation
from schemaless.storage.shard_log import Changes
from schemaless.topology import Datastore, Role

# CheckpointWaiter: queries that wait until an index has reached a put's location share their polls.
#
# Each poll of an index asks a node one small question, however many queries wait. The answer only says when to run the
# query again. The query itself proves, on the node that answers it, that it includes the put.

PAUSE_S = 0.005
PAUSE_MAX_S = 0.05
PAUSE_OF_WAIT = 0.1  # the pause is a tenth of the time that the youngest query has waited


class CheckpointsAt(msgspec.Struct, frozen=True):
    """Where the checkpoints of one consumer are read."""

    cluster: str
    read_from: Role | None
    datastore: str
    consumer: str


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    wanted: ShardLocation
    done: asyncio.Future[None]
    since: float
    has_seen: bool


@dataclass(eq=False)
class CheckpointWaiter:
    """Belongs to one event loop. `pause` waits between polls."""

    reader: Reader
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    _waiting: dict[CheckpointsAt, set[_Waiting]] = field(init=False, default_factory=dict)
    _polling: dict[CheckpointsAt, asyncio.Task[None]] = field(init=False, default_factory=dict)

    async def reached(self, place: CheckpointsAt, wanted: ShardLocation, *, has_seen: bool = False) -> None:
        """Returns when a node has shown a checkpoint at or after `wanted`, or none after one was seen.

        `has_seen`: whether the query has seen one, before it waited. Raises StorageUnavailable.
        """
        me = _Waiting(wanted, asyncio.get_running_loop().create_future(), self.clock(), has_seen)
        waiting = self._waiting.setdefault(place, set())
        waiting.add(me)
        if place not in self._polling:
            self._polling[place] = asyncio.create_task(self._poll(place))
        try:
            await me.done
        finally:
            waiting.discard(me)

    async def _poll(self, place: CheckpointsAt) -> None:
        """Polls until nobody waits, or until the error of a poll has gone to everybody who does."""
        waiting = self._waiting[place]
        seen = set[int]()
        try:
            while waiting:
                youngest = max(one.since for one in waiting)
                await self.pause(min(PAUSE_MAX_S, max(PAUSE_S, (self.clock() - youngest) * PAUSE_OF_WAIT)))
                shards = sorted({one.wanted.shard for one in waiting})
                if not shards:
                    break
                checkpoints, _ = await self.reader.read(
                    place.cluster,
                    checkpoint_table.of_consumer,
                    place.datastore,
                    place.consumer,
                    shards,
                    read_from=place.read_from,
                )
                reached = {checkpoint.shard: checkpoint.location for checkpoint in checkpoints}
                for one in waiting:
                    location = reached.get(one.wanted.shard)
                    # One that is there no more went with its index. The query finds that out.
                    was_there = one.has_seen or one.wanted.shard in seen
                    is_due = was_there if location is None else location >= one.wanted.location
                    if is_due and not one.done.done():
                        one.done.set_result(None)
                seen.update(reached)
        except SchemalessError as error:
            for one in waiting:
                if not one.done.done():
                    one.done.set_exception(error)
        finally:
            del self._polling[place], self._waiting[place]


# Overlay: what the cells of one shard that an index has not reached yet add to a query, so that it sees a put at once.
#
# The order of the reads makes it right. The node that answers shows the index's checkpoint first. Then the shard's
# master shows its head, the rows of the cells in between, and the newest cells of these rows as of that head. The page
# of the node is read last, without these rows: the index may have written any of them meanwhile.

CELLS_MAX = 1000
BYTES_MAX = 4 << 20
"""Of the bodies that one query reads, as they are stored and as they are decoded."""

ENTRIES_MAX = 10_000
"""Elements that one query evaluates: some tens of milliseconds."""

EXCLUDED_MAX = 10_000
"""Rows times values of the shard field, each of which is a row key in the statement."""

AT_ONCE_MAX = 16
"""Queries of a process that read an overlay at the same time."""

_ENTRY_WORK_BYTES = 64  # evaluating an element takes about as long as decoding so many bytes


Cells = Mapping[tuple[RowKey, ColumnName], StoredCell | None]
"""The newest cells of columns, as a node has them."""


class Unevaluated(Unavailable):
    """The cells that the index lacks can't be evaluated with the query, so it waits for the index."""


class Overlay(msgspec.Struct, frozen=True):
    """`page` has the entries of the rows as of the shard's head, as far as the query asks for them.

    `cells` counts what the index lacked. `newest` has the source cells of the rows on the page. `unreadable` has cells
    that can't be decoded, as an answer names them. Their rows are in `row_keys` and not on the page.
    """

    cells: int
    row_keys: list[RowKey]
    page: NodePage
    newest: Cells
    unreadable: Mapping[tuple[RowKey, ColumnName], dict[str, Any]] = {}

    def with_newest(self, cells: Cells) -> Cells:
        """Returns cells that another node read, each at least as new as the one that this overlay was made of."""
        newer = {}
        for key, cell in cells.items():
            known = self.newest.get(key)
            newer[key] = known if known is not None and (cell is None or cell.ref_key < known.ref_key) else cell
        return newer


class Overlays:
    """Reads overlays. Belongs to one event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._under_way = 0

    async def read(
        self,
        datastore: Datastore,
        definition: IndexDefinition,
        query: IndexQuery,
        after: ShardLocation,
        reached: tuple[Location, int],
        read_from: Role | None,
    ) -> tuple[Overlay, Served]:
        """Returns what lies between the index's checkpoint and the head of the shard of `after`.

        `reached` is the lowest checkpoint of the nodes that answer, and the highest added_id that any of them has
        reached. Raises Unevaluated, StorageUnavailable, or LocationGone for a location that is superseded.
        """
        if self._under_way >= AT_ONCE_MAX:
            raise Unevaluated(f"{AT_ONCE_MAX} queries evaluate such cells already")
        self._under_way += 1
        try:
            (changes, cells), served = await self._reader.read(
                datastore.home(after.shard),
                changed_rows,
                datastore,
                definition,
                after,
                reached,
                read_from=Role.MASTER if read_from is Role.MASTER else None,  # a minion only if the master is away
            )
            if len(changes.row_keys) * len(query.places) > EXCLUDED_MAX:
                raise Unevaluated(f"{len(changes.row_keys)} rows changed, with {len(query.places)} values to look for")
            entries, unreadable = await _entries(definition, cells)
            page = page_of(definition, [value for _, value in query.places], query.selection, entries)
            shown = {found.row_key for found in page.entries}
            newest = {(cell.row_key, cell.column_name): cell for cell in cells if cell.row_key in shown}
            lacked = changes.head.added_id - reached[0].added_id
            return Overlay(lacked, list(changes.row_keys), page, newest, unreadable), served
        finally:
            self._under_way -= 1


def changed_rows(
    datastore: Datastore, definition: IndexDefinition, after: ShardLocation, reached: tuple[Location, int]
) -> Operation[tuple[Changes, list[StoredCell]]]:
    """Returns the rows that the index lacks cells of, and their newest source cells as of the head, of one node."""
    changes = yield from shard_log.changes_after(
        datastore, after.shard, reached[0].added_id, definition.columns, CELLS_MAX
    )
    verify_evaluable(changes, after.location, reached)
    if not changes.row_keys:
        return changes, []
    rows = {after.shard: (changes.head.added_id, changes.row_keys)}
    newest = yield from entity_table.newest_until(datastore, rows, definition.columns, BYTES_MAX)
    if newest.unread or sum(len(cell.body) for cell in newest.cells) > BYTES_MAX:
        raise Unevaluated(f"{len(changes.row_keys)} rows changed, with more cells than are evaluated")
    return changes, newest.cells


def verify_evaluable(changes: Changes, wanted: Location, reached: tuple[Location, int]) -> None:
    """Raises Unevaluated where the cells between the checkpoints and the head say too little or are too many.

    Raises LocationGone for a wanted location that is superseded.
    """
    lowest, highest = reached
    head = changes.head
    try:
        verify_location(wanted.generation, wanted.added_id, changes.starts, head.added_id)
    except LocationGone as gone:
        if not is_lag(wanted, gone):
            raise
        raise Unevaluated(str(gone)) from gone
    if lowest.generation != head.generation:
        raise Unevaluated(f"the shard's generation is {head.generation}")
    if head.added_id < highest:
        raise Unevaluated(f"the node that has the log shows it up to {head.added_id} only")
    if head.added_id - lowest.added_id > CELLS_MAX:
        raise Unevaluated(f"it lacks {head.added_id - lowest.added_id} cells, and {CELLS_MAX} are evaluated at most")


async def _entries(
    definition: IndexDefinition, cells: list[StoredCell]
) -> tuple[list[FoundEntry], dict[tuple[RowKey, ColumnName], dict[str, Any]]]:
    """Evaluates the rows of these cells. Returns their entries, and the cells that cost their rows: they can't be
    decoded.

    Raises Unevaluated.
    """
    rows: dict[RowKey, list[StoredCell]] = {}
    for cell in cells:
        rows.setdefault(cell.row_key, []).append(cell)
    steps = Steps()
    left = BYTES_MAX
    evaluated = 0
    entries: list[FoundEntry] = []
    unreadable: dict[tuple[RowKey, ColumnName], dict[str, Any]] = {}
    for row_key, columns in rows.items():
        bodies: dict[ColumnName, Body] = {}
        for cell in columns:
            try:
                packed = inflate_body(cell.body)
                left -= len(packed)
                if left < 0:
                    raise Unevaluated(f"{len(rows)} rows changed, with more than {BYTES_MAX} bytes of cells")
                bodies[cell.column_name] = decode_packed(packed)
            except Corrupt as error:
                unreadable[row_key, cell.column_name] = unreadable_view(cell, error)
                continue
            await steps.after(len(packed))
        if len(bodies) < len(columns):
            continue
        made = entries_for(definition, bodies)
        entries += [FoundEntry(row_key, entry, element) for element, entry in enumerate(made) if entry is not None]
        evaluated += len(made)
        if evaluated > ENTRIES_MAX:
            raise Unevaluated(f"{len(rows)} rows changed, with more than {ENTRIES_MAX} elements")
        await steps.after(len(made) * _ENTRY_WORK_BYTES)
    return entries, unreadable


log = structlog.get_logger()

OVERLAYS_MAX = 3
"""How often a query reads an overlay anew, because a node answered that is behind the one before."""

Answers = Mapping[str, tuple[NodeAnswer, Served]]
"""By cluster."""


class Found(msgspec.Struct, frozen=True):
    """What the nodes answered. Without an overlay the pages are complete.

    `waited_s` is None for a query that did not wait. `read_at` is when the reads began, by the monotonic clock.
    """

    answers: Answers
    overlay: Overlay | None
    overlay_served: Sequence[Served]
    read_at: float
    waited_s: float | None


@dataclass(eq=False)
class EntryReader:
    """Belongs to one event loop. `differing` names the minions that are known to differ in a version of an index."""

    reader: Reader
    waiter: CheckpointWaiter
    overlays: Overlays
    differing: Callable[[IndexVersion], Collection[str]]
    clock: Callable[[], float] = time.monotonic

    async def find(self, datastore: Datastore, index: DefinedIndex, query: IndexQuery, read_from: Role | None) -> Found:
        """Raises Behind, QueryTooSlow, ManyDamaged, MinionsDiffer, StorageUnavailable, or LocationGone for an `after`
        that is superseded.
        """
        deadline = self.clock() + query.wait_s
        waited_s = None
        while True:
            read_at = self.clock()
            answers = await self._ask(datastore, index, query, read_from)
            after = query.after
            if after is None:
                return Found(answers, None, (), read_at, None)
            reached = {cluster: answer.reached for cluster, (answer, _) in answers.items()}
            behind = {name: at for name, at in reached.items() if at is None or at < after.location}
            if not behind:
                if any(at.generation != after.location.generation for at in reached.values() if at is not None):
                    await self._verify_kept(datastore, after)
                return Found(answers, None, (), read_at, waited_s)
            shown = ", ".join(map(str, behind.values()))
            why = f"index {index.name} has reached {shown} in shard {after.shard}, not {after.location}"
            if index.order.run_state is not RunState.RUNNING:
                raise Behind(f"{why}, and it is {index.state}: resume it")
            try:
                return Found(
                    *await self._with_overlay(datastore, index, query, after, read_from, answers), read_at, waited_s
                )
            except Unevaluated as error:
                why = f"{why}: {error}"
            except StorageUnavailable as error:  # its text names a server, which is for the log
                log.info("cells that an index lacks can't be read", index=index.name, error=str(error))
                why = f"{why}: the cells between can't be read now"
            wait_began = self.clock()
            try:
                async with asyncio.timeout(deadline - wait_began):
                    for cluster, at in behind.items():
                        place = CheckpointsAt(cluster, read_from, datastore.name, index.definition.consumer)
                        await self.waiter.reached(place, after, has_seen=at is not None)
            except TimeoutError:
                await self._verify_kept(datastore, after)
                raise Behind(why) from None
            waited_s = (waited_s or 0.0) + self.clock() - wait_began

    async def _with_overlay(
        self,
        datastore: Datastore,
        index: DefinedIndex,
        query: IndexQuery,
        after: ShardLocation,
        read_from: Role | None,
        answers: Answers,
    ) -> tuple[Answers, Overlay, Sequence[Served]]:
        """Returns what the nodes answer without the rows of the overlay, the overlay, and who served it.

        Another node may answer the second time. It proves again, in the statement before its page, that it is not
        behind the checkpoint from which the overlay was read. Raises Unevaluated besides what `find` does.
        """
        lowest, highest = _span(answers)
        for _ in range(OVERLAYS_MAX):
            overlay, served = await self.overlays.read(
                datastore, index.definition, query, after, (lowest, highest.added_id), read_from
            )
            if overlay.row_keys:
                answers = await self._ask(datastore, index, query, read_from, overlay.row_keys)
            least, _ = _span(answers)
            if least.generation == lowest.generation and least >= lowest:
                return answers, overlay, [served]
            lowest, highest = _span(answers)
        raise Unevaluated("nodes answered that are behind one another")

    async def _ask(
        self,
        datastore: Datastore,
        index: DefinedIndex,
        query: IndexQuery,
        read_from: Role | None,
        excluded: Sequence[RowKey] = (),
    ) -> Answers:
        """Asks one node of each cluster that has entries of the query. A minion that differs is left out (C17)."""
        definition = index.definition
        places = places_by_cluster(datastore, definition, query)
        sums = read_from is Role.MINION
        without = self.differing(IndexVersion(datastore.name, definition.name, definition.number))

        async def find(cluster: str) -> tuple[NodeAnswer, Served]:
            asked = (datastore, definition, query, places[cluster], sums, PAGE_BYTES_MAX, excluded)
            try:
                answer, served = await self.reader.read(
                    cluster, find_entries, *asked, read_from=read_from, without=without
                )
            except StorageUnavailable as error:
                if without and not self.reader.minions(cluster).isdisjoint(without):
                    raise MinionsDiffer(definition, cluster) from error
                raise
            if len(answer.page.damaged) > DAMAGED_MAX:
                raise ManyDamaged(definition, served.role, answer.page.damaged)
            return answer, served

        return dict(zip(places, await all_or_first_error(find(cluster) for cluster in places), strict=True))

    async def _verify_kept(self, datastore: Datastore, after: ShardLocation) -> None:
        """Raises LocationGone for a location that is superseded: no index includes that put (I13)."""
        home = datastore.home(after.shard)
        (head, starts), served = await self.reader.read(home, shard_head.history, datastore.name, after.shard)
        try:
            verify_location(after.location.generation, after.location.added_id, starts, head.added_id)
        except LocationGone as gone:
            if not is_lag(after.location, gone):
                raise said_by(gone, served) from None


def _span(answers: Answers) -> tuple[Location, Location]:
    """Returns the lowest and the highest checkpoint of the nodes. Raises Unevaluated where they can't be compared."""
    reached = [answer.reached for answer, _ in answers.values()]
    known = [at for at in reached if at is not None]
    if len(known) < len(reached) or len({at.generation for at in known}) > 1:
        raise Unevaluated("it has no checkpoint there, or one of another generation")
    return min(known), max(known)


# An index query on entries in memory: comparisons, order, cursor and bounds, as the servers have them. Pure (no I/O).
#
# The SQL is in schemaless/storage/index_select.py. One test holds both to each other, on both kinds of server.

_NUMBER_BYTES = 8

_HOLDS: Mapping[Operator, Callable[[Any, Sequence[Any]], bool]] = {
    Operator.EQ: lambda value, given: value == given[0],
    Operator.NE: lambda value, given: value != given[0],
    Operator.LT: lambda value, given: operator.lt(value, given[0]),
    Operator.LTE: lambda value, given: operator.le(value, given[0]),
    Operator.GT: lambda value, given: operator.gt(value, given[0]),
    Operator.GTE: lambda value, given: operator.ge(value, given[0]),
    Operator.IN: lambda value, given: value in given,
    Operator.BETWEEN: lambda value, given: bool(given[0] <= value <= given[1]),
    Operator.PREFIX: lambda value, given: value[: len(given[0])] == given[0],
}


def holds(term: Term, value: Value | None) -> bool:
    """Returns whether a comparison holds for a value. Only `isnull` may hold for a null."""
    if term.op is Operator.ISNULL:
        return (value is None) is term.values[0]
    return value is not None and _HOLDS[term.op](value, term.values)


def page_of(
    definition: IndexDefinition,
    shard_values: Sequence[Value],
    selection: Selection,
    entries: Iterable[FoundEntry],
    bytes_max: int = PAGE_BYTES_MAX,
) -> NodePage:
    """Returns the page of a query that one node with these entries would answer.

    It has at most `bytes_max` bytes of values, but for the last entry.
    """
    terms = [(definition.fields.index(term.field), term) for term in selection.terms]
    key = order_key(definition, selection)
    behind = operator.lt if selection.descending else operator.gt
    end = None if selection.after is None else cursor_key(selection.after)
    found = [
        one
        for one in entries
        if one.entry.values[0] in shard_values
        and all(holds(term, one.entry.values[position]) for position, term in terms)
        and (end is None or behind(key(one), end))
    ]
    found.sort(key=key, reverse=selection.descending)
    page: list[FoundEntry] = []
    left = bytes_max
    for one in found[: selection.limit]:
        if left <= 0:
            break
        page.append(one)
        left -= ENTRY_BYTES + sum(map(_bytes, one.entry.values))
    return NodePage(page, len(page) < len(found))


def _bytes(value: Value | None) -> int:
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else _NUMBER_BYTES
