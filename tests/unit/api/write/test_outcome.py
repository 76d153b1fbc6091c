"""What came of a put: every combination of what the secondary and the home said (I1, I5)."""

from itertools import product

import pytest

from api.http.response import problem_of
from api.write.put import DECISIONS, BufferState, HomeState, PendingPut, PutOutcome, PutState, decide
from schemaless.cell import CellKey, ColumnName, Placed, PutStatus, RefKey, RowKey
from schemaless.errors import StorageUnavailable, Unavailable
from schemaless.storage.buffer_table import BufferRow

ROW = BufferRow(CellKey(RowKey(bytes(16)), ColumnName("BASE"), RefKey(1)), b"body", 3, "a", 1)

STORED_IN = {BufferState.INSERTED, BufferState.SHARED, BufferState.NONE}
"""What the secondary may have said before a cell is put at home."""


def is_possible(buffered: BufferState, home: HomeState) -> bool:
    """Written down a second time, by what the writer does and not by what the table holds."""
    if home is HomeState.NOT_ASKED:
        return buffered is BufferState.NONE
    if home is HomeState.NOTHING:
        return buffered is BufferState.CONFLICT
    if home is HomeState.STORED:
        return buffered in STORED_IN
    return True


def expected(buffered: BufferState, home: HomeState) -> tuple[PutStatus | None, int]:
    """I5: a copy counts where it is known to be durable. BUFFERED needs one, and stored means the home's answer."""
    is_buffered = buffered in {BufferState.INSERTED, BufferState.SHARED}
    if home in {HomeState.STORED, HomeState.ALREADY_STORED}:
        return PutStatus(home.value), 1 + is_buffered
    if home in {HomeState.CONFLICT, HomeState.NOTHING}:
        return PutStatus.CONFLICT, 0
    if home is HomeState.UNREACHABLE and is_buffered:
        return PutStatus.BUFFERED, 1
    return None, 0


@pytest.mark.parametrize(("buffered", "home"), list(product(BufferState, HomeState)))
def test_every_combination_is_decided_or_impossible(buffered, home):
    """No default hides a forgotten one."""
    if is_possible(buffered, home):
        state = decide(buffered, home)
        assert (state.status, state.copies) == expected(buffered, home)
    else:
        assert (buffered, home) not in DECISIONS
        with pytest.raises(KeyError):
            decide(buffered, home)


def test_every_state_is_reached():
    """A state that no combination leads to would be a dead one."""
    assert set(DECISIONS.values()) == set(PutState)


@pytest.mark.parametrize(("buffered", "home"), list(DECISIONS))
def test_a_result_is_the_decision_with_the_cell_or_the_error(buffered, home):
    """An error is returned as it is; an outcome carries key, shard, and the place if there is one."""
    placed = Placed(PutStatus.STORED, 3, 1, 42, 99) if home in {HomeState.STORED, HomeState.ALREADY_STORED} else None
    error = StorageUnavailable("down")
    put = PendingPut(ROW, buffered, "b", home, placed, error)
    status, copies = expected(buffered, home)
    result = put.result(min_copies=1)
    if status is None:
        assert result is error
    else:
        assert result == PutOutcome(status, ROW.key, 3, placed, copies)


@pytest.mark.parametrize(("buffered", "home"), list(DECISIONS))
def test_with_two_copies_required_fewer_are_a_503_also_where_one_exists(buffered, home):
    """I5, min_copies=2: stored or buffered on one master alone may be tried again. A conflict stays."""
    placed = Placed(PutStatus.STORED, 3, 1, 42, 99)
    status, copies = expected(buffered, home)
    result = PendingPut(ROW, buffered, "b", home, placed, StorageUnavailable("down")).result(min_copies=2)
    if status is PutStatus.CONFLICT or copies == 2:
        assert result == PutOutcome(status, ROW.key, 3, placed, copies)
    else:
        assert isinstance(result, Unavailable)
        assert result.retryable
    if status not in (None, PutStatus.CONFLICT) and copies < 2:
        shown = problem_of(result)
        assert shown["detail"] == f"2 durable copies are required, and {copies} are known in time"
        assert "may still appear" in shown["hint"]
