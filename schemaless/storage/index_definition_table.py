"""index_definition: the versions of a datastore's indexes, and how far each one is. Every cluster has all rows.

A row only moves forward: to a later stage, to the order of a higher revision, and to a later switch. So the rows of
several clusters merge in any sequence (schemaless/index/versions.py), and a server that was away takes what the others
have. Several versions of one index may stand side by side. The one with the latest switch answers queries.

index_build says how far the checkpoints of an index must come before it answers. It has rows only while one is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import msgspec

from schemaless.index.definition import IndexDefinition, dump_definition, parse_definition
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import Script, Time, commas, literal, sql

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

_limits_encoder = msgspec.json.Encoder()
_limits_decoder = msgspec.json.Decoder(IndexLimits)


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
    """One version of an index. `text` is its definition as JSON, empty once the version is gone."""

    name: str
    number: int
    text: str
    stage: IndexStage = IndexStage.DEFINED
    order: IndexOrder = NO_ORDER
    switch: IndexSwitch = FIRST_SWITCH

    @cached_property
    def definition(self) -> IndexDefinition:
        """The parsed definition. Raises Invalid when a newer program wrote it."""
        return parse_definition(json.loads(self.text), self.number)

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


def defined(
    definition: IndexDefinition,
    stage: IndexStage = IndexStage.DEFINED,
    order: IndexOrder = NO_ORDER,
    switch: IndexSwitch = FIRST_SWITCH,
) -> DefinedIndex:
    """Returns the version that a definition describes."""
    return DefinedIndex(definition.name, definition.number, dump_definition(definition), stage, order, switch)


class BuildProgress(msgspec.Struct, frozen=True):
    """`done` of the `total` cells at the start are finished. `total` is None while tables are being made."""

    done: int
    total: int | None


def insert(datastore: str, index: DefinedIndex, indexes_max: int) -> Operation[None]:
    """Makes a version, unless its number was used or `indexes_max` exist. The caller reads what became of it."""
    row = _row(datastore, index)
    free = f"(SELECT COUNT(*) FROM {_TABLE} WHERE datastore = {row[0]} AND stage <> 'gone') < {indexes_max}"
    yield (
        sql("BEGIN;SELECT 1 FROM schemaless.datastore WHERE name = %s FOR UPDATE;", datastore)
        + f"{_insert_if_unused(row)} AND {free};{_delete_overtaken(row)};COMMIT"
    )


def bring_to(datastore: str, index: DefinedIndex) -> Operation[None]:
    """Brings the row of a version to at least this stage, order and switch. Makes it unless its number was used."""
    row = _row(datastore, index)
    _, _, number, _, stage, run_state, reason, limits, revision, switch, switched_at, keep_s, by_hand = row
    rank = f"FIELD(stage, {commas([literal(str(each)) for each in IndexStage])})"
    newer, later = f"revision < {revision}", f"switch_number < {switch}"
    # MySQL assigns from left to right, so what the conditions read is assigned last.
    changed = [
        f"definition = IF({int(index.stage is IndexStage.GONE)} OR stage = 'gone', '', definition)",
        f"stage = IF({rank} < {index.stage.rank + 1}, {stage}, stage)",
        f"run_state = IF({newer}, {run_state}, run_state)",
        f"reason = IF({newer}, {reason}, reason)",
        f"limits = IF({newer}, {limits}, limits)",
        f"revision = GREATEST(revision, {revision})",
        f"switched_at = IF({later}, {switched_at}, switched_at)",
        f"keep_s = IF({later}, {keep_s}, keep_s)",
        f"switch_by_hand = IF({later}, {by_hand}, switch_by_hand)",
        f"switch_number = GREATEST(switch_number, {switch})",
    ]
    which = f"WHERE datastore = {row[0]} AND name = {row[1]} AND number = {number}"
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
        sql("BEGIN;SELECT 1 FROM schemaless.datastore WHERE name = %s FOR UPDATE;", datastore)
        + f"UPDATE {_TABLE} SET switch_number = ({latest}) + 1, switched_at = UTC_TIMESTAMP(6), keep_s = {keep_s}"
        + f" WHERE {which} AND stage = 'active' AND switch_number = {index.switch.number}"
        + f" AND switch_number < ({latest});COMMIT"
    )


def retire(datastore: str, index: DefinedIndex, not_before: int = 0) -> Operation[None]:
    """Marks a version to be deleted, on the first master, unless it is the one that answers.

    Does nothing if the version was switched to since it was read, or before a time, in microseconds of the server's
    clock. The caller reads what became of it.
    """
    latest, which = _latest_switch(datastore, index.name), _which(datastore, index)
    yield (
        sql("BEGIN;SELECT 1 FROM schemaless.datastore WHERE name = %s FOR UPDATE;", datastore)
        + f"UPDATE {_TABLE} SET stage = 'deleting' WHERE {which} AND {_PRESENT}"
        + f" AND switch_number = {index.switch.number} AND switch_number < ({latest})"
        + sql(" AND UTC_TIMESTAMP(6) >= %s;COMMIT", Time(not_before))
    )


def _latest_switch(datastore: str, name: str) -> Script:
    """Returns a SELECT of the number of the switch that counts. The inner one is read before anything is changed."""
    own = sql("datastore = %s AND name = %s", datastore, name)
    return (
        f"SELECT latest FROM (SELECT MAX(switch_number) AS latest FROM {_TABLE} WHERE {own} AND {_PRESENT}) AS of_all"
    )


def _which(datastore: str, index: DefinedIndex) -> Script:
    return sql("datastore = %s AND name = %s AND number = %s", datastore, index.name, index.number)


def all_of(datastore: str) -> Operation[list[DefinedIndex]]:
    """Returns the versions of a datastore's indexes by name and number, as this server has them."""
    rows = yield from query(
        "SELECT name, number, definition, stage, run_state, reason, limits, revision, switch_number,"
        f" {MICROSECONDS.format('switched_at')}, keep_s, switch_by_hand FROM {_TABLE}"
        + sql(" WHERE datastore = %s ORDER BY name, number", datastore)
    )
    return [
        DefinedIndex(
            name,
            number,
            text,
            IndexStage(stage),
            IndexOrder(RunState(run_state), reason, _limits_decoder.decode(limits), revision),
            IndexSwitch(switch, switched_at, keep_s, bool(by_hand)),
        )
        for (
            name,
            number,
            text,
            stage,
            run_state,
            reason,
            limits,
            revision,
            switch,
            switched_at,
            keep_s,
            by_hand,
        ) in rows
    ]


def stamps_of(datastore: str) -> Operation[tuple[tuple[object, ...], ...]]:
    """Returns what changes whenever `all_of` does, without the definitions: cheap enough to be asked often."""
    rows = yield from query(
        f"SELECT name, number, stage, revision, switch_number FROM {_TABLE}"
        + sql(" WHERE datastore = %s ORDER BY name, number", datastore)
    )
    return tuple(tuple(row) for row in rows)


def begin_build(datastore: str, name: str, number: int, build_until: Mapping[int, int]) -> Operation[None]:
    """Notes how far a build must come, at least one shard, unless the version was dropped. What was noted stays.

    `build_until`: by shard, the added_id that its checkpoint must reach.
    """
    rows = [sql("(%s, %s, %s, %s, %s)", datastore, name, number, n, until) for n, until in build_until.items()]
    which = sql("WHERE datastore = %s AND name = %s AND number = %s", datastore, name, number)
    later = sql("WHERE datastore = %s AND name = %s AND number > %s", datastore, name, number)
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
    rows = yield from query(
        sql(
            f"SELECT shard, added_id FROM {_BUILD_TABLE} WHERE datastore = %s AND name = %s AND number = %s",
            datastore,
            name,
            number,
        )
    )
    return {shard: added_id for shard, added_id in rows}


def lower_build(datastore: str, name: str, number: int, shard: int, added_id: int) -> Operation[None]:
    """Lets a shard count as built at an added_id, when the cells behind it were superseded (I13)."""
    yield sql(
        f"UPDATE {_BUILD_TABLE} SET added_id = LEAST(added_id, %s)"
        " WHERE datastore = %s AND name = %s AND number = %s AND shard = %s",
        added_id,
        datastore,
        name,
        number,
        shard,
    )


def _row(datastore: str, index: DefinedIndex) -> list[Script]:
    """Returns the values of a row as SQL, in the order of the table but for created_at."""
    order, switch = index.order, index.switch
    values = (
        datastore,
        index.name,
        index.number,
        index.text,
        str(index.stage),
        str(order.run_state),
        order.reason and order.reason[:REASON_CHARACTERS_MAX],
        _limits_encoder.encode(order.limits).decode(),
        order.revision,
        switch.number,
        None if switch.at is None else Time(switch.at),
        switch.keep_s,
        switch.by_hand,
    )
    return [literal(value) for value in values]


def _insert_if_unused(row: list[Script]) -> Script:
    """Returns an INSERT that does nothing if this or a later number of the name was used."""
    return (
        f"INSERT IGNORE INTO {_TABLE} SELECT {commas(row)}, UTC_TIMESTAMP(6) FROM DUAL WHERE NOT EXISTS"
        f" (SELECT * FROM {_TABLE} WHERE datastore = {row[0]} AND name = {row[1]} AND number >= {row[2]})"
    )


def _delete_overtaken(row: list[Script]) -> Script:
    """Returns a DELETE of rows that only kept a number, where a later one of the name exists."""
    own = f"datastore = {row[0]} AND name = {row[1]}"
    highest = f"SELECT number FROM (SELECT MAX(number) AS number FROM {_TABLE} WHERE {own}) AS highest"
    return f"DELETE FROM {_TABLE} WHERE {own} AND stage = 'gone' AND number < ({highest})"
