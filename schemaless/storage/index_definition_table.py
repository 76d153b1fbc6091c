"""index_definition: the versions of a datastore's indexes, and how far each one is. Every cluster has all rows.

A row only moves forward: to a later stage, and to the order of a higher revision. So the rows of several clusters merge
in any sequence, and a server that was away takes what the others have (`merge`).

index_build says how far the checkpoints of an index must come before it answers. It has rows only while one is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import msgspec

from schemaless.errors import NotFound
from schemaless.index.definition import IndexDefinition, dump_definition, parse_definition
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Script, commas, literal, sql

_TABLE = "schemaless.index_definition"
_BUILD_TABLE = "schemaless.index_build"
_COLUMNS = "name, number, definition, stage, run_state, reason, cells_per_s, revision"
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


class IndexOrder(msgspec.Struct, frozen=True):
    """What was last ordered for an index, by an operator or by the indexer that gave it up.

    The highest revision counts.

    `cells_per_s` bounds what each process delivers to the index. None: no bound.
    """

    run_state: RunState = RunState.RUNNING
    reason: str | None = None
    cells_per_s: int | None = None
    revision: int = 0


NO_ORDER = IndexOrder()


@dataclass(frozen=True)
class DefinedIndex:
    """One version of an index. `text` is its definition as JSON, empty once the version is gone."""

    name: str
    number: int
    text: str
    stage: IndexStage = IndexStage.DEFINED
    order: IndexOrder = NO_ORDER

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
    def is_being_built(self) -> bool:
        """Whether it was never complete, and isn't dropped."""
        return self.stage in (IndexStage.DEFINED, IndexStage.BUILDING)

    @property
    def has_tables(self) -> bool:
        """Whether every shard has its index table, and the build has begun."""
        return self.stage in (IndexStage.BUILDING, IndexStage.ACTIVE)


def defined(
    definition: IndexDefinition, stage: IndexStage = IndexStage.DEFINED, order: IndexOrder = NO_ORDER
) -> DefinedIndex:
    """Returns the version that a definition describes."""
    return DefinedIndex(definition.name, definition.number, dump_definition(definition), stage, order)


VersionKey = tuple[str, int]
"""Name and number of a version."""


class IndexVersions(msgspec.Struct, frozen=True):
    """All versions of a datastore's indexes, as the masters that answer know them together.

    `lagging`: the masters that lack something of a version. `away`: the masters that didn't answer, and why.
    """

    merged: Mapping[VersionKey, DefinedIndex] = {}
    lagging: Sequence[tuple[str, DefinedIndex]] = ()
    away: Mapping[str, str] = {}

    def newest(self) -> dict[str, DefinedIndex]:
        """Returns by name the newest version that isn't gone."""
        by_number = sorted(self.merged.items())
        return {name: index for (name, _), index in by_number if index.stage is not IndexStage.GONE}

    def of(self, datastore: str, name: str) -> DefinedIndex:
        """Returns the newest version of a name. Raises NotFound."""
        try:
            return self.newest()[name]
        except KeyError:
            raise NotFound(f"there is no index {name!r} in {datastore}") from None


def merge(rows: Mapping[str, Iterable[DefinedIndex]], away: Mapping[str, str]) -> IndexVersions:
    """Merges what each master has, by its cluster. The furthest stage and the order of the highest revision count."""
    merged: dict[VersionKey, DefinedIndex] = {}
    held: dict[str, dict[VersionKey, DefinedIndex]] = {}
    highest: dict[tuple[str, str], int] = {}
    for cluster, indexes in sorted(rows.items()):
        held[cluster] = {(index.name, index.number): index for index in indexes}
        for key, index in held[cluster].items():
            known = merged.get(key, index)
            stage = max(known.stage, index.stage, key=lambda each: each.rank)
            text = "" if stage is IndexStage.GONE else known.text or index.text
            merged[key] = replace(known, text=text, stage=stage, order=max(known.order, index.order, key=_order_key))
            highest[cluster, index.name] = max(index.number, highest.get((cluster, index.name), 0))
    lagging = [
        (cluster, index)
        for cluster, own in held.items()
        for key, index in merged.items()
        if _lags(own.get(key), index, highest.get((cluster, index.name), 0))
    ]
    return IndexVersions(merged, lagging, away)


def _lags(own: DefinedIndex | None, index: DefinedIndex, highest: int) -> bool:
    """Whether a master has less than `index`, and may have it: a version below its highest number is made no more."""
    if own is None:
        return index.number > highest
    return own.stage.rank < index.stage.rank or own.order.revision < index.order.revision


def _order_key(order: IndexOrder) -> tuple[int, str, int, str]:
    """Returns by what orders are compared. If two were given at once, the same one counts everywhere."""
    return order.revision, order.run_state, order.cells_per_s or 0, order.reason or ""


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
    """Brings the row of a version to at least this stage and this order. Makes it unless its number was used."""
    row = _row(datastore, index)
    _, _, number, _, stage, run_state, reason, cells_per_s, revision = row
    rank = f"FIELD(stage, {commas([literal(str(each)) for each in IndexStage])})"
    newer = f"revision < {revision}"
    # MySQL assigns from left to right, so what the conditions read is assigned last.
    changed = [
        f"definition = IF({int(index.stage is IndexStage.GONE)} OR stage = 'gone', '', definition)",
        f"stage = IF({rank} < {index.stage.rank + 1}, {stage}, stage)",
        f"run_state = IF({newer}, {run_state}, run_state)",
        f"reason = IF({newer}, {reason}, reason)",
        f"cells_per_s = IF({newer}, {cells_per_s}, cells_per_s)",
        f"revision = GREATEST(revision, {revision})",
    ]
    which = f"WHERE datastore = {row[0]} AND name = {row[1]} AND number = {number}"
    unneeded = f"DELETE FROM {_BUILD_TABLE} {which};" if index.stage.rank > IndexStage.BUILDING.rank else ""
    others = f"{_insert_if_unused(row)};{_delete_overtaken(row)};{unneeded}COMMIT"
    yield f"BEGIN;UPDATE {_TABLE} SET {commas(changed)} {which};{others}"


def all_of(datastore: str) -> Operation[list[DefinedIndex]]:
    """Returns the versions of a datastore's indexes by name and number, as this server has them."""
    rows = yield from query(
        sql(f"SELECT {_COLUMNS} FROM {_TABLE} WHERE datastore = %s ORDER BY name, number", datastore)
    )
    return [
        DefinedIndex(
            name, number, text, IndexStage(stage), IndexOrder(RunState(run_state), reason, cells_per_s, revision)
        )
        for name, number, text, stage, run_state, reason, cells_per_s, revision in rows
    ]


def stamps_of(datastore: str) -> Operation[tuple[tuple[object, ...], ...]]:
    """Returns what changes whenever `all_of` does, without the definitions: cheap enough to be asked often."""
    rows = yield from query(
        sql(f"SELECT name, number, stage, revision FROM {_TABLE} WHERE datastore = %s ORDER BY name, number", datastore)
    )
    return tuple(tuple(row) for row in rows)


def begin_build(datastore: str, name: str, number: int, build_until: Mapping[int, int]) -> Operation[None]:
    """Notes how far a build must come, at least one shard. What was noted before stays.

    `build_until`: by shard, the added_id that its checkpoint must reach.
    """
    rows = [sql("(%s, %s, %s, %s, %s)", datastore, name, number, n, until) for n, until in build_until.items()]
    yield f"INSERT IGNORE INTO {_BUILD_TABLE} VALUES {commas(rows)}"


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
    order = index.order
    values = (
        datastore,
        index.name,
        index.number,
        index.text,
        str(index.stage),
        str(order.run_state),
        order.reason and order.reason[:REASON_CHARACTERS_MAX],
        order.cells_per_s,
        order.revision,
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
