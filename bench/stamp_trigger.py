"""The trigger program of the latency benchmark: says on its output when it was called for which row."""

from __future__ import annotations

import time
import uuid

from schemaless import trigger


@trigger(column="BASE")
def stamp(row_key: uuid.UUID) -> None:
    # In one write: calls of several shards may overlap, in threads.
    print(f"called {row_key} {time.monotonic()}\n", end="", flush=True)
