"""The trigger programs of the benchmark of waiting rows. The name under which a copy runs says what it does."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path

from schemaless import Park, RetryPolicy, trigger
from schemaless.triggers.decorator import TriggerCell

NAME = __name__.rpartition(".")[2]
CALL_S = 0.05 if NAME.startswith("waits_50") else 0.005
DOWN = Path(__file__).with_name("down")

if NAME.startswith("waits"):

    @trigger(column="BASE")
    async def wait(cell: TriggerCell) -> None:
        await asyncio.sleep(CALL_S)

elif NAME.startswith("fails"):

    @trigger(column="BASE", retry=RetryPolicy(attempts=3, delay=0.5))
    def call(cell: TriggerCell) -> None:
        if DOWN.exists():
            print(f"failed {cell.row_key}\n", end="", flush=True)
            raise ConnectionError("the provider is down")

else:  # one of two workers that are compared

    @trigger(column="PARKED")
    def park(cell: TriggerCell) -> None:
        if NAME.startswith("with_parked"):
            raise Park("a hundred thousand of these")

    @trigger(column="BASE")
    def do_nothing(cell: TriggerCell) -> None:
        pass

    @trigger(column="STAMP")
    def stamp(cell: TriggerCell) -> None:
        late_s = time.time() - datetime.fromisoformat(cell.created_at).timestamp()
        print(f"late {late_s:.6f}\n", end="", flush=True)
