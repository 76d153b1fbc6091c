"""`schemaless explain ROW|LOCATION`: what happened to a row, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from schemaless.cli.output import print_json
from schemaless.cli.targets import api_command
from schemaless.client.client import Client
from schemaless.quantity import quantity

Document = Mapping[str, Any]
_KINDS = {"failed_call": "failed call", "retry_ordered": "retry ordered", "discard_ordered": "discard ordered"}

_ENDINGS = {
    "finished": "called again and finished",
    "discarded": "discarded",
    "sought": "a seek let it come again",
    "superseded": "a new generation superseded it",
}


def register(app: typer.Typer) -> None:
    app.command()(explain)


@api_command
def explain(
    client: Client,
    as_json: bool,
    row: Annotated[str, typer.Argument(help="row key, or the location of one of its cells: SHARD:GENERATION:ADDED_ID")],
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="at most so many cells: the last, or around LOCATION")
    ] = 100,
) -> None:
    """Tell what happened to a row: cells, failed calls, parked cells, index entries. And what it waits for now."""
    document = client.explain(row, limit=limit)
    if as_json:
        print_json(document)
        return
    for line in explanation_lines(document):
        print(line)


def explanation_lines(document: Document) -> Iterator[str]:
    """Yields the explanation as people read it: the timeline, then programs, indexes, and what the row waits for."""
    yield f"row {document['row_key']}: shard {document['shard']} on cluster {document['cluster']}"
    yield ""
    yield from _timeline_lines(document)
    for program in document["programs"]:
        yield ""
        yield from _program_lines(program)
    for index in document["indexes"]:
        yield ""
        yield from _index_lines(index)
    yield ""
    if not document["waits"]:
        yield "it waits for nothing"
    for wait in document["waits"]:
        yield f"it waits for {wait['for']} at {wait['cell']}: {wait['why']}"
    for cluster, why in document["unknown"].items():
        yield f"cluster {cluster} couldn't be asked: {why}"


def _timeline_lines(document: Document) -> Iterator[str]:
    told = [event for event in document["events"] if not event.get("at_home")]
    if document["earlier"]:
        yield "  (earlier cells are left out)"
    for event in told:
        yield f"  {event['at']}  {_KINDS.get(event['kind'], event['kind']):<15}  {_event_text(event)}".rstrip()
    if document["later"]:
        yield "  (later cells are left out)"
    if copies := len(document["events"]) - len(told):
        yield f"  {copies} of these cells {'is' if copies == 1 else 'are'} also in a buffer until a minion shows them"


def _event_text(event: Document) -> str:
    match event["kind"]:
        case "cell":
            cause = f"  caused by {event['cause']}" if "cause" in event else ""
            return f"{event['location']}  {event['column_name']} {event['ref_key']}{cause}"
        case "buffered":
            refused = f", refused by its home: {event['refused']}" if event["refused"] else ""
            return f"{event['column_name']} {event['ref_key']} on cluster {event['cluster']}{refused}"
        case "failed_call":
            return f"{_called(event)}, attempt {event['attempt']}"
        case "parked":
            attempts = quantity(event["attempts"], "attempt")
            return f"{_called(event)}, {event['cause']} after {attempts}: {_last_line(event['error'])}"
        case "waiting":
            return f"{_called(event)} for its next attempt: {_last_line(event['error'])}"
        case "unparked":
            return f"{_called(event)}, {_ENDINGS[event['ending']]}"
        case _:
            reason = f": {event['reason']}" if event.get("reason") else ""
            return f"{_called(event)} by {event.get('who')}, job {event.get('job')}{reason}"


def _called(event: Document) -> str:
    return f"{event['location']}  {event['program']}/{event['trigger']}"


def _program_lines(program: Document) -> Iterator[str]:
    reason = f" ({program['reason']})" if program["reason"] else ""
    workers = f"{program['workers']} worker" + ("" if program["workers"] == 1 else "s")
    yield f"program {program['program']}: {program['state']}{reason}, {workers}"
    checkpoint = program["checkpoint"]
    if checkpoint is None:
        yield "  it has no checkpoint in this shard"
    elif program["finished"]:
        cells = f"{program['finished']} cell" + ("" if program["finished"] == 1 else "s")
        yield f"  {cells} finished by the checkpoint {checkpoint['location']} of {checkpoint['at']}"
    for cell in program["unfinished"]:
        state = cell["state"].replace("_", " ")
        yield f"  {cell['location']} {cell['column_name']} {cell['ref_key']} {state}: {cell['why']}"
    if (left := program["unfinished_count"] - len(program["unfinished"])) > 0:
        yield f"  and {quantity(left, 'more unfinished cell')}"


def _index_lines(index: Document) -> Iterator[str]:
    checkpoint = index["checkpoint"]
    reached = "" if checkpoint is None else f", at {checkpoint['location']}"
    yield f"index {index['name']}: {index['state']}{reached}"
    for entry in index["entries"]:
        fields = ", ".join(f"{name}={value}" for name, value in entry["fields"].items())
        yield f"  entry in shard {entry['shard']}: {fields}"
    if index["why"]:
        yield f"  {'note' if index['entries'] else 'no entry'}: {index['why']}"


def _last_line(error: str) -> str:
    return error.rstrip().rpartition("\n")[2][:200]
