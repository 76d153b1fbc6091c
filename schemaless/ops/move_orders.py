"""What operators want of shards: to move them, to reverse that, to complete or to cancel it. docs/growth.md."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from schemaless.errors import Invalid, Misconfigured, NotFound, StateConflict
from schemaless.ops.growth import SAME_SETTINGS
from schemaless.ops.moves import Mover, ShardMover, Told, drop_entity_table
from schemaless.storage import schema, shard_copy, shard_move_table
from schemaless.storage.failover import run_on_all
from schemaless.storage.operation import Operation, query
from schemaless.storage.pymysql_driver import SyncNode, SyncStorage
from schemaless.storage.server_settings import faults_of
from schemaless.storage.shard_move_table import READY_BEHIND_CELLS, MoveState, ShardMove
from schemaless.storage.sql import where
from schemaless.topology import Datastore, Role

_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_FOLLOW_PAUSE_S = 0.2
_ROOM = 2
"""How many times the data must fit on a target's disk: its binary log has it, too."""
_HERE = ("127.0.0.1", "localhost", "::1")


def parse_shards(text: str, datastore: Datastore) -> list[int]:
    """Returns the shards of a text such as `3`, `0-15` or `1,4,9-12`, in order. Raises Invalid or NotFound."""
    found: set[int] = set()
    for part in text.split(","):
        if not (match := _PART.fullmatch(part.strip())):
            raise Invalid("shards", f"{part!r} is no shard: write them as 3, 0-15 or 1,4,9-12")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= datastore.shards:
            raise NotFound(f"{datastore.name} has no shards {part.strip()}: it has 0 to {datastore.shards - 1}")
        found |= set(range(first, last + 1))
    return sorted(found)


class Arrival(NamedTuple):
    """A shard that comes, or came, to a cluster. `is_home`: it lives there now."""

    move: ShardMove
    is_home: bool

    @property
    def is_moving(self) -> bool:
        """True while it isn't the home yet, and is to be."""
        return self.move.state not in (MoveState.OPEN, MoveState.COMPLETE) and not self.move.is_back


def arrivals(storage: SyncStorage, datastore: str = "") -> list[Arrival]:
    """Returns all that masters say which answer, by datastore and shard."""
    rows = run_on_all(storage.masters, shard_move_table.moves)
    homes = run_on_all(storage.masters, shard_move_table.homes)
    found = [row for answer in rows.at_least_one() for row in answer if datastore in ("", row.datastore)]
    live = {(cluster, *place) for cluster, places in homes.found.items() for place in places}
    return [
        Arrival(
            row, row.state in (MoveState.OPEN, MoveState.COMPLETE) and (row.target, row.datastore, row.shard) in live
        )
        for row in sorted(found, key=lambda row: (row.datastore, row.shard, row.is_back))
    ]


class Plan(NamedTuple):
    """Where shards come from, the bytes of their tables, and whether it is known that they fit."""

    sources: Mapping[int, str]
    size_bytes: int
    fits: bool


def plan_move(storage: SyncStorage, datastore: Datastore, shards: Sequence[int], target: str) -> Plan:
    """Raises what keeps these shards from moving: NotFound, StateConflict or Misconfigured."""
    storage.look()
    if target not in storage.topology.clusters:
        raise NotFound(f"there is no storage cluster {target!r}: there are {', '.join(storage.topology.clusters)}")
    if storage.has_no_master(target):
        raise StateConflict(f"cluster {target} is joining: wait until `schemaless topology show` says healthy")
    live, known = storage.live(datastore), arrivals(storage, datastore.name)
    sources = {
        shard: source_of(live, shard, target, [one for one in known if one.move.shard == shard]) for shard in shards
    }
    coming = {shard: source for shard, source in sources.items() if live.home(shard) == source}
    size, fits = 0, True
    if coming:
        _verify_alike(storage, {*coming.values(), target}, target)
        for source in set(coming.values()):
            databases = [datastore.database(shard) for shard, home in coming.items() if home == source]
            size += storage.master(source).run(_size_bytes, databases)
        fits = _verify_room(storage.master(target), size)
    return Plan(sources, size, fits)


def source_of(live: Datastore, shard: int, target: str, known: Sequence[Arrival]) -> str:
    """Returns where a shard comes from. Raises StateConflict where it can't be moved to that target now."""
    for move, is_home in known:
        if move.is_back:
            if move.target == target:
                raise StateConflict(f"shard {shard} came from {target}: `schemaless topology reverse` takes it back")
        elif move.target == target and (is_home or move.state is not MoveState.OPEN):
            if move.state is MoveState.COMPLETE:
                continue
            return move.source  # the same command ran before
        elif move.state is MoveState.OPEN and is_home:
            raise StateConflict(
                f"shard {shard} moved from {move.source} to {move.target}, and can still be reversed: give"
                " `schemaless topology complete` first"
            )
        elif move.state in (MoveState.COPYING, MoveState.READY, MoveState.CLOSING):
            raise StateConflict(
                f"shard {shard} moves to {move.target} already: `schemaless topology move-cancel` ends that"
            )
    if (home := live.home(shard)) == target:
        raise StateConflict(f"shard {shard} of {live.name} lives on {target} already")
    return home


def _verify_alike(storage: SyncStorage, clusters: Collection[str], target: str) -> None:
    """Raises Misconfigured for a target whose master has another format, another kind, or settings that differ."""
    storage.master(target).run(schema.check_format)
    settings: dict[str, dict[str, str]] = {
        cluster: dict(storage.master(cluster).run(query, "SHOW GLOBAL VARIABLES")) for cluster in clusters
    }
    mine = settings[target]
    for cluster in sorted(clusters):
        for name in SAME_SETTINGS:
            if mine.get(name) != settings[cluster].get(name):
                raise Misconfigured(
                    f"{name} is {mine.get(name)} on {target}, and {settings[cluster].get(name)} on {cluster}"
                )
        kinds = {"MariaDB" if "mariadb" in each["version"].lower() else "MySQL" for each in (mine, settings[cluster])}
        if len(kinds) > 1:
            raise Misconfigured(f"{target} and {cluster} are servers of two kinds: a shard moves between those of one")
    if faults := faults_of(Role.MASTER, mine):
        raise Misconfigured(f"on {target} {faults[0]}")


def _size_bytes(databases: Sequence[str]) -> Operation[int]:
    yield "SET @unused = 0 /*!80000 , information_schema_stats_expiry = 0 */"
    ((size,),) = yield from query(
        "SELECT COALESCE(SUM(data_length + index_length), 0) FROM information_schema.tables "
        + where(table_schema=databases, table_name="entity")
    )
    return int(size)


def _verify_room(target: SyncNode, size: int) -> bool:
    """Returns False where the target's disk can't be seen from here. Raises Misconfigured where it is too small."""
    ((folder,),) = target.run(query, "SELECT @@datadir")
    if (not target.node.socket and target.node.host not in _HERE) or not Path(folder).exists():
        return False
    free = shutil.disk_usage(folder).free
    if free < size * _ROOM:
        raise Misconfigured(
            f"the disk of {target.node.name} has {free >> 20} MiB left, and the shards need {size * _ROOM >> 20} MiB",
            hint="move fewer shards, or make room",
        )
    return True


# Orders.


def move_shards(
    storage: SyncStorage,
    datastore: Datastore,
    plan: Plan,
    target: str,
    told: Told,
    *,
    lag_max_ms: int | None = None,
    commit_max_ms: int | None = None,
) -> None:
    """Moves shards one after another: each is copied, compared, followed and switched. It may be run again."""
    with Mover(storage, {*plan.sources.values(), target}, told) as mover:
        mover.verify_quiet({*plan.sources.values(), target})
        for shard, source in plan.sources.items():
            one = ShardMover(mover, datastore, shard, source, target)
            one.begin(lag_max_ms=lag_max_ms, commit_max_ms=commit_max_ms)
            if one.move.state is not MoveState.OPEN:
                one.copy(READY_BEHIND_CELLS)
                one.switch()


def reverse(storage: SyncStorage, datastore: Datastore, shards: Sequence[int], told: Told) -> None:
    """Takes shards back to where they came from, with what was written since."""
    came = _reversible(storage, datastore, shards)
    with Mover(storage, _clusters(came), told) as mover:
        mover.verify_quiet(_clusters(came))
        for move in came:
            if not _finished(mover, datastore, move):
                back = ShardMover(mover, datastore, move.shard, move.target, move.source)
                back.begin()
                back.copy(READY_BEHIND_CELLS)
                back.switch()


def follow(
    storage: SyncStorage, datastore: Datastore, shards: Sequence[int], told: Told, over: Callable[[], bool]
) -> None:
    """Copies to the former homes what is written, until `over`. So a reversal has little to copy."""
    came = _reversible(storage, datastore, shards)
    with Mover(storage, _clusters(came), told) as mover:
        for move in came:
            _finished(mover, datastore, move)
        backs = [ShardMover(mover, datastore, move.shard, move.target, move.source) for move in came]
        for back in backs:
            back.begin()
        while not over():
            for back in backs:
                back.copy()
            time.sleep(_FOLLOW_PAUSE_S)


def complete(storage: SyncStorage, datastore: Datastore, shards: Sequence[int], told: Told) -> None:
    """Drops the cells of shards at their former homes. Nothing can be reversed then."""
    came = _reversible(storage, datastore, shards, completed=True)
    with Mover(storage, _clusters(came), told) as mover:
        for move in came:
            _finished(mover, datastore, move)
            former, home = mover.sessions[move.source], mover.sessions[move.target]
            there = former.run(shard_move_table.home_head, datastore.name, move.shard)
            if there is None or there.moved_to != move.target:
                raise StateConflict(f"shard {move.shard} lives on {move.source}: it isn't dropped there")
            if move.state is not MoveState.COMPLETE:
                home.run(lambda: shard_move_table.change(move, state=MoveState.COMPLETE))  # noqa: B023  # run at once
            former.run(drop_entity_table, datastore, move.shard)
            former.run(query, shard_copy.deleting(shard_copy.CHECKPOINTS, datastore.name, move.shard))
            former.run(shard_move_table.delete, datastore.name, move.shard)


def cancel(storage: SyncStorage, datastore: Datastore, shards: Sequence[int], told: Told) -> None:
    """Ends moves that aren't switched, and drops what they copied."""
    moving = [one.move for one in _known(storage, datastore, shards) if one.is_moving]
    if missing := sorted(set(shards) - {move.shard for move in moving}):
        raise StateConflict(
            f"shards {_named(missing)} of {datastore.name} don't move: what was switched is taken back by"
            " `schemaless topology reverse`"
        )
    with Mover(storage, _clusters(moving), told) as mover:
        for move in moving:
            one = ShardMover(mover, datastore, move.shard, move.source, move.target)
            one.begin()
            if one.move.state is MoveState.OPEN:
                raise StateConflict(f"shard {move.shard} was switched already: `schemaless topology reverse`")
            one.clear()
            mover.sessions[move.target].run(drop_entity_table, datastore, move.shard)
            mover.sessions[move.target].run(shard_move_table.delete, datastore.name, move.shard)


def throttle(storage: SyncStorage, datastore: Datastore, shards: Sequence[int], limits: Mapping[str, int]) -> int:
    """Changes limits of moves, also of those that another process carries out. Returns of how many."""
    changed = run_on_all(storage.masters, lambda: shard_move_table.set_limits(datastore.name, shards, **limits))
    if not (count := sum(changed.at_least_one())):
        raise NotFound(f"no shard of {datastore.name} that was named moves")
    return count


def _known(storage: SyncStorage, datastore: Datastore, shards: Sequence[int]) -> list[Arrival]:
    storage.look()
    return [one for one in arrivals(storage, datastore.name) if one.move.shard in shards]


def _reversible(
    storage: SyncStorage, datastore: Datastore, shards: Sequence[int], *, completed: bool = False
) -> list[ShardMove]:
    """Returns the moves by which shards came to where they live. Raises StateConflict where one didn't.

    With `completed` also those that were completed and whose former home isn't cleared yet.
    """
    known = _known(storage, datastore, shards)
    left = {one.move.shard for one in known if one.move.is_back}
    found = [
        one.move
        for one in known
        if one.is_home
        and (
            one.move.state is MoveState.OPEN
            or (completed and one.move.state is MoveState.COMPLETE and one.move.shard in left)
        )
    ]
    if missing := sorted(set(shards) - {move.shard for move in found}):
        raise StateConflict(
            f"shards {_named(missing)} of {datastore.name} can't be reversed or completed: they didn't move, or that is"
            " complete"
        )
    return found


def _finished(mover: Mover, datastore: Datastore, move: ShardMove) -> bool:
    """Finishes a switch whose process ended before all was told. Returns whether that switch was a reversal."""
    back = mover.sessions[move.source].run(shard_move_table.of_shard, datastore.name, move.shard)
    placed = mover.storage.live(datastore).home(move.shard)
    is_settled = back is not None and back.source == move.target and back.state is not MoveState.OPEN
    if (is_settled and placed == move.target) or move.state is MoveState.COMPLETE:
        return False
    ShardMover(mover, datastore, move.shard, move.source, move.target).begin()
    return back is not None and back.state is MoveState.OPEN


def _clusters(moves: Sequence[ShardMove]) -> set[str]:
    return {cluster for move in moves for cluster in (move.source, move.target)}


def _named(shards: Sequence[int]) -> str:
    return ", ".join(map(str, shards[:10]))
