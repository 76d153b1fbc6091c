"""Parked cells of one trigger program: its records must be what its checkpoints count, and cells that are there (I12).

A parked cell is no fault. It is a warning, with the command that lists it.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemaless.audit.report import FindingKind, Findings
from schemaless.names import TRIGGER_PREFIX
from schemaless.quantity import quantity
from schemaless.storage import parked_proof, trigger_program_table
from schemaless.storage.parked_proof import ParkedProof
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.trigger_program_table import ProgramFunctions
from schemaless.topology import Datastore


@dataclass(slots=True)
class ParkedReport:
    """The cells that one program set aside. `counted` are those of its checkpoints, and `found` those of its records.

    `parked` records are all, also of cells before a checkpoint began to count, the oldest for `oldest_s`. `waiting`
    counts the cells that wait for their next attempt or behind another cell.
    """

    consumer: str
    counted: int = 0
    found: int = 0
    parked: int = 0
    waiting: int = 0
    oldest_s: float = 0.0

    def warning(self, datastore: str) -> str | None:
        if not self.parked:
            return None
        program = self.consumer.removeprefix(TRIGGER_PREFIX)
        return (
            f"{self.consumer} has {quantity(self.parked, 'parked cell')}, the oldest for {self.oldest_s:.0f} s:"
            f" schemaless parked list {program} --datastore {datastore}"
        )

    def document(self) -> dict[str, object]:
        return {"parked": self.parked, "waiting": self.waiting, "oldest_s": round(self.oldest_s, 1)}


def audit_parked(storage: SyncStorage, datastore: Datastore, consumer: str, findings: Findings) -> ParkedReport:
    """Compares the records of a program with its checkpoints and with the entity tables."""
    report = ParkedReport(consumer)
    masters = {cluster: storage.master(cluster) for cluster in datastore.clusters}
    program = trigger_program_table.newest(
        [master.run(trigger_program_table.get, datastore.name, consumer) for master in masters.values()]
    )
    columns = () if program is None else tuple(program.functions)
    for cluster, master in masters.items():
        for shard in master.run(parked_proof.shards_of, datastore.name, consumer):
            if shard >= datastore.shards or datastore.home(shard) != cluster:
                detail = f"{consumer} has a record or a count on {cluster}, which isn't the home of the shard"
                findings.add(FindingKind.PARKED_DIFFERS, shard, detail)
                continue
            proof = master.run(parked_proof.of_shard, datastore, consumer, shard, columns)
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
