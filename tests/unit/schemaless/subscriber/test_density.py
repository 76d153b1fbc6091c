"""The check of density: what the topic promises passes, and whatever breaks it is told by name."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemaless.cell import StoredCell
from schemaless.location import Location
from schemaless.record import Announcement
from schemaless.subscriber.density import CellPlace, DensityCheck, Fault, judge


def cell(added_id, generation=1, shard=0):
    return StoredCell(b"r" * 16, "BASE", 1, shard, generation, added_id, created_at=0, body=b"")


def cells(*added_ids):
    return [cell(n) for n in added_ids]


def faults(records, **options):
    check = DensityCheck()
    found = [finding for record in records if (finding := check.take(record, **options)) is not None]
    assert check.findings == len(found)
    return [(finding.fault, finding.detail) for finding in found]


@pytest.mark.parametrize(
    ("generation", "added_id", "verdict"),
    [
        (2, 6, CellPlace.NEXT),
        (2, 5, CellPlace.REPEATED),
        (2, 7, CellPlace.AHEAD),
        (1, 6, CellPlace.SUPERSEDED),
        (1, 5, CellPlace.REPEATED),
        (3, 6, CellPlace.UNANNOUNCED),
        (3, 2, CellPlace.UNANNOUNCED),
    ],
)
def test_a_cell_is_judged_beside_where_its_shard_stands(generation, added_id, verdict):
    """I9: only the very next one of the same generation is next."""
    assert judge(Location(2, 5), cell(added_id, generation)) is verdict


def test_the_first_record_of_a_shard_says_where_the_check_begins():
    """A topic whose beginning was cut off is no hole; one that is whole must begin with the first cell."""
    assert faults(cells(7, 8, 9)) == []
    assert faults(cells(1, 2), complete=True) == []
    assert faults(cells(3), complete=True) == [(Fault.HOLE, "cells 1 to 2 are missing before 1:3")]
    assert faults([Announcement(0, 2, 8), cell(8, 2)]) == []


def test_a_hole_a_repeat_and_disorder_are_told_apart():
    """A cell that comes late is not one that comes again; of a row of repeats the first is told."""
    assert faults(cells(1, 2, 5)) == [(Fault.HOLE, "cells 3 to 4 are missing before 1:5")]
    assert faults(cells(1, 3, 2, 4)) == [
        (Fault.HOLE, "cell 2 is missing before 1:3"),
        (Fault.DISORDER, "1:2 comes after 1:3"),
    ]
    assert faults(cells(1, 2, 3, 1, 2, 3, 4)) == [(Fault.REPEAT, "1:1 comes again after 1:3")]
    assert faults(cells(1, 3, 2, 2)) == [
        (Fault.HOLE, "cell 2 is missing before 1:3"),
        (Fault.DISORDER, "1:2 comes after 1:3"),
        (Fault.REPEAT, "1:2 comes again after 1:3"),
    ]


def test_a_generation_goes_on_where_it_says():
    """I13: with and without superseded cells; not announced, announced twice, or short of cells is told."""
    assert faults([*cells(1, 2, 3), Announcement(0, 2, 4), cell(4, 2)]) == []
    assert faults([*cells(1, 2, 3, 4, 5), Announcement(0, 2, 4), cell(4, 2), cell(5, 2)]) == []
    assert faults([*cells(1, 2), Announcement(0, 2, 4), cell(4, 2)]) == [
        (Fault.HOLE, "cell 3 is missing before generation 2")
    ]
    assert faults([*cells(1), Announcement(0, 2, 2), Announcement(0, 2, 2)]) == [
        (Fault.REPEAT, "generation 2 is announced after 2:1")
    ]
    assert faults([*cells(1), cell(2, 2), cell(3, 2)]) == [
        (Fault.DISORDER, "2:2 comes after 1:1, but generation 2 was not announced")
    ]
    assert faults([*cells(1, 2, 3), Announcement(0, 2, 3), cell(4)]) == [(Fault.DISORDER, "1:4 comes after 2:2")]


def test_shards_are_checked_each_by_itself():
    """Interleaved as they may be."""
    mixed = [cell(n, shard=shard) for n in range(1, 5) for shard in (0, 1)]
    assert faults(mixed, complete=True) == []
    assert faults([record for record in mixed if (record.shard, record.added_id) != (1, 3)]) == [
        (Fault.HOLE, "cell 3 is missing before 1:4")
    ]


@given(st.integers(2, 30), st.randoms(use_true_random=False))
def test_any_loss_repeat_or_swap_inside_is_found(length, chooser: random.Random):
    """Whatever single thing goes wrong between the first and the last cell."""
    whole = list(range(1, length + 2))
    place = chooser.randrange(1, length)
    damages = {
        Fault.HOLE: whole[:place] + whole[place + 1 :],
        Fault.REPEAT: whole[: place + 1] + whole[place:],
        Fault.DISORDER: [*whole[:place], whole[place + 1], whole[place], *whole[place + 2 :]],
    }
    for fault, damaged in damages.items():
        assert fault in {found for found, _ in faults(cells(*damaged))}
    assert faults(cells(*whole), complete=True) == []


def test_holes_beyond_the_bound_are_still_told():
    """Memory is bounded: a cell that comes late into a forgotten hole is told as a repeat."""
    found = faults([*cells(*range(1, 1001, 2)), cell(2), cell(998)])
    assert [fault for fault, _ in found].count(Fault.HOLE) == 499
    assert [fault for fault, _ in found[-2:]] == [Fault.DISORDER, Fault.REPEAT]
