"""I11: an index converges to a function of the newest cells, whatever the order, repetition, batching or crash."""

from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import StoredCell
from schemaless.codec import encode_body
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entry_for, entry_shard
from schemaless.index.transition import index_writes

SHARDS = 4
SOURCE_SHARD = 0
DEFINITION = parse_definition(
    {
        "name": "by_owner",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owner", "type": "int"}],
        "stored": [{"name": "state", "column": "STATUS", "path": "state", "type": "int"}],
        "where": [{"field": "state", "op": "ne", "value": 2}],
    }
)
ROWS = [bytes([n]) * 16 for n in range(3)]

events = st.lists(
    st.tuples(
        st.sampled_from(ROWS),
        st.sampled_from(["BASE", "STATUS", "OTHER"]),
        st.integers(0, 4),
        st.integers(0, 3) | st.none(),
    ),
    max_size=14,
    unique_by=lambda event: event[:3],
)


def log_of(found):
    """The shard's log: ref_keys in any order, as writers may choose them."""
    return [
        StoredCell(row, column, ref_key, SOURCE_SHARD, 1, n, 0, encode_body({"owner": value, "state": value}))
        for n, (row, column, ref_key, value) in enumerate(found, start=1)
    ]


def rows_until(log, position):
    """By row: the newest cell of each source column in the log up to a position."""
    rows = {}
    for cell in log[:position]:
        row = rows.setdefault(cell.row_key, {})
        if cell.column_name in DEFINITION.columns and cell.ref_key >= row.get(cell.column_name, cell).ref_key:
            row[cell.column_name] = cell
    return rows


def wanted(log):
    """What the index must come to: by (shard, row key), the live entries."""
    entries = {}
    for row_key, row in rows_until(log, len(log)).items():
        bodies = {column: decoded(cell) for column, cell in row.items()}
        entry = entry_for(DEFINITION, bodies)
        if entry is not None:
            entries[entry_shard(DEFINITION, entry, SHARDS), row_key] = entry
    return entries


def decoded(cell):
    from schemaless.codec import decode_body

    return decode_body(cell.body)


def apply(table, writes):
    """What the SQL guard does: only a greater version overwrites."""
    for write in writes:
        key = write.shard, write.row_key
        if key not in table or write.version > table[key].version:
            table[key] = write


def live(table):
    return {key: write.entry for key, write in table.items() if write.entry is not None}


def cut(log, sizes):
    """Batches (start, end) that cover the log."""
    start = 0
    for size in sizes:
        if start >= len(log):
            return
        yield start, min(len(log), start + size)
        start += size
    if start < len(log):
        yield start, len(log)


@given(events, st.data())
def test_any_batching_any_order_and_any_repetition_converge(found, data):
    """Several processes, each with its own batches, apply theirs in any order, some twice: the same index comes out."""
    log = log_of(found)
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
        for start, end in cut(log, sizes):
            pieces.append(index_writes(DEFINITION, SHARDS, rows_until(log, start), log[start:end]))
    repeated = data.draw(st.lists(st.sampled_from(pieces), max_size=4)) if pieces else []
    table = {}
    for writes in data.draw(st.permutations(pieces + repeated)):
        apply(table, writes)
    assert live(table) == wanted(log)


@given(events, st.data())
def test_a_late_writer_that_dies_in_between_changes_nothing(found, data):
    """A zombie replays any part of the log in batches of its own and dies anywhere: the index stays as it was."""
    log = log_of(found)
    table = {}
    apply(table, index_writes(DEFINITION, SHARDS, {}, log))
    start = data.draw(st.integers(0, len(log)))
    end = data.draw(st.integers(start, len(log)))
    late = index_writes(DEFINITION, SHARDS, rows_until(log, start), log[start:end])
    apply(table, late[: data.draw(st.integers(0, len(late)))])
    assert live(table) == wanted(log)
