"""One worker of a trigger program: a process with one Faust app over one datastore, which feeds the program.

`schemaless triggers run` starts `python -m schemaless.consume.trigger_worker`; the stack starts `python -m consumers`,
which is the same. Any number of workers share the partitions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec
import structlog

from schemaless.bus.parked_topic import ParkedTopic
from schemaless.bus.transport import transport_of
from schemaless.config import ConsumerSettings
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.consume.parked_store import MySQLParkedStore, ParkedCopies, ParkedStore
from schemaless.consume.start_at import Start, parse_start, verify_start
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram, load_program
from schemaless.consume.worker import Worker
from schemaless.errors import (
    CallHangs,
    InUse,
    Misconfigured,
    NameTaken,
    SchemalessError,
    StorageUnavailable,
    Unavailable,
)
from schemaless.names import trigger_group
from schemaless.ops.datastores import Catalogue
from schemaless.ops.ownership import take_part
from schemaless.quantity import quantity
from schemaless.runtime.forks import part_from_children
from schemaless.runtime.lifecycle import cancelled_at, run_service
from schemaless.runtime.outputs import wait_for_nobody
from schemaless.storage import (
    everywhere,
    parked_table,
    trigger_order_table,
    worker_table,
)
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all, nobody_answers
from schemaless.storage.operation import Operation
from schemaless.storage.parked_table import Ending, ParkedCell
from schemaless.storage.trigger_order_table import ProgramFunctions, SeekOrder, TriggerOrders, latest
from schemaless.storage.worker_table import SEEN_WITHIN_S, WorkerReport, WorkerRow
from schemaless.topology import Datastore

log = structlog.get_logger()

_LOOK_PAUSE_S = 0.5
_ORDERS_PAUSE_S = 1.0
_HISTORY_PAUSE_S = 60.0


async def run_program(
    settings: ConsumerSettings,
    storage: AsyncStorage,
    program: TriggerProgram,
    datastore_name: str,
    start_at: Start,
    *,
    take_over: bool = False,
    metrics: ConsumerMetrics | None = None,
) -> None:
    """Runs a program until it is cancelled, or until a part fails: the process then ends and is started again."""
    datastore = await _begin(storage, program, datastore_name, start_at, take_over=take_over)
    worker = Worker(storage, datastore, program.consumer, program.origin)
    await worker.tell(WorkerReport(origin=program.origin), time.monotonic())  # the program is known: who runs it, too
    host = ConsumerHost(storage, datastore, settings, worker)
    checkpoints = Checkpoints(host.lanes, program.consumer, CheckpointPlacement.HOME, start_at)
    parked = MySQLParkedStore(storage, datastore, program.consumer, row_reads_max=settings.connections_max // 4)
    handler = TriggerHandler(program, datastore, settings, parked)
    if metrics is not None:
        metrics.watch(datastore, host, handler)
    orders = Orders(storage, datastore, program.consumer)
    await host.add(Consumer(handler, checkpoints))
    transport = transport_of(settings, trigger_group(datastore.name, program.name), datastore.topic, host)
    host.join(transport)
    host.pause(program.consumer, lambda _: True)  # until it is known what people ordered
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take_part(transport, storage, settings.kafka, datastore))
            tasks.create_task(host.run())
            if settings.parked_topic:
                topic = await asyncio.to_thread(ParkedTopic, settings.kafka, datastore, program.name)
                copies = ParkedCopies(storage, datastore, program.consumer, topic.publish)
                tasks.create_task(copies.run(lambda: host.shards))
            tasks.create_task(_carry_out_orders(program, orders, host, handler, parked, datastore.name))
            tasks.create_task(_forget_old_history(storage, datastore))
            tasks.create_task(worker.run(lambda: _report(host, handler, program)))
            while True:
                await asyncio.sleep(_LOOK_PAUSE_S)
                if (hung := handler.hung_call()) is not None:
                    await host.blame(program.consumer, hung)
                    raise CallHangs(hung.text)  # the transport leaves the group before the process ends
    finally:
        await worker.leave()


async def _begin(
    storage: AsyncStorage, program: TriggerProgram, datastore_name: str, start_at: Start, *, take_over: bool
) -> Datastore:
    """Returns the datastore, once the program owns its name there. The log says what is waited for, each cause once.

    A datastore that is still being made is waited for, and so are servers that don't answer.
    """
    catalogue, said = Catalogue(storage), ""
    while True:
        try:
            datastore = await catalogue.datastore(datastore_name)
            await verify_start(storage, datastore, program.consumer, start_at)
            await claim_name(storage, datastore, program, take_over=take_over)
            break
        except (InUse, Misconfigured):
            raise
        except SchemalessError as error:
            if str(error) != said:
                log.warning("the program waits", program=program.name, datastore=datastore_name, why=str(error))
                said = str(error)
            await asyncio.sleep(_LOOK_PAUSE_S)
    columns = {column: ", ".join(marked.name for marked in found) for column, found in program.triggers.items()}
    group = trigger_group(datastore.name, program.name)
    log.info(
        "the program begins, and waits for its partitions", program=program.name, datastore=datastore.name,
        calls="; ".join(f"{column}: {names}" for column, names in columns.items()), group=group,
        worker=f"{socket.gethostname()} pid {os.getpid()}", version=program.version,
    )  # fmt: skip
    return datastore


def _report(host: ConsumerHost, handler: TriggerHandler, program: TriggerProgram) -> WorkerReport:
    count, erred, failing = handler.failing()
    calls, failures = handler.recent_calls()
    return msgspec.structs.replace(
        host.report(handler.oldest_call(), handler.tripped, handler.parallel),
        origin=program.origin,
        failing=tuple(failing),
        failing_count=count,
        erred_count=erred,
        calls=calls,
        failures=failures,
    )


async def _carry_out_orders(
    program: TriggerProgram,
    orders: Orders,
    host: ConsumerHost,
    handler: TriggerHandler,
    parked: ParkedStore,
    datastore: str,
) -> None:
    """Looks each second for what people ordered, until it is cancelled."""
    consumer = program.consumer
    while True:
        seen = await orders.read(host.shards, host.at_work(consumer))
        host.pause(consumer, seen.is_paused)
        for shard, seek in seen.seeks.items():
            scripts = [
                trigger_order_table.seek_done(datastore, consumer, shard, seek.number),
                parked.delete_from(shard, seek.to.added_id + 1, Ending.SOUGHT),
            ]
            await host.seek(consumer, seek.to, ";".join(scripts))
        handler.order(seen.due)
        await asyncio.sleep(_ORDERS_PAUSE_S)


async def _forget_old_history(storage: AsyncStorage, datastore: Datastore) -> None:
    """Keeps the history of parked cells within its bounds on every cluster that answers, until it is cancelled."""
    while True:
        await answers_of_all(
            {cluster: storage.master(cluster).run(parked_table.forget_old_history) for cluster in datastore.clusters},
            tolerated=SchemalessError,
        )
        await asyncio.sleep(_HISTORY_PAUSE_S)


def main() -> None:
    """Runs a worker until SIGTERM. `--from` counts for shards that have no checkpoint yet."""
    wait_for_nobody()  # before the program's module keeps what there is
    parser = argparse.ArgumentParser(prog="trigger-worker", description="One worker of a trigger program.")
    parser.add_argument("module", help="dotted module, or a .py file")
    parser.add_argument("--datastore", required=True)
    parser.add_argument("--name", help="of the program; default: the last part of the module's name")
    parser.add_argument("--take-over", action="store_true", help="continue where another program of the name stopped")
    parser.add_argument("--from", dest="start", action="append", default=[], help="beginning, end, a time, locations")
    arguments = parser.parse_args()
    try:
        start_at = parse_start(arguments.start)
        program = load_program(arguments.module, arguments.name)
    except SchemalessError as error:
        print(f"error: {error} ({error.hint})", file=sys.stderr)
        sys.exit(1)
    part_from_children()
    run_service(
        program.consumer,
        ConsumerSettings,
        lambda parts: cancelled_at(
            parts.stop,
            run_program(
                parts.settings,
                parts.storage,
                program,
                arguments.datastore,
                start_at,
                take_over=arguments.take_over,
                metrics=ConsumerMetrics(parts.metrics.registry),
            ),
        ),
    )


# Identity: to which program the name of a trigger program belongs. Two programs never share checkpoints by accident.
#
# The first worker under a name stores its module or file (`origin`) on every cluster, once all of them answer. A
# worker of another origin is refused then. So is one that has none of the functions that are known: two containers may
# both call it /app/main.py. Later workers store it on the clusters that answer. So clusters may know different owners,
# and the latest counts.

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
    owner = everywhere.latest(known for known, _ in found.values())
    if owner is None and answers.failures:
        what = f"nobody can tell whether the name {program.name} is free"
        raise nobody_answers(answers.failures.values(), what)
    if owner is not None and _is_another(owner, own) and not take_over:
        raise NameTaken(_refusal(program, owner))
    if any(known is not None and _is_another(known, own) for known, _ in found.values()):
        workers = [row for _, rows in found.values() for row in rows]
        others = {row.worker: row.report for row in workers if row.report.origin != program.origin}
        if others:
            places = ", ".join(f"{report.host} pid {report.pid}" for report in others.values())
            raise InUse(
                f"the other program {program.name} is run by {quantity(len(others), 'worker')}: {places}. One that was"
                f" killed counts for {SEEN_WITHIN_S:.0f} s"
            )
    # One cluster after the other: of two programs that start at once, the first cluster has one.
    for cluster, (seen, _) in found.items():
        try:
            is_ours = await storage.master(cluster).run(trigger_order_table.claim, name, consumer, own, seen)
        except StorageUnavailable as error:
            if owner is None:
                raise
            log.warning("a cluster doesn't know who owns a name", program=program.name, cluster=cluster, why=str(error))
            continue
        if not is_ours:
            raise NameTaken(f"another program has just begun under the name {program.name} on {name}")


def _known(datastore: str, consumer: str) -> Operation[_Known]:
    owner = yield from trigger_order_table.functions_of(datastore, consumer)
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


# Orders: what people ordered for a trigger program, as a worker reads it once a second.
#
# It is about the shards that the worker has: which of them are paused, where checkpoints are to go, and which records
# of parked cells are to be called again or discarded. The worker carries that out. Nobody else writes there.

DUE_MAX = 1000
"""How many due records a look returns for each cluster."""

_TIMEOUT_S = 1.0


class OrdersSeen(msgspec.Struct, frozen=True):
    """What is ordered. `program_paused`: nothing of the program is called. `seeks` and `paused` are by shard.

    `due` are records of shards that aren't paused, those that are due longest first.
    """

    program_paused: bool = False
    paused: frozenset[int] = frozenset()
    seeks: Mapping[int, SeekOrder] = {}
    due: Sequence[ParkedCell] = ()

    def is_paused(self, shard: int) -> bool:
        """Whether nothing of a shard is called. Before a seek that is so too, or cells that it passes would be."""
        return self.program_paused or shard in self.paused or shard in self.seeks


class _ClusterOrders(msgspec.Struct, frozen=True):
    orders: TriggerOrders
    due: Sequence[ParkedCell]


class Orders:
    """Reads the orders for one program from the masters of its datastore."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, consumer: str) -> None:
        self._storage = storage
        self._datastore = datastore
        self._consumer = consumer
        self._known: dict[str, TriggerOrders] = {}

    async def read(self, shards: Collection[int], at_work: Collection[int] | None = None) -> OrdersSeen:
        """Returns what is ordered for these shards. One that can't be asked keeps its last known pauses and seeks.

        `at_work` are those that can carry out orders for records now, by default all. What is due in others, such as a
        shard that stopped, would fill each look, and orders of the shards at work would never be seen.
        """
        by_home: dict[str, list[int]] = {cluster: [] for cluster in self._datastore.clusters}
        for shard in shards if at_work is None else at_work:
            by_home[self._datastore.home(shard)].append(shard)
        answers = await answers_of_all(
            {
                cluster: self._storage.master(cluster).run(self._look, tuple(own), timeout_s=_TIMEOUT_S)
                for cluster, own in by_home.items()
            },
            tolerated=Unavailable,  # Overloaded, too: calls may keep our connections busy for that long
        )
        for cluster, error in answers.failures.items():
            log.warning("orders can't be read", consumer=self._consumer, cluster=cluster, why=str(error))
        self._known.update({cluster: found.orders for cluster, found in answers.found.items()})
        paused = latest(self._known.values()).paused
        ours = {(self._datastore.home(shard), shard) for shard in shards}  # a former home still has its orders
        known = self._known.items()
        return OrdersSeen(
            program_paused=paused,
            paused=frozenset(n for cluster, one in known for n in one.paused if (cluster, n) in ours),
            seeks={n: seek for cluster, one in known for n, seek in one.seeks.items() if (cluster, n) in ours},
            due=() if paused else [record for found in answers.found.values() for record in found.due],
        )

    def _look(self, shards: Sequence[int]) -> Operation[_ClusterOrders]:
        name, consumer = self._datastore.name, self._consumer
        orders = yield from trigger_order_table.of_consumer(name, consumer)
        due = [] if orders.program.paused else (yield from parked_table.due(name, consumer, DUE_MAX, shards))
        return _ClusterOrders(orders, due)


if __name__ == "__main__":
    main()
