"""ParkedRows: which rows of a shard wait, behind a parked cell or for their next attempt, and what a pass did to them.

The owner of a shard knows this of all its records in MySQL, so no cell costs a look-up. This module does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf

import msgspec

from schemaless.cell import StoredCell
from schemaless.consume.parked_store import ParkedStore
from schemaless.consume.ports import Outcome
from schemaless.storage.checkpoint_table import CellCounts
from schemaless.storage.parked_table import Cause, Ending, Order, ParkedCell

_SCRIPT_CHARACTERS_MAX = 1 << 20  # of the records of one pass. One more may come on top
_ERROR_CHARACTERS_LEFT = 500


class Replay:
    """A record whose cell is to be called again at `due_at`, and then the cells of its row behind it.

    Cells of the row up to `after` are finished. `task`: a call of it runs beyond the pass that began it, and nothing
    makes it due until that has ended. `result` is what it ended with.
    `inherited`: calls failed for it before this process took the shard, and none of its own has since.
    `is_asked`: the function asked for that time by a Retry, or the process before may have let it wait.
    `order_due_at` tells the order that was carried out last from a later one: the record may have both for a moment.
    `is_erased`: the body of its cell is gone.
    """

    __slots__ = (
        "after", "due_at", "inherited", "is_asked", "is_erased", "order_due_at", "ordered", "record", "result", "task",
    )  # fmt: skip

    def __init__(self, record: ParkedCell, due_at: float, *, after: int | None = None, is_asked: bool = False) -> None:
        self.record = record
        self.due_at = due_at
        self.after = record.added_id - 1 if after is None else after
        self.inherited = False
        self.is_asked = is_asked
        self.is_erased = False
        self.ordered: Order | None = None
        self.order_due_at: int | None = None
        self.task: asyncio.Task[None] | None = None
        self.result: FinishedCall | None = None


class FinishedCall:
    """A call that ended after the pass that began it."""

    __slots__ = ("error",)

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class ParkedRows:
    """One shard. `held` has the added_id of the record that holds a row. Live cells up to `seen` were looked at.

    `apart` are records that hold no row. `to_put` has records that changed, with what they counted as before, and
    `to_unmark` those whose call was begun by a process that ended. `orders` are by added_id. `tasks` are calls that run
    beyond the pass that began them. Cells after `counted_from` count. `began_at` is in microseconds.
    """

    __slots__ = (
        "apart", "began_at", "counted_from", "held", "orders", "replays", "seen", "shard", "tasks", "to_put",
        "to_unmark",
    )  # fmt: skip

    def __init__(self, shard: int, seen: int, counted_from: int, began_at: int) -> None:
        self.shard = shard
        self.seen = seen
        self.counted_from = counted_from
        self.began_at = began_at
        self.held: dict[bytes, int] = {}
        self.apart: set[int] = set()
        self.replays: dict[int, Replay] = {}
        self.orders: dict[int, ParkedCell] = {}
        self.to_put: list[tuple[ParkedCell, str]] = []
        self.to_unmark: list[ParkedCell] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def due(self, now: float) -> list[Replay]:
        """Returns what is to be called again now, what is due longest first."""
        due = [r for r in self.replays.values() if r.task is None and r.due_at <= now]
        return sorted(due, key=lambda replay: replay.due_at)

    def due_in_s(self, now: float) -> float:
        if self.has_duties:
            return 0.0
        return max(0.0, min((r.due_at for r in self.replays.values() if r.task is None), default=inf) - now)

    @property
    def has_duties(self) -> bool:
        """Whether something has to be stored or begun that no cell and no time asks for."""
        return bool(self.orders or self.to_put or self.to_unmark)

    def knows(self, record: ParkedCell) -> bool:
        """Whether a record that was read from MySQL isn't finished yet."""
        if record.added_id in self.apart:
            return True
        return self.held.get(record.row_key) == record.added_id

    def wait(self, record: ParkedCell, due_at: float, *, is_asked: bool = False) -> Replay:
        """Holds the row of a record until it is called again, unless the row has passed it before."""
        if record.holds_row:
            self.held[record.row_key] = record.added_id
        else:
            self.apart.add(record.added_id)
        before, replay = self.replays.get(record.added_id), Replay(record, due_at, is_asked=is_asked)
        replay.order_due_at = None if before is None else before.order_due_at
        self.replays[record.added_id] = replay
        return replay

    def park(self, record: ParkedCell, *, holds_row: bool, now: float) -> None:
        """Takes note of a parked record. If it need not hold its row, what waits behind it is called soon."""
        self.replays.pop(record.added_id, None)
        if record.added_id in self.apart:
            return
        self.held[record.row_key] = record.added_id
        if not holds_row:
            self.replays[record.added_id] = Replay(record, now, after=record.added_id)

    def remove(self, record: ParkedCell) -> None:
        self.replays.pop(record.added_id, None)
        self.apart.discard(record.added_id)
        if self.held.get(record.row_key) == record.added_id:
            del self.held[record.row_key]

    def supersede(self, starts_at: int) -> None:
        """Forgets the records from an added_id on. The counts begin anew before it."""
        for row_key in [row_key for row_key, added_id in self.held.items() if added_id >= starts_at]:
            del self.held[row_key]
        for replay in [replay for replay in self.replays.values() if replay.record.added_id >= starts_at]:
            cancel([replay])
            del self.replays[replay.record.added_id]
        self.apart = {added_id for added_id in self.apart if added_id < starts_at}
        self.orders = {added_id: record for added_id, record in self.orders.items() if added_id < starts_at}
        self.to_put = [(record, was) for record, was in self.to_put if record.added_id < starts_at]
        self.to_unmark = [record for record in self.to_unmark if record.added_id < starts_at]
        self.counted_from, self.seen = starts_at - 1, min(self.seen, starts_at - 1)


class Pass:
    """What one call of the handler did in one shard. It becomes the outcome. `rows` is what it knew of the shard."""

    __slots__ = (
        "_counted_from", "_counts", "_parked", "_script_characters", "_scripts", "deadline", "durable", "is_probe",
        "rows", "stop_reason",
    )  # fmt: skip

    def __init__(self, parked: ParkedStore, rows: ParkedRows, deadline: float, *, is_probe: bool) -> None:
        self._parked = parked
        self._counted_from = rows.counted_from
        self._counts = dict.fromkeys(CellCounts.__struct_fields__, 0)
        self._scripts: list[str] = []
        self._script_characters = 0
        self.rows = rows
        self.deadline = deadline
        self.is_probe = is_probe
        self.durable = False
        self.stop_reason: str | None = None

    def count(self, became: str, was: str | None = None, *, of: int) -> None:
        """Counts what became of the cell at an added_id, and no longer what it was before."""
        if of > self._counted_from:
            self._counts[became] += 1
            if was is not None:
                self._counts[was] -= 1

    @property
    def is_full(self) -> bool:
        """Whether it has to be stored before more cells fail: a transaction has to fit a packet of the server."""
        return self._script_characters > _SCRIPT_CHARACTERS_MAX

    def put(self, record: ParkedCell) -> None:
        if self.is_full:  # rows that were called beside each other may fail all at once
            record = msgspec.structs.replace(record, error=record.error[-_ERROR_CHARACTERS_LEFT:])
        script = self._parked.put(record)
        self._script_characters += len(script)
        self._scripts.append(script)

    def begin(self, record: ParkedCell) -> None:
        self._scripts.append(self._parked.begin(record))
        self.durable = True

    def unmark(self, record: ParkedCell) -> None:
        self._scripts.append(self._parked.unmark(record))

    def release_row(self, record: ParkedCell) -> None:
        self._scripts.append(self._parked.release_row(record))

    def keep(self, record: ParkedCell, ending: Ending) -> None:
        self._scripts.append(self._parked.keep(record, ending))

    def delete(self, record: ParkedCell, ending: Ending) -> None:
        self._scripts.append(self._parked.delete(record, ending))

    def outcome(self, finished: int, *, retry_in_s: float = 0.0, due_in_s: float = inf) -> Outcome:
        return Outcome(
            finished,
            retry_in_s,
            self.stop_reason,
            counts=CellCounts(**self._counts),
            script=";".join(self._scripts),
            durable=self.durable,
            due_in_s=due_in_s,
        )


def counted(record: ParkedCell) -> str:
    """Returns the name under which the cell of a record counts."""
    return "waiting" if record.cause is Cause.WAITING else "parked"


def cancel(replays: Iterable[Replay]) -> None:
    """Cancels calls of async functions. Those in threads can't be cancelled."""
    for replay in replays:
        if replay.task is not None:
            replay.task.cancel()


def head_of(cell: StoredCell, function_name: str, cause: Cause, error: str, now_us: int, version: str) -> ParkedCell:
    """Returns a new record of a cell that no call has failed for yet."""
    return ParkedCell(
        cell.shard, cell.generation, cell.added_id, cell.row_key, cell.column_name, cell.ref_key, function_name, cause,
        True, error, 0, (), version, now_us,
    )  # fmt: skip
