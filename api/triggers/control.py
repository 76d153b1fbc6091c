"""Trigger control: pause, resume and seek of trigger programs, as orders that their workers carry out (I10)."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from schemaless.consume.start_at import StartAfter, parse_start, start_positions
from schemaless.contract.indexes import WouldView
from schemaless.contract.programs import LeftOutView, ResumedView, SeekStepView
from schemaless.errors import Invalid, Misconfigured, NotFound, StorageUnavailable
from schemaless.facts.consumers import read_workers
from schemaless.location import ADDED_ID_MAX, Location, kept_until
from schemaless.ops.trigger_removal import (
    TriggerRemoval,
    consumer_of_program,
    read_removal,
    removal_of,
    require_no_workers,
)
from schemaless.position import Position
from schemaless.quantity import quantity
from schemaless.runtime.batching import chunks
from schemaless.storage import (
    checkpoint_table,
    everywhere,
    job_table,
    parked_selection,
    shard_head,
    trigger_order_table,
)
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.checkpoint_table import State
from schemaless.storage.failover import Answers, answers_of_all, nobody_answers
from schemaless.storage.job_table import Job, JobKind
from schemaless.storage.operation import Operation
from schemaless.storage.parked_selection import ORDERED_AT_ONCE, ParkedFilter, ParkedId, RecordOrder, counts_of
from schemaless.storage.parked_table import Order
from schemaless.storage.trigger_order_table import ProgramFunctions, ProgramPause, TriggerOrders, latest
from schemaless.storage.worker_table import SEEN_WITHIN_S
from schemaless.topology import Datastore

T = TypeVar("T")


SeekStep = tuple[Position, SeekStepView]
"""Where a shard goes, and what that does."""


class TriggerControl:
    """The orders of people for one program of a datastore."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, program: str) -> None:
        self.consumer = consumer_of_program(program)
        self._storage = storage
        self._datastore = datastore
        self._program = program

    async def functions(self) -> ProgramFunctions | None:
        """Returns the functions that the program has, None if no worker has said so."""
        answers = await self._ask(lambda: trigger_order_table.functions_of(self._datastore.name, self.consumer))
        return everywhere.latest(answers.at_least_one())

    async def require_known(self) -> None:
        """Raises NotFound for a program that never ran here, StorageUnavailable where nobody knows."""
        answers = await self._ask(lambda: _is_known(self._datastore.name, self.consumer))
        if not any(answers.found.values()):
            if answers.failures:
                raise nobody_answers(answers.failures.values(), "not every cluster answers")
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
            await self._at_home(cluster, own, trigger_order_table.pause_shards, own, reason)
        return []

    async def would(self, shards: Collection[int], becomes: str) -> WouldView:
        """Returns what a pause or a resume would touch."""
        await self.require_known()
        workers = await read_workers(self._storage, self._datastore)
        count = len(set(shards)) if self._by_home(shards) else self._datastore.shards
        return WouldView(becomes, count, sum(row.consumer == self.consumer for row in workers))

    async def plan_resume(self, shards: Collection[int]) -> ResumedView:
        """Returns what a resume would come to."""
        would = await self.would(shards, "running")
        program = await self._pause_to_end(shards)
        orders = await self.orders()
        checkpoints = await self._ask(lambda: checkpoint_table.of_consumer(self._datastore.name, self.consumer))
        halted = {row.shard for rows in checkpoints.found.values() for row in rows if row.state is State.STOPPED}
        held = {shard for one in orders.values() for shard in one.paused}
        wanted: Collection[int] = shards or range(self._datastore.shards)
        stopped, paused = (len(found.intersection(wanted)) for found in (halted, held))
        unreached = sorted(checkpoints.failures)
        return ResumedView(self._program, stopped, paused, unreached, program.paused, would)

    async def resume(self, shards: Collection[int]) -> ResumedView:
        """Lets stopped and paused shards run again, all or those named."""
        await self.require_known()
        unreached: list[str] = []
        program = await self._pause_to_end(shards)
        by_home = self._by_home(shards)
        if not shards and program.paused:
            unreached = await self._put_program(paused=False, reason=None)
        stopped = paused = 0
        for cluster in by_home or self._datastore.clusters:
            own = by_home.get(cluster, [])
            try:
                paused += await self._at_home(cluster, own, trigger_order_table.resume_shards, own)
                stopped += await self._at_home(cluster, own, checkpoint_table.resume, own)
            except StorageUnavailable:
                if shards:
                    raise
                unreached.append(cluster)
        return ResumedView(self._program, stopped, paused, sorted(set(unreached)), program.paused)

    async def _pause_to_end(self, shards: Collection[int]) -> ProgramPause:
        """Returns the pause of the whole program, which a resume of some shards can't end. Raises Invalid."""
        program = latest((await self.orders()).values())
        if shards and program.paused:
            raise Invalid("shards", "the whole program is paused: resume it, and pause the shards that shall wait")
        return program

    async def plan_seek(self, to: Sequence[str], shards: Collection[int]) -> list[SeekStep]:
        """Returns where shards go, and what that does. Raises Invalid for a location that the log doesn't have."""
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
        return sorted(steps, key=lambda step: step[0].shard)

    async def seek(self, to: Sequence[Position]) -> None:
        """Orders a seek. Raises StorageUnavailable where the home of a shard is away."""
        number = time.time_ns() // 1000
        for cluster, own in self._datastore.by_home(to, lambda one: one.shard).items():
            await self._at_home(cluster, [to.shard for to in own], trigger_order_table.seek, own, number)

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
        pause = ProgramPause(paused, reason, everywhere.after(known.changed_at))
        return await everywhere.write_everywhere(
            map(self._storage.master, self._datastore.clusters),
            lambda master: master.run(trigger_order_table.put_program, self._datastore.name, self.consumer, pause),
        )

    def _by_home(self, shards: Collection[int]) -> Mapping[str, list[int]]:
        for shard in shards:
            if not 0 <= shard < self._datastore.shards:
                raise Invalid("shards", f"{shard} is none of 0 to {self._datastore.shards - 1}")
        return self._datastore.by_home(sorted(set(shards)), lambda shard: shard)

    async def _at_home(
        self, cluster: str, shards: Collection[int], write: Callable[..., Operation[T]], *args: object
    ) -> T:
        """Orders something for shards, or for all. Raises ShardsMoved where one has moved: it would stay behind."""
        name, consumer = self._datastore.name, self.consumer
        at_home = shard_head.at_home if shards else lambda _name, _shards, written: written
        return await self._storage.master(cluster).run(lambda: at_home(name, shards, write(name, consumer, *args)))

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
        step = SeekStepView(
            to.shard,
            None if row is None else str(row.location),
            str(to.location),
            again=max(0, until - to.added_id),
            passed=max(0, to.added_id - until),
            stopped=row is not None and row.state is State.STOPPED,
        )
        steps.append((to, step))
    return steps


# Parked orders: retry and discard of parked cells, by filter or by id. The owners of the shards carry them out.

IDS_MAX = 1000
ORDERED_MAX = 100_000
"""Records that one request orders at most. The next request orders the rest."""

_ID = re.compile(r"(0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,18}):(.{1,100})")
_Key = tuple[int, int]


class Ordered(msgspec.Struct, frozen=True):
    """What a request ordered. `job` is None for a dry run, and where nothing matched."""

    matched: int
    job: int | None
    left_out: list[LeftOutView] = []
    more: bool = False


def parse_parked_id(text: str) -> ParkedId:
    """Parses SHARD:GENERATION:ADDED_ID:TRIGGER. Raises Invalid."""
    match = _ID.fullmatch(text)
    if match is None or int(match[3]) > ADDED_ID_MAX:
        raise Invalid("ids", f"{text[:100]!r} is not SHARD:GENERATION:ADDED_ID:TRIGGER")
    return ParkedId(int(match[1]), Location(int(match[2]), int(match[3])), match[4])


class ParkedOrders:
    """The orders of people for the parked cells of one program."""

    def __init__(self, storage: AsyncStorage, datastore: Datastore, control: TriggerControl, who: str) -> None:
        self._storage = storage
        self._datastore = datastore
        self._control = control
        self._who = who

    async def by_filter(
        self, order: Order, wanted: ParkedFilter, rate: float | None, reason: str | None, *, dry_run: bool
    ) -> Ordered:
        """Orders what matches. A retry leaves out functions that the program no longer has."""
        await self._control.require_known()
        consumer = self._control.consumer
        by_cluster = {
            cluster: await self._storage.master(cluster).run(
                parked_selection.by_function, self._datastore, consumer, wanted
            )
            for cluster in self._datastore.clusters
        }
        counted = counts_of(by_cluster.values())
        gone = await self._gone(counted) if order is Order.RETRY else {}
        left_out = [LeftOutView(name, counted[name], why) for name, why in gone.items()]
        matched = {
            cluster: sum(count for name, count in counts.items() if name not in gone)
            for cluster, counts in by_cluster.items()
        }
        total = sum(matched.values())
        if not total and left_out:
            raise Invalid(
                "filter", f"of {quantity(left_out[0].cells, 'parked cell')} none can be called: {left_out[0].why}"
            )
        if dry_run or not total:
            return Ordered(total, None, left_out)
        job, ordered = secrets.randbits(63), 0
        only = msgspec.structs.replace(wanted, without=tuple(gone))
        for cluster, count in matched.items():
            if not count or ordered >= ORDERED_MAX:
                continue
            what = RecordOrder(order, job, _step_us(total, count, rate), reason)
            await self._put_job(cluster, what, count)
            ordered += await self._order_matching(cluster, only, what, ORDERED_MAX - ordered)
        return Ordered(ordered, job, left_out, more=total > ordered >= ORDERED_MAX)

    async def by_ids(
        self, order: Order, ids: Sequence[str], rate: float | None, reason: str | None, *, dry_run: bool
    ) -> Ordered:
        """Orders what ids stand for. One of a cell that waits behind another stands for the row's first parked cell."""
        await self._control.require_known()
        keys: dict[_Key, None] = {}
        left_out: list[LeftOutView] = []
        for wanted in dict.fromkeys(map(parse_parked_id, ids)):
            key, why = await self._resolved(order, wanted)
            if key is None:
                left_out.append(LeftOutView(str(wanted), 1, why))
            else:
                keys[key] = None
        if not keys:
            raise NotFound("; ".join(f"{one.name}: {one.why}" for one in left_out[:5]))
        if dry_run:
            return Ordered(len(keys), None, left_out)
        job, ordered = secrets.randbits(63), 0
        for cluster, own in self._datastore.by_home(keys, lambda key: key[0]).items():
            what = RecordOrder(order, job, _step_us(len(keys), len(own), rate), reason)
            await self._put_job(cluster, what, len(own))
            ordered += await self._order(cluster, own, 0, what)
        return Ordered(ordered, job, left_out)

    async def _resolved(self, order: Order, wanted: ParkedId) -> tuple[_Key | None, str]:
        """Returns the record that an id stands for, or why it stands for none."""
        if wanted.shard >= self._datastore.shards:
            raise Invalid("ids", f"{wanted} names shard {wanted.shard}, the last one is {self._datastore.shards - 1}")
        home = self._storage.master(self._datastore.home(wanted.shard))
        found = await home.run(parked_selection.resolve, self._datastore, self._control.consumer, wanted)
        record = found.record
        if record is None:
            return None, "isn't parked, or no longer"
        first = ParkedId(record.shard, record.location, record.function_name)
        if order is Order.DISCARD and found.is_behind:
            return None, f"waits behind {first}. Only a row's first parked cell can be discarded: retry or discard that"
        if order is Order.DISCARD and wanted.trigger != record.function_name:
            return None, f"is parked by another function now: {first}"
        if order is Order.RETRY and (gone := await self._gone([record.function_name])):
            return None, gone[record.function_name]
        return (record.shard, record.added_id), ""

    async def _gone(self, names: Sequence[str] | Mapping[str, int]) -> dict[str, str]:
        """Returns why functions can't be called again: the program's present code doesn't have them."""
        program = await self._control.functions() if names else None
        if program is None:
            return {}
        return {
            name: f"the program (version {program.version}) has no function {name}: name one so with"
            f" @trigger(name={name!r}), or discard the cells"
            for name in names
            if name not in program.names
        }

    async def _put_job(self, cluster: str, what: RecordOrder, matched: int) -> None:
        job = Job(what.job, self._control.consumer, JobKind(what.order), matched, what.reason, self._who)
        await self._storage.master(cluster).run(job_table.put, self._datastore.name, job)

    async def _order_matching(self, cluster: str, wanted: ParkedFilter, what: RecordOrder, limit: int) -> int:
        after, ordered = (-1, 0), 0
        while ordered < limit:
            keys = await self._storage.master(cluster).run(
                parked_selection.next_keys, self._datastore, self._control.consumer, wanted, after, ORDERED_AT_ONCE
            )
            if not keys:
                break
            ordered += await self._order(cluster, keys, ordered, what)
            after = keys[-1]
        return ordered

    async def _order(self, cluster: str, keys: Sequence[_Key], first: int, what: RecordOrder) -> int:
        ordered = 0
        for part in chunks(keys, count_max=ORDERED_AT_ONCE):
            ordered += await self._storage.master(cluster).run(
                parked_selection.order, self._datastore, self._control.consumer, part, first, what
            )
            first += len(part)
        return ordered


def _step_us(total: int, own: int, rate: float | None) -> int:
    """Returns the time between two records of a cluster, so that all clusters together keep to the rate a second."""
    return 0 if rate is None else round(total / rate / own * 1_000_000)


def job_view(datastore: Datastore, parts: Sequence[job_table.JobProgress], waits: str | None) -> dict[str, Any]:
    """Shows a job from what each cluster has of it, at least one. What is neither pending nor failed again is done."""
    job = parts[0].job
    matched, pending = sum(part.job.matched for part in parts), sum(part.pending for part in parts)
    failed, replaced = sum(part.failed for part in parts), sum(part.job.replaced for part in parts)
    return {
        "job": f"{job.job:016x}",
        "datastore": datastore.name,
        "program": job.consumer.partition(":")[2],
        "kind": job.kind.value,
        "state": "running" if pending else "done",
        "matched": matched,
        "pending": pending,
        "failed": failed,
        "replaced": replaced,
        "done": max(0, matched - pending - failed - replaced),
        "who": job.who,
        "reason": job.reason,
        "waits_for": waits if pending else None,
    }
