"""The document of an explanation: the timeline of a row, and what the row waits for now. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from api.explain.program_standing import ProgramStanding
from api.explain.row_facts import HomeFacts
from schemaless.cell import created_at_text
from schemaless.storage.buffer_table import BufferedCopy
from schemaless.storage.shard_log import RowCell

Event = tuple[int, int, Mapping[str, Any]]
"""When it happened, in microseconds, the added_id of its cell or 0, and what is shown of it."""


def events_of(
    shard: int,
    home: HomeFacts | None,
    copies: Mapping[str, Sequence[BufferedCopy]],
    programs: Iterable[ProgramStanding],
) -> list[dict[str, Any]]:
    """Returns what happened to a row, in the order of time. Cells come in added_id order, because time does (I4)."""
    events: list[Event] = []
    if home is not None:
        events += [_cell_event(shard, cell) for cell in home.page.cells]
    for cluster, each in copies.items():
        events += [_copy_event(cluster, copy, home) for copy in each]
    for program in programs:
        events += [(at, 0, event) for at, event in program.events()]
    return [{"at": created_at_text(at), **event} for at, _, event in sorted(events, key=lambda one: one[:2])]


def waits_of(
    copies: Mapping[str, Sequence[BufferedCopy]],
    home: HomeFacts | None,
    programs: Iterable[Mapping[str, Any]],
    indexes: Iterable[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yields what the row waits for now: of each program its first cell that isn't finished."""
    for cluster, each in copies.items():
        for copy in each:
            if _is_at_home(copy, home) is False:
                why = copy.refused and f"its home refuses it: {copy.refused}"
                cell = f"{copy.column_name}/{copy.ref_key}"
                yield {"for": "its home", "cell": cell, "why": why or f"it is in the buffer of cluster {cluster}"}
    for program in programs:
        for cell in program["unfinished"][:1]:
            yield {"for": f"program {program['program']}", "cell": cell["location"], "why": cell["why"]}
    for index in indexes:
        if index["late"]:
            yield {"for": f"index {index['name']}", "cell": index["late"], "why": index["why"]}


def _cell_event(shard: int, cell: RowCell) -> Event:
    shown = {
        "kind": "cell",
        "location": f"{shard}:{cell.location}",
        "column_name": cell.column_name,
        "ref_key": cell.ref_key,
        "size_bytes": cell.size_bytes,
    }
    return cell.created_at, cell.location.added_id, shown if cell.cause is None else {**shown, "cause": cell.cause}


def _copy_event(cluster: str, copy: BufferedCopy, home: HomeFacts | None) -> Event:
    shown = {
        "kind": "buffered",
        "cluster": cluster,
        "column_name": copy.column_name,
        "ref_key": copy.ref_key,
        "size_bytes": copy.size_bytes,
        "at_home": _is_at_home(copy, home),
        "refused": copy.refused,
    }
    return copy.buffered_at, 0, shown


def _is_at_home(copy: BufferedCopy, home: HomeFacts | None) -> bool | None:
    """Returns whether the cell of a copy is at home, None where that can't be told from the cells that are shown."""
    if home is None:
        return None
    if any((cell.column_name, cell.ref_key) == (copy.column_name, copy.ref_key) for cell in home.page.cells):
        return True
    return None if home.page.earlier or home.page.later else False
