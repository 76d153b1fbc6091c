"""Operators' commands to the tailers of a datastore: pause, resume, read the progress again. They are durable, and
every tailer obeys them within two seconds.

A command is written to every master that can be reached, and read from every cluster. The latest one counts. So an
unreachable cluster does not keep anybody from pausing or resuming.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from schemaless.storage import schema, tailer_order_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.failover import answers_of_all, first_answer, run_on_all
from schemaless.storage.operation import Operation
from schemaless.storage.pymysql_driver import SyncStorage
from schemaless.storage.tailer_order_table import NO_COMMAND, TailerCommand

_READ_TIMEOUT_S = 1.0


def latest(answers: Iterable[Mapping[str, TailerCommand]]) -> dict[str, TailerCommand]:
    """Returns the latest command of each datastore."""
    found: dict[str, TailerCommand] = {}
    for answer in answers:
        for name, command in answer.items():
            if command.changed_at > found.get(name, NO_COMMAND).changed_at:
                found[name] = command
    return found


def set_paused(storage: SyncStorage, datastore: str, paused: bool) -> list[str]:
    """Pauses or resumes the tailers of a datastore, and returns the clusters whose master is unreachable.

    Raises StorageUnavailable when no master can be reached.
    """
    return _change(storage, datastore, lambda command: msgspec.structs.replace(command, paused=paused))


def announce_seek(storage: SyncStorage, datastore: str) -> list[str]:
    """Makes the tailers of a datastore open their logs again, so that they continue from the progress that was moved.

    Returns and raises what `set_paused` does.
    """
    return _change(storage, datastore, lambda command: msgspec.structs.replace(command, seeks=command.seeks + 1))


def read_commands(storage: SyncStorage) -> dict[str, TailerCommand]:
    """Returns the latest command of each datastore, from the masters that can be reached."""
    return latest(run_on_all(storage.masters, tailer_order_table.all_of).found.values())


async def fetch_commands(storage: AsyncStorage) -> dict[str, TailerCommand]:
    """Returns the latest command of each datastore, from each cluster's master or, if that is unreachable, a minion.

    Raises StorageUnavailable when no server answers.
    """

    async def fetch(cluster: str) -> dict[str, TailerCommand]:
        commands, _ = await first_answer(
            (storage.master(cluster), *storage.minions(cluster)),
            lambda node: node.run(tailer_order_table.all_of, timeout_s=_READ_TIMEOUT_S),
        )
        return commands

    answers = await answers_of_all({cluster: fetch(cluster) for cluster in storage.topology.clusters})
    return latest(answers.at_least_one())


def _change(storage: SyncStorage, datastore: str, change: Callable[[TailerCommand], TailerCommand]) -> list[str]:
    known = read_commands(storage).get(datastore, NO_COMMAND)
    command = msgspec.structs.replace(change(known), changed_at=max(time.time_ns() // 1000, known.changed_at + 1))

    def write() -> Operation[None]:
        yield from schema.create_server_tables()
        yield from tailer_order_table.put(datastore, command)

    answers = run_on_all(storage.masters, write)
    answers.at_least_one()
    return list(answers.failures)
