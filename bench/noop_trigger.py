"""The trigger programs of the benchmark of calls: one does nothing, the other blocks for 5 ms."""

from __future__ import annotations

import time
import uuid

from schemaless import trigger

CALL_S = 0.005


@trigger(column="BASE")
def do_nothing(row_key: uuid.UUID) -> None:
    pass


@trigger(column="SLOW")
def block(row_key: uuid.UUID) -> None:
    time.sleep(CALL_S)
