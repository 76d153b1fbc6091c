"""BufferCursor: where a pass is among the buffer rows of one pair, and how much it takes at once (I14).

A pass has several cursors, which take turns, so neither old rows nor large ones hold up others. Time and servers are
the caller's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from cleaner.pair import ClusterPair
from schemaless.errors import StorageUnavailable
from schemaless.storage import buffer_table
from schemaless.storage.buffer_table import Buffered, Sizes
from schemaless.storage.operation import Operation

ALL_SIZES = Sizes()
_STRETCH_MAX = 1 << 63


class PageSize:
    """The bounds of a page. A time-out quarters them, down to one row, and each page that went well doubles them."""

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self.rows = rows_max
        self.bytes = bytes_max

    def shrink(self) -> None:
        self.rows = max(1, self.rows // 4)
        self.bytes = max(1, self.bytes // 4)

    def grow(self) -> None:
        self.rows = min(self._rows_max, self.rows * 2)
        self.bytes = min(self._bytes_max, self.bytes * 2)


class BufferCursor:
    """Goes over the rows of a home whose sizes are within `sizes`, page by page. All up to `after` was seen."""

    def __init__(self, page_size: PageSize, sizes: Sizes = ALL_SIZES) -> None:
        self.after = 0
        self.page_size = page_size
        self._sizes = sizes
        self._stretch = _STRETCH_MAX

    async def page(self, pair: ClusterPair, until: int) -> list[Buffered]:
        """Returns the next rows up to `until`. The cursor stays: `moved_past` or `failed` moves it.

        Without rows it has moved on to `until`, or less far: the server looks at all rows in between, of any size, and
        millions take longer than a time-out. After one, raised as StorageUnavailable, it looks at fewer.
        """
        if self.after >= until:
            return []
        until = min(until, self.after + self._stretch)
        try:
            rows = await pair.run(pair.secondary, self._page, pair.home, until)
        except StorageUnavailable:
            self.page_size.shrink()
            self._stretch = max(1, (until - self.after) // 4)
            raise
        if not rows:
            self.after = until
        self._stretch = min(_STRETCH_MAX, self._stretch + self._stretch // 8 + 1)  # slowly: a time-out costs most
        return rows

    def moved_past(self, rows: Sequence[Buffered]) -> None:
        """Goes on after a page that went well."""
        self.after = rows[-1].buffer_id
        self.page_size.grow()

    def failed(self, rows: Sequence[Buffered]) -> bool:
        """Takes less next time. Returns True for a page of one row: it is passed, so that it holds up no other."""
        self.page_size.shrink()
        if len(rows) > 1:
            return False
        self.after = rows[-1].buffer_id
        return True

    def _page(self, home: str, until: int) -> Operation[list[Buffered]]:
        size = self.page_size
        return buffer_table.page(home, self.after, until, self._sizes, rows_max=size.rows, bytes_max=size.bytes)


class Horizon:
    """The highest buffer_id of `grace_s` ago. Rows up to it are old enough, whatever a server's clock says.

    `newest` is the highest one at the last look.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._newest: deque[tuple[float, int]] = deque()
        self._old_enough = 0
        self.newest = 0

    async def look(self, pair: ClusterPair) -> int:
        """Asks for the newest row, and returns the id up to which rows are old enough by now."""
        self.newest = await pair.run(pair.secondary, buffer_table.newest_id, pair.home)
        now = self._clock()
        self._newest.append((now, self.newest))
        while self._newest and self._newest[0][0] <= now - self._grace_s:
            self._old_enough = max(self._old_enough, self._newest.popleft()[1])
        return self._old_enough
