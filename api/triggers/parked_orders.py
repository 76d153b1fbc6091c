"""Parked orders: retry and discard of parked cells, by filter or by id. The owners of the shards carry them out."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api.triggers.control import TriggerControl
from schemaless.errors import Invalid, NotFound
from schemaless.location import ADDED_ID_MAX, Location
from schemaless.quantity import quantity
from schemaless.runtime.batching import chunks
from schemaless.storage import job_table, parked_selection
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.job_table import Job, JobKind
from schemaless.storage.parked_selection import ORDERED_AT_ONCE, ParkedFilter, ParkedId, RecordOrder, counts_of
from schemaless.storage.parked_table import Order
from schemaless.topology import Datastore

IDS_MAX = 1000
ORDERED_MAX = 100_000
"""Records that one request orders at most. The next request orders the rest."""

_ID = re.compile(r"(\d{1,9}):(\d{1,10}):(\d{1,19}):(.{1,100})", re.ASCII)
_Key = tuple[int, int]


class LeftOut(msgspec.Struct, frozen=True):
    """What was not ordered, and why. `name` is an id or a function."""

    name: str
    cells: int
    why: str


class Ordered(msgspec.Struct, frozen=True):
    """What a request ordered. `job` is None for a dry run, and where nothing matched."""

    matched: int
    job: int | None
    left_out: Sequence[LeftOut] = ()
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
        left_out = [LeftOut(name, counted[name], why) for name, why in gone.items()]
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
        left_out: list[LeftOut] = []
        for wanted in dict.fromkeys(map(parse_parked_id, ids)):
            key, why = await self._resolved(order, wanted)
            if key is None:
                left_out.append(LeftOut(str(wanted), 1, why))
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
