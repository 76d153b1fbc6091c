"""index_definition: the versions of a datastore's indexes, and how far each one is. Every cluster has all rows.

A row only moves forward: to a later stage, to the order of a higher revision, and to a later switch. So the rows of
several clusters merge in any sequence (schemaless/index/versions.py), and a server that was away takes what the others
have. Several versions of one index may stand side by side. The one with the latest switch answers queries.

index_build says how far the checkpoints of an index must come before it answers. It has rows only while one is built.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import msgspec

from schemaless.cell import RowKey
from schemaless.index.definition import IndexDefinition, dump_definition, parse_definition
from schemaless.storage.checkpoint_table import change_one
from schemaless.storage.index_problem_table import IndexVersion
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import NOW, Script, Time, commas, literal, literals, matching, sql, where
from schemaless.storage.table import Table

_TABLE = "schemaless.index_definition"
_BUILD_TABLE = "schemaless.index_build"
_PRESENT = "stage NOT IN ('deleting', 'gone')"
REASON_CHARACTERS_MAX = 2000


class IndexState(StrEnum):
    """What people see of an index: its stage and its run state in one word."""

    BUILDING = "building"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"
    DELETING = "deleting"


class IndexStage(StrEnum):
    """How far a version of an index is. It never goes back."""

    DEFINED = "defined"  # its tables are being made
    BUILDING = "building"
    ACTIVE = "active"
    DELETING = "deleting"
    GONE = "gone"  # only its number is left

    @property
    def rank(self) -> int:
        return list(IndexStage).index(self)


class RunState(StrEnum):
    """Whether indexers work on an index."""

    RUNNING = "running"
    PAUSED = "paused"
    FAILED = "failed"


class IndexLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What each indexer process may take of the servers for a version.

    `cells_per_s` bounds what it delivers to the index. None: no bound. The others bound a build, and are named as the
    settings of the indexer that they go before. None: the setting counts.
    """

    cells_per_s: int | None = None
    build_lag_cells_max: int | None = None
    build_commit_max_s: float | None = None
    build_busy_share: float | None = None


NO_LIMITS = IndexLimits()


class IndexOrder(msgspec.Struct, frozen=True):
    """What was last ordered for an index, by an operator or by the indexer that gave it up.

    The highest revision counts.
    """

    run_state: RunState = RunState.RUNNING
    reason: str | None = None
    limits: IndexLimits = NO_LIMITS
    revision: int = 0


NO_ORDER = IndexOrder()


class IndexSwitch(msgspec.Struct, frozen=True):
    """The switch that made a version answer queries. The first version of a name begins with number 1.

    A change of an index begins with number 0, as long as it hasn't answered. `by_hand`: it then waits for an order.
    `at` is the time on the first master, in microseconds. The version that answered before is kept for `keep_s`.
    """

    number: int = 1
    at: int | None = None
    keep_s: int = 0
    by_hand: bool = False


FIRST_SWITCH = IndexSwitch()


@dataclass(frozen=True)
class DefinedIndex:
    """One version of an index. `text` is its definition as JSON, empty once the version is gone. `homes` is as in the
    definition.
    """

    name: str
    number: int
    text: str
    stage: IndexStage = IndexStage.DEFINED
    order: IndexOrder = NO_ORDER
    switch: IndexSwitch = FIRST_SWITCH
    homes: Mapping[int, str] = field(default_factory=dict, compare=False)

    @cached_property
    def definition(self) -> IndexDefinition:
        """The parsed definition. Raises Invalid when a newer program wrote it."""
        return replace(parse_definition(json.loads(self.text), self.number), homes=self.homes)

    @property
    def state(self) -> IndexState:
        if self.stage.rank >= IndexStage.DELETING.rank:
            return IndexState.DELETING
        if self.order.run_state is not RunState.RUNNING:
            return IndexState(self.order.run_state)
        return IndexState.ACTIVE if self.stage is IndexStage.ACTIVE else IndexState.BUILDING

    @property
    def is_present(self) -> bool:
        """Whether nobody dropped it."""
        return self.stage.rank < IndexStage.DELETING.rank

    @property
    def is_complete(self) -> bool:
        """Whether it can answer queries."""
        return self.stage is IndexStage.ACTIVE

    @property
    def is_being_built(self) -> bool:
        """Whether it was never complete, and isn't dropped."""
        return self.stage in (IndexStage.DEFINED, IndexStage.BUILDING)

    @property
    def has_tables(self) -> bool:
        """Whether every shard has its index table, and the build has begun."""
        return self.stage in (IndexStage.BUILDING, IndexStage.ACTIVE)


_SWITCH = Table("", IndexSwitch, number="switch_number", at="switched_at", by_hand="switch_by_hand")
_ROWS = Table(_TABLE, DefinedIndex, text="definition", order=Table("", IndexOrder), switch=_SWITCH)


def defined(
    definition: IndexDefinition,
    stage: IndexStage = IndexStage.DEFINED,
    order: IndexOrder = NO_ORDER,
    switch: IndexSwitch = FIRST_SWITCH,
) -> DefinedIndex:
    """Returns the version that a definition describes."""
    return DefinedIndex(
        definition.name, definition.number, dump_definition(definition), stage, order, switch, definition.homes
    )


class BuildProgress(msgspec.Struct, frozen=True):
    """`done` of the `total` cells at the start are finished. `total` is None while tables are being made."""

    done: int
    total: int | None


def insert(datastore: str, index: DefinedIndex, indexes_max: int) -> Operation[None]:
    """Makes a version, unless its number was used or `indexes_max` exist. The caller reads what became of it."""
    row = _row(datastore, index)
    free = f"(SELECT COUNT(*) FROM {_TABLE} WHERE datastore = {row['datastore']} AND stage <> 'gone') < {indexes_max}"
    yield (f"{_lock(datastore)}{_insert_if_unused(row)} AND {free};{_delete_overtaken(row)};COMMIT")


def bring_to(datastore: str, index: DefinedIndex) -> Operation[None]:
    """Brings the row of a version to at least this stage, order and switch. Makes it unless its number was used."""
    row = _row(datastore, index)
    rank = f"FIELD(stage, {commas([literal(each) for each in IndexStage])})"
    newer, later = f"revision < {row['revision']}", f"switch_number < {row['switch_number']}"
    # MySQL assigns from left to right, so what the conditions read is assigned last.
    changed = [
        f"definition = IF({int(index.stage is IndexStage.GONE)} OR stage = 'gone', '', definition)",
        f"stage = IF({rank} < {index.stage.rank + 1}, {row['stage']}, stage)",
        *(f"{name} = IF({newer}, {row[name]}, {name})" for name in ("run_state", "reason", "limits")),
        f"revision = GREATEST(revision, {row['revision']})",
        *(f"{name} = IF({later}, {row[name]}, {name})" for name in ("switched_at", "keep_s", "switch_by_hand")),
        f"switch_number = GREATEST(switch_number, {row['switch_number']})",
    ]
    which = "WHERE " + _which(datastore, index)
    unneeded = f"DELETE FROM {_BUILD_TABLE} {which};" if index.stage.rank > IndexStage.BUILDING.rank else ""
    others = f"{_insert_if_unused(row)};{_delete_overtaken(row)};{unneeded}COMMIT"
    yield f"BEGIN;UPDATE {_TABLE} SET {commas(changed)} {which};{others}"


def switch_to(datastore: str, index: DefinedIndex, keep_s: int) -> Operation[None]:
    """Lets a complete version answer, on the first master, which decides. Does nothing if it is the one that answers.

    It is a compare-and-set: nothing happens either if the version was switched to since it was read. The version that
    answered until now is kept for `keep_s`. The caller reads what became of it.
    """
    latest, which = _latest_switch(datastore, index.name), _which(datastore, index)
    yield (
        f"{_lock(datastore)}UPDATE {_TABLE} SET switch_number = ({latest}) + 1, switched_at = {NOW.text}"
        f", keep_s = {keep_s} WHERE {which} AND stage = 'active' AND switch_number = {index.switch.number}"
        f" AND switch_number < ({latest});COMMIT"
    )


def retire(datastore: str, index: DefinedIndex, not_before: int = 0) -> Operation[None]:
    """Marks a version to be deleted, on the first master, unless it is the one that answers.

    Does nothing if the version was switched to since it was read, or before a time, in microseconds of the server's
    clock. The caller reads what became of it.
    """
    latest, which = _latest_switch(datastore, index.name), _which(datastore, index)
    yield (
        f"{_lock(datastore)}UPDATE {_TABLE} SET stage = 'deleting' WHERE {which} AND {_PRESENT}"
        + f" AND switch_number = {index.switch.number} AND switch_number < ({latest})"
        + sql(" AND UTC_TIMESTAMP(6) >= %s;COMMIT", Time(not_before))
    )


def _lock(datastore: str) -> Script:
    return f"BEGIN;SELECT 1 FROM schemaless.datastore {where(name=datastore)} FOR UPDATE;"


def _latest_switch(datastore: str, name: str) -> Script:
    """Returns a SELECT of the number of the switch that counts. The inner one is read before anything is changed."""
    own = matching(datastore=datastore, name=name)
    return (
        f"SELECT latest FROM (SELECT MAX(switch_number) AS latest FROM {_TABLE} WHERE {own} AND {_PRESENT}) AS of_all"
    )


def _which(datastore: str, index: DefinedIndex) -> Script:
    return matching(datastore=datastore, name=index.name, number=index.number)


def all_of(datastore: str) -> Operation[list[DefinedIndex]]:
    """Returns the versions of a datastore's indexes by name and number, as this server has them."""
    return (yield from _ROWS.rows(where(datastore=datastore) + " ORDER BY name, number"))


def stamps_of(datastore: str) -> Operation[tuple[tuple[object, ...], ...]]:
    """Returns what changes whenever `all_of` does, without the definitions: cheap enough to be asked often."""
    rows = yield from query(
        f"SELECT name, number, stage, revision, switch_number FROM {_TABLE} {where(datastore=datastore)}"
        " ORDER BY name, number"
    )
    return tuple(tuple(row) for row in rows)


def begin_build(datastore: str, name: str, number: int, build_until: Mapping[int, int]) -> Operation[None]:
    """Notes how far a build must come, at least one shard, unless the version was dropped. What was noted stays.

    `build_until`: by shard, the added_id that its checkpoint must reach.
    """
    rows = [literals(datastore, name, number, shard, until) for shard, until in build_until.items()]
    which = where(datastore=datastore, name=name, number=number)
    later = f"{where(datastore=datastore, name=name)} AND number > {number}"
    # The lock keeps a drop out until the commit, and the drop deletes these rows. A master may not have the row yet.
    own = f"(SELECT {_PRESENT} FROM {_TABLE} {which})"
    yield (
        f"BEGIN;SELECT 1 FROM {_TABLE} {which} FOR UPDATE;INSERT IGNORE INTO {_BUILD_TABLE} VALUES {commas(rows)};"
        f"DELETE FROM {_BUILD_TABLE} {which} AND NOT COALESCE({own}, NOT EXISTS (SELECT 1 FROM {_TABLE} {later}));"
        "COMMIT"
    )


def build_progress(datastore: str, name: str, number: int, consumer: str) -> Operation[BuildProgress]:
    """Returns how far an index is on this server: its checkpoints, and its walks where there is none yet.

    Where the generations of a shard are known, on its home, what a later one superseded isn't finished (I13).
    """
    ((done, total),) = yield from query(
        "SELECT COALESCE(SUM(LEAST(build.added_id, COALESCE(reached.added_id, walk.walked, 0),"
        " COALESCE((SELECT MIN(g.starts_at) - 1 FROM schemaless.shard_generation AS g"
        " WHERE g.datastore = reached.datastore AND g.shard = reached.shard"
        " AND g.generation > reached.generation), build.added_id))), 0),"
        f" SUM(build.added_id) FROM {_BUILD_TABLE} AS build"
        " LEFT JOIN schemaless.checkpoint AS reached ON reached.datastore = build.datastore"
        + sql(" AND reached.consumer = %s AND reached.shard = build.shard", consumer)
        + " LEFT JOIN schemaless.index_walk AS walk ON walk.datastore = build.datastore AND walk.name = build.name"
        " AND walk.number = build.number AND walk.shard = build.shard"
        + sql(" WHERE build.datastore = %s AND build.name = %s AND build.number = %s", datastore, name, number)
    )
    return BuildProgress(int(done), None if total is None else int(total))


def build_until(datastore: str, name: str, number: int) -> Operation[dict[int, int]]:
    """Returns what `begin_build` noted here, by shard."""
    which = where(datastore=datastore, name=name, number=number)
    rows = yield from query(f"SELECT shard, added_id FROM {_BUILD_TABLE} {which}")
    return {shard: added_id for shard, added_id in rows}


def lower_build(datastore: str, name: str, number: int, shard: int, added_id: int) -> Operation[None]:
    """Lets a shard count as built at an added_id, when the cells behind it were superseded (I13)."""
    which = where(datastore=datastore, name=name, number=number, shard=shard)
    yield f"UPDATE {_BUILD_TABLE} SET added_id = LEAST(added_id, {added_id}) {which}"


def _row(datastore: str, index: DefinedIndex) -> dict[str, Script]:
    """Returns the columns of a row as SQL, but for created_at."""
    order = msgspec.structs.replace(
        index.order, reason=index.order.reason and index.order.reason[:REASON_CHARACTERS_MAX]
    )
    values = {"datastore": datastore} | _ROWS.values(replace(index, order=order))
    return {name: literal(value) for name, value in values.items()}


def _insert_if_unused(row: Mapping[str, Script]) -> Script:
    """Returns an INSERT that does nothing if this or a later number of the name was used."""
    return (
        f"INSERT IGNORE INTO {_TABLE} ({commas([*row])},created_at) SELECT {commas([*row.values()])}, UTC_TIMESTAMP(6)"
        f" FROM DUAL WHERE NOT EXISTS (SELECT * FROM {_TABLE} WHERE {_of_name(row)} AND number >= {row['number']})"
    )


def _delete_overtaken(row: Mapping[str, Script]) -> Script:
    """Returns a DELETE of rows that only kept a number, where a later one of the name exists."""
    highest = f"SELECT number FROM (SELECT MAX(number) AS number FROM {_TABLE} WHERE {_of_name(row)}) AS highest"
    return f"DELETE FROM {_TABLE} WHERE {_of_name(row)} AND stage = 'gone' AND number < ({highest})"


def _of_name(row: Mapping[str, Script]) -> Script:
    return f"datastore = {row['datastore']} AND name = {row['name']}"


# index_walk: how far the walk over the rows of a source shard has written a version of an index, on each cluster.
#
# The position moves by compare-and-set in the transaction that writes the entries. So a process that wakes up late
# changes nothing, and the position is as exact as the entries.

_WALK_TABLE = "schemaless.index_walk"
_IS_OVER = (
    "(SELECT COUNT(*) FROM schemaless.checkpoint AS reached WHERE reached.datastore = index_walk.datastore"
    " AND reached.consumer = %s AND reached.shard = index_walk.shard)"
)


class RowWalk(msgspec.Struct, frozen=True):
    """The walk of one shard, as one cluster has it. It is over where the shard has a checkpoint (`is_over`).

    `until` is the fixed head, in `generation`. Rows up to `row_key` are written, and have `walked` cells. `superseded`:
    what an earlier walk wrote must be taken back first.
    """

    generation: int
    until: int
    row_key: RowKey = RowKey(b"")
    walked: int = 0
    superseded: bool = False
    is_over: bool = False


_WALKS = Table(_WALK_TABLE, RowWalk, is_over=_IS_OVER)


def walks(of: IndexVersion, consumer: str, shards: Collection[int]) -> Operation[dict[int, RowWalk]]:
    """Returns the walks of these shards, at least one, that were begun here."""
    return (yield from _WALKS.by("shard", f"{of.where} AND {matching(shard=shards)}", consumer))


def begin_walk(of: IndexVersion, shard: int, walk: RowWalk) -> Operation[None]:
    """Begins a walk, unless one was begun."""
    begun = RowWalk(walk.generation, walk.until)
    yield _WALKS.insert([begun], "INSERT IGNORE", **msgspec.structs.asdict(of), shard=shard)


def supersede_walk(of: IndexVersion, consumer: str, shard: int, at: RowWalk, walk: RowWalk) -> Operation[bool]:
    """Begins a walk anew with an earlier head, from a later generation on. It may write nothing until `resume_walk`.

    Returns False, and changes nothing, if another process began the walk `at` anew since it was read.
    """
    begins = (
        f"UPDATE {_WALK_TABLE} SET generation = {walk.generation}, until = {walk.until}, row_key = '', walked = 0,"
        f" superseded = 1 {of.where} AND shard = {shard} AND generation = {at.generation}"
        f" AND until = {at.until} AND superseded = {int(at.superseded)}"
    )
    ends = f"DELETE FROM schemaless.checkpoint {where(datastore=of.datastore, consumer=consumer, shard=shard)}"
    return (yield from change_one(begins, ends))


def write_superseded(of: IndexVersion, shard: int, anew: RowWalk, script: Script) -> Operation[bool]:
    """Runs a script that takes back what was walked, in one transaction, while the walk that begins anew waits for it.

    Returns False, and nothing of the script stays, if it doesn't wait any more.
    """
    hold = f"UPDATE {_WALK_TABLE} SET superseded = 1 {_is_superseded(of, shard, anew)}"
    return (yield from change_one(hold, script))


def resume_walk(of: IndexVersion, shard: int, walk: RowWalk) -> Operation[None]:
    """Lets a walk write that was begun anew with this head and generation, once everything is taken back."""
    yield f"UPDATE {_WALK_TABLE} SET superseded = 0 {_is_superseded(of, shard, walk)}"


def lowering_walk(of: IndexVersion, shard: int, until: int) -> Script:
    """Returns a statement that notes that the walk of a shard stands for no cells behind an added_id."""
    return f"UPDATE {_WALK_TABLE} SET until = LEAST(until, {until}) {of.where} AND shard = {shard}"


def move_walk(of: IndexVersion, shard: int, at: RowWalk, to: RowWalk, effect: Script) -> Operation[bool]:
    """Moves a walk in one transaction with `effect`. Returns False, and nothing of it stays, if it isn't at `at`."""
    here = matching(generation=at.generation, until=at.until, row_key=at.row_key, walked=at.walked, superseded=False)
    update = sql(f"UPDATE {_WALK_TABLE} SET row_key = %s, walked = %s ", to.row_key, to.walked)
    update += f"{of.where} AND shard = {shard} AND {here}"
    if (yield from change_one(update, effect)):
        return True
    rows = yield from query(
        f"SELECT generation, until, row_key, walked FROM {_WALK_TABLE} {of.where} AND shard = {shard}"
    )
    ours = (at.generation, at.until, to.row_key, to.walked)
    return [tuple(row) for row in rows] == [ours]  # our own COMMIT had succeeded before its answer was lost


def walked_sum(of: IndexVersion) -> Operation[int]:
    """Returns how many cells are walked, as this server has it. A minion that lags has fewer than its master."""
    ((total,),) = yield from query(f"SELECT COALESCE(SUM(walked), 0) FROM {_WALK_TABLE} {of.where}")
    return int(total)


def _is_superseded(of: IndexVersion, shard: int, anew: RowWalk) -> Script:
    return (
        f"{of.where} AND shard = {shard} AND superseded = 1 AND generation = {anew.generation} AND until = {anew.until}"
    )
