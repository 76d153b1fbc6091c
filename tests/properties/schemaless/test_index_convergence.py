"""I11: an index converges to a function of the newest cells, whatever the order, repetition, batching or crash."""

from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import CellKey
from schemaless.codec import decode_body, encode_body
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entry_for, entry_shard
from schemaless.index.transition import index_writes
from schemaless.storage.entity_table import ShardCell
from schemaless.testing import MemoryEntityTable
from schemaless.topology import Datastore

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


def table_of(found):
    """The source shard with these cells: ref_keys in any order, as writers may choose them."""
    table = MemoryEntityTable(Datastore("d", SHARDS, 1, ("a",)))
    table.put_cells(
        [
            ShardCell(CellKey(row, column, ref_key), encode_body({"owner": value, "state": value}), SOURCE_SHARD)
            for row, column, ref_key, value in found
        ]
    )
    return table


def log_of(table):
    return table.read_after(SOURCE_SHARD, 0, 1000)


def rows_until(table, position):
    """By row: the newest cell of each source column in the log up to a position."""
    rows = {}
    for cell in table.newest_until({SOURCE_SHARD: (position, ROWS)}, DEFINITION.columns).cells:
        rows.setdefault(cell.row_key, {})[cell.column_name] = cell
    return rows


def wanted(table):
    """What the index must come to: by (shard, row key), the live entries."""
    entries = {}
    for row_key, row in rows_until(table, len(log_of(table))).items():
        bodies = {column: decode_body(cell.body) for column, cell in row.items()}
        entry = entry_for(DEFINITION, bodies)
        if entry is not None:
            entries[entry_shard(DEFINITION, entry, SHARDS), row_key] = entry
    return entries


def apply(index, writes):
    """What the SQL guard does: only a greater version overwrites."""
    for write in writes:
        key = write.shard, write.row_key
        if key not in index or write.version > index[key].version:
            index[key] = write


def live(index):
    return {key: write.entry for key, write in index.items() if write.entry is not None}


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
    source = table_of(found)
    log = log_of(source)
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
        for start, end in cut(log, sizes):
            pieces.append(index_writes(DEFINITION, SHARDS, rows_until(source, start), log[start:end]).writes)
    repeated = data.draw(st.lists(st.sampled_from(pieces), max_size=4)) if pieces else []
    index = {}
    for writes in data.draw(st.permutations(pieces + repeated)):
        apply(index, writes)
    assert live(index) == wanted(source)


@given(events, st.data())
def test_a_late_writer_that_dies_in_between_changes_nothing(found, data):
    """A zombie replays any part of the log in batches of its own and dies anywhere: the index stays as it was."""
    source = table_of(found)
    log = log_of(source)
    index = {}
    apply(index, index_writes(DEFINITION, SHARDS, {}, log).writes)
    start = data.draw(st.integers(0, len(log)))
    end = data.draw(st.integers(start, len(log)))
    late = index_writes(DEFINITION, SHARDS, rows_until(source, start), log[start:end]).writes
    apply(index, late[: data.draw(st.integers(0, len(late)))])
    assert live(index) == wanted(source)
