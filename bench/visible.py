"""When records became visible: a committed reader that notes the moment of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from confluent_kafka import Message

from bench.cells_log import committed_reader

SETTLE_TIMEOUT_S = 60.0

KeyOf = Callable[[Message], str | None]
"""The row key that a record is of, as text."""


def key_of_cell(message: Message) -> str | None:
    key = message.key()
    return key.decode() if isinstance(key, bytes) else None


@contextmanager
def visible_records(
    bootstrap: str, topics: Sequence[str], partitions: int, key_of: KeyOf = key_of_cell
) -> Iterator[Mapping[str, float]]:
    """Moments of the machine's monotonic clock at which a committed reader got each record, by row key."""
    seen: dict[str, float] = {}
    stopping = threading.Event()

    def read() -> None:
        with committed_reader(bootstrap, topics, partitions) as reader:
            while not stopping.is_set():
                message = reader.poll(0.1)
                key = key_of(message) if message is not None and not message.error() else None
                if key:
                    seen.setdefault(key, time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        thread.join()


def settled(moments: Callable[[], Mapping[str, float]], row_keys: Sequence[str]) -> Mapping[str, float]:
    """The moments once there is one for every row. Raises TimeoutError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while missing := set(row_keys) - moments().keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(missing)} of {len(row_keys)} puts had no effect after {SETTLE_TIMEOUT_S:.0f} s")
        time.sleep(0.5)
    return moments()
