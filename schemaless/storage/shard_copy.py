"""Rows of a shard as they go to another cluster: read as SQL text, and compared by digests that the servers compute.

No process decodes them. So a copy costs little here, and what is compared is what each server has stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from schemaless.names import ERASE_COLUMN
from schemaless.runtime.batching import chunks
from schemaless.storage.operation import Operation, query
from schemaless.storage.shard_log import hole
from schemaless.storage.sql import Name, Script, commas, literal, matching, sql, where
from schemaless.topology import Datastore

PAGE_CELLS = 1000
PAGE_BYTES_MAX = 2 << 20
"""The most bytes of bodies in a page, beyond the first cell. As SQL text they are twice as long."""

NO_CELLS = "0" * 32
"""The digest of no cells."""


class RowText(msgspec.Struct, frozen=True):
    """How rows of `DATABASE.TABLE AS rows_` are read as SQL: their columns, and an expression for a row's values.

    `key` is the same of some columns alone.
    """

    columns: Script
    values: Script
    key_columns: Script
    key: Script


def row_text(
    database: str, table: str, key: Sequence[str] = (), others: Mapping[str, Script] = {}, without: Sequence[str] = ()
) -> Operation[RowText]:
    """Returns how rows are read. `others` has the expressions of some columns."""
    which = where(table_schema=database, table_name=table)
    found = yield from query(
        f"SELECT column_name, data_type FROM information_schema.columns {which} ORDER BY ordinal_position"
    )
    texts = {
        column: _text(others.get(column, f"rows_.{column}"), kind) for column, kind in found if column not in without
    }
    keys = {column: text for column, text in texts.items() if column in key}
    return RowText(commas(list(texts)), _row(texts), commas(list(keys)), _row(keys))


def _row(texts: Mapping[str, Script]) -> Script:
    return f"CONCAT('(',CONCAT_WS(',',{commas(list(texts.values()) or ['NULL'])}),')')"


def _text(value: Script, kind: str) -> Script:
    """Returns an expression for the literal of a value: a number, a time, or bytes."""
    if kind.endswith("int"):
        return f"IFNULL(CAST({value} AS CHAR),'NULL')"
    if kind == "datetime":
        return f"QUOTE(CAST({value} AS CHAR))"
    return f"IFNULL(CONCAT('x''',HEX({value}),''''),'NULL')"


class Texts(msgspec.Struct, frozen=True):
    """How cells are read, and the answers of POSTs that wrote them."""

    cells: RowText
    answers: RowText


def texts(datastore: Datastore, shard: int) -> Operation[Texts]:
    cells = yield from row_text(datastore.database(shard), "entity")
    answers = yield from row_text("schemaless", "idempotency")
    return Texts(cells, answers)


class CopiedPage(msgspec.Struct, frozen=True):
    """Cells with added_ids above `after` up to `until`, answers of POSTs that wrote them, and the cells' digest."""

    after: int
    until: int
    cells: Sequence[Script] = ()
    answers: Sequence[Script] = ()
    digest: str = NO_CELLS
    stubs: Sequence[tuple[int, int, Script]] = ()
    """Cells before the page that are erased in rows of which it has an entry: added_id, the erasure, and when."""


def read_page(
    datastore: Datastore, shard: int, texts: Texts, after: int, head: int, limit: int = PAGE_CELLS
) -> Operation[CopiedPage]:
    """Returns the first cells behind an added_id up to the head, within the bounds of a page.

    Raises NotWhole when one isn't there (I3).
    """
    database = datastore.database(shard)
    table = sql("%s.entity", Name(database))
    bound = f"added_id > {after} AND added_id <= {min(head, after + limit)} ORDER BY added_id"
    sizes = yield from query(
        f"SELECT added_id, LENGTH(body), IF({matching(column_name=ERASE_COLUMN.encode())}, row_key, NULL)"
        f" FROM {table} WHERE {bound}"
    )
    until, size = after, 0
    erased_rows = set()
    for added_id, length, erased_row in sizes:
        size += length
        if added_id != until + 1:
            raise hole(database, until + 1)
        if size > PAGE_BYTES_MAX and until > after:
            break
        until = added_id
        if erased_row is not None:
            erased_rows.add(erased_row)
    if until == after:
        if head > after:
            raise hole(database, after + 1)
        return CopiedPage(after, after)
    within = f"WHERE rows_.added_id > {after} AND rows_.added_id <= {until}"
    answers = sql("rows_.datastore = %s", datastore.name.encode())
    cells, posts, compared = yield ";".join(
        [
            f"SELECT {texts.cells.values} FROM {table} AS rows_ {within} ORDER BY rows_.added_id",
            f"SELECT {texts.answers.values} FROM {table} AS cell STRAIGHT_JOIN schemaless.idempotency AS rows_"
            f" ON {answers} AND rows_.row_key = cell.row_key AND rows_.column_name = cell.column_name"
            f" AND rows_.ref_key = cell.ref_key WHERE cell.added_id > {after} AND cell.added_id <= {until}",
            digest(datastore, shard, after, until),
        ]
    )
    texts_of = [row[0] for row in cells.rows], [row[0] for row in posts.rows]
    stubs = (yield from _stubs(table, after, sorted(erased_rows))) if erased_rows else ()
    return CopiedPage(after, until, *texts_of, compared.rows[0][0], stubs)


def _stubs(table: Script, after: int, row_keys: Sequence[bytes]) -> Operation[list[tuple[int, int, Script]]]:
    rows = yield from query(
        f"SELECT added_id, erased, QUOTE(CAST(erased_at AS CHAR)) FROM {table} {where(row_key=row_keys)}"
        f" AND added_id <= {after} AND erased IS NOT NULL"
    )
    return [(int(added_id), int(erasure), at) for added_id, erasure, at in rows]


def erasing(datastore: Datastore, shard: int, page: CopiedPage) -> tuple[list[Script], Script]:
    """Returns the statements that carry out the entries of a page on what was copied before it (S31), and by what the
    digest of that changes, as SQL.
    """
    if not page.stubs:
        return [], literal(NO_CELLS)
    table = sql("%s.entity", Name(datastore.database(shard)))
    compared = digest_of(datastore, shard, matching(added_id=[added_id for added_id, _, _ in page.stubs]))
    emptied = [
        f"UPDATE {table} SET body = '', erased = {erasure}, erased_at = {at} WHERE added_id = {added_id}"
        for added_id, erasure, at in page.stubs
    ]
    return [f"SET @before = ({compared})", *emptied, f"SET @after = ({compared})"], joined("@before", "@after")


def joined(one: Script, other: Script) -> Script:
    """Returns an expression for the digest of two ranges together, or of one without cells that the other has."""
    halves = [
        "LPAD(HEX("
        + " ^ ".join(f"CAST(CONV(SUBSTR({each},{at},16),16,10) AS UNSIGNED)" for each in (one, other))
        + "),16,'0')"
        for at in (1, 17)
    ]
    return f"LOWER(CONCAT({commas(halves)}))"


def inserting(datastore: Datastore, shard: int, texts: Texts, page: CopiedPage) -> list[Script]:
    """Returns the statements that write a page."""
    table = sql("%s.entity", Name(datastore.database(shard)))
    script = []
    if page.cells:
        script.append(f"INSERT INTO {table} ({texts.cells.columns}) VALUES {commas(list(page.cells))}")
    if page.answers:
        answers = commas(list(page.answers))
        script.append(f"REPLACE INTO schemaless.idempotency ({texts.answers.columns}) VALUES {answers}")
    return script


def digest(datastore: Datastore, shard: int, after: int, until: int) -> Script:
    """Returns a SELECT of the digest of some cells: every field of them, with its place.

    The digest of a range is that of its parts, put together by `joined`.
    """
    return digest_of(datastore, shard, f"added_id > {after} AND added_id <= {until}")


def digest_of(datastore: Datastore, shard: int, condition: Script) -> Script:
    """Returns a SELECT of the digest of the cells that fulfil a condition."""
    cell = (
        "SHA2(CONCAT_WS(',',added_id,generation,HEX(row_key),HEX(column_name),ref_key,created_at,"
        "IFNULL(HEX(cause),'-'),SHA2(body,256)),256)"
    )
    halves = commas(
        [f"LPAD(HEX(BIT_XOR(CAST(CONV(SUBSTR(hash,{at},16),16,10) AS UNSIGNED))),16,'0')" for at in (1, 17)]
    )
    table = sql("%s.entity", Name(datastore.database(shard)))
    return f"SELECT LOWER(CONCAT({halves})) FROM (SELECT {cell} AS hash FROM {table} WHERE {condition}) AS cells"


# What else a shard has on its home, by tables. These rows change, so both sides are compared by key.


class HomeTable(msgspec.Struct, frozen=True):
    """A table with rows of a shard. `condition` says which, beside the datastore and the shard.

    `others` are expressions for columns that the copy has otherwise. `only_missing`: a row that is there stays.
    """

    name: str
    key: Sequence[str]
    shard: str = "shard"
    condition: Script = "TRUE"
    others: Mapping[str, Script] = {}
    without: Sequence[str] = ()
    only_missing: bool = False

    def rows(self, datastore: str, shard: int) -> Script:
        """Returns a condition: the rows of a shard."""
        which = matching(**{"datastore": datastore, self.shard: shard})
        return f"{which} AND {self.condition}"


class JobTable(HomeTable, frozen=True):
    """The jobs that rows of a shard name. A copy counts no records: those are counted where they were ordered."""

    def rows(self, datastore: str, shard: int) -> Script:
        which = where(datastore=datastore, shard=shard)
        named = " UNION ".join(f"SELECT job FROM schemaless.{table} {which}" for table in ("parked", "parked_history"))
        return f"job IN ({named})"


class ProgramTable(HomeTable, frozen=True):
    """A table with rows of whole programs, which every cluster with shards of the datastore has."""

    def rows(self, datastore: str, shard: int) -> Script:
        return f"{matching(datastore=datastore)} AND {self.condition}"


CHECKPOINTS = HomeTable(
    "checkpoint",
    ("datastore", "consumer", "shard"),
    condition="finished IS NOT NULL",
    others={"state": "IF(reason IS NULL,'running','stopped')"},
)
"""Of trigger programs. What they count is in `finished`, which an index hasn't."""
PARKED = HomeTable("parked", ("datastore", "consumer", "shard", "added_id"))
ORDERS = HomeTable("trigger_order", ("datastore", "consumer", "shard"))
HISTORY = HomeTable(
    "parked_history",
    ("datastore", "consumer", "row_key", "added_id", "ended_at"),
    without=("number",),
    only_missing=True,
)
JOBS = JobTable("job", ("job",), others={"matched": "0", "replaced": "0"}, only_missing=True)

PROGRAMS = (
    ProgramTable("trigger_program", ("datastore", "consumer"), only_missing=True),
    ProgramTable("trigger_order", ("datastore", "consumer", "shard"), condition="shard = -1", only_missing=True),
)
"""A cluster gets them with its first shard."""
BESIDE = (PARKED, ORDERS, HISTORY, JOBS)
"""Copied just before a switch. The switch copies what is new of them."""
IN_SWITCH = (CHECKPOINTS, *BESIDE)
"""What a closed shard's workers can't change any more."""
DELETED = (PARKED, ORDERS, HISTORY)
"""Deleted at the former home, because readers add up what all clusters have."""


_ROWS_AT_ONCE = 100


def home_text(table: HomeTable) -> Operation[RowText]:
    """Returns how rows of a table are read."""
    return (yield from row_text("schemaless", table.name, table.key, table.others, table.without))


class Known(msgspec.Struct, frozen=True):
    """A table, how its rows are read, and the digests of the rows that the other side has by key. `since` is a
    condition: only rows that it selects are compared.
    """

    table: HomeTable
    text: RowText
    there: Mapping[str, str] = {}
    since: Script = "TRUE"

    def select(self, datastore: str, shard: int) -> Script:
        """Selects the key and the digest of each row of a shard."""
        compared = "0" if self.table.only_missing else f"SHA2({self.text.values},256)"
        which = f"{self.table.rows(datastore, shard)} AND {self.since}"
        return f"SELECT {self.text.key},{compared} {_of(self.table)} WHERE {which}"


def with_keys(tables: Sequence[Known], datastore: str, shard: int) -> Operation[list[Known]]:
    """Returns what this server has of tables, at least one, as what the other side compares with."""
    results = yield ";".join(known.select(datastore, shard) for known in tables)
    return [
        msgspec.structs.replace(known, there=dict(result.rows)) for known, result in zip(tables, results, strict=True)
    ]


def differences(tables: Sequence[Known], datastore: str, shard: int) -> Operation[list[Script]]:
    """Returns the statements that make the other side's rows those of this server."""
    script: list[Script] = []
    results = yield ";".join(known.select(datastore, shard) for known in tables)
    for known, result in zip(tables, results, strict=True):
        table, text = known.table, known.text
        here: dict[str, str] = dict(result.rows)
        wanted = [key for key, digest_ in here.items() if known.there.get(key) != digest_]
        for some in chunks(wanted, count_max=_ROWS_AT_ONCE):
            rows = yield from query(f"SELECT {text.values} {_of(table)} WHERE {_among(text, some)}")
            if values := [row[0] for row in rows]:
                verb = "INSERT IGNORE" if table.only_missing else "REPLACE"
                script.append(f"{verb} INTO schemaless.{table.name} ({text.columns}) VALUES {commas(values)}")
        gone = [] if table.only_missing else [key for key in known.there if key not in here]
        script += [
            f"DELETE FROM schemaless.{table.name} WHERE {_among(text, some)}"
            for some in chunks(gone, count_max=_ROWS_AT_ONCE)
        ]
    return script


def deleting(table: HomeTable, datastore: str, shard: int) -> Script:
    """Returns a statement that deletes a shard's rows of a table."""
    return f"DELETE FROM schemaless.{table.name} WHERE {table.rows(datastore, shard)}"


def _of(table: HomeTable) -> Script:
    return f"FROM schemaless.{table.name} AS rows_"


def _among(text: RowText, some: Sequence[str]) -> Script:
    return f"({text.key_columns}) IN ({commas(list(some))})"
