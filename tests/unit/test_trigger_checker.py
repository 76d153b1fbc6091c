"""The judge of killed trigger programs finds what it is there to find."""

import uuid

import pytest

from schemaless.cell import StoredCell
from schemaless.topology import Datastore
from tests.faults.trigger_checker import TriggerChecker

ROWS = [uuid.UUID(int=n) for n in (1, 2)]
CELLS = [
    StoredCell(ROWS[row].bytes, "BASE", ref, 0, 1, n, 0, b"")
    for n, (row, ref) in enumerate([(0, 1), (1, 1), (0, 2)], 1)
]


class Checker(TriggerChecker):
    def _cells(self, shard):
        return CELLS


def checker_of(folder, *calls):
    """A run whose processes noted these calls: (what, row, ref_key), in this order of time, in two files."""
    for at, (what, row, ref_key) in enumerate(calls):
        with (folder / f"{at % 2}.tsv").open("a") as file:
            file.write(f"{what}\t{ROWS[row]}\t{ref_key}\t{at}\n")
    (folder / "2.tsv").write_text("begin\ttorn")
    return Checker(None, Datastore("d", 1, 1, ("a",)), "program", "BASE", None, folder)


ORDERLY = [
    ("begin", 0, 1),
    ("begin", 1, 1),
    ("begin", 0, 1),
    ("end", 0, 1),
    ("begin", 0, 2),
    ("end", 1, 1),
    ("end", 0, 2),
]


def test_an_orderly_run_passes(tmp_path):
    checker = checker_of(tmp_path, *ORDERLY)
    checker.check_order()
    checker.check_all_called([])


def test_a_cell_that_overtakes_another_of_its_row_is_found(tmp_path):
    checker = checker_of(tmp_path, ("begin", 0, 1), ("begin", 0, 2), ("end", 0, 1), ("end", 0, 2))
    with pytest.raises(AssertionError, match="before 1 had ended"):
        checker.check_order()


@pytest.mark.parametrize(
    ("calls", "parked"),
    [(ORDERLY[:-1], []), (ORDERLY, [{"row_key": str(ROWS[0]), "added_id": 3}])],
    ids=["never called", "called and parked"],
)
def test_a_cell_that_is_neither_called_nor_parked_or_both_is_found(tmp_path, calls, parked):
    with pytest.raises(AssertionError, match="neither called nor parked"):
        checker_of(tmp_path, *calls).check_all_called(parked)


def test_what_waits_behind_a_parked_cell_need_not_be_called(tmp_path):
    checker_of(tmp_path, *ORDERLY[:-1]).check_all_called([{"row_key": str(ROWS[0]), "added_id": 3}])
