"""I11: whatever the damage of an index, a comparison names it, and a repair leaves the index computed from nothing."""

from hypothesis import given
from hypothesis import strategies as st

from schemaless.codec import decode_body
from schemaless.index.comparison import (
    EntryFaultKind,
    EntryPlace,
    expected_entries,
    misplaced,
    missing_or_stale,
    repairs,
)
from schemaless.index.entry import IndexEntry
from schemaless.index.transition import IndexWrite, index_writes
from schemaless.location import Location
from tests.properties.schemaless.test_index_convergence import (
    BOTH,
    ROWS,
    SHARDS,
    apply,
    events,
    live,
    log_of,
    rows_until,
    table_of,
    wanted,
)

NOBODY = b"\xee" * 16
entries = st.builds(lambda *values: IndexEntry(values), st.integers(0, 3), st.integers(0, 3) | st.none())
damages = st.lists(
    st.tuples(
        st.builds(EntryPlace, st.integers(0, SHARDS - 1), st.sampled_from([*ROWS, NOBODY]), st.integers(0, 4)),
        st.builds(Location, st.integers(1, 3), st.integers(0, 99)),
        st.none() | entries,
        st.booleans(),
    ),
    max_size=6,
)


def plant(definition, index, damage):
    """Deletes rows of index tables, and writes tombstones and entries of any version."""
    for place, version, entry, deletes in damage:
        if deletes:
            index.pop(tuple(place), None)
        else:
            padded = entry and IndexEntry((*entry.values, None, None)[: len(definition.fields)])
            index[tuple(place)] = IndexWrite(place.shard, place.row_key, version, padded, place.element)


def placed(entries):
    return {EntryPlace(*key): entry for key, entry in entries.items()}


def compare(definition, source, index, position):
    """What both directions find, with all rows in one page."""
    bodies = {
        row_key: {column: decode_body(cell.body) for column, cell in row.items()}
        for row_key, row in rows_until(definition, source, position).items()
    }
    expected, found = expected_entries(definition, SHARDS, bodies), placed(live(index))
    here = {place: entry for place, entry in found.items() if place in expected}
    return expected, missing_or_stale(expected, here) + misplaced(expected, found)


@BOTH
@given(found=events, damage=damages, data=st.data())
def test_any_damage_is_named_once_and_repaired(definition, found, damage, data):
    """The faults are the difference. After the repair late writers of any part of the log lose, and later cells win."""
    source = table_of(found)
    log = log_of(source)
    checkpoint = data.draw(st.integers(0, len(log)))
    index = {}
    apply(index, index_writes(definition, SHARDS, {}, log[:checkpoint]).writes)
    right = placed(live(index))
    plant(definition, index, damage)
    damaged = placed(live(index))
    expected, faults = compare(definition, source, index, checkpoint)
    assert expected == right
    places = [fault.place for fault in faults]
    assert sorted(places) == sorted(
        place for place in right.keys() | damaged.keys() if right.get(place) != damaged.get(place)
    )
    having = {place.row_key for place in right}
    for fault in faults:
        if fault.place not in damaged:
            assert fault.kind is EntryFaultKind.MISSING
        else:
            assert (fault.kind is EntryFaultKind.STALE) is (fault.place.row_key in having)

    for write in repairs(places, expected, Location(1, checkpoint)):
        index[write.shard, write.row_key, write.element] = write
    assert placed(live(index)) == right
    start = data.draw(st.integers(0, checkpoint))
    late = index_writes(definition, SHARDS, rows_until(definition, source, start), log[start:checkpoint]).writes
    repaired = [write for write in late if EntryPlace(write.shard, write.row_key, write.element) in places]
    apply(index, repaired)
    assert placed(live(index)) == right
    later = index_writes(definition, SHARDS, rows_until(definition, source, checkpoint), log[checkpoint:]).writes
    apply(index, [write for write in later if EntryPlace(write.shard, write.row_key, write.element) in places])
    whole = placed(wanted(definition, source))
    assert {place: whole.get(place) for place in places} == {place: placed(live(index)).get(place) for place in places}
