"""What came of a put: one table from what the secondary and the home said to how far the put came (I1, I5)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

import msgspec

from schemaless.cell import CellKey, Placed, PutStatus
from schemaless.errors import SchemalessError, Unavailable
from schemaless.storage.buffer_table import BufferRow


class PutOutcome(msgspec.Struct, frozen=True, gc=False):
    """A put that was answered. `placed` is None for BUFFERED, and for a CONFLICT with a cell that is only buffered.

    `copies` counts the masters on which the cell is known to be durable, 0 for a CONFLICT. `replayed` marks the first
    answer to an Idempotency-Key, given again.
    """

    status: PutStatus
    key: CellKey
    shard: int
    placed: Placed | None
    copies: int
    replayed: bool = False


PutResult = PutOutcome | SchemalessError
"""An error is a value here, because each cell of a batch succeeds or fails by itself."""


class BufferState(StrEnum):
    """What the secondary said of a put's buffer row."""

    NONE = "none"
    """No secondary took it in time. A row whose outcome is unknown may be there all the same."""
    INSERTED = "inserted"
    SHARED = "shared"
    """The same body is buffered already, and this put took its claim over."""
    CONFLICT = "conflict"
    """Another body is buffered under the key, so the home is read and not written."""


class HomeState(StrEnum):
    """What the home said of the cell."""

    NOT_ASKED = "not_asked"
    STORED = "stored"
    ALREADY_STORED = "already_stored"
    CONFLICT = "conflict"
    NOTHING = "nothing"
    """Read after a conflict in the buffer: no node of the home shows a cell under the key."""
    UNREACHABLE = "unreachable"
    """Unreachable, hung, too busy, or it refused for a reason of its own. The cell may be stored or not."""


class PutState(Enum):
    """How far a put came: its status, and on how many masters the cell is known to be durable."""

    STORED_TWICE = PutStatus.STORED, 2
    STORED_ONCE = PutStatus.STORED, 1
    ALREADY_STORED_TWICE = PutStatus.ALREADY_STORED, 2
    ALREADY_STORED_ONCE = PutStatus.ALREADY_STORED, 1
    BUFFERED = PutStatus.BUFFERED, 1
    CONFLICT = PutStatus.CONFLICT, 0
    FAILED = None, 0
    """The put's error says why."""

    def __init__(self, status: PutStatus | None, copies: int) -> None:
        self.status = status
        self.copies = copies


DECISIONS: Mapping[tuple[BufferState, HomeState], PutState] = {
    (BufferState.INSERTED, HomeState.STORED): PutState.STORED_TWICE,
    (BufferState.INSERTED, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_TWICE,
    (BufferState.INSERTED, HomeState.CONFLICT): PutState.CONFLICT,  # and the put removes its own buffer row
    (BufferState.INSERTED, HomeState.UNREACHABLE): PutState.BUFFERED,
    (BufferState.SHARED, HomeState.STORED): PutState.STORED_TWICE,
    (BufferState.SHARED, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_TWICE,
    (BufferState.SHARED, HomeState.CONFLICT): PutState.CONFLICT,  # the row stays: another put relies on it
    (BufferState.SHARED, HomeState.UNREACHABLE): PutState.BUFFERED,
    (BufferState.NONE, HomeState.STORED): PutState.STORED_ONCE,
    (BufferState.NONE, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_ONCE,
    (BufferState.NONE, HomeState.CONFLICT): PutState.CONFLICT,
    (BufferState.NONE, HomeState.UNREACHABLE): PutState.FAILED,
    (BufferState.NONE, HomeState.NOT_ASKED): PutState.FAILED,  # min_copies needs a secondary
    (BufferState.CONFLICT, HomeState.ALREADY_STORED): PutState.ALREADY_STORED_ONCE,  # the buffered one will be refused
    (BufferState.CONFLICT, HomeState.CONFLICT): PutState.CONFLICT,
    (BufferState.CONFLICT, HomeState.NOTHING): PutState.CONFLICT,  # the buffered one came first
    (BufferState.CONFLICT, HomeState.UNREACHABLE): PutState.FAILED,  # the cell at home can't be compared
}
"""Every combination that can happen. The others are impossible: a home is put to only after the buffer took the cell or
no secondary could, and read only after a conflict in the buffer.
"""


def decide(buffered: BufferState, home: HomeState) -> PutState:
    """Returns how far a put came. Raises KeyError for a combination that can't happen."""
    return DECISIONS[buffered, home]


class PendingPut(msgspec.Struct, gc=False):
    """A put under way: its row, and what the secondary and the home said so far. `error` is the last one of either."""

    row: BufferRow
    buffered: BufferState = BufferState.NONE
    secondary: str | None = None
    home: HomeState = HomeState.NOT_ASKED
    placed: Placed | None = None
    error: SchemalessError | None = None

    @property
    def is_buffered(self) -> bool:
        return self.buffered is BufferState.INSERTED or self.buffered is BufferState.SHARED

    def result(self, min_copies: int) -> PutResult:
        """Returns what came of the put. One that has fewer copies than required fails, although a copy may exist."""
        state = decide(self.buffered, self.home)
        if state.status is None:
            assert self.error is not None, "a put fails with an error"
            return self.error
        if state.status is not PutStatus.CONFLICT and state.copies < min_copies:
            return too_few_copies(state.copies, min_copies)
        return PutOutcome(state.status, self.row.key, self.row.shard, self.placed, state.copies)


def too_few_copies(copies: int, min_copies: int) -> Unavailable:
    hint = "put the same cell again: it may be stored or buffered already, and may still appear"
    return Unavailable(f"{min_copies} durable copies are required, and {copies} are known in time", hint=hint)
