"""census: counts every cell of STATUS: each call is a line of `row key, ref_key, location` with tabs between.

    CENSUS_DIR=/tmp/census schemaless triggers run examples.census --datastore flights

CENSUS_DIR is the folder of the lines (examples/call_log.py), by default `census` under SCHEMALESS_HOME.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from examples.call_log import CallLog
from schemaless.triggers.decorator import TriggerCell, trigger

COLUMN = "STATUS"

_calls = CallLog(Path(os.environ.get("CENSUS_DIR", f"{os.environ.get('SCHEMALESS_HOME', '.schemaless')}/census")))


@trigger(column=COLUMN)
def count_status(cell: TriggerCell) -> None:
    _calls.add(str(cell.row_key), str(cell.ref_key), str(cell.location))


def calls(folder: Path) -> Counter[str]:
    """Calls by location, of all processes so far."""
    lines = [line for path in sorted(folder.glob("*.tsv")) for line in path.read_text().splitlines(keepends=True)]
    return Counter(line.rstrip("\n").split("\t")[2] for line in lines if line.endswith("\n"))
