"""The next versions of columns: cells whose ref_key the server gives (POST), each batch in one transaction at home.

The script that locks the heads also asks for the highest ref_key of each column, so no other put can take the same
one: a POST never loses a race. Not idempotent by itself: without an Idempotency-Key each run is a new version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from schemaless.cell import REF_KEY_MAX, Cell, CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey, StoredCell
from schemaless.codec import same_body
from schemaless.errors import Busy, Corrupt, DuplicateKey, Invalid, KeyErased, NeedsLockedHeads, SchemalessError
from schemaless.storage import append, entity_table
from schemaless.storage.append import NewRow, TransactionSteps
from schemaless.storage.operation import Operation, query
from schemaless.storage.sql import Name, Script, sql
from schemaless.topology import Datastore

_LOOKS_MAX = 5  # Idempotency-Keys are looked up again only after another POST was faster with one of them


class NewVersion(msgspec.Struct, frozen=True, gc=False):
    """What is to be appended to a column. `idempotency_key` None: each time anew. The ref_key is above `above`."""

    shard: int
    row_key: RowKey
    column_name: ColumnName
    body: bytes
    idempotency_key: str | None = None
    above: int = 0
    cause: str | None = None

    @property
    def column(self) -> tuple[int, RowKey, ColumnName]:
        return self.shard, self.row_key, self.column_name


class NextVersion(msgspec.Struct, frozen=True, gc=False):
    """`replayed`: an earlier POST with the same Idempotency-Key wrote the cell."""

    cell: Cell
    placed: Placed
    replayed: bool


def put_next(
    datastore: Datastore, versions: Sequence[NewVersion], latest: int | None = None
) -> Operation[list[NextVersion | SchemalessError]]:
    """Returns what came of each POST, in order, at most append.SHARDS_MAX of them: versions of one column in order.

    An Invalid is an Idempotency-Key that was used with another body. Raises Invalid when no higher ref_key is left in a
    column, and what append.insert does.
    """
    found: dict[int, NextVersion | SchemalessError] = {}
    for _ in range(_LOOKS_MAX):
        pending = [n for n in range(len(versions)) if n not in found]
        # A repeat of an Idempotency-Key waits for the answer of the first one.
        firsts: list[int] = []
        seen = set()
        for n in pending:
            key = (versions[n].column, versions[n].idempotency_key)
            if versions[n].idempotency_key is None or key not in seen:
                firsts.append(n)
                seen.add(key)
        try:
            appended = yield from _append(datastore, [versions[n] for n in firsts], latest)
        except DuplicateKey:  # some Idempotency-Keys were used before
            pass
        else:
            found.update(zip(firsts, appended, strict=True))
            pending = [n for n in pending if n not in found]
        if pending:
            answers = yield from _first_answers(datastore, [versions[n] for n in pending])
            found.update({n: answer for n, answer in zip(pending, answers, strict=True) if answer is not None})
        if len(found) == len(versions):
            return [found[n] for n in range(len(versions))]
    raise Busy("other POSTs used these Idempotency-Keys again and again")


def _append(datastore: Datastore, versions: Sequence[NewVersion], latest: int | None) -> Operation[list[NextVersion]]:
    """Appends all of them in one script. Raises DuplicateKey when an Idempotency-Key was used before."""
    columns = {column: n for n, column in enumerate(dict.fromkeys([version.column for version in versions]))}
    counts = dict.fromkeys(columns, 0)
    rows, last, offsets = [], [], []
    for version in versions:
        counts[version.column] += 1
        offsets.append(counts[version.column])
        ref_key = f"@r{columns[version.column]}+{offsets[-1]}"
        values = append.values(version.row_key, version.column_name, ref_key, version.body, version.cause)
        rows.append(NewRow(version.shard, values))
        if version.idempotency_key is not None:
            last.append(
                append.answer_insertion(
                    datastore.name, version.row_key, version.column_name, version.idempotency_key, ref_key
                )
            )
    above = {column: max(version.above for version in versions if version.column == column) for column in columns}
    highest = [
        (column[0], _highest(datastore, column, f"@r{n}", counts[column], above[column]))
        for column, n in columns.items()
    ]
    steps = TransactionSteps(locked=highest, last=last, numbers=[f"@r{n}" for n in columns.values()])
    try:
        placed, numbers = yield from append.insert(datastore, rows, steps, latest)
    except NeedsLockedHeads:
        yield from _verify_room(datastore, above)
        raise
    return [
        NextVersion(
            Cell(
                CellKey(version.row_key, version.column_name, RefKey(numbers[columns[version.column]] + offset)),
                version.body,
                cause=version.cause,
            ),
            place,
            replayed=False,
        )
        for version, place, offset in zip(versions, placed, offsets, strict=True)
    ]


def _highest(
    datastore: Datastore, column: tuple[int, RowKey, ColumnName], variable: str, count: int, above: int
) -> Script:
    """Sets a variable to the highest ref_key of a column or `above`, NULL where no `count` are left above it."""
    shard, row_key, column_name = column
    highest = f"GREATEST(COALESCE(MAX(ref_key),0),{above})"
    return f"SET {variable}=(SELECT IF({highest}<={REF_KEY_MAX - count},{highest},NULL)" + sql(
        " FROM %s.entity WHERE row_key = %s AND column_name = %s)",
        Name(datastore.database(shard)),
        row_key,
        column_name.encode(),
    )


def _verify_room(datastore: Datastore, above: Mapping[tuple[int, RowKey, ColumnName], int]) -> Operation[None]:
    """Raises Invalid when a column holds the highest ref_key, or a buffer holds it for that column."""
    for (shard, row_key, column_name), buffered in above.items():
        ((highest,),) = yield from query(
            sql(
                "SELECT MAX(ref_key) FROM %s.entity WHERE row_key = %s AND column_name = %s",
                Name(datastore.database(shard)),
                row_key,
                column_name.encode(),
            )
        )
        if REF_KEY_MAX in (highest, buffered):
            raise Invalid("ref_key", "the column holds the highest one already")


def _first_answers(
    datastore: Datastore, versions: Sequence[NewVersion]
) -> Operation[list[NextVersion | SchemalessError | None]]:
    """Returns for each POST the answer that an earlier one with the same Idempotency-Key got, or None."""
    keyed = [version for version in versions if version.idempotency_key is not None]
    if not keyed:
        return [None] * len(versions)
    wanted = [(version.row_key, version.column_name, version.idempotency_key or "") for version in keyed]
    ref_keys = yield from find_answer(datastore.name, wanted)
    used = [
        (version, CellKey(version.row_key, version.column_name, ref_key))
        for version, ref_key in zip(keyed, ref_keys, strict=True)
        if ref_key is not None
    ]
    cells = (yield from entity_table.get(datastore, [(version.shard, key) for version, key in used])) if used else []
    answers = {id(version): _replay(version, key, cell) for (version, key), cell in zip(used, cells, strict=True)}
    return [answers.get(id(version)) for version in versions]


def _replay(version: NewVersion, key: CellKey, found: StoredCell | None) -> NextVersion | SchemalessError:
    if found is None:
        return Corrupt(f"an Idempotency-Key names {key}, which is not there")
    if found.erased is not None:
        what = f"the cell {key}, which a POST with this Idempotency-Key wrote, was erased"
        return KeyErased(what, found.erased.erasure_id, found.erased.at)
    if not same_body(found.body, version.body):
        return Invalid("Idempotency-Key", "was used with another body")
    placed = Placed(PutStatus.STORED, version.shard, found.generation, found.added_id, found.created_at)
    return NextVersion(Cell(key, found.body, cause=found.cause), placed, replayed=True)


# The idempotency table: which ref_key a POST with an Idempotency-Key got.
#
# It is on the home of the shard and is written in the cell's own transaction. So a repeat gets the first response,
# even if that was lost on its way.

KEPT_HOURS = 25
"""The contract says at least 24; an hour for clocks and slow cleaners."""


def find_answer(datastore: str, wanted: Sequence[tuple[RowKey, ColumnName, str]]) -> Operation[list[RefKey | None]]:
    """Returns, for each (row key, column, Idempotency-Key), the ref_key that an earlier POST with it got, or None."""
    results = yield ";".join(
        sql(
            "SELECT ref_key FROM schemaless.idempotency"
            " WHERE datastore = %s AND row_key = %s AND column_name = %s AND idempotency_key = %s",
            datastore.encode(),
            row_key,
            column_name.encode(),
            idempotency_key.encode(),
        )
        for row_key, column_name, idempotency_key in wanted
    )
    return [RefKey(result.rows[0][0]) if result.rows else None for result in results]


def delete_old_answers(limit: int) -> Operation[int]:
    """Deletes at most `limit` rows that need not be kept any longer, and returns how many."""
    (result,) = yield (
        f"DELETE FROM schemaless.idempotency WHERE created_at < UTC_TIMESTAMP(6) - INTERVAL {KEPT_HOURS} HOUR"
        f" ORDER BY created_at LIMIT {limit}"
    )
    return result.affected
