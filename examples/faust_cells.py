"""faust_cells: a Faust agent on the cells of a datastore: notes each one as `column, row key, location` in a file.

    python -m examples.faust_cells worker --loglevel warn

A cell comes at least once: after a crash some come again, under the same location. Run it under a supervisor: an agent
that raises ends the process, and the cell that it was at comes first when it is started again.

    DATASTORE          default: mezzanine
    CELLS_DIR          folder of the lines (examples/call_log.py), default: cells
    SCHEMALESS_KAFKA   default: the embedded stack's
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from examples.call_log import CallLog
from schemaless import cells_topic, each_cell, faust_app, kafka_address

datastore = os.environ.get("DATASTORE", "mezzanine")
notes = CallLog(Path(os.environ.get("CELLS_DIR", "cells")))
app = faust_app(
    f"{datastore}.notes",
    kafka_address(),
    broker_session_timeout=6.0,  # how long the partitions of a killed process wait
    broker_heartbeat_interval=2.0,
)
topic = cells_topic(app, datastore)


@app.agent(topic)
async def note(stream: Any) -> None:
    async for cell in each_cell(stream):
        notes.add(cell.column_name, str(cell.row_key), str(cell.location))


if __name__ == "__main__":
    app.main()
