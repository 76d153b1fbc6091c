"""`schemaless parked list|show|retry|discard`: the parked cells of trigger programs, and what is done with them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from schemaless.cli.output import add_group, print_json, print_table
from schemaless.cli.targets import api_command
from schemaless.client.client import Client
from schemaless.error_text import error_summary
from schemaless.errors import Invalid, NotFound
from schemaless.quantity import quantity

ProgramName = Annotated[str, typer.Argument(help="name of the program")]
FiltersArgument = Annotated[
    list[str] | None, typer.Argument(help="trigger=, column=, row_key=, cause= and since=, such as cause=error")
]
ChosenArgument = Annotated[
    list[str], typer.Argument(help="ids of `parked list`, or filters such as cause=error, or the word all")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="only say how many match")]
_FILTERS = ("trigger", "column", "row_key", "cause", "since")


def register(app: typer.Typer) -> None:
    commands = {"list": list_all, "show": show, "retry": retry, "discard": discard}
    add_group(app, "parked", "List parked cells, call them again, or discard them.", commands)


@api_command
def list_all(
    client: Client,
    as_json: bool,
    program: ProgramName,
    filters: FiltersArgument = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="at most so many")] = 100,
    cursor: Annotated[str | None, typer.Option(help="of the page before")] = None,
) -> None:
    """List parked cells by shard, each followed by what waits behind it in its row."""
    page = client.program(program).parked(
        **_filter(filters or []), limit=limit, **({} if cursor is None else {"cursor": cursor})
    )
    if as_json:
        print_json(page)
        return
    rows = [
        (cell["id"], cell["row_key"], cell["column_name"], cell["cause"], cell["attempts"], cell["parked_at"],
         error_summary(cell["error"] or "", 120))
        for cell in page["parked"]
    ]  # fmt: skip
    print_table(("id", "row", "column", "cause", "attempts", "since", "error"), rows)
    print(f"{page['count']} match" + (f". The next page: --cursor {page['cursor']}" if page["cursor"] else ""))


@api_command
def show(
    client: Client,
    as_json: bool,
    program: ProgramName,
    row: Annotated[str, typer.Argument(help="row key")],
) -> None:
    """Show what is parked of one row, with whole errors, and what waits behind it."""
    page = client.program(program).parked(row_key=row)
    if as_json:
        print_json(page)
        return
    if not page["parked"]:
        raise NotFound(f"nothing of row {row} is parked", hint=f"`schemaless parked list {program}` shows what is")
    for cell in page["parked"]:
        attempts = quantity(cell["attempts"], "attempt")
        print(f"{cell['id']} {cell['column_name']} {cell['ref_key']}: {cell['cause']}, {attempts}")
        if cell["error"]:
            print(cell["error"].rstrip())


@api_command
def retry(
    client: Client,
    as_json: bool,
    program: ProgramName,
    chosen: ChosenArgument,
    rate: Annotated[float | None, typer.Option(help="cells a second; default: all at once")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Call parked cells again, and then what waits behind them. One that fails again is parked again."""
    pace = {} if rate is None else {"rate": rate}
    document = client.program(program).retry(**_chosen(chosen), **pace, dry_run=dry_run)
    _print_order(document, as_json, "to be called again")


@api_command
def discard(
    client: Client,
    as_json: bool,
    program: ProgramName,
    chosen: ChosenArgument,
    reason: Annotated[str, typer.Option(help="why they are never called")],
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False,
) -> None:
    """Give parked cells up: they are never called. What waits behind them is called, in order."""
    if as_json and not (dry_run or yes):
        raise Invalid("--json", "needs --dry-run or --yes, because nobody can be asked")
    order, found = _chosen(chosen), client.program(program)
    if not (dry_run or yes):
        matched = found.discard(**order, reason=reason, dry_run=True)["matched"]
        typer.confirm(f"discard {quantity(matched, 'parked cell')}?", abort=True)
    _print_order(found.discard(**order, reason=reason, dry_run=dry_run), as_json, "to be discarded")


def _filter(terms: list[str]) -> dict[str, str]:
    """Returns filters by name. Raises Invalid."""
    found = dict(term.partition("=")[::2] for term in terms)
    if wrong := [name for name, value in found.items() if name not in _FILTERS or not value]:
        raise Invalid(wrong[0], f"is no filter with a value: {', '.join(f'{name}=…' for name in _FILTERS)}")
    return found


def _chosen(texts: list[str]) -> dict[str, Any]:
    """Returns the members of an order that say which cells. Raises Invalid."""
    terms = [text for text in texts if "=" in text]
    if texts == ["all"]:
        return {"filter": {}}
    if terms and len(terms) < len(texts):
        raise Invalid("cells", "are chosen by ids or by filters, not by both")
    return {"filter": _filter(terms)} if terms else {"ids": texts}


def _print_order(document: dict[str, Any], as_json: bool, what: str) -> None:
    if as_json:
        print_json(document)
        return
    print(f"{quantity(document['matched'], 'parked cell')} {what}" + (" (dry run)" if document["dry_run"] else ""))
    for left in document["left_out"]:
        print(f"left out: {left}")
    if document["more"]:
        print("there are more: give the command again")
    if document["waits_for"]:
        print(f"it waits: {document['waits_for']}")
    if document["job"]:
        print(f"job {document['job']}")
