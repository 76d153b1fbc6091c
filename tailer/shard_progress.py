"""One shard of a tailed partition: what was published, what is there, and the proof that nothing lies between (I7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemaless.cell import StoredCell
from schemaless.errors import Corrupt
from schemaless.location import GenerationStart, Location


@dataclass(slots=True)
class ShardTail:
    """`head` as last seen; `following` is the generation that has to be announced next, once it is known (I13).

    `held` is a published location that the master was seen to hold; `refused_at` the master's head when it was seen not
    to.
    """

    shard: int
    published: Location
    head: Location
    following: GenerationStart | None = None
    held: Location | None = None
    refused_at: Location | None = None

    @property
    def behind(self) -> bool:
        return self.head > self.published and not self.refused

    @property
    def refused(self) -> bool:
        """The topic has cells that MySQL has not. What is written in their places now is another history."""
        return self.refused_at is not None and self.head.generation <= self.published.generation

    @property
    def doubtful(self) -> bool:
        """The topic may be ahead of the master; or a minion was asked that lags."""
        return self.head < self.published and self.held != self.published and not self.refused

    def published_up_to(self, location: Location) -> None:
        if location.generation > self.published.generation:
            self.following = self.refused_at = None
        self.published = location
        self.head = max(self.head, location)

    @property
    def must_look_for_generation(self) -> bool:
        return self.head.generation > self.published.generation and self.following is None

    @property
    def waiting(self) -> int:
        """Cells that can be published before a generation has to be announced."""
        end = self.head.added_id
        if self.following is not None:
            end = min(end, self.following.starts_at - 1)
        return max(0, end - self.published.added_id)

    def proven(self, cells: Sequence[StoredCell]) -> Sequence[StoredCell]:
        """The cells that come next: dense, of the published generation. Those of a later one wait for its turn.

        Raises Corrupt when a cell is missing, or belongs to a generation that ended before.
        """
        cells = [cell for cell in cells if cell.generation <= self.published.generation]
        for expected, cell in enumerate(cells, start=self.published.added_id + 1):
            if cell.added_id != expected:
                raise Corrupt(f"shard {self.shard}: cell {expected} is missing, the next one is {cell.added_id}")
            if cell.generation != self.published.generation:
                raise Corrupt(
                    f"shard {self.shard}: cell {cell.added_id} is of generation {cell.generation},"
                    f" but {self.published} was published before"
                )
        return cells
