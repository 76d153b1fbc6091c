"""Identity: to which program the name of a trigger program belongs. Two programs never share checkpoints by accident.

The first worker under a name stores its module or file (`origin`) on every cluster, once all of them answer. A worker
of another origin is refused then. So is one that has none of the functions that are known: two containers may both call
it /app/main.py. Later workers store it on the clusters that answer. So clusters may know different owners, and the
latest counts.
"""

from __future__ import annotations

import structlog

from schemaless.consume.trigger_program import TriggerProgram
from schemaless.errors import InUse, NameTaken, StorageUnavailable
from schemaless.quantity import quantity
from schemaless.storage import trigger_program_table, worker_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.trigger_program_table import ProgramFunctions, newest
from schemaless.storage.worker_table import SEEN_WITHIN_S, WorkerRow
from schemaless.topology import Datastore

log = structlog.get_logger()

_Known = tuple[ProgramFunctions | None, list[WorkerRow]]


async def claim_name(storage: AsyncStorage, datastore: Datastore, program: TriggerProgram, *, take_over: bool) -> None:
    """Stores on every cluster that answers that the program owns its name. Call it once at the start.

    Raises NameTaken if the name belongs to another program. With `take_over` the program continues where that one
    stopped. InUse is raised while workers of that one run, StorageUnavailable while nobody can tell who owns the name.
    """
    name, consumer, own = datastore.name, program.consumer, program.functions
    answers = await answers_of_all(
        {cluster: storage.master(cluster).run(_known, name, consumer) for cluster in datastore.clusters},
        tolerated=StorageUnavailable,
    )
    answers.at_least_one()
    found = answers.found
    owner = newest(known for known, _ in found.values())
    if owner is None and answers.failures:
        why = "; ".join(map(str, answers.failures.values()))
        raise StorageUnavailable(f"nobody can tell whether the name {program.name} is free: {why}")
    if owner is not None and _is_another(owner, own) and not take_over:
        raise NameTaken(_refusal(program, owner))
    if any(known is not None and _is_another(known, own) for known, _ in found.values()):
        _require_gone(program, [row for _, rows in found.values() for row in rows])
    # One cluster after the other: of two programs that start at once, the first cluster has one.
    for cluster, (seen, _) in found.items():
        try:
            is_ours = await storage.master(cluster).run(trigger_program_table.claim, name, consumer, own, seen)
        except StorageUnavailable as error:
            if owner is None:
                raise
            log.warning("a cluster doesn't know who owns a name", program=program.name, cluster=cluster, why=str(error))
            continue
        if not is_ours:
            raise NameTaken(f"another program has just begun under the name {program.name} on {name}")


def _known(datastore: str, consumer: str) -> Operation[_Known]:
    owner = yield from trigger_program_table.get(datastore, consumer)
    workers = yield from worker_table.of_datastore(datastore)
    return owner, [row for row in workers if row.consumer == consumer and row.age_s <= SEEN_WITHIN_S]


def _is_another(owner: ProgramFunctions, own: ProgramFunctions) -> bool:
    if not owner.origin or not own.origin:
        return False
    return owner.origin != own.origin or not _marked(owner) & _marked(own)


def _marked(program: ProgramFunctions) -> set[tuple[str, str]]:
    return {(column, name) for column, names in program.functions.items() for name in names}


def _refusal(program: TriggerProgram, owner: ProgramFunctions) -> str:
    if owner.origin == program.origin:
        known = ", ".join(sorted(f"{name} on {column}" for column, name in _marked(owner)))
        return f"{program.name} had other functions until now ({known}), and this program has none of them"
    return f"the name {program.name} belongs to the program {owner.origin}, and this one is {program.origin}"


def _require_gone(program: TriggerProgram, workers: list[WorkerRow]) -> None:
    others = {row.worker: row.report for row in workers if row.report.origin != program.origin}
    if others:
        places = ", ".join(f"{report.host} pid {report.pid}" for report in others.values())
        raise InUse(
            f"the other program {program.name} is run by {quantity(len(others), 'worker')}: {places}. One that was"
            f" killed counts for {SEEN_WITHIN_S:.0f} s"
        )
