"""PartialStore: stores a batch that its master refuses, but for the rows that are to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from schemaless.errors import NodeRefuses, SchemalessError, TableMissing
from schemaless.storage.buffer_table import BufferRow

Outcome = TypeVar("Outcome")

WRITES_MAX = 64
"""How many transactions look for the rows to blame. Rows that none of them reached are refused, too."""
REFUSED_AT_FIRST_MAX = 16
"""So many that are refused before one is taken mean that the master refuses all."""
REFUSALS_OF_SHARD_MAX = 8
"""So many rows of one shard are refused alone, before the rest of the shard is."""


class PartialStore(Generic[Outcome]):
    """Looks for the rows by halves, in the order of their shards.

    A shard without its table is refused as a whole. So are copies, whose shard is None.
    """

    def __init__(
        self,
        rows: Sequence[BufferRow],
        shard_of: Callable[[BufferRow], int | None],
        store: Callable[[Sequence[BufferRow]], Awaitable[Sequence[Outcome | SchemalessError]]],
    ) -> None:
        self._rows = rows
        self._shards = [shard_of(row) for row in rows]
        self._store = store
        self._outcomes: dict[int, Outcome | SchemalessError] = {}
        self._refused: set[int | None] = set()
        self._refusals: Counter[int | None] = Counter()
        self._writes = 0
        self._any_taken = False
        self._lost: SchemalessError | None = None

    async def run(self, refusal: NodeRefuses) -> list[Outcome | SchemalessError]:
        """Returns what came of each row: what the store says of it, or an error, `refusal` for one that wasn't reached.

        Raises `refusal` when the master takes nothing.
        """
        copies_first = [-1 if shard is None else shard for shard in self._shards]
        by_shard = sorted(range(len(self._rows)), key=copies_first.__getitem__)
        await self._store_halves(by_shard)
        error = self._lost or refusal
        if not self._any_taken:
            raise error
        return [self._outcomes.get(position, error) for position in range(len(self._rows))]

    async def _store_halves(self, part: Sequence[int]) -> None:
        """Writes both halves before it looks into one: where bad rows are side by side, the other half is taken."""
        middle = len(part) // 2
        refused_halves = []
        for half in (part[:middle], part[middle:]):
            wanted = [position for position in half if self._shards[position] not in self._refused]
            if wanted and self._may_write() and await self._is_refused_in_part(wanted):
                refused_halves.append(wanted)
        for half in refused_halves:
            await self._store_halves(half)

    async def _is_refused_in_part(self, part: Sequence[int]) -> bool:
        """Stores rows. Returns whether smaller parts of them may be taken."""
        self._writes += 1
        try:
            found = await self._store([self._rows[position] for position in part])
        except NodeRefuses as error:
            self._outcomes.update(dict.fromkeys(part, error))
            return not self._is_blamed(part, error)
        except SchemalessError as error:  # such as a master that went away: what it took keeps its outcome
            self._lost = error
        else:
            self._any_taken = True
            self._outcomes.update(zip(part, found, strict=True))
        return False

    def _is_blamed(self, part: Sequence[int], error: NodeRefuses) -> bool:
        """Returns whether smaller parts of this one would tell no more."""
        shards = {self._shards[position] for position in part}
        if len(shards) == 1 and (isinstance(error, TableMissing) or None in shards):
            self._refused |= shards
            return True
        if len(part) > 1:
            return False
        self._refusals.update(shards)
        self._refused |= {shard for shard in shards if self._refusals[shard] == REFUSALS_OF_SHARD_MAX}
        return True

    def _may_write(self) -> bool:
        if self._lost is not None:
            return False
        return self._writes < (WRITES_MAX if self._any_taken else REFUSED_AT_FIRST_MAX)
