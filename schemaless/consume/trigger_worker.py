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

import msgspec
import structlog

from schemaless.bus.parked_topic import ParkedTopic
from schemaless.bus.transport import transport_of
from schemaless.config import ConsumerSettings
from schemaless.consume.checkpoints import CheckpointPlacement, Checkpoints
from schemaless.consume.host import Consumer, ConsumerHost
from schemaless.consume.identity import claim_name
from schemaless.consume.metrics import ConsumerMetrics
from schemaless.consume.orders import Orders
from schemaless.consume.parked_copies import ParkedCopies
from schemaless.consume.parked_store import MySQLParkedStore, ParkedStore
from schemaless.consume.start_at import Start, parse_start, verify_start
from schemaless.consume.trigger_handler import TriggerHandler
from schemaless.consume.trigger_program import TriggerProgram, load_program
from schemaless.consume.worker import Worker
from schemaless.errors import CallHangs, InUse, Misconfigured, SchemalessError
from schemaless.names import trigger_group
from schemaless.ops.datastores import Catalogue
from schemaless.runtime.lifecycle import cancelled_at, run_service
from schemaless.storage import parked_history_table, trigger_order_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all
from schemaless.storage.parked_history_table import Ending
from schemaless.storage.worker_table import WorkerReport
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
    host = ConsumerHost(storage, datastore, settings, worker)
    checkpoints = Checkpoints(host.lanes, program.consumer, CheckpointPlacement.HOME, start_at)
    parked = MySQLParkedStore(storage, datastore, program.consumer)
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
            tasks.create_task(transport.run())
            tasks.create_task(host.run())
            if settings.parked_topic:
                topic = ParkedTopic(settings.kafka, datastore, program.name)
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
    return msgspec.structs.replace(
        host.report(handler.oldest_call(), handler.tripped, handler.parallel),
        origin=program.origin,
        failing=tuple(failing),
        failing_count=count,
        erred_count=erred,
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
            {cluster: storage.master(cluster).run(parked_history_table.forget_old) for cluster in datastore.clusters},
            tolerated=SchemalessError,
        )
        await asyncio.sleep(_HISTORY_PAUSE_S)


def main() -> None:
    """Runs a worker until SIGTERM. `--from` counts for shards that have no checkpoint yet."""
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


if __name__ == "__main__":
    main()
