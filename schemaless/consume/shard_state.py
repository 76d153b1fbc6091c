"""ShardState: what one consumer knows of one shard while it runs. Keeps I9: a run begins right after a location."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemaless.cell import StoredCell
from schemaless.location import GenerationStart, Location


class ShardState:
    """`location` None: to be read. `live`: takes from the topic. `busy`: the handler works on it.

    `seen`: the log goes at least as far. `to_end`: the end of the log must be met before the topic is taken from,
    because the topic may have brought cells before we listened. `generation`: the highest that was met; `checked`:
    the highest for which the location was looked at.
    """

    __slots__ = (
        "busy", "checked", "failures", "generation", "live", "location",
        "old_head", "running", "seen", "served_at", "to_end", "wait_until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.location: Location | None = None
        self.live = self.busy = False
        self.running = self.to_end = True
        self.seen = self.old_head = self.generation = self.checked = self.failures = 0
        self.wait_until = self.served_at = 0.0

    def due(self, now: float) -> bool:
        return self.running and not self.live and not self.busy and now >= self.wait_until

    def forget(self) -> None:
        self.location, self.live, self.to_end = None, False, True

    def meets(self, generation: int) -> bool:
        """True: a generation that was not met before. The location may be superseded, so it is read again (I13)."""
        if generation <= self.checked:
            return False
        self.generation = max(self.generation, generation)
        self.forget()
        return True

    def go_live_if_met(self) -> None:
        """From here the topic brings the next: it was heard all the time since the log was read to its end."""
        if not self.to_end and self.location is not None and self.location.added_id >= self.seen:
            self.live = True


def resume_location(location: Location, generations: Iterable[GenerationStart]) -> Location:
    """Where a reader at `location` goes on: there, or before the first generation that superseded it (I13)."""
    for start in sorted(generations, key=lambda start: start.generation):
        if start.generation > location.generation and start.starts_at <= location.added_id:
            return Location(start.generation, start.starts_at - 1)
    return location


def is_dense(after: Location, cells: Sequence[StoredCell]) -> bool:
    """Whether the cells are the next ones (I3)."""
    return all(cell.added_id == n for n, cell in enumerate(cells, start=after.added_id + 1))
