"""EntryReader: the pages of all nodes that a query of an index needs, and with `after` such that include that put.

every node shows that the index has reached the put    the pages are the answer
it hasn't, and the cells that it lacks are few         they are evaluated with the query (api/index/overlay.py)
they are many, or can't be evaluated                   the query waits for the index, as long as it may
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import structlog

from api.index.checkpoint_waiter import CheckpointsAt, CheckpointWaiter
from api.index.overlay import Overlay, Overlays, Unevaluated
from api.index.query import IndexQuery
from api.index.search import (
    DAMAGED_MAX,
    Behind,
    ManyDamaged,
    MinionsDiffer,
    NodeAnswer,
    find_entries,
    places_by_cluster,
)
from api.read.reader import Reader, Served, said_by
from schemaless.cell import RowKey
from schemaless.errors import LocationGone, StorageUnavailable
from schemaless.location import Location, ShardLocation, is_lag, verify_location
from schemaless.runtime.batching import all_or_first_error
from schemaless.storage import shard_head
from schemaless.storage.index_definition_table import DefinedIndex, RunState
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.index_select import PAGE_BYTES_MAX
from schemaless.topology import Datastore, Role

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


class EntryReader:
    """Belongs to one event loop. `differing` names the minions that are known to differ in a version of an index."""

    def __init__(
        self,
        reader: Reader,
        waiter: CheckpointWaiter,
        overlays: Overlays,
        differing: Callable[[IndexVersion], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._waiter = waiter
        self._overlays = overlays
        self._clock = clock
        self._differing = differing

    async def find(self, datastore: Datastore, index: DefinedIndex, query: IndexQuery, read_from: Role | None) -> Found:
        """Raises Behind, QueryTooSlow, ManyDamaged, MinionsDiffer, StorageUnavailable, or LocationGone for an `after`
        that is superseded.
        """
        deadline = self._clock() + query.wait_s
        waited_s = None
        while True:
            read_at = self._clock()
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
            wait_began = self._clock()
            try:
                async with asyncio.timeout(deadline - wait_began):
                    for cluster, at in behind.items():
                        place = CheckpointsAt(cluster, read_from, datastore.name, index.definition.consumer)
                        await self._waiter.reached(place, after, has_seen=at is not None)
            except TimeoutError:
                await self._verify_kept(datastore, after)
                raise Behind(why) from None
            waited_s = (waited_s or 0.0) + self._clock() - wait_began

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
            overlay, served = await self._overlays.read(
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
        places, definition = places_by_cluster(datastore, query), index.definition
        sums = read_from is Role.MINION
        without = self._differing(IndexVersion(datastore.name, definition.name, definition.number))

        async def find(cluster: str) -> tuple[NodeAnswer, Served]:
            asked = (datastore, definition, query, places[cluster], sums, PAGE_BYTES_MAX, excluded)
            try:
                answer, served = await self._reader.read(
                    cluster, find_entries, *asked, read_from=read_from, without=without
                )
            except StorageUnavailable as error:
                if without and not self._reader.minions(cluster).isdisjoint(without):
                    raise MinionsDiffer(definition, cluster) from error
                raise
            if len(answer.page.damaged) > DAMAGED_MAX:
                raise ManyDamaged(definition, served.role, answer.page.damaged)
            return answer, served

        return dict(zip(places, await all_or_first_error(find(cluster) for cluster in places), strict=True))

    async def _verify_kept(self, datastore: Datastore, after: ShardLocation) -> None:
        """Raises LocationGone for a location that is superseded: no index includes that put (I13)."""
        home = datastore.home(after.shard)
        (head, starts), served = await self._reader.read(home, shard_head.history, datastore.name, after.shard)
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
