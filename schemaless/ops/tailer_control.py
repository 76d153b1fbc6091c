"""What operators tell the tailers of a datastore: to pause, to go on, to read their progress again. Durable, and
seen by every tailer within two seconds.

Written to every master that can be reached and read from every cluster; of several answers the latest counts. So one
cluster that is away keeps nobody from pausing or resuming.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from schemaless.errors import StorageUnavailable
from schemaless.storage import schema, tailer_order_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.operation import Operation
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.tailer_order_table import NO_ORDER, TailerOrder

_TIMEOUT_S = 1.0


def latest(answers: Iterable[Mapping[str, TailerOrder]]) -> dict[str, TailerOrder]:
    """What counts, by datastore."""
    found: dict[str, TailerOrder] = {}
    for answer in answers:
        for name, order in answer.items():
            if order.changed_at > found.get(name, NO_ORDER).changed_at:
                found[name] = order
    return found


def set_paused(storage: SyncStorage, datastore: str, paused: bool) -> list[str]:
    """Names of the clusters whose master could not be told. Raises StorageUnavailable when that is all of them."""
    return _change(storage, datastore, lambda order: msgspec.structs.replace(order, paused=paused))


def tell_of_seek(storage: SyncStorage, datastore: str) -> list[str]:
    """As `set_paused`: tailers open their logs anew, so that they go on from where progress is now."""
    return _change(storage, datastore, lambda order: msgspec.structs.replace(order, seeks=order.seeks + 1))


def read_orders(storage: SyncStorage) -> dict[str, TailerOrder]:
    """Of the masters that can be reached."""
    answers = []
    for cluster in sorted(storage.topology.clusters):
        try:
            answers.append(storage.master(cluster).run(tailer_order_table.all_of))
        except StorageUnavailable:
            continue
    return latest(answers)


async def ask_orders(storage: AsyncStorage) -> dict[str, TailerOrder]:
    """Of each cluster's master, or of a minion while it is away. Raises StorageUnavailable when no server answers."""
    asked = await asyncio.gather(*(_ask(storage, cluster) for cluster in storage.topology.clusters))
    answers = [answer for answer in asked if answer is not None]
    if not answers:
        raise StorageUnavailable("no server answers")
    return latest(answers)


def _change(storage: SyncStorage, datastore: str, change: Callable[[TailerOrder], TailerOrder]) -> list[str]:
    known = read_orders(storage).get(datastore, NO_ORDER)
    order = msgspec.structs.replace(change(known), changed_at=max(time.time_ns() // 1000, known.changed_at + 1))
    failures = {}
    for cluster in sorted(storage.topology.clusters):
        try:
            storage.master(cluster).run(_put, datastore, order)
        except StorageUnavailable as error:
            failures[cluster] = error
    if len(failures) == len(storage.topology.clusters):
        raise StorageUnavailable("no master answers: " + "; ".join(map(str, failures.values())))
    return list(failures)


async def _ask(storage: AsyncStorage, cluster: str) -> dict[str, TailerOrder] | None:
    for node in (storage.master(cluster), *storage.minions(cluster)):
        try:
            return await node.run(tailer_order_table.all_of, timeout_s=_TIMEOUT_S)
        except StorageUnavailable:
            continue
    return None


def _put(datastore: str, order: TailerOrder) -> Operation[None]:
    yield from schema.create_server_tables()
    yield from tailer_order_table.put(datastore, order)
