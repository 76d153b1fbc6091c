"""What waits in the buffers of secondaries for its home, and whether what waited is readable there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from schemaless.errors import SchemalessError, Unavailable
from schemaless.storage import buffer_table, entity_table
from schemaless.storage.asyncmy_driver import AsyncStorage
from schemaless.storage.buffer_table import Buffered, Sizes, Waiting
from schemaless.storage.operation import Operation
from schemaless.topology import Datastore

_ROWS_AT_ONCE = 500
_PAUSE_S = 0.2
_TIMEOUT_S = 2.0


def by_home(datastore: str, waiting: Mapping[tuple[str, str, str], Waiting]) -> dict[str, Waiting]:
    """Adds up what several secondaries buffer of a datastore for each home. By (secondary, datastore, home)."""
    found: dict[str, Waiting] = {}
    for home, one in ((home, one) for (_, name, home), one in waiting.items() if name == datastore):
        known = found.get(home, Waiting(0, 0, 0.0))
        oldest_s = max(known.oldest_s, one.oldest_s)
        found[home] = Waiting(known.rows + one.rows, known.size_bytes + one.size_bytes, oldest_s)
    return dict(sorted(found.items()))


async def settle(
    storage: AsyncStorage,
    datastore: Datastore,
    wait_s: float,
    stopping: Callable[[], bool],
    homes: Collection[str] | None = None,
) -> None:
    """Returns when the home of each cell shows what was buffered at the call, or the cell met another body there.

    `homes` bounds which are meant. Rows of a shard that moved may name an earlier home, until the cleaner corrects
    them, and lie on the new one. Raises StorageUnavailable where a buffer can't be read, so nobody knows what it has,
    and Unavailable after `wait_s` or when the process is `stopping`.
    """
    deadline = time.monotonic() + wait_s
    clusters = storage.topology.clusters
    pairs = [
        (secondary, home)
        for secondary in clusters
        for home in (clusters if datastore.moves else datastore.clusters)
        if datastore.moves or (home != secondary and (homes is None or home in homes))
    ]
    newest = await asyncio.gather(
        *(
            storage.master(secondary).run(buffer_table.newest_id, home, timeout_s=_TIMEOUT_S)
            for secondary, home in pairs
        )
    )

    async def settled(secondary: str, home: str, until: int) -> None:
        after, failure = 0, None
        while after < until:
            try:
                after, is_settled = await _next(storage, datastore, (secondary, home), after, until, homes)
            except SchemalessError as error:
                is_settled, failure = False, error
            if stopping():
                raise Unavailable("this process stops, before all was readable at home")
            if time.monotonic() >= deadline and (not is_settled or after < until):
                why = "as far as was looked" if is_settled else "yet"
                raise Unavailable(f"what {secondary} buffers isn't all readable on {home} {why}") from failure
            if not is_settled:
                await asyncio.sleep(_PAUSE_S)

    latest: dict[str, int] = {}
    for (secondary, _), until in zip(pairs, newest, strict=True):
        latest[secondary] = max(until, latest.get(secondary, 0))
    await asyncio.gather(
        *(settled(secondary, home, until) for (secondary, home), until in zip(pairs, newest, strict=True))
    )
    if datastore.moves:  # a row may have got another home after that one's were seen
        await asyncio.gather(*(settled(secondary, home, latest[secondary]) for secondary, home in pairs))


async def _next(
    storage: AsyncStorage,
    datastore: Datastore,
    pair: tuple[str, str],
    after: int,
    until: int,
    homes: Collection[str] | None,
) -> tuple[int, bool]:
    """Returns up to which row all are at home, and whether that goes on."""
    secondary, named = pair

    def page() -> Operation[list[Buffered]]:
        return buffer_table.page(named, after, until, Sizes(), rows_max=_ROWS_AT_ONCE, bytes_max=1 << 40)

    rows = await storage.master(secondary).run(page, timeout_s=_TIMEOUT_S)
    own = [row for row in rows if row.datastore == datastore.name]
    # A row with another digest waits for the cleaner: it goes when the bodies mean the same, or is a conflict.
    missing: list[int] = []
    for home, some in datastore.by_home(own, lambda row: row.shard).items():
        if homes is None or home in homes:
            keys = [(row.shard, row.key) for row in some]
            shown = await storage.master(home).run(entity_table.digests, datastore, keys, timeout_s=_TIMEOUT_S)
            missing += [row.buffer_id for row, digest in zip(some, shown, strict=True) if digest != row.digest]
    if missing:
        return min(missing) - 1, False
    return rows[-1].buffer_id if rows else until, True
