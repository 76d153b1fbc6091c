"""Checkpoints of one consumer: each must have finished all of every shard (I9, I10), on this history (I16), counted.

An audit reads the consumers one after another, so it holds the checkpoints of one: as many as shards, on each cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from schemaless.audit.history import Starts, audit_positions, finished_until
from schemaless.audit.parked_audit import audit_parked
from schemaless.audit.report import ConsumerReport, FindingKind, Findings, Patience
from schemaless.names import INDEXER, TRIGGER_PREFIX
from schemaless.position import Position
from schemaless.quantity import quantity
from schemaless.storage import checkpoint_table, trigger_order_table, worker_table
from schemaless.storage.checkpoint_table import Checkpoint, State
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.worker_table import SEEN_WITHIN_S
from schemaless.topology import Datastore


class Standing(msgspec.Struct, frozen=True):
    """A checkpoint as the audit judges it. `until` counts what it has finished of the present history.

    `finished` counts the cells since `counted_from` that the consumer has finished, None if it doesn't count.
    """

    position: Position
    until: int
    stop_reason: str | None
    counted_from: int
    finished: int | None
    seen: int
    """What became of cells, added up."""

    @property
    def is_plain(self) -> bool:
        """Whether the shard has nothing of its own to tell: it wasn't stopped, and no generation took cells back."""
        return self.stop_reason is None and self.until == self.position.added_id

    @property
    def skipped(self) -> int:
        """Cells that the checkpoint passed without finishing them. Below zero: more were finished than it passed.

        added_ids are dense, so the cells that a consumer finished are as many as the distance of its checkpoint.
        """
        if self.finished is None:
            return 0
        return self.position.added_id - self.counted_from - self.finished


Standings = Mapping[tuple[str, int], Standing | None]
"""The checkpoints of one consumer by cluster and shard. None: it has none at the shard's home."""


class ConsumerAudit:
    """The audit of one consumer. `heads` are the fixed heads by shard."""

    def __init__(
        self,
        storage: SyncStorage,
        datastore: Datastore,
        consumer: str,
        heads: Mapping[int, int],
        starts: Starts,
        findings: Findings,
    ) -> None:
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._heads = heads
        self._starts = starts
        self._findings = findings

    def run(self, patience: Patience) -> ConsumerReport:
        """Waits while the consumer makes progress, and reports it. What is stopped or paused is not waited for."""
        found = self._read()
        paused_until = self._paused_until()
        while paused_until is None and any(
            one is None or one.stop_reason is None for _, _, one in behind(found, self._heads)
        ):
            if not patience.wait():
                break
            before, found = found, self._read()
            if finished(found, self._heads) != finished(before, self._heads):
                patience.renew()
        self._audit_ends(found, is_paused=paused_until is not None)
        self._audit_counts(found)
        for cluster in self._datastore.clusters:
            positions = [one.position for (where, _), one in found.items() if one is not None and where == cluster]
            whose = f"the checkpoint of {self._consumer} on {cluster}"
            audit_positions(self._storage, self._datastore, whose, positions, self._starts, self._findings)
        is_program = self._consumer.startswith(TRIGGER_PREFIX)
        return ConsumerReport(
            self._consumer,
            sum(self._heads.values()),
            finished(found, self._heads),
            audit_parked(self._storage, self._datastore, self._consumer, self._findings) if is_program else None,
            paused_until,
        )

    def _audit_ends(self, found: Standings, *, is_paused: bool) -> None:
        """Names each shard that is behind. Where one cause holds for many, it is named once with their number.

        A shard that is behind only because the consumer is paused breaks no promise.
        """
        late = [
            each for each in behind(found, self._heads) if not (is_paused and (each[2] is None or each[2].is_plain))
        ]
        cause = self._cause() if late else None
        plain = sum(one is not None and one.is_plain for _, _, one in late)
        if cause and plain > 1:
            detail = f"{self._consumer} is behind in {quantity(plain, 'shard')}: {cause}"
            self._findings.add(FindingKind.CHECKPOINT_BEHIND, -1, detail, count=plain)
            late = [each for each in late if each[2] is None or not each[2].is_plain]
            cause = None
        for cluster, shard, one in late:
            why = f": {cause}" if cause and (one is None or one.stop_reason is None) else ""
            detail = f"{self._consumer} {_describe(cluster, one, self._heads[shard])}{why}"
            self._findings.add(FindingKind.CHECKPOINT_BEHIND, shard, detail)

    def _paused_until(self) -> str | None:
        """Returns the command that ends the pause of a program, None while it isn't paused."""
        masters, name = [self._storage.master(cluster) for cluster in self._datastore.clusters], self._datastore.name
        orders = [master.run(trigger_order_table.of_datastore, name, self._consumer) for master in masters]
        program = self._consumer.removeprefix(TRIGGER_PREFIX)
        given = [order[self._consumer] for order in orders if self._consumer in order]
        return f"schemaless triggers resume {program} -d {name}" if trigger_order_table.latest(given).paused else None

    def _cause(self) -> str | None:
        """Returns why the consumer doesn't go on in any shard, and what ends that, if no process runs it."""
        masters, name = [self._storage.master(cluster) for cluster in self._datastore.clusters], self._datastore.name
        program = self._consumer.removeprefix(TRIGGER_PREFIX)
        workers = [row for master in masters for row in master.run(worker_table.of_datastore, name)]
        seen = {row.consumer for row in workers if row.age_s <= SEEN_WITHIN_S}
        if program == self._consumer:
            return None if INDEXER in seen else "no indexer runs"
        if self._consumer in seen:
            return None
        return f"nobody runs it. `schemaless triggers remove {program} -d {name}` retires it"

    def _audit_counts(self, found: Standings) -> None:
        must_count = self._consumer.startswith(TRIGGER_PREFIX)
        for (cluster, shard), one in found.items():
            if one is None:
                continue
            went = f"{self._consumer} went from {one.counted_from} to {one.position.added_id} on {cluster}"
            if one.skipped:
                detail = f"{went} and finished {quantity(one.finished or 0, 'cell')}"
                self._findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail, count=abs(one.skipped))
            elif one.finished is not None and one.finished != one.seen:
                detail = f"{went}, finished {quantity(one.finished or 0, 'cell')} and says what became of {one.seen}"
                self._findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail, count=abs(one.finished - one.seen))
            elif must_count and one.finished is None:
                detail = f"{went} without a count of finished cells"
                self._findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail)

    def _read(self) -> Standings:
        found: dict[tuple[str, int], Standing | None] = {
            (self._datastore.home(shard), shard): None for shard in self._heads
        }
        for cluster in self._datastore.clusters:
            master = self._storage.master(cluster)
            for checkpoint in master.run(checkpoint_table.of_consumer, self._datastore.name, self._consumer):
                if checkpoint.shard in self._heads:
                    found[cluster, checkpoint.shard] = self._standing(checkpoint)
        return dict(sorted(found.items()))

    def _standing(self, checkpoint: Checkpoint) -> Standing:
        return Standing(
            position=checkpoint.position,
            until=finished_until(checkpoint.location, self._starts[checkpoint.shard]),
            stop_reason=(checkpoint.reason or "") if checkpoint.state is State.STOPPED else None,
            counted_from=checkpoint.counted_from,
            finished=checkpoint.finished,
            seen=checkpoint.counts.seen,
        )


def behind(found: Standings, heads: Mapping[int, int]) -> Iterator[tuple[str, int, Standing | None]]:
    """Yields the checkpoints that are before their head on any cluster, and those that are missing at home."""
    for (cluster, shard), one in found.items():
        if (0 if one is None else one.until) < heads[shard]:
            yield cluster, shard, one


def finished(found: Standings, heads: Mapping[int, int]) -> int:
    """Counts the finished cells of all shards. The slowest checkpoint of each shard counts."""
    slowest = dict(heads)
    for (_, shard), one in found.items():
        slowest[shard] = min(slowest[shard], 0 if one is None else one.until)
    return sum(slowest.values())


def _describe(cluster: str, one: Standing | None, head: int) -> str:
    if one is None:
        return f"has no checkpoint on {cluster}, the head is {head}"
    stopped = "" if one.stop_reason is None else f", stopped: {one.stop_reason}"
    superseded = "" if one.until == one.position.added_id else f", {one.position.location} is superseded"
    return f"has finished {one.until} of {head} on {cluster}{superseded}{stopped}"
