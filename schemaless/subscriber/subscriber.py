"""The Subscriber: every cell of a datastore, or of some partitions, in order and proven to be all of them (I9).

It is for programs of others, and needs Kafka and the API's hosts, no MySQL. The rules are in
schemaless/subscriber/engine.py. This module brings what they ask for: records of the topic, and pages of a shard's log.
Kafka's offsets are hints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal

from schemaless.bus.ownership import require_ours
from schemaless.bus.plain_transport import GroupReader
from schemaless.bus.reader import Span
from schemaless.cell import ColumnName, RefKey, RowKey, StoredCell, microseconds_since_epoch, with_trace
from schemaless.client.answers import LogPage
from schemaless.client.client import Client
from schemaless.codec import encode_body
from schemaless.errors import Invalid, LocationGone, Misconfigured, SchemalessError, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.location import BEGINNING, Location
from schemaless.names import cells_topic_name
from schemaless.position import Position
from schemaless.record import ForeignRecord
from schemaless.runtime.batching import chunks
from schemaless.shard_cursor import ProvenPage
from schemaless.subscriber.engine import Batch, FollowedShards, LogAnswers, ReadLog, Steps, SubscriberCounts
from schemaless.topology import Datastore

Known = Mapping[int, Position | Location]
"""By shard, where to continue."""
Positions = Known | Callable[[Sequence[int]], Known]
"""Positions of shards, or a function that is asked for them whenever partitions are assigned to this process."""
Start = Literal["beginning", "end"] | datetime
History = Literal["topic", "log"]

LOOK_PAUSE_S = 5.0
_WAIT_S = 0.5

_log = logging.getLogger("schemaless.subscriber")


class Subscriber:
    """Iterates over batches, in one thread. `stop` may be called from any thread, and from a signal handler.

    - `client` reads the logs of shards. The default is a client of SCHEMALESS_HOSTS.
    - `group`: processes of the same group share the partitions. Without it this process has all, or `partitions`.
    - `positions` are those of earlier batches, by shard. A function is asked for them whenever partitions are assigned.
    - `start` is where shards without a position begin: "beginning", "end", or a time.
    - `history`: "topic" reads the topic as far back as it goes, and the log of a shard for what it lacks. "log" reads
      the logs up to their present heads first, then changes over to the topic.
    - `look_pause_s` is the pause between two looks at the heads, which show what the topic never brought.

    Store the `position` of a batch before you ask for the next one. There is nothing else to acknowledge. Every method
    that reads raises Unavailable when Kafka or the hosts don't answer: ask again, nothing is lost.
    """

    def __init__(  # noqa: PLR0913  # all but two have defaults
        self,
        kafka: str,
        datastore: str,
        *,
        client: Client | None = None,
        group: str | None = None,
        partitions: Sequence[int] | None = None,
        positions: Positions | None = None,
        start: Start = "beginning",
        history: History = "topic",
        look_pause_s: float = LOOK_PAUSE_S,
    ) -> None:
        if group is not None and (partitions is not None or not callable(positions)):
            raise Misconfigured("a group gives out the partitions, and needs a function that finds their positions")
        self._client = client or Client(datastore=datastore)
        self._keeps_client = client is None
        self._history = ShardHistory(self._client)
        self._positions = positions or {}
        self._start = start
        self._from_log = history == "log"
        self._look_pause_s = look_pause_s
        self._look_at = time.monotonic() + look_pause_s
        self._steps: Steps | None = None
        self._asked: ReadLog | None = None
        self._stopped = False
        self._reader = GroupReader(kafka, cells_topic_name(datastore), group, self._end)
        in_topic, self._partition_count = len(self._reader.partitions()), self._history.partitions()
        known = range(self._partition_count)
        wanted = known if partitions is None else partitions
        if not set(wanted) <= set(known):
            raise Invalid("partitions", f"must be from 0 to {len(known) - 1}")
        if in_topic < len(known):
            raise Misconfigured(f"the topic has {in_topic} partitions, and {datastore} {len(known)}")
        if in_topic > len(known):
            _log.error("the topic has %d partitions, and %s %d: others are left out", in_topic, datastore, len(known))
        shards = len(self._history.heads())
        require_ours(kafka, Datastore(datastore, shards, len(known), (), installation=self._history.installation()))
        self._shards = FollowedShards(shards, len(known))
        self._reader.join(wanted)

    @property
    def counts(self) -> SubscriberCounts:
        return self._shards.counts

    @property
    def foreign(self) -> Sequence[ForeignRecord]:
        """The last hundred records that were not ours. `counts.foreign` is how many there were."""
        return tuple(self._shards.foreign)

    @property
    def refused(self) -> Mapping[int, str]:
        """Returns by shard why its log is refused. Nothing of it is given out (I16).

        A node that lags is the reason for a moment. A restored master is one until an operator opens a generation.
        """
        return self._shards.refused()

    def positions(self) -> dict[int, Position]:
        """Returns the position of every shard that this process follows, as far as batches were given out."""
        return self._shards.positions()

    def poll(self, timeout_s: float) -> Batch | None:
        """Returns the next batch, or None when there was none for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._stopped:
            left_s = max(0.0, deadline - time.monotonic())
            if self._steps is None:
                if self._reader.fresh:
                    self._steps = self._begin(tuple(self._reader.fresh))
                elif time.monotonic() >= self._look_at:
                    self._look_at = time.monotonic() + self._look_pause_s
                    self._steps = self._look()
                elif records := self._reader.consume(min(left_s, _WAIT_S)):
                    self._steps = self._shards.take(records)
            if (batch := self._step()) is not None or not left_s:
                return batch
        return None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Waits for the next batch. Ends after `stop`."""
        while not self._stopped:
            if (batch := self.poll(_WAIT_S)) is not None:
                return batch
        raise StopIteration

    def cells(self) -> Iterator[FoundCell]:
        """Yields cell by cell, for programs that keep no positions. Superseded cells are only counted."""
        for batch in self:
            yield from batch.cells

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """Leaves the group, so that others take over at once."""
        self._stopped = True
        self._reader.close()
        if self._keeps_client:
            self._client.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, partitions: Iterable[int]) -> None:
        self._shards.end(frozenset(partitions))

    def _step(self) -> Batch | None:
        """Continues the present steps until they give a batch or are finished."""
        while self._steps is not None:
            answer = self._read_log()
            try:
                step = self._steps.send(answer)
            except StopIteration:
                self._steps = None
                return None
            if isinstance(step, Batch):
                return step
            self._asked = step
        return None

    def _read_log(self) -> LogAnswers | None:
        """Reads the pages that were asked for. When that fails they are asked for again at the next poll."""
        if self._asked is None:
            return None
        self._reader.keep()
        answer = self._history.read(self._asked)
        self._asked = None
        return answer

    def _look(self) -> Steps:
        try:
            heads = self._history.heads()
        except Unavailable:
            return  # the topic continues without it, and a hole there is found anyway
        yield from self._shards.look(heads, frozenset(self._reader.at_end))

    def _begin(self, partitions: Sequence[int]) -> Steps:
        """Begins partitions. The topic's ends are read before the heads: cells between them come twice, not never."""
        spans = {partition: self._reader.span(partition) for partition in partitions}
        heads = self._history.heads()
        count = self._partition_count
        shards = {each: range(each, len(heads) if each < count else 0, count) for each in partitions}
        every = [shard for numbers in shards.values() for shard in numbers]
        try:
            positions = self._positions(every) if callable(self._positions) else self._positions
        except StopIteration as error:  # it would end the iteration over batches as if all were said
            raise RuntimeError("the function for positions raised StopIteration") from error
        known = {shard: positions[shard] for shard in every if shard in positions}
        unknown = [shard for shard in every if shard not in known]
        places: dict[int, Position | Location] = dict(known)
        if isinstance(self._start, datetime):
            places |= self._history.since(unknown, self._start)
        else:
            places |= {shard: heads[shard] if self._start == "end" else BEGINNING for shard in unknown}
        for partition, numbers in shards.items():
            offset = self._first_offset(spans[partition], [known[shard] for shard in numbers if shard in known])
            starts = [_position(shard, places[shard]) for shard in numbers]
            self._shards.begin(partition, offset, starts, to_end=offset == spans[partition].high)
            self._reader.read_from(partition, offset)
        # Positions without a digest are taken by their numbers. That happens once, as the next ones have digests.
        stored = [_position(shard, place) for shard, place in known.items()]
        unproven = [position.shard for position in stored if position.digest is None and position.added_id]
        if unproven:
            self.counts.unproven_positions += len(unproven)
            _log.warning("%d stored positions have no digest, first of shard %d", len(unproven), unproven[0])
        return self._shards.catch_up(every)

    def _first_offset(self, span: Span, known: Sequence[Position | Location]) -> int:
        """Returns where to read a partition of the topic. That is its end when history comes from the log.

        A stored offset beyond the topic means that the topic was made anew: it is read from its beginning.
        """
        offsets = [place.offset for place in known if isinstance(place, Position) and place.offset is not None]
        if self._from_log or (not offsets and (known or self._start != "beginning")):
            return span.high
        wanted = max(offsets, default=span.low)
        return wanted if span.low <= wanted <= span.high else span.low


def _position(shard: int, place: Position | Location) -> Position:
    digest = place.digest if isinstance(place, Position) else None
    return Position(shard, place.generation, place.added_id, digest=digest)


# The logs of shards over HTTP, for the subscribers' kit: their cells are as the topic would bring them.
#
# A body comes as a value and is encoded again. Its bytes may differ from those in the topic, but the value is the
# same.

_SHARDS_PER_CALL = 1000


class ShardHistory:
    """Reads the logs and the heads of shards. Each call raises Unavailable when no host answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def partitions(self) -> int:
        """Returns how many partitions the datastore has. Its topic has more where somebody raised them."""
        return int(self._client.document("/topology")["partitions"])

    def installation(self) -> str:
        """Returns the id of the databases that the hosts read (I20)."""
        return str(self._client.document("/topology")["installation"])

    def heads(self) -> dict[int, Location]:
        """Returns the head of every shard."""
        listed = self._client.document("/shards")["shards"]
        return {shard["shard"]: Location(shard["generation"], shard["head"]) for shard in listed}

    def read(self, wanted: ReadLog) -> LogAnswers:
        """Returns the pages that were asked for, or the errors that say where a log continues.

        Of several shards one may be missing: its cluster is away, or there was no room for its page.
        """
        if len(wanted.positions) == 1:
            (at,) = wanted.positions
            try:
                return {at.shard: _proven_page(at, self._client.get_cells_for_shard(at.shard, at, wanted.limit))}
            except LocationGone as gone:
                return {at.shard: gone}
        answers: dict[int, ProvenPage | LocationGone] = {}
        pages = self._client.get_cells_for_shards({at.shard: at for at in wanted.positions}, wanted.limit)
        for at in wanted.positions:
            page = pages[at.shard]
            if isinstance(page, LocationGone):
                answers[at.shard] = page
            elif isinstance(page, SchemalessError):
                if not page.retryable:
                    raise page
            elif page.cells or not page.pending:
                answers[at.shard] = _proven_page(at, page)
        return answers

    def since(self, shards: Sequence[int], moment: datetime) -> dict[int, Location]:
        """Returns by shard the location after which cells were created at or after a moment."""
        found: dict[int, Location] = {}
        for some in chunks(shards, count_max=_SHARDS_PER_CALL):
            for shard, page in self._client.get_cells_for_shards(dict.fromkeys(some, moment), limit=1).items():
                if isinstance(page, SchemalessError):
                    raise page
                first = next(iter(page), None)
                found[shard] = page.location if first is None else Location(first.generation, first.added_id - 1)
        return found


def _proven_page(at: Position, page: LogPage) -> ProvenPage:
    cells = [stored_cell(cell) for cell in page]
    digest = page.position.digest if page.location.added_id == at.added_id else None
    return ProvenPage(cells, Location(page.generation or page.next.generation, page.head), digest)


def stored_cell(found: FoundCell) -> StoredCell:
    """Returns a cell of the API as the topic would bring it."""
    return StoredCell(
        row_key=RowKey(found.row_key.bytes),
        column_name=ColumnName(found.column_name),
        ref_key=RefKey(found.ref_key),
        shard=found.shard,
        generation=found.generation,
        added_id=found.added_id,
        created_at=microseconds_since_epoch(found.created_at),
        body=b"" if found.erased else encode_body(found.body, check_shape=False),
        cause=found.cause if found.trace is None else with_trace(found.cause, found.trace),
    )
