"""A stock Faust agent, which does nothing with each event and acknowledges it: what calls of ours are compared with.

    BENCH_KAFKA=… BENCH_TOPIC=… python -m bench.stock_agent worker --without-web

It reads the topic from its beginning. Each second it prints how many events it has finished, and when.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import faust

app = faust.App(
    "bench.stock",
    broker=f"kafka://{os.environ['BENCH_KAFKA']}",
    store="memory://",
    topic_disable_leader=True,
    topic_allow_declare=False,
)
cells = app.topic(os.environ["BENCH_TOPIC"], value_type=bytes, value_serializer="raw")


@app.agent(cells)
async def do_nothing(stream: AsyncIterator[bytes]) -> None:
    count, printed = 0, 0.0
    async for _ in stream:
        count += 1
        if count == 1 or time.monotonic() - printed > 0.2:
            printed = time.monotonic()
            print(f"finished {count} {printed}\n", end="", flush=True)


if __name__ == "__main__":
    app.main()
