"""BuildEta: when an index that is building will be ready, by the pace seen since this process first looked."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemaless.index.catalogue import BuildProgress


class BuildEta:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[tuple[str, str], tuple[float, int]] = {}

    def seconds(self, datastore: str, index: str, progress: BuildProgress) -> float | None:
        """None as long as no pace is known."""
        now = self._clock()
        began, done = self._first.setdefault((datastore, index), (now, progress.done))
        built = progress.done - done
        if progress.total is None or built <= 0:
            return None
        return (now - began) / built * (progress.total - progress.done)

    def forget(self, datastore: str, index: str) -> None:
        """It is ready."""
        self._first.pop((datastore, index), None)
