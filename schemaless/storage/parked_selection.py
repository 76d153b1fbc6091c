"""Selections of parked cells: what people list of them, and order for them. On the home of the shards.

People only write orders. What waits behind a parked cell of its row has no record: it is read from the entity table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from schemaless.cell import RowKey, StoredCell
from schemaless.location import Location
from schemaless.storage import parked_table, shard_head
from schemaless.storage.operation import Operation, query
from schemaless.storage.parked_table import Cause, Order, ParkedCell
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Name, Script, commas, matching, sql, where
from schemaless.topology import Datastore
from schemaless.triggers.verdicts import DOUBT_PREFIX

ORDERED_AT_ONCE = 250
_TABLE = "schemaless.parked"


class ParkedFilter(msgspec.Struct, frozen=True):
    """Which records are meant. `since`: parked at that time or later, in microseconds. None: whatever it is."""

    trigger: str | None = None
    column: str | None = None
    row_key: RowKey | None = None
    cause: Cause | None = None
    since: int | None = None
    without: Sequence[str] = ()
    """Functions that are left out."""
    only_held: bool = False
    """Only records that hold their rows."""
    only_doubts: bool = False
    """Only records of effects that may have happened or not (schemaless/triggers/effects.py)."""

    def condition(self, datastore: str, consumer: str) -> Script:
        fields = {
            "function_name": self.trigger,
            "column_name": self.column,
            "row_key": self.row_key,
            "cause": self.cause,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        parts = [matching(datastore=datastore, consumer=consumer, **given), shard_head.not_moved(datastore)]
        if self.since is not None:
            parts.append(sql("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', parked_at) >= %s", self.since))
        if self.without:
            parts.append(f"NOT {matching(function_name=list(self.without))}")
        if self.only_held:
            parts.append("holds_row = 1")
        if self.only_doubts:
            verdict = sql("cause = %s", Cause.VERDICT.value)
            parts.append(f"{verdict} AND LEFT(error, {len(DOUBT_PREFIX)}) = " + sql("%s", DOUBT_PREFIX))
        return " AND ".join(parts)


class ParkedPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a record is. `until`: up to that added_id its shard is finished, so no cell behind it waits further on."""

    shard: int
    added_id: int
    row_key: RowKey
    holds_row: bool
    function_name: str
    size_bytes: int
    until: int


class BehindCell(msgspec.Struct, frozen=True, gc=False):
    """A cell that waits behind a parked one."""

    added_id: int
    size_bytes: int


def places(
    datastore: Datastore, consumer: str, wanted: ParkedFilter, start: tuple[int, int], limit: int
) -> Operation[tuple[list[ParkedPlace], int]]:
    """Returns the records from (shard, added_id) on, in that order, and how many records match in all."""
    which = wanted.condition(datastore.name, consumer)
    shard, added_id = start
    found, counted = yield (
        "SELECT p.shard, p.added_id, p.row_key, p.holds_row, p.function_name, LENGTH(p.error), COALESCE("
        "(SELECT c.added_id FROM schemaless.checkpoint AS c WHERE c.datastore = p.datastore"
        " AND c.consumer = p.consumer AND c.shard = p.shard), 0)"
        f" FROM {_TABLE} AS p WHERE {which} AND (p.shard > {shard} OR (p.shard = {shard} AND p.added_id >= {added_id}))"
        f" ORDER BY p.shard, p.added_id LIMIT {limit};SELECT COUNT(*) FROM {_TABLE} WHERE {which}"
    )
    rows = [
        ParkedPlace(shard, added_id, RowKey(row_key), bool(holds), function, size, int(until))
        for shard, added_id, row_key, holds, function, size, until in found.rows
    ]
    return rows, int(counted.rows[0][0])


def behind(
    datastore: Datastore, heads: Sequence[tuple[ParkedPlace, int]], columns: Iterable[str], limit: int
) -> Operation[list[list[BehindCell]]]:
    """Returns, for each record and added_id, the cells after it that wait behind the record, at least one record.

    Without `columns` cells of all columns are returned.
    """
    names = commas([sql("%s", name.encode()) for name in columns])
    only = f" AND column_name IN ({names})" if names else ""
    results = yield ";".join(
        sql(
            "SELECT added_id, LENGTH(body) FROM %s.entity WHERE row_key = %s AND added_id > %s AND added_id <= %s"
            f"{only} ORDER BY added_id LIMIT {limit}",
            Name(datastore.database(head.shard)),
            head.row_key,
            after,
            head.until,
        )
        for head, after in heads
    )
    return [[BehindCell(*row) for row in result.rows] for result in results]


def read(
    datastore: Datastore, consumer: str, keys: Sequence[tuple[int, int]]
) -> Operation[tuple[dict[tuple[int, int], ParkedCell], dict[tuple[int, int], StoredCell]]]:
    """Returns the records and the cells that are at these shards and added_ids, at least one."""
    records = yield from parked_table.of_keys(datastore.name, consumer, keys)
    by_shard: dict[int, list[int]] = {}
    for shard, added_id in keys:
        by_shard.setdefault(shard, []).append(added_id)
    results = yield ";".join(
        "SELECT row_key, column_name, ref_key, generation, added_id,"
        f" {MICROSECONDS.format('created_at')}, body, cause FROM "
        + sql("%s.entity", Name(datastore.database(shard)))
        + f" WHERE added_id IN ({commas([str(added_id) for added_id in ids])})"
        for shard, ids in by_shard.items()
    )
    cells = {
        (shard, row[4]): StoredCell(row[0], row[1], row[2], shard, row[3], row[4], row[5], row[6], row[7])
        for shard, result in zip(by_shard, results, strict=True)
        for row in result.rows
    }
    return {(record.shard, record.added_id): record for record in records}, cells


class ParkedId(msgspec.Struct, frozen=True):
    """Names a parked cell. Text form: SHARD:GENERATION:ADDED_ID:TRIGGER."""

    shard: int
    location: Location
    trigger: str

    def __str__(self) -> str:
        return f"{self.shard}:{self.location}:{self.trigger}"


class ResolvedId(msgspec.Struct, frozen=True):
    """The record that an id stands for: of the cell itself, or the one that holds its row. None: it isn't parked."""

    record: ParkedCell | None
    is_behind: bool = False


def resolve(datastore: Datastore, consumer: str, wanted: ParkedId) -> Operation[ResolvedId]:
    """Returns the record that an id stands for. An id of a cell behind another stands for the row's record."""
    own = yield from parked_table.of_keys(datastore.name, consumer, [(wanted.shard, wanted.location.added_id)])
    if own:
        return ResolvedId(own[0] if own[0].generation == wanted.location.generation else None)
    rows = yield from query(
        sql(
            "SELECT p.shard, p.added_id FROM %s.entity AS e",
            Name(datastore.database(wanted.shard)),
        )
        + sql(
            f" JOIN {_TABLE} AS p ON p.datastore = %s AND p.consumer = %s AND p.row_key = e.row_key AND p.holds_row"
            " AND p.shard = %s AND p.added_id < e.added_id"
            " JOIN schemaless.checkpoint AS c ON c.datastore = p.datastore AND c.consumer = p.consumer"
            " AND c.shard = p.shard AND c.added_id >= e.added_id WHERE e.added_id = %s AND e.generation = %s",
            datastore.name,
            consumer,
            wanted.shard,
            wanted.location.added_id,
            wanted.location.generation,
        )
    )
    if not rows:
        return ResolvedId(None)
    records = yield from parked_table.of_keys(datastore.name, consumer, [tuple(rows[0])])
    return ResolvedId(records[0] if records else None, is_behind=True)


def by_function(datastore: Datastore, consumer: str, wanted: ParkedFilter) -> Operation[dict[str, int]]:
    """Returns how many records match, by the function that failed."""
    rows = yield from query(
        f"SELECT function_name, COUNT(*) FROM {_TABLE} WHERE {wanted.condition(datastore.name, consumer)}"
        " GROUP BY function_name"
    )
    return {name: int(count) for name, count in rows}


class RecordOrder(msgspec.Struct, frozen=True):
    """What is ordered for many records: each is due `step_us` after the one before."""

    order: Order
    job: int
    step_us: int = 0
    reason: str | None = None


def next_keys(
    datastore: Datastore, consumer: str, wanted: ParkedFilter, after: tuple[int, int], limit: int
) -> Operation[list[tuple[int, int]]]:
    """Returns shard and added_id of records that match, after these, in their order."""
    shard, added_id = after
    rows = yield from query(
        f"SELECT shard, added_id FROM {_TABLE} WHERE {wanted.condition(datastore.name, consumer)}"
        f" AND (shard > {shard} OR (shard = {shard} AND added_id > {added_id})) ORDER BY shard, added_id LIMIT {limit}"
    )
    return [tuple(row) for row in rows]


def order(
    datastore: Datastore, consumer: str, keys: Sequence[tuple[int, int]], first: int, what: RecordOrder
) -> Operation[int]:
    """Orders something for records, at least one and ORDERED_AT_ONCE at most, and returns how many are still there.

    The latest order of a record counts until it is carried out. The job of an earlier one counts it as replaced.
    """
    rows = [
        f"SELECT {shard} AS shard, {added_id} AS added_id, {(first + place) * what.step_us} AS delay_us"
        for place, (shard, added_id) in enumerate(keys)
    ]
    mine = sql("p.datastore = %s AND p.consumer = %s", datastore.name.encode(), consumer.encode())
    listed = " OR ".join(f"(p.shard = {shard} AND p.added_id = {added_id})" for shard, added_id in keys)
    yield from shard_head.lock(datastore.name, {shard for shard, _ in keys})  # or it moves away without the order
    results = yield (
        "UPDATE schemaless.job AS j JOIN (SELECT p.job, COUNT(*) AS taken"
        f" FROM {_TABLE} AS p WHERE {mine} AND ({listed}) AND p.ordered IS NOT NULL AND p.job <> {what.job}"
        " GROUP BY p.job) AS others ON others.job = j.job SET j.replaced = j.replaced + others.taken;"
        f"UPDATE ({' UNION ALL '.join(rows)}) AS x STRAIGHT_JOIN {_TABLE} AS p"
        f" ON {mine} AND p.shard = x.shard AND p.added_id = x.added_id"
        " SET p.due_at = UTC_TIMESTAMP(6) + INTERVAL x.delay_us MICROSECOND,"
        + sql(" p.ordered = %s, p.job = %s, p.order_reason = %s", what.order.value, what.job, what.reason)
        + ";COMMIT"
    )
    return results[1].affected


class ParkedSummary(msgspec.Struct, frozen=True):
    """The parked cells of a program on one server. `oldest_at` is in microseconds."""

    parked: int
    oldest_at: int | None


def summaries(datastore: str) -> Operation[dict[str, ParkedSummary]]:
    """Returns by program how many cells are parked here. A record that only waits doesn't count."""
    rows = yield from query(
        f"SELECT consumer, COUNT(*), {MICROSECONDS.format('MIN(parked_at)')} FROM {_TABLE}"
        + sql(" WHERE datastore = %s AND cause <> %s", datastore, Cause.WAITING.value)
        + f" AND {shard_head.not_moved(datastore)} GROUP BY consumer"
    )
    return {name: ParkedSummary(int(count), oldest) for name, count, oldest in rows}


def counts_of(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up the counts of several clusters by name."""
    found = Counter[str]()
    for part in parts:
        found.update(part)
    return found


# Proof of parked cells: the records of a program beside what its checkpoints count, and beside the entity tables.
#
# For the audit. Each answer is of one statement, so it is of one moment, whatever workers do meanwhile.

_PARKED = f"p.cause <> '{Cause.WAITING.value}'"
_OF_SHARD = "p.datastore = c.datastore AND p.consumer = c.consumer AND p.shard = c.shard"


class ParkedProof(msgspec.Struct, frozen=True):
    """One shard. `counted_parked` and `counted_waiting` are of its checkpoint, since it began to count.

    `parked` and `waiting` records, and the cells `behind` them in their rows, are of the cells since then. `records`
    are all that are parked, the oldest for `oldest_s`. `beyond` have an added_id after the checkpoint. `lost` aren't in
    the entity table, the first at `first_lost`. `versions` are the program's when the cells failed.
    """

    shard: int
    counted_parked: int
    counted_waiting: int
    parked: int
    waiting: int
    behind: int
    records: int
    oldest_s: float
    beyond: int
    lost: int
    first_lost: int | None
    versions: frozenset[str]


def proof_shards_of(datastore: str, consumer: str) -> Operation[list[int]]:
    """Returns the shards here that have a record, or count a cell that is parked or waits."""
    which = where(datastore=datastore, consumer=consumer)
    rows = yield from query(
        f"SELECT shard FROM schemaless.parked {which} AND {shard_head.not_moved(datastore)}"
        f" UNION SELECT shard FROM schemaless.checkpoint {which} AND (parked <> 0 OR waiting <> 0)"
        " AND state <> 'moved' ORDER BY shard"
    )
    return [shard for (shard,) in rows]


def proof_of_shard(
    datastore: Datastore, consumer: str, shard: int, columns: Collection[str]
) -> Operation[ParkedProof | None]:
    """Returns the proof of one shard, on its home, or None without a checkpoint. `columns` are the program's."""
    entity = sql("%s.entity", Name(datastore.database(shard)))
    since, names = "p.added_id > c.counted_from", commas([sql("%s", name.encode()) for name in columns])
    behind = "0"
    if names:
        behind = (
            f"(SELECT COUNT(*) FROM schemaless.parked AS p STRAIGHT_JOIN {entity} AS e ON e.row_key = p.row_key"
            f" AND e.column_name IN ({names}) AND e.added_id > GREATEST(p.added_id, c.counted_from)"
            f" AND e.added_id <= c.added_id WHERE {_OF_SHARD} AND p.holds_row = 1)"
        )
    is_lost = (
        f"p.added_id IS NOT NULL AND NOT EXISTS (SELECT * FROM {entity} AS e WHERE e.added_id = p.added_id"
        " AND e.generation = p.generation AND e.row_key = p.row_key AND e.column_name = p.column_name"
        " AND e.ref_key = p.ref_key)"
    )
    sums = [
        f"SUM({_PARKED} AND {since})",
        f"SUM(NOT {_PARKED} AND {since})",
        f"SUM({_PARKED})",
        f"MAX(IF({_PARKED}, TIMESTAMPDIFF(MICROSECOND, p.parked_at, UTC_TIMESTAMP(6)), 0)) / 1000000",
        "SUM(p.added_id > c.added_id)",
        f"SUM({is_lost})",
        f"MIN(IF({is_lost}, p.added_id, NULL))",
        "GROUP_CONCAT(DISTINCT p.version SEPARATOR ' ')",
    ]
    rows = yield from query(
        f"SELECT MAX(c.parked), MAX(c.waiting), {behind}, {commas(sums)} FROM schemaless.checkpoint AS c"
        f" LEFT JOIN schemaless.parked AS p ON {_OF_SHARD}"
        + sql(" WHERE c.datastore = %s AND c.consumer = %s AND c.shard = %s", datastore.name, consumer, shard)
        + " GROUP BY c.datastore, c.consumer, c.shard"
    )
    for counted_parked, counted_waiting, held, *found in rows:
        parked, waiting, records, oldest_s, beyond, lost, first_lost, versions = found
        return ParkedProof(
            shard, counted_parked, counted_waiting, int(parked or 0), int(waiting or 0), held, int(records or 0),
            float(oldest_s or 0), int(beyond or 0), int(lost or 0), first_lost, frozenset((versions or "").split()),
        )  # fmt: skip
    return None
