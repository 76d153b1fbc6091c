"""Checkpoints of one consumer: each must have finished all of every shard (I9, I10), on this history (I16), counted.

An audit reads the consumers one after another, so it holds the checkpoints of one: as many as shards, on each cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from schemaless.audit.report import POLL_S, ConsumerReport, FindingKind, Findings, ParkedReport, Patience
from schemaless.location import GenerationStart, Location
from schemaless.names import INDEXER, TRIGGER_PREFIX
from schemaless.position import Position
from schemaless.quantity import quantity
from schemaless.storage import (
    checkpoint_table,
    everywhere,
    parked_selection,
    shard_log,
    trigger_order_table,
    worker_table,
)
from schemaless.storage.checkpoint_table import State
from schemaless.storage.parked_selection import ParkedProof
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.trigger_order_table import ProgramFunctions
from schemaless.storage.worker_table import SEEN_WITHIN_S
from schemaless.topology import Datastore

RESTART_S = 5.0
"""How long nobody may run a program before it counts as one that nobody runs: a supervisor starts it again."""


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
"""The checkpoints of one consumer by cluster and shard. None: it has none where it must have one."""


@dataclass(eq=False)
class ConsumerAudit:
    """The audit of one consumer. `heads` are the fixed heads by shard.

    `placed`: a program must have its checkpoints at the shards' homes, an index where its version was made.
    """

    storage: SyncStorage
    datastore: Datastore
    placed: Datastore
    consumer: str
    heads: Mapping[int, int]
    starts: Starts
    findings: Findings

    def run(self, patience: Patience) -> ConsumerReport:
        """Waits while the consumer makes progress, and reports it.

        What is stopped or paused is not waited for. A program that no worker runs is given the time of a restart.
        """
        is_program = self.consumer.startswith(TRIGGER_PREFIX)
        found = self._read()
        paused_until, looks_without_worker = self._paused_until(), 0
        while paused_until is None and any(
            one is None or one.stop_reason is None for _, _, one in behind(found, self.heads)
        ):
            looks_without_worker = looks_without_worker + 1 if is_program and self._cause() else 0
            if looks_without_worker > RESTART_S / POLL_S or not patience.wait():
                break
            before, found = found, self._read()
            if finished(found, self.heads) != finished(before, self.heads):
                patience.renew()
        self._audit_ends(found, is_paused=paused_until is not None)
        self._audit_counts(found)
        for cluster in self.datastore.clusters:
            positions = [one.position for (where, _), one in found.items() if one is not None and where == cluster]
            whose = f"the checkpoint of {self.consumer} on {cluster}"
            audit_positions(self.storage, self.datastore, whose, positions, self.starts, self.findings)
        return ConsumerReport(
            self.consumer,
            sum(self.heads.values()),
            finished(found, self.heads),
            audit_parked(self.storage, self.datastore, self.consumer, self.findings) if is_program else None,
            paused_until,
        )

    def _audit_ends(self, found: Standings, *, is_paused: bool) -> None:
        """Names each shard that is behind. Where one cause holds for many, it is named once with their number.

        A shard that is behind only because the consumer is paused breaks no promise.
        """
        late = [each for each in behind(found, self.heads) if not (is_paused and (each[2] is None or each[2].is_plain))]
        cause = self._cause() if late else None
        plain = sum(one is not None and one.is_plain for _, _, one in late)
        if cause and plain > 1:
            detail = f"{self.consumer} is behind in {quantity(plain, 'shard')}: {cause}"
            self.findings.add(FindingKind.CHECKPOINT_BEHIND, -1, detail, count=plain)
            late = [each for each in late if each[2] is None or not each[2].is_plain]
            cause = None
        for cluster, shard, one in late:
            why = f": {cause}" if cause and (one is None or one.stop_reason is None) else ""
            detail = f"{self.consumer} {_describe(cluster, one, self.heads[shard])}{why}"
            self.findings.add(FindingKind.CHECKPOINT_BEHIND, shard, detail)

    def _paused_until(self) -> str | None:
        """Returns the command that ends the pause of a program, None while it isn't paused."""
        masters, name = [self.storage.master(cluster) for cluster in self.datastore.clusters], self.datastore.name
        orders = [master.run(trigger_order_table.of_datastore, name, self.consumer) for master in masters]
        program = self.consumer.removeprefix(TRIGGER_PREFIX)
        given = [order[self.consumer] for order in orders if self.consumer in order]
        return f"schemaless triggers resume {program} -d {name}" if trigger_order_table.latest(given).paused else None

    def _cause(self) -> str | None:
        """Returns why the consumer doesn't go on in any shard, if no process was seen that runs it, and what ends that.

        A clean stop deletes the row of its process. One whose row stays was killed, or it lives and can't write it.
        """
        masters, name = [self.storage.master(cluster) for cluster in self.datastore.clusters], self.datastore.name
        program = self.consumer.removeprefix(TRIGGER_PREFIX)
        workers = [row for master in masters for row in master.run(worker_table.of_datastore, name)]
        runs_it = INDEXER if program == self.consumer else self.consumer
        last = min((row for row in workers if row.consumer == runs_it), key=lambda row: row.age_s, default=None)
        if last is not None and last.age_s <= SEEN_WITHIN_S:
            return None
        if last is not None:
            who = f"the process {last.report.pid} at {last.report.host}"
            return (
                f"{who} was seen {last.age_s:.0f} s ago and didn't end cleanly: it was killed, or it can't reach MySQL"
            )
        if runs_it == INDEXER:
            return "no indexer runs"
        return f"nobody runs it. `schemaless triggers remove {program} -d {name}` retires it"

    def _audit_counts(self, found: Standings) -> None:
        must_count = self.consumer.startswith(TRIGGER_PREFIX)
        for (cluster, shard), one in found.items():
            if one is None:
                continue
            went = f"{self.consumer} went from {one.counted_from} to {one.position.added_id} on {cluster}"
            if one.skipped:
                detail = f"{went} and finished {quantity(one.finished or 0, 'cell')}"
                self.findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail, count=abs(one.skipped))
            elif one.finished is not None and one.finished != one.seen:
                detail = f"{went}, finished {quantity(one.finished or 0, 'cell')} and says what became of {one.seen}"
                self.findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail, count=abs(one.finished - one.seen))
            elif must_count and one.finished is None:
                detail = f"{went} without a count of finished cells"
                self.findings.add(FindingKind.CHECKPOINT_COUNT, shard, detail)

    def _read(self) -> Standings:
        self.storage.look()  # a shard may move meanwhile, and its checkpoint with it
        found: dict[tuple[str, int], Standing | None] = {(self.placed.home(shard), shard): None for shard in self.heads}
        for cluster in self.datastore.clusters:
            master = self.storage.master(cluster)
            for checkpoint in master.run(checkpoint_table.of_consumer, self.datastore.name, self.consumer):
                if checkpoint.shard in self.heads:
                    found[cluster, checkpoint.shard] = Standing(
                        position=checkpoint.position,
                        until=finished_until(checkpoint.location, self.starts[checkpoint.shard]),
                        stop_reason=(checkpoint.reason or "") if checkpoint.state is State.STOPPED else None,
                        counted_from=checkpoint.counted_from,
                        finished=checkpoint.finished,
                        seen=checkpoint.counts.seen,
                    )
        return dict(sorted(found.items()))


def behind(found: Standings, heads: Mapping[int, int]) -> Iterator[tuple[str, int, Standing | None]]:
    """Yields the checkpoints that are before their head on any cluster, and those that are missing."""
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


# Positions that others recorded, judged by the audit itself: by generation (I13), and by the cell at them (I16).
#
# Checkpoints and progress records are positions. A later generation supersedes a position by number. A restored master
# does it without changing any number, so the digest of the cell counts.

QUESTION_POSITIONS_MAX = 500
"""How many positions one question to a server compares (I14)."""

Starts = Mapping[int, Sequence[GenerationStart]]
"""The starts of each shard's generations."""


def finished_until(location: Location, starts: Iterable[GenerationStart]) -> int:
    """Returns up to which added_id of the present history a location counts (I13).

    What a later generation superseded isn't finished, so the location counts up to before the lowest later start.
    """
    later = [start.starts_at - 1 for start in starts if start.generation > location.generation]
    return min([location.added_id, *later])


def audit_positions(
    storage: SyncStorage,
    datastore: Datastore,
    whose: str,
    positions: Iterable[Position],
    starts: Starts,
    findings: Findings,
) -> set[int]:
    """Compares the cell that each position stands on with MySQL's, and returns the shards where it is another one.

    There is at most one position of a shard. A superseded position stands on a cell that is rightly gone, so it is not
    compared. A position without a digest is compared by its number only: MySQL must have a cell there.
    """
    storage.look()  # what was recorded may be of a shard that moved meanwhile
    present = [
        position
        for position in positions
        if finished_until(position.location, starts[position.shard]) == position.added_id
    ]
    wrong = set()
    for position, found in _digests(storage, datastore, present):
        if found is None:
            detail = f"{whose} is at {position.location}, where MySQL has no cell"
        elif position.digest is not None and found != position.digest:
            detail = f"{whose} is at {position.location} of another history: MySQL has another cell there"
        else:
            continue
        findings.add(FindingKind.OTHER_HISTORY, position.shard, detail)
        wrong.add(position.shard)
    return wrong


def _digests(
    storage: SyncStorage, datastore: Datastore, positions: Iterable[Position]
) -> Iterator[tuple[Position, int | None]]:
    """Yields each position with the digest of the cell that the shard's master has there."""
    for cluster, mine in datastore.by_home(positions, lambda position: position.shard).items():
        for first in range(0, len(mine), QUESTION_POSITIONS_MAX):
            some = mine[first : first + QUESTION_POSITIONS_MAX]
            wanted = {position.shard: position.added_id for position in some}
            found = storage.master(cluster).run(shard_log.digests, datastore, wanted)
            yield from ((position, found[position.shard]) for position in some)


# Parked cells of one trigger program: its records must be what its checkpoints count, and cells that are there (I12).
#
# A parked cell is no fault. It is a warning, with the command that lists it.


def audit_parked(storage: SyncStorage, datastore: Datastore, consumer: str, findings: Findings) -> ParkedReport:
    """Compares the records of a program with its checkpoints and with the entity tables."""
    report = ParkedReport(consumer)
    masters = {cluster: storage.master(cluster) for cluster in datastore.clusters}
    program = everywhere.latest(
        [master.run(trigger_order_table.functions_of, datastore.name, consumer) for master in masters.values()]
    )
    columns = () if program is None else tuple(program.functions)
    for cluster, master in masters.items():
        for shard in master.run(parked_selection.proof_shards_of, datastore.name, consumer):
            if shard >= datastore.shards or datastore.home(shard) != cluster:
                detail = f"{consumer} has a record or a count on {cluster}, which isn't the home of the shard"
                findings.add(FindingKind.PARKED_DIFFERS, shard, detail)
                continue
            proof = master.run(parked_selection.proof_of_shard, datastore, consumer, shard, columns)
            if proof is None:
                findings.add(FindingKind.PARKED_DIFFERS, shard, f"{consumer} has records, and no checkpoint")
            else:
                _judge(proof, _waiting(proof, program), consumer, findings, report)
    return report


def _waiting(proof: ParkedProof, program: ProgramFunctions | None) -> int:
    """Returns how many cells wait, as far as that is known.

    A cell behind another counts if its column was one of the program's when it was seen. Only of the present version
    are the columns known.
    """
    if program is not None and proof.versions <= {program.version}:
        return proof.waiting + proof.behind
    return max(proof.waiting, proof.counted_waiting)


def _judge(proof: ParkedProof, waiting: int, consumer: str, findings: Findings, report: ParkedReport) -> None:
    report.parked += proof.records
    report.waiting += waiting
    report.oldest_s = max(report.oldest_s, proof.oldest_s)
    report.counted += proof.counted_parked + proof.counted_waiting
    report.found += proof.parked + waiting
    if proof.counted_parked != proof.parked:
        detail = f"{consumer} counts {quantity(proof.counted_parked, 'parked cell')} and has records of {proof.parked}"
        findings.add(FindingKind.PARKED_DIFFERS, proof.shard, detail)
    if proof.counted_waiting != waiting:
        detail = f"{consumer} counts {proof.counted_waiting} waiting cells, and {waiting} wait"
        findings.add(FindingKind.PARKED_DIFFERS, proof.shard, detail)
    if proof.beyond:
        detail = f"{consumer} has {quantity(proof.beyond, 'record')} beyond its checkpoint"
        findings.add(FindingKind.PARKED_DIFFERS, proof.shard, detail, count=proof.beyond)
    if proof.lost:
        lost = quantity(proof.lost, "record")
        detail = f"{consumer} has {lost} of cells that MySQL lacks, the first of cell {proof.first_lost}"
        findings.add(FindingKind.PARKED_DIFFERS, proof.shard, detail, count=proof.lost)
