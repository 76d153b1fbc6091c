"""I11: an index converges to a function of the newest cells, whatever the order, repetition, batching or crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import CellKey
from schemaless.codec import decode_body, encode_body
from schemaless.index.definition import parse_definition
from schemaless.index.entry import entries_for, entry_shard, misfits_of, with_column
from schemaless.index.transition import index_writes, superseding_problems, superseding_writes, walked_writes
from schemaless.location import Location, generation_at, visible_starts
from schemaless.storage.entity_table import ShardCell
from schemaless.testing.memory_program import MemoryEntityTable
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
ELEMENTS = parse_definition(
    {
        "name": "by_owners",
        "shard_field": "owner",
        "fields": [{"name": "owner", "column": "BASE", "path": "owners[].owner", "type": "int"}],
        "stored": [
            {"name": "share", "column": "BASE", "path": "owners[].share", "type": "int"},
            {"name": "state", "column": "STATUS", "path": "state", "type": "int"},
        ],
        "where": [{"field": "state", "op": "ne", "value": 2}],
    }
)
"""An entry for each element, whose number and owner change with each version of the row."""

BOTH = pytest.mark.parametrize("definition", [DEFINITION, ELEMENTS], ids=["one", "elements"])
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
    put(table, found)
    return table


def body_of(ref_key, value):
    """As many elements as the ref_key says, none of them without a value."""
    owners = [{"owner": (value + n) % 4, "share": n % 2} for n in range(ref_key % 4)] if value is not None else None
    return {"owner": value, "state": value, "owners": owners}


def put(table, found):
    table.put_cells(
        [
            ShardCell(CellKey(row, column, ref_key), encode_body(body_of(ref_key, value)), SOURCE_SHARD)
            for row, column, ref_key, value in found
        ]
    )


def log_of(table):
    return table.read_after(SOURCE_SHARD, 0, 1000)


def rows_until(definition, table, position):
    """By row: the newest cell of each source column in the log up to a position."""
    rows = {}
    for cell in table.newest_until({SOURCE_SHARD: (position, ROWS)}, definition.columns).cells:
        rows.setdefault(cell.row_key, {})[cell.column_name] = cell
    return rows


def wanted(definition, table):
    """What the index must come to: by (shard, row key, element), the live entries."""
    entries = {}
    for row_key, row in rows_until(definition, table, len(log_of(table))).items():
        bodies = {column: decode_body(cell.body) for column, cell in row.items()}
        for element, entry in enumerate(entries_for(definition, bodies)):
            if entry is not None:
                entries[entry_shard(definition, entry, SHARDS), row_key, element] = entry
    return entries


def apply(index, writes):
    """What the SQL guard does: only a greater version overwrites."""
    for write in writes:
        key = write.shard, write.row_key, write.element
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


@BOTH
@given(found=events, data=st.data())
def test_any_batching_any_order_and_any_repetition_converge(definition, found, data):
    """Several processes, each with its own batches, apply theirs in any order, some twice: the same index comes out."""
    source = table_of(found)
    log = log_of(source)
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
        for start, end in cut(log, sizes):
            pieces.append(
                index_writes(definition, SHARDS, rows_until(definition, source, start), log[start:end]).writes
            )
    repeated = data.draw(st.lists(st.sampled_from(pieces), max_size=4)) if pieces else []
    index = {}
    for writes in data.draw(st.permutations(pieces + repeated)):
        apply(index, writes)
    assert live(index) == wanted(definition, source)


@BOTH
@given(found=events, data=st.data())
def test_a_late_writer_that_dies_in_between_changes_nothing(definition, found, data):
    """A zombie replays any part of the log in batches of its own and dies anywhere: the index stays as it was."""
    source = table_of(found)
    log = log_of(source)
    index = {}
    apply(index, index_writes(definition, SHARDS, {}, log).writes)
    start = data.draw(st.integers(0, len(log)))
    end = data.draw(st.integers(start, len(log)))
    late = index_writes(definition, SHARDS, rows_until(definition, source, start), log[start:end]).writes
    apply(index, late[: data.draw(st.integers(0, len(late)))])
    assert live(index) == wanted(definition, source)


def superseded_places(index, starts):
    """What index_table.superseded finds: by the latest generation that supersedes its version, (shard, row key)s."""
    found = {}
    for (shard, row_key, element), write in index.items():
        version = write.version
        above = [s for s in starts if version.generation < s.generation and version.added_id >= s.starts_at]
        if above:
            found.setdefault(max(above, key=lambda start: start.generation), []).append((shard, row_key, element))
    return found


def supersede(definition, index, source, stop_after=None):
    """What a maintainer does about all generations of the source shard, perhaps killed after some writes."""
    starts = visible_starts(source.generations(SOURCE_SHARD))
    writes = []
    for start, places in superseded_places(index, starts).items():
        before = rows_until(definition, source, start.starts_at - 1)
        writes += superseding_writes(definition, SHARDS, start, before, places)
    apply(index, writes[:stop_after])


def test_what_a_generation_supersedes_leaves_the_index():
    """A cell that a promotion lost had moved the row: the old owner has it again, and the new one hasn't."""
    source = table_of([(ROWS[0], "BASE", 1, 0), (ROWS[0], "STATUS", 1, 0), (ROWS[0], "BASE", 2, 1)])
    index = {}
    apply(index, index_writes(DEFINITION, SHARDS, {}, log_of(source)).writes)
    ((lost_shard, *_),) = live(index)
    source.open_generation(SOURCE_SHARD, 3)
    supersede(DEFINITION, index, source)
    ((shard, *_),) = live(index)
    assert shard != lost_shard
    assert live(index) == wanted(DEFINITION, source)
    assert {write.version for write in index.values()} == {Location(2, 2)}


def test_the_first_cell_of_a_generation_beats_what_the_generation_took_back():
    """It has the lowest version that a later event can have."""
    source = table_of([(ROWS[0], "BASE", 1, 0), (ROWS[0], "STATUS", 1, 0), (ROWS[0], "BASE", 2, 1)])
    index = {}
    apply(index, index_writes(DEFINITION, SHARDS, {}, log_of(source)).writes)
    source.open_generation(SOURCE_SHARD, 3)
    supersede(DEFINITION, index, source)
    put(source, [(ROWS[0], "BASE", 3, 3)])
    apply(index, index_writes(DEFINITION, SHARDS, rows_until(DEFINITION, source, 2), log_of(source)[2:]).writes)
    assert live(index) == wanted(DEFINITION, source)


def test_cells_of_a_generation_count_that_a_later_one_kept():
    """The index slept through two generations, the later of which starts higher: (2, 3) and (2, 4) still stand."""
    source = table_of([(ROWS[0], "STATUS", 1, 0), (ROWS[1], "STATUS", 1, 0), (ROWS[0], "BASE", 1, 0)])
    index = {}
    apply(index, index_writes(DEFINITION, SHARDS, {}, log_of(source)).writes)
    source.open_generation(SOURCE_SHARD, 3)
    put(source, [(ROWS[0], "BASE", 2, 0), (ROWS[1], "BASE", 1, 1)])
    source.open_generation(SOURCE_SHARD, 5)
    supersede(DEFINITION, index, source)
    apply(index, index_writes(DEFINITION, SHARDS, rows_until(DEFINITION, source, 2), log_of(source)[2:]).writes)
    assert live(index) == wanted(DEFINITION, source) != {}


moves = st.lists(
    st.tuples(
        st.sampled_from(ROWS[:2]), st.sampled_from(["BASE", "BASE", "STATUS"]), st.integers(0, 9), st.integers(0, 2)
    ),
    min_size=4,
    max_size=8,
    unique_by=lambda event: event[:3],
)
"""Few rows, and nearly every cell moves one: what isn't taken back is seen."""


@BOTH
@given(histories=st.lists(moves, min_size=2, max_size=4), data=st.data())
def test_generations_that_supersede_cells_converge_too(definition, histories, data):
    """Promotions come between puts, at any position, also below an earlier one. The index follows in between or not.

    It may die within any batch and within any superseding, which are then repeated.
    """
    source = table_of([])
    index, at = {}, Location(1, 0)
    for n, found in enumerate(histories, start=1):
        if data.draw(st.booleans()):
            head = source.heads()[SOURCE_SHARD].added_id
            lost = data.draw(st.integers(0, 6))
            source.open_generation(SOURCE_SHARD, max(1, head + 1 - lost))
        put(source, found)
        left = 0 if n == len(histories) else data.draw(st.integers(0, 9))
        at = follow(definition, index, source, at, max(0, len(log_of(source)) - left), data)
    assert live(index) == wanted(definition, source)


def follow(definition, index, source, at, until, data):
    """Takes back what was superseded, then takes the log up to a position. Returns how far it came."""
    starts = source.generations(SOURCE_SHARD)
    later = [start.starts_at for start in starts if start.generation > at.generation]
    reached = at.added_id
    if later and min(later) <= reached:
        supersede(definition, index, source, stop_after=data.draw(st.integers(0, 4)))
        supersede(definition, index, source)
        reached = min(later) - 1
    log = log_of(source)[reached:until]
    for start, end in cut(log, data.draw(st.lists(st.integers(1, 5), max_size=6))):
        writes = index_writes(
            definition, SHARDS, rows_until(definition, source, reached + start), log[start:end]
        ).writes
        apply(index, writes[: data.draw(st.integers(0, len(writes)))])
        apply(index, writes)
    reached += len(log)
    return Location(generation_at(reached, starts), reached) if reached else Location(1, 0)


fitting_or_not = st.lists(
    st.tuples(
        st.sampled_from(ROWS),
        st.sampled_from(["BASE", "STATUS"]),
        st.integers(0, 9),
        st.sampled_from([0, 1, "no number", "neither"]),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda event: event[:3],
)


def put_as_they_are(table, found):
    """Puts cells whose fields may be texts, which a field of numbers can't hold."""
    cells = []
    for row, column, ref_key, value in found:
        body = {"owner": value, "state": value, "owners": [{"owner": value, "share": ref_key}] * (ref_key % 3)}
        cells.append(ShardCell(CellKey(row, column, ref_key), encode_body(body), SOURCE_SHARD))
    table.put_cells(cells)


def wanted_problems(definition, table):
    """By row: what the newest cells have that doesn't fit, computed from nothing."""
    problems = {}
    for row_key, row in rows_until(definition, table, len(log_of(table))).items():
        misfits = []
        for column in sorted(row):
            body = decode_body(row[column].body)
            values = with_column(definition, [None] * len(definition.fields), column, body)
            misfits += misfits_of(definition, column, values, body)
        if misfits:
            problems[row_key] = tuple(misfits)
    return problems


def apply_problems(problems, writes):
    for write in writes:
        if write.row_key not in problems or write.version > problems[write.row_key].version:
            problems[write.row_key] = write


def open_problems(problems):
    return {row_key: write.misfits for row_key, write in problems.items() if write.misfits}


@BOTH
@given(found=fitting_or_not, data=st.data())
def test_problems_converge_whatever_the_batches_their_order_and_repetition(definition, found, data):
    """A late writer that dies in between changes nothing either. A row that was never a problem has no write."""
    source = table_of([])
    put_as_they_are(source, found)
    log = log_of(source)
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        for start, end in cut(log, data.draw(st.lists(st.integers(1, 5), max_size=6))):
            before = rows_until(definition, source, start)
            pieces.append(index_writes(definition, SHARDS, before, log[start:end]).problems)
    pieces += data.draw(st.lists(st.sampled_from(pieces), max_size=4))
    problems = {}
    for writes in data.draw(st.permutations(pieces)):
        apply_problems(problems, writes)
    assert open_problems(problems) == wanted_problems(definition, source)
    assert problems.keys() <= {row for row, _, _, value in found if isinstance(value, str)}


@BOTH
@given(first=fitting_or_not, second=fitting_or_not, data=st.data())
def test_problems_of_superseded_cells_are_taken_back(definition, first, second, data):
    """A promotion loses cells, and others come in their place."""
    source, problems = table_of([]), {}
    put_as_they_are(source, first)
    apply_problems(problems, index_writes(definition, SHARDS, {}, log_of(source)).problems)
    starts_at = data.draw(st.integers(1, len(log_of(source)) + 1))
    source.open_generation(SOURCE_SHARD, starts_at)
    put_as_they_are(source, second)
    (_, start) = source.generations(SOURCE_SHARD)
    before = rows_until(definition, source, starts_at - 1)
    superseded = [row for row, write in problems.items() if write.version.added_id >= starts_at]
    again = superseding_problems(definition, SHARDS, start, SOURCE_SHARD, before, superseded)
    apply_problems(problems, again[: data.draw(st.integers(0, len(again)))])
    apply_problems(problems, again)
    apply_problems(problems, index_writes(definition, SHARDS, before, log_of(source)[starts_at - 1 :]).problems)
    assert open_problems(problems) == wanted_problems(definition, source)


def walk(definition, index, problems, source, until, rows=ROWS):
    """Writes rows as a build by row does, each as the log makes it up to a fixed head."""
    found = rows_until(definition, source, until)
    for row_key in rows:
        if row_key in found:
            writes, problem = walked_writes(definition, SHARDS, SOURCE_SHARD, found[row_key])
            apply(index, writes)
            apply_problems(problems, [] if problem is None else [problem])


def log_from(definition, index, problems, source, after):
    log = log_of(source)[after:]
    changed = index_writes(definition, SHARDS, rows_until(definition, source, after), log)
    apply(index, changed.writes)
    apply_problems(problems, changed.problems)


@BOTH
@given(found=fitting_or_not, data=st.data())
def test_a_walk_up_to_a_head_and_the_log_from_there_converge(definition, found, data):
    """Whatever was put when. Rows are walked in pieces that come again, also late: beside and after the log."""
    source, index, problems = table_of([]), {}, {}
    put_as_they_are(source, found)
    until = data.draw(st.integers(0, len(log_of(source))))
    walk(definition, index, problems, source, until, data.draw(st.lists(st.sampled_from(ROWS))))
    walk(definition, index, problems, source, until)
    log_from(definition, index, problems, source, until)
    walk(definition, index, problems, source, until, data.draw(st.lists(st.sampled_from(ROWS))))
    assert live(index) == wanted(definition, source)
    assert open_problems(problems) == wanted_problems(definition, source)


entering_and_leaving = st.lists(
    st.tuples(st.sampled_from(ROWS), st.just("STATUS"), st.integers(2, 9), st.sampled_from([0, 2])),
    min_size=1,
    max_size=8,
    unique_by=lambda event: event[:3],
)
"""A row leaves the index where its newest STATUS is 2."""


@BOTH
@given(first=entering_and_leaving, second=st.lists(moves, max_size=1), data=st.data())
def test_a_generation_at_or_below_the_head_of_a_walk_converges_too(definition, first, second, data):
    """It comes while the walk is under way or later. What was walked is taken back, and walked again to its start."""
    source, index = table_of([(row, column, 1, 1) for row in ROWS for column in ("BASE", "STATUS")] + first), {}
    until = data.draw(st.integers(1, len(log_of(source))))
    walk(definition, index, {}, source, until, data.draw(st.sampled_from([ROWS, ROWS[:1], []])))
    if data.draw(st.booleans()):
        walk(definition, index, {}, source, until)
        log_from(definition, index, {}, source, until)
    starts_at = data.draw(st.integers(1, until))
    source.open_generation(SOURCE_SHARD, starts_at)
    put(source, [event for found in second for event in found])
    walk(definition, index, {}, source, until, data.draw(st.lists(st.sampled_from(ROWS))))  # a page that mixes both
    supersede(definition, index, source)
    walk(definition, index, {}, source, starts_at - 1)
    log_from(definition, index, {}, source, starts_at - 1)
    assert live(index) == wanted(definition, source)
