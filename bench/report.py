"""The report: one Markdown page of tables, with the machine and the command that made them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench.figures import NOT_MET, Comparison, Figure

_HEADER = ("what", "unit", "ours", "beside it", "ratio", "floor", "")
_LIBRARIES = ("fastapi", "uvicorn", "pymysql", "asyncmy", "confluent-kafka")


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark's part of the report. `notes` say what was compared."""

    title: str
    notes: str
    rows: Sequence[Comparison | Figure]

    def text(self) -> str:
        lines = [f"## {self.title}", "", self.notes, "", _line(_HEADER), _line(["---"] * len(_HEADER))]
        return "\n".join([*lines, *(_line(row.cells()) for row in self.rows)]) + "\n"


def heading(command: str) -> str:
    return (
        f"# Benchmark report\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on {machine()}.\n\n"
        "Medians of alternating rounds (ours, then the comparator, and again), lowest and highest in brackets; the\n"
        "ratio is the median of the rounds' ratios. Only ratios mean something elsewhere: servers, load and all\n"
        "processes share this machine.\n"
    )


def summary(sections: Sequence[Section]) -> str:
    """Last line of the page, and a line for each floor that was not met."""
    floors = [row for section in sections for row in section.rows if row.floor]
    short = shortfalls(sections)
    lines = [f"{len(floors) - len(short)} of {len(floors)} floors met.", *(f"- NOT met: {what}" for what in short)]
    return "\n".join(lines) + "\n"


def shortfalls(sections: Sequence[Section]) -> list[str]:
    return [row.what for section in sections for row in section.rows if row.verdict == NOT_MET]


def machine() -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"{os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}, {libraries}"


def _processor() -> str:
    models = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
