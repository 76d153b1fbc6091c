"""Sample queries of the loaded datastore over HTTP, which the demo shows beside its audit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from schemaless.client.answers import Entry
from schemaless.client.client import Client
from schemaless.demo.flights import STATUS, row_key_of_flight
from schemaless.errors import CellMissing
from schemaless.found_cell import FoundCell
from schemaless.sharding import shard_of_text

INDEX = "flights_by_tailnum"
TAILNUM = "N14228"
JANUARY = (datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 2, 1, tzinfo=UTC))
FIRST_FLIGHT = ("2013-01-01T10:00:00Z", "UA", "1545")
LOG_CELLS = 5
BODY_CHARACTERS = 64


def show_queries(console: Console, client: Client, shards: int) -> list[Entry]:
    """Asks and prints, and returns the flights of TAILNUM in January. Raises CellMissing for a missing flight."""
    begin, end = JANUARY
    index = client.index(INDEX)
    entries = list(index.query(tailnum=TAILNUM, time_hour__gte=begin, time_hour__lt=end, order="time_hour", limit=1000))
    title = f"flights of tail number {TAILNUM} in January, by index {INDEX}"
    table = Table("time_hour", "flight", "from", "to", "row key", title=title, title_justify="left")
    for entry in entries:
        fields = entry.fields
        flight = f"{fields['carrier']} {fields['flight']}"
        table.add_row(str(fields["time_hour"]), flight, fields["origin"], fields["dest"], str(entry.row_key))
    console.print(table)
    row_key = row_key_of_flight(*FIRST_FLIGHT)
    status = client.get_cell_latest(row_key, STATUS)
    if not status:
        raise CellMissing(f"flight {' '.join(FIRST_FLIGHT)} has no {STATUS}")
    console.print(_cells_table(f"latest STATUS of {' '.join(FIRST_FLIGHT)}", [status]))
    shard = shard_of_text(str(row_key), shards)
    page = client.get_cells_for_shard(shard, 0, LOG_CELLS)
    console.print(_cells_table(f"the first {LOG_CELLS} cells of shard {shard}, of {page.head:,}", page))
    return entries


def _cells_table(title: str, cells: Iterable[FoundCell]) -> Table:
    table = Table("location", "row key", "column", "ref_key", "body", title=title, title_justify="left")
    for cell in cells:
        location = f"{cell.shard}:{cell.generation}:{cell.added_id}"
        body = ", ".join(f"{name} {value}" for name, value in cell.body.items())
        shown = textwrap.shorten(body, BODY_CHARACTERS, placeholder=" …")
        table.add_row(location, str(cell.row_key), cell.column_name, str(cell.ref_key), shown)
    return table
