"""CPU time of processes and of everything that they started."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path


def cpu_by_kind(pids: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """Returns the seconds of CPU time so far, by kind of process. A process counts with its children."""
    children, spent = _processes()
    total: Counter[str] = Counter()
    for kind, roots in pids.items():
        left = list(roots)
        while left:
            pid = left.pop()
            total[kind] += spent[pid]  # type: ignore[assignment]  # typeshed's Counter counts in integers
            left += children[pid]
    return dict(total)


def own_children() -> dict[str, list[int]]:
    """Returns the pids of the processes that this one started, by kind: servers, or what `python -m` runs."""
    children, _ = _processes()
    kinds: dict[str, list[int]] = defaultdict(list)
    for pid in children[os.getpid()]:
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "kafka.Kafka" in argv:
            kinds["kafka"].append(pid)
        elif "-m" in argv:
            kinds[argv[argv.index("-m") + 1]].append(pid)
        else:
            kinds["masters"].append(pid)
    return dict(kinds)


def cpu_a_put(before: Mapping[str, float], after: Mapping[str, float], puts: int) -> dict[str, float]:
    """Returns milliseconds of CPU time a put, by kind of process."""
    return {kind: 1000 * (seconds - before[kind]) / puts for kind, seconds in after.items()}


def _processes() -> tuple[Mapping[int, list[int]], Mapping[int, float]]:
    """Returns the children of each process, and the CPU time of each in seconds, user and system."""
    children: dict[int, list[int]] = defaultdict(list)
    spent: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        spent[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return children, spent
