"""shard_head: one small row a shard, whose lock makes added_ids dense and in commit order (I3, I4, I13).

Every inserting transaction locks the rows of its shards, in shard order, before it gives out an added_id, and moves
the head in the same transaction. So a reader that sees head n can read every cell up to n, on master and minions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from schemaless.errors import Misconfigured, NodeRefuses, ShardsMoved, StaleTopology
from schemaless.location import GenerationStart, Location
from schemaless.storage.operation import Args, Operation, query
from schemaless.storage.sql import Name, Script, commas, sql, where
from schemaless.topology import Datastore

T = TypeVar("T")

MICROSECONDS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"
"""SQL for a DATETIME(6) as an integer: drivers read it several times faster than a datetime."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """Highest added_id of a shard. `last_created_at` in microseconds since the epoch."""

    shard: int
    generation: int
    added_id: int
    last_created_at: int

    @property
    def location(self) -> Location:
        return Location(self.generation, self.added_id)


class Movement(msgspec.Struct, frozen=True, gc=False):
    """Sums that change whenever any head of a datastore on a server moves. They are cheap to read.

    Within its generation a head only grows, and a generation only grows: no two moves cancel out.
    """

    heads_sum: int
    generations_sum: int


BLOCK_SHARDS = 128
"""Shards whose heads are read together. 4096 shards: 32 sums, and one head that moved costs 128 heads at most."""

MOVE = (
    "INSERT INTO schemaless.shard_head (datastore, shard, generation, head, last_created_at) VALUES {}"
    " ON DUPLICATE KEY UPDATE head = VALUES(head), last_created_at = VALUES(last_created_at)"
)
"""SQL that moves heads, each by its key, all in one statement. It belongs into the transaction of the insertion."""

_LOOKS_S = (0.0, 0.02, 0.05)
"""Pauses before the looks at locked heads. A commit of another process takes less than all of them."""

_HEAD_COLUMNS = f"heads.shard, generation, head, {MICROSECONDS.format('last_created_at')}"


def movement(datastore: str) -> Operation[Movement]:
    """Returns the sums of one datastore on this server."""
    return (yield from movements()).get(datastore, Movement(0, 0))


def movements() -> Operation[dict[str, Movement]]:
    """Returns the sums of every datastore on this server. One poll costs one query, whatever the number of shards."""
    rows = yield from query(
        "SELECT datastore, SUM(head), SUM(generation) FROM schemaless.shard_head GROUP BY datastore"
    )
    return {name: Movement(int(heads), int(generations)) for name, heads, generations in rows}


def sum_at_home(datastore: str) -> Operation[int]:
    """Returns the sum of the heads of the shards that live here now."""
    which = where(datastore=datastore)
    ((total,),) = yield from query(
        f"SELECT COALESCE(SUM(head), 0) FROM schemaless.shard_head {which} AND moved_to IS NULL"
    )
    return int(total)


def block_of(shard: int) -> int:
    return shard // BLOCK_SHARDS


def block_movements(datastore: str) -> Operation[dict[int, Movement]]:
    """Returns the sums of each block of shards: finer than `movements` and dearer, to find the heads worth reading."""
    rows = yield from query(
        f"SELECT shard DIV {BLOCK_SHARDS} AS block, SUM(head), SUM(generation) FROM schemaless.shard_head"
        f" {where(datastore=datastore)} GROUP BY block"
    )
    return {int(block): Movement(int(heads), int(generations)) for block, heads, generations in rows}


def heads(datastore: str) -> Operation[list[Head]]:
    """Returns the heads of the shards whose home is this server's cluster, or was, by shard, as it has them."""
    return (yield from _heads_where(datastore, "TRUE"))


def heads_at_home(datastore: str) -> Operation[list[Head]]:
    """Returns the heads of the shards that live here now, without those that went to another cluster."""
    return (yield from _heads_where(datastore, "moved_to IS NULL"))


def heads_in_blocks(datastore: str, blocks: Sequence[int]) -> Operation[list[Head]]:
    """Returns the heads of all shards of these blocks, at least one, found by their keys."""
    ranges = [f"shard BETWEEN {block * BLOCK_SHARDS} AND {(block + 1) * BLOCK_SHARDS - 1}" for block in blocks]
    return (yield from _heads_where(datastore, f"({' OR '.join(ranges)})"))


def heads_of(datastore: str, shards: Collection[int]) -> Operation[list[Head]]:
    """Returns the heads of these shards, without those that don't live here."""
    return (yield from _heads_where(datastore, f"shard IN ({commas([str(n) for n in shards])})")) if shards else []


def highest_epoch() -> Operation[int]:
    """Returns the epoch of the master that this server's heads were opened under last, 0 without one."""
    ((epoch,),) = yield from query("SELECT COALESCE(MAX(epoch), 0) FROM schemaless.shard_head")
    return int(epoch)


def highest_number(datastore: str, shard: int) -> Operation[int]:
    """Returns the highest epoch of any cluster, or generation of a shard, that this server knows, 0 without one."""
    which = where(datastore=datastore, shard=shard)
    ((number,),) = yield from query(
        "SELECT COALESCE(MAX(number), 0) FROM (SELECT MAX(epoch) AS number FROM schemaless.appointment"
        " UNION ALL SELECT MAX(epoch) FROM schemaless.promise"
        f" UNION ALL SELECT MAX(generation) FROM schemaless.shard_head {which}) AS numbers"
    )
    return int(number)


class Moved(msgspec.Struct, frozen=True):
    """Sums, and heads that are at least as new. `blocks` only where many shards are watched."""

    total: Movement
    blocks: Mapping[int, Movement] = {}
    heads: Sequence[Head] = ()


NOTHING_SEEN = Moved(Movement(-1, -1))


def moved_since(seen: Mapping[str, Moved], watched: Mapping[str, Collection[int]]) -> Operation[dict[str, Moved]]:
    """Returns, by datastore, the heads of the `watched` shards that may have moved since `seen`. A datastore in which
    surely none moved is left out.

    One node answers all questions, the heads last: what moves between them is reported twice and never missed.
    """
    now = yield from movements()
    moved = {}
    for name, shards in watched.items():
        before, total = seen.get(name, NOTHING_SEEN), now.get(name, Movement(0, 0))
        if total == before.total:
            continue
        blocks = (yield from block_movements(name)) if len(shards) > BLOCK_SHARDS else {}
        changed = [n for n in shards if not blocks or before.blocks.get(block_of(n)) != blocks.get(block_of(n))]
        moved[name] = Moved(total, blocks, (yield from heads_of(name, changed)))
    return moved


def generations(datastore: str, shard: int) -> Operation[list[GenerationStart]]:
    """Returns where each generation of a shard begins, by generation."""
    which = where(datastore=datastore, shard=shard)
    rows = yield from query(
        f"SELECT generation, starts_at FROM schemaless.shard_generation {which} ORDER BY generation"
    )
    return [GenerationStart(*row) for row in rows]


def generations_of_all(datastore: str) -> Operation[dict[int, list[GenerationStart]]]:
    """Returns by shard where its generations begin, of all shards whose home is this server's cluster."""
    rows = yield from query(
        f"SELECT shard, generation, starts_at FROM schemaless.shard_generation {where(datastore=datastore)}"
        " ORDER BY shard, generation"
    )
    found: dict[int, list[GenerationStart]] = {}
    for shard, generation, starts_at in rows:
        found.setdefault(shard, []).append(GenerationStart(generation, starts_at))
    return found


def open_generation(datastore: Datastore, shard: int, start: GenerationStart) -> Operation[None]:
    """Begins a generation of a shard, and gives it to the cells that were written since its start (I13).

    No other field of a cell changes. Generations below it that this server doesn't know are superseded by it from
    their first cell. Run again after its answer was lost, it changes nothing. Raises Misconfigured when another
    generation was opened meanwhile, or when the start isn't the next added_id or an earlier one.
    """
    locked, _ = yield from lock(datastore.name, [shard])
    head = locked[shard]
    starts = yield from generations(datastore.name, shard)
    if start in starts and head.generation == start.generation:
        yield "COMMIT"
        return
    if head.generation >= start.generation or not 1 <= start.starts_at <= head.added_id + 1:
        raise Misconfigured(f"shard {shard}: generation {start.generation} can't begin at {start.starts_at}: {head}")
    known = {known.generation for known in starts}
    rows = [
        sql("(%s, %s, %s, %s, UTC_TIMESTAMP(6))", datastore.name, shard, generation, start.starts_at)
        for generation in range(1, start.generation + 1)
        if generation not in known
    ]
    yield ";".join(
        [
            sql(
                "UPDATE %s.entity SET generation = %s WHERE added_id >= %s",
                Name(datastore.database(shard)),
                start.generation,
                start.starts_at,
            ),
            f"UPDATE schemaless.shard_head SET generation = {start.generation}"
            f" {where(datastore=datastore.name, shard=shard)}",
            f"INSERT INTO schemaless.shard_generation VALUES {commas(rows)}",
            "COMMIT",
        ]
    )


def history(datastore: str, shard: int) -> Operation[tuple[Head, list[GenerationStart]]]:
    """Returns head and generations of one shard as this server has them. Raises Misconfigured: it doesn't live here."""
    which = where(datastore=datastore, shard=shard)
    found, starts = yield (
        f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads {which};"
        f"SELECT generation, starts_at FROM schemaless.shard_generation {which} ORDER BY generation"
    )
    if not found.rows:
        raise Misconfigured(f"datastore {datastore}: shard {shard} does not live on this cluster")
    return Head(*found.rows[0]), [GenerationStart(*row) for row in starts.rows]


class Moment(msgspec.Struct, frozen=True):
    """The heads of the shards that live on a server, where their generations begin, and its clock just before.

    `now` is in microseconds since the epoch. `starts` has later generations than the first only, by shard.
    """

    now: int
    heads: Sequence[Head]
    starts: Mapping[int, Sequence[GenerationStart]]


def moment(datastore: str) -> Operation[Moment]:
    """Returns the heads of a datastore's shards on this server, and when they were so."""
    which = where(datastore=datastore)
    clock, found, starts = yield (
        f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')};"
        f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads {which};"
        f"SELECT shard, generation, starts_at FROM schemaless.shard_generation {which} AND generation > 1"
    )
    by_shard: dict[int, list[GenerationStart]] = {}
    for shard, generation, starts_at in starts.rows:
        by_shard.setdefault(shard, []).append(GenerationStart(generation, starts_at))
    return Moment(clock.rows[0][0], [Head(*row) for row in found.rows], by_shard)


def lock(
    datastore: str, shards: Iterable[int], before: Sequence[Script] = ()
) -> Operation[tuple[dict[int, Head], int]]:
    """Begins a transaction, runs `before` in it and locks the heads, in shard order.

    Returns the heads by shard, and the master's clock under the lock, in microseconds since the epoch. Raises what
    `verify_home` does.
    """
    wanted = sorted(set(shards))
    *_, found, clock = yield ";".join(
        [
            "BEGIN",
            *before,
            f"SELECT {LOCK_WAIT} {_HEAD_COLUMNS} {from_exactly(datastore, wanted)}{OF_EPOCH} FOR UPDATE",
            f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')}",
        ]
    )
    locked = {row[0]: Head(*row) for row in found.rows}
    if len(locked) != len(wanted):
        yield from verify_home(datastore, wanted)
    return locked, int(clock.rows[0][0])


OF_EPOCH: Script = " AND heads.epoch = @epoch AND heads.moved_to IS NULL"
"""Follows `from_exactly`: heads of another master's epoch than the session's process believes aren't found, nor those
of shards that went to another cluster.
"""


def verify_home(datastore: str, shards: Collection[int]) -> Operation[None]:
    """Raises Misconfigured when a shard never lived on this cluster, StaleTopology when the server's epoch is another
    one than this process believes, and ShardsMoved when shards went to another cluster.
    """
    found = yield from query(
        f"SELECT shard, epoch = @epoch, moved_to FROM schemaless.shard_head {where(datastore=datastore)}"
        f" AND shard IN ({commas([str(n) for n in shards])})"
    )
    if missing := sorted(set(shards) - {shard for shard, *_ in found}):
        raise Misconfigured(f"datastore {datastore}: shards {missing[:5]} do not live on this cluster")
    if moved := {shard: cluster for shard, _, cluster in found if cluster is not None}:
        told = ", ".join(f"{shard} to {cluster}" for shard, cluster in sorted(moved.items())[:5])
        raise ShardsMoved(f"datastore {datastore}: shards went to another cluster: {told}", moved)
    if late := sorted(shard for shard, is_same, _ in found if not is_same):
        raise StaleTopology(f"datastore {datastore}: shards {late[:5]} have a master of another epoch")


def moved(datastore: str, shards: Collection[int]) -> Operation[set[int]]:
    """Returns which of these shards, at least one, this server is closed for: they went to another cluster."""
    rows = yield from query(
        f"SELECT shard FROM schemaless.shard_head {where(datastore=datastore, shard=sorted(shards))}"
        " AND moved_to IS NOT NULL"
    )
    return {shard for (shard,) in rows}


LOCK_WAIT: Script = "/*+ MAX_EXECUTION_TIME(1000) */"
"""Follows the SELECT that locks heads. MySQL looks once a second for lock waits that are over, so a wait of one second
may take two, and a put would be cut off before it knew why. MariaDB ends its waits in time, and has this as a comment.
"""


def at_home(datastore: str, shards: Collection[int], write: Operation[T]) -> Operation[T]:
    """Runs one script in a transaction that holds the heads, so that no shard moves away meanwhile.

    Raises what `verify_home` does.
    """
    yield from lock(datastore, shards)
    written = yield from write
    yield "COMMIT"
    return written


def read_at_home(
    datastore: str, untils: Mapping[int, int], operation: Callable[[*Args], Operation[T]], *args: *Args
) -> Operation[T]:
    """Runs an operation that reads cells of shards up to these added_ids, and proves in its first script that no shard
    had gone to another cluster before it had them all.

    Who learnt earlier of a move may know of later cells. Raises ShardsMoved.
    """
    which, read = where(datastore=datastore, shard=list(untils)), operation(*args)
    script = next(read)
    *results, gone = yield f"{script};SELECT shard, head FROM schemaless.shard_head {which} AND moved_to IS NOT NULL"
    if away := sorted(shard for shard, head in gone.rows if head < untils[shard]):
        raise ShardsMoved(f"datastore {datastore}: shards {away[:5]} went to another cluster", away)
    try:
        script = read.send(results)
        while True:
            script = read.send((yield script))
    except StopIteration as stop:
        value: T = stop.value
        return value


def not_moved(datastore: str) -> Script:
    """Returns a condition on the column `shard`: the shard didn't go to another cluster, which has its rows now."""
    return "shard NOT IN (SELECT gone.shard FROM schemaless.shard_head AS gone" + sql(
        " WHERE gone.datastore = %s AND gone.moved_to IS NOT NULL)", datastore.encode()
    )


def locked(datastore: str, shards: Sequence[int]) -> Operation[list[int]]:
    """Returns the shards, out of those that live here, whose heads another transaction holds for longer than a commit.

    It waits for no lock, and looks again after a moment at what is locked.
    """
    held = sorted({head.shard for head in (yield from heads_of(datastore, shards))})
    for pause_s in _LOOKS_S:
        if held:
            select = f"SELECT heads.shard {from_exactly(datastore, held)} FOR UPDATE SKIP LOCKED"
            *_, free = yield f"DO SLEEP({pause_s});{select}"
            held = sorted(set(held) - {shard for (shard,) in free.rows})
    return held


def from_exactly(datastore: str, shards: Sequence[int]) -> Script:
    """Returns a FROM clause with these heads, in the order given, each found by its key.

    A condition `shard IN (…)` may scan the table instead. It then waits for the locks of heads that it doesn't want.
    """
    first, *others = shards
    wanted = "".join([f"SELECT {first} AS shard", *(f" UNION ALL SELECT {shard}" for shard in others)])
    name = sql("%s", datastore.encode())
    return (
        f"FROM ({wanted}) AS wanted STRAIGHT_JOIN schemaless.shard_head AS heads"
        f" ON heads.datastore = {name} AND heads.shard = wanted.shard"
    )


class ServerPosition(msgspec.Struct, frozen=True, gc=False):
    """How far a server is, all datastores together. Times in microseconds since the epoch, `clock` is the server's."""

    heads_sum: int
    last_created_at: int
    clock: int = 0


def position() -> Operation[ServerPosition]:
    """Returns how far this server is. A minion lags while its position is behind its master's."""
    ((total, moment, now),) = yield from query(
        f"SELECT COALESCE(SUM(head), 0), COALESCE(MAX({MICROSECONDS.format('last_created_at')}), 0),"
        f" {MICROSECONDS.format('UTC_TIMESTAMP(6)')} FROM schemaless.shard_head"
    )
    return ServerPosition(int(total), int(moment), int(now))


CLOCK_AHEAD_MAX_S = 60.0
"""A clock that is further ahead of all others is not believed (I4)."""


def clock() -> Operation[int]:
    """Returns the server's clock, in microseconds since the epoch."""
    ((now,),) = yield from query(f"SELECT {MICROSECONDS.format('UTC_TIMESTAMP(6)')}")
    return int(now)


def ahead(heads: Iterable[Head], now_s: float) -> list[Head]:
    """Returns the heads whose last created_at is in the future: their master met a clock that was ahead."""
    return [head for head in heads if head.last_created_at > (now_s + CLOCK_AHEAD_MAX_S) * 1e6]


class ServerHistory(msgspec.Struct, frozen=True):
    """Which server this is, and how far each datastore is on it."""

    server_id: int
    movements: Mapping[str, Movement]

    def continues(self, before: ServerHistory) -> bool:
        """Returns whether nothing that `before` showed can be lost: the same server and generations, and no head fell.

        A head that fell and grew again since is not seen.
        """
        return self.server_id == before.server_id and all(
            name in self.movements
            and self.movements[name].generations_sum == moved.generations_sum
            and self.movements[name].heads_sum >= moved.heads_sum
            for name, moved in before.movements.items()
        )


def server_history() -> Operation[ServerHistory]:
    """Returns what tells whether this server's history is still the one that was seen before (I13)."""
    ((server_id,),) = yield from query("SELECT @@server_id")
    return ServerHistory(int(server_id), (yield from movements()))


def _heads_where(datastore: str, condition: Script) -> Operation[list[Head]]:
    which = f"{where(datastore=datastore)} AND {condition} ORDER BY shard"
    rows = yield from query(f"SELECT {_HEAD_COLUMNS} FROM schemaless.shard_head AS heads {which}")
    return [Head(*row) for row in rows]


def end_idle_holders(idle_s: int) -> Operation[list[int]]:
    """Ends our own account's connections whose transaction holds rows and is idle for `idle_s`. Returns their ids.

    No operation leaves a transaction open between two scripts for long. So such a transaction belongs to a process that
    hangs, or to a person who forgot it. Other accounts' transactions are not touched. It needs the right PROCESS.
    """
    rows = yield from query(
        "SELECT process.id FROM information_schema.innodb_trx AS trx"
        " JOIN information_schema.processlist AS process ON process.id = trx.trx_mysql_thread_id"
        " WHERE process.user = SUBSTRING_INDEX(CURRENT_USER(), '@', 1) AND process.command = 'Sleep'"
        f" AND process.time >= {idle_s} AND trx.trx_rows_locked > 0"
    )
    ended = []
    for (connection,) in rows:
        with suppress(NodeRefuses):  # it ended by itself
            yield f"KILL {int(connection)}"
            ended.append(int(connection))
    return ended
