"""index_pass: what the last comparison of each range of an index with its cells came to, and all of them together.

The masters are compared together. Each minion has rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemaless.index.comparison import FaultCounts
from schemaless.storage.index_problem_table import VERSION, IndexVersion
from schemaless.storage.operation import Operation, Row, query
from schemaless.storage.shard_head import MICROSECONDS
from schemaless.storage.sql import NOW, Expression, Script, Time, commas, literal, literals, matching, where

_TABLE = "schemaless.index_pass"
_COUNTED = ("cell_rows", "entries", "missing", "stale", "ghost", "repaired", "unsettled")
_TOTALS = ("missing", "stale", "ghost", "repaired")
_NEVER = "'1970-01-02'"
"""When a range was compared of which only a check has found something."""


class IndexPass(msgspec.Struct, frozen=True):
    """The comparisons of some ranges. `last` sums the last one of each range, and `total` all of them.

    `ranges` were compared at least once. The one that waits longest was at `compared_since`, in microseconds since the
    epoch.
    """

    ranges: int
    compared_since: int
    last: FaultCounts
    total: FaultCounts


NO_PASS = IndexPass(0, 0, FaultCounts(), FaultCounts())

MASTERS = ""
"""What is noted as the node of a comparison of all masters."""

_NODE_CHARACTERS_MAX = 255

PassKey = tuple[IndexVersion, str]
"""A version of an index, and the minion that was compared, or MASTERS."""


def note(version: IndexVersion, number: int, counts: FaultCounts, node: str = MASTERS) -> Operation[None]:
    """Stores what a comparison of one range came to. Repeated after a lost answer, its totals may count twice."""
    update = [f"{name} = VALUES({name})" for name in ("compared_at", *_COUNTED)]
    update += [f"{name}_total = {name}_total + VALUES({name}_total)" for name in _TOTALS]
    yield f"{_insert(version, node, number, NOW, counts, counts)} ON DUPLICATE KEY UPDATE {commas(update)}"


def note_found(version: IndexVersion, number: int, counts: FaultCounts, node: str) -> Operation[None]:
    """Stores what a check found in a range on a minion, until the range is compared there again. Idempotent."""
    kinds = _TOTALS[:3]
    found = FaultCounts(**{kind: getattr(counts, kind) for kind in kinds})
    update = commas([f"{kind} = GREATEST({kind}, VALUES({kind}))" for kind in kinds])
    insert = _insert(version, node, number, Expression(_NEVER), found, FaultCounts())
    yield f"{insert} ON DUPLICATE KEY UPDATE {update}"


def _insert(of: IndexVersion, node: str, number: int, at: Expression, last: FaultCounts, total: FaultCounts) -> Script:
    names = commas([*_COUNTED, *(f"{name}_total" for name in _TOTALS)])
    counts = [last.rows, *(getattr(last, name) for name in _COUNTED[1:]), *(getattr(total, name) for name in _TOTALS)]
    values = literals(of.datastore, of.name, of.number, node[:_NODE_CHARACTERS_MAX], number, at, *counts)
    return f"INSERT INTO {_TABLE} (datastore, name, number, node, range_number, compared_at, {names}) VALUES {values}"


def note_clean(version: IndexVersion, node: str, ranges: Sequence[int], since: Time) -> Operation[None]:
    """Stores that a check compared ranges of a minion since then, as this server's clock says, and found nothing.

    There is at least one. What the cleaner compared later than `since` stays.
    """
    zero = commas([f"{kind} = 0" for kind in _TOTALS[:3]])
    these = matching(node=node[:_NODE_CHARACTERS_MAX], range_number=ranges)
    yield f"UPDATE {_TABLE} SET {zero} {version.where} AND {these} AND compared_at < {literal(since)}"


def ages(version: IndexVersion, nodes: Sequence[str] = (MASTERS,)) -> Operation[dict[int, float]]:
    """Returns by number how many seconds ago a range was compared on one of these nodes, as this server noted it."""
    age = "TIMESTAMPDIFF(MICROSECOND, MAX(compared_at), UTC_TIMESTAMP(6)) / 1000000"
    there = matching(node=[node[:_NODE_CHARACTERS_MAX] for node in nodes])
    rows = yield from query(
        f"SELECT range_number, {age} FROM {_TABLE} {version.where} AND {there} GROUP BY range_number"
    )
    return {number: float(age_s) for number, age_s in rows}


def of_datastore(datastore: str) -> Operation[dict[PassKey, IndexPass]]:
    """Returns what this server knows of the indexes of one datastore."""
    return (yield from _sums(where(datastore=datastore)))


def of_all() -> Operation[dict[PassKey, IndexPass]]:
    """Returns what this server knows of all indexes."""
    return (yield from _sums(""))


def _sums(which: Script) -> Operation[dict[PassKey, IndexPass]]:
    summed = [f"SUM({name})" for name in (*_COUNTED, *(f"{name}_total" for name in _TOTALS))]
    compared = f"CASE WHEN compared_at > {_NEVER} THEN compared_at END"
    since = f"COALESCE({MICROSECONDS.format(f'MIN({compared})')}, 0)"
    rows = yield from query(
        f"SELECT datastore, name, number, node, COUNT({compared}), {since}, {commas(summed)}"
        f" FROM {_TABLE} {which} GROUP BY datastore, name, number, node"
    )
    return {(VERSION.decode(row[:3]), row[3]): _pass(row[4:]) for row in rows}


def _pass(row: Row) -> IndexPass:
    ranges, since, *counts = row
    numbers = [int(count) for count in counts]
    last = FaultCounts(**dict(zip(("rows", *_COUNTED[1:]), numbers, strict=False)))
    return IndexPass(ranges, since, last, FaultCounts(**dict(zip(_TOTALS, numbers[len(_COUNTED) :], strict=True))))


def merged(one: IndexPass, other: IndexPass) -> IndexPass:
    """Returns what two servers know together: each has ranges of its own."""
    return IndexPass(
        one.ranges + other.ranges,
        min((each.compared_since for each in (one, other) if each.ranges), default=0),
        one.last + other.last,
        one.total + other.total,
    )
