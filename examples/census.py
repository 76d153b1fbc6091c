"""census: counts every cell of STATUS, in a file of its own for each process, written call by call.

A line is `row key, ref_key, location` with tabs between. The files tell how often each cell was called, also after
processes were killed: a line goes to the kernel in one unbuffered write, before the call returns.

    CENSUS_DIR=/tmp/census schemaless triggers run examples.census --datastore flights
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from schemaless.trigger import TriggerCell, trigger

COLUMN = "STATUS"
_file: int | None = None


def folder() -> Path:
    """CENSUS_DIR, by default `census` under SCHEMALESS_HOME."""
    home = os.environ.get("SCHEMALESS_HOME", ".schemaless")
    return Path(os.environ.get("CENSUS_DIR", f"{home}/census"))


@trigger(column=COLUMN)
def count_status(cell: TriggerCell) -> None:
    os.write(_opened(), f"{cell.row_key}\t{cell.ref_key}\t{cell.location}\n".encode())


def calls(where: Path) -> Counter[str]:
    """Calls by location, of all processes so far."""
    return Counter(line.rsplit("\t", 1)[1] for path in sorted(where.glob("*.tsv")) for line in _whole_lines(path))


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line.rstrip("\n")


def _opened() -> int:
    global _file  # noqa: PLW0603  # one descriptor for the life of the process
    if _file is None:
        path = folder()
        path.mkdir(parents=True, exist_ok=True)
        _file = os.open(path / f"{os.getpid()}.tsv", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return _file
