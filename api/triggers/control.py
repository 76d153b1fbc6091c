"""Trigger control: pause, resume and seek of trigger programs, as orders that their workers carry out (I10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from schemaless.consume.start_at import StartAfter, parse_start, start_positions
from schemaless.errors import Invalid, Misconfigured, NotFound, StorageUnavailable
from schemaless.location import Location, kept_until
from schemaless.ops.trigger_removal import (
    TriggerRemoval,
    consumer_of_program,
    read_removal,
    removal_of,
    require_no_workers,
)
from schemaless.position import Position
from schemaless.storage import checkpoint_table, shard_head, trigger_order_table, trigger_program_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.checkpoint_table import State
from schemaless.storage.failover import Answers, answers_of_all
from schemaless.storage.operation import Operation
from schemaless.storage.trigger_order_table import ProgramPause, TriggerOrders, latest
from schemaless.storage.trigger_program_table import ProgramFunctions
from schemaless.storage.worker_table import SEEN_WITHIN_S
from schemaless.topology import Datastore

T = TypeVar("T")


class ResumedProgram(msgspec.Struct, frozen=True):
    """How many stopped shards, and how many paused ones, run again, and which clusters don't know it yet."""

    stopped: int
    paused: int
    unreached: Sequence[str]


class SeekStep(msgspec.Struct, frozen=True):
    """What a seek does to one shard. `before` is None without a checkpoint. `again` and `passed` count cells."""

    before: Location | None
    to: Position
    again: int
    passed: int
    is_stopped: bool


class TriggerControl:
    """The orders of people for one program of a datastore."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, program: str) -> None:
        self.consumer = consumer_of_program(program)
        self._storage = storage
        self._datastore = datastore
        self._program = program

    async def functions(self) -> ProgramFunctions | None:
        """Returns the functions that the program has, None if no worker has said so."""
        answers = await self._ask(lambda: trigger_program_table.get(self._datastore.name, self.consumer))
        return trigger_program_table.newest(answers.at_least_one())

    async def require_known(self) -> None:
        """Raises NotFound for a program that never ran here, StorageUnavailable where nobody knows."""
        answers = await self._ask(lambda: _is_known(self._datastore.name, self.consumer))
        if not any(answers.found.values()):
            if answers.failures:
                raise StorageUnavailable("; ".join(map(str, answers.failures.values())))
            raise NotFound(f"no trigger program {self._program!r} has run on datastore {self._datastore.name}")

    async def orders(self) -> dict[str, TriggerOrders]:
        """Returns the orders by cluster, of those that answer."""
        name = self._datastore.name
        return (await self._ask(lambda: trigger_order_table.of_consumer(name, self.consumer))).found

    async def pause(self, shards: Collection[int], reason: str | None) -> list[str]:
        """Pauses the program, or only some shards. Returns the clusters that don't know it yet."""
        await self.require_known()
        if not shards:
            return await self._put_program(paused=True, reason=reason)
        for cluster, own in self._by_home(shards).items():
            await self._storage.master(cluster).run(
                trigger_order_table.pause_shards, self._datastore.name, self.consumer, own, reason
            )
        return []

    async def resume(self, shards: Collection[int]) -> ResumedProgram:
        """Lets stopped and paused shards run again, all or those named."""
        await self.require_known()
        name, unreached = self._datastore.name, []
        program = latest((await self.orders()).values())
        if shards and program.paused:
            raise Invalid("shards", "the whole program is paused: resume it, and pause the shards that shall wait")
        by_home = self._by_home(shards)
        if not shards and program.paused:
            unreached = await self._put_program(paused=False, reason=None)
        stopped = paused = 0
        for cluster in by_home or self._datastore.clusters:
            own = by_home.get(cluster, [])
            try:
                master = self._storage.master(cluster)
                paused += await master.run(trigger_order_table.resume_shards, name, self.consumer, own)
                stopped += await master.run(checkpoint_table.resume, name, self.consumer, own)
            except StorageUnavailable:
                if shards:
                    raise
                unreached.append(cluster)
        return ResumedProgram(stopped, paused, sorted(set(unreached)))

    async def plan_seek(self, to: Sequence[str], shards: Collection[int]) -> list[SeekStep]:
        """Returns what a seek does. Raises Invalid for a location that the log doesn't have."""
        await self.require_known()
        try:
            start = parse_start(to)
        except Invalid as wrong:
            raise Invalid("to", wrong.why) from wrong
        wanted: Collection[int] = shards or range(self._datastore.shards)
        if isinstance(start, StartAfter):
            if shards and set(shards) != set(start.locations):
                raise Invalid("shards", "a location names its shard: leave shards out, or name the same ones")
            wanted = start.locations
        steps: list[SeekStep] = []
        for cluster, own in self._by_home(wanted).items():
            try:
                targets = await self._storage.master(cluster).run(start_positions, self._datastore, start, own)
            except Misconfigured as gone:
                raise Invalid("to", str(gone).removeprefix("--from ")) from gone
            steps += await self._storage.master(cluster).run(_steps, self._datastore.name, self.consumer, targets)
        return sorted(steps, key=lambda step: step.to.shard)

    async def seek(self, steps: Sequence[SeekStep]) -> None:
        """Orders a seek. Raises StorageUnavailable where the home of a shard is away."""
        number = time.time_ns() // 1000
        for cluster, own in self._datastore.by_home([step.to for step in steps], lambda to: to.shard).items():
            await self._storage.master(cluster).run(
                trigger_order_table.seek, self._datastore.name, self.consumer, own, number
            )

    async def remove(self) -> TriggerRemoval:
        """Removes the program. Raises InUse while workers run, and StorageUnavailable while a cluster is away."""
        name, consumer = self._datastore.name, self.consumer
        parts = [
            await self._storage.master(cluster).run(read_removal, name, consumer)
            for cluster in self._datastore.clusters
        ]
        removal = removal_of(self._datastore, self._program, parts)
        require_no_workers(removal)
        for cluster in self._datastore.clusters:
            removed = await self._storage.master(cluster).run(checkpoint_table.remove, name, consumer, SEEN_WITHIN_S)
            removal.require_removed(cluster, removed)
        return removal

    async def _put_program(self, *, paused: bool, reason: str | None) -> list[str]:
        known = latest((await self.orders()).values())
        pause = ProgramPause(paused, reason, max(time.time_ns() // 1000, known.changed_at + 1))
        answers = await self._ask(lambda: trigger_order_table.put_program(self._datastore.name, self.consumer, pause))
        answers.at_least_one()
        return sorted(answers.failures)

    def _by_home(self, shards: Collection[int]) -> Mapping[str, list[int]]:
        for shard in shards:
            if not 0 <= shard < self._datastore.shards:
                raise Invalid("shards", f"{shard} is none of 0 to {self._datastore.shards - 1}")
        return self._datastore.by_home(sorted(set(shards)), lambda shard: shard)

    async def _ask(self, question: Callable[[], Operation[T]]) -> Answers[T]:
        """Asks the masters of the datastore's clusters."""
        return await answers_of_all(
            {cluster: self._storage.master(cluster).run(question) for cluster in self._datastore.clusters}
        )


def _is_known(datastore: str, consumer: str) -> Operation[bool]:
    return bool((yield from checkpoint_table.of_consumer(datastore, consumer)))


def _steps(datastore: str, consumer: str, targets: Sequence[Position]) -> Operation[list[SeekStep]]:
    shards = [to.shard for to in targets]
    found = {row.shard: row for row in (yield from checkpoint_table.of_consumer(datastore, consumer, shards))}
    starts = yield from shard_head.generations_of_all(datastore)
    steps = []
    for to in targets:
        row = found.get(to.shard)
        until = 0 if row is None else kept_until(row.location, starts.get(to.shard, ()))
        steps.append(
            SeekStep(
                None if row is None else row.location,
                to,
                again=max(0, until - to.added_id),
                passed=max(0, to.added_id - until),
                is_stopped=row is not None and row.state is State.STOPPED,
            )
        )
    return steps
