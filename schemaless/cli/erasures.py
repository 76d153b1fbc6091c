"""`schemaless erase ROW_KEY` and `schemaless erase status|verify`: bodies that go for good, and what came of that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from schemaless.cli.output import add_group, print_json, print_notice, print_table
from schemaless.cli.targets import api_command
from schemaless.client.client import Client
from schemaless.errors import Invalid
from schemaless.quantity import quantity

if TYPE_CHECKING:
    from typer import _click

_ORDER = "row"
_POLL_S = 0.5
_WAIT_MAX_S = 300.0

ErasureId = Annotated[str, typer.Argument(help="id of the erasure, as the order printed it")]


class ErasureGroup(TyperGroup):
    """A group whose command `row` need not be named: a row key is a UUID, so it is never a command."""

    def parse_args(self, ctx: _click.Context, args: list[str]) -> list[str]:
        is_named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_named else [_ORDER, *args])


def register(app: typer.Typer) -> None:
    text = "Erase bodies for good: `schemaless erase ROW_KEY --reason TEXT`. And ask what came of it."
    add_group(app, "erase", text, {_ORDER: erase, "status": status, "verify": verify}, ErasureGroup)


@api_command
def erase(  # noqa: PLR0913, PLR0917  # a parameter for each option
    client: Client,
    as_json: bool,
    row_key: Annotated[str, typer.Argument(help="UUID of the row")],
    reason: Annotated[str, typer.Option(help="why; it is kept, so put no name into it")],
    column: Annotated[str | None, typer.Option(help="only this column; default: all")] = None,
    ref_key: Annotated[int | None, typer.Option(min=0, help="only this version of the column; default: all")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say how many cells match")] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help=f"wait up to {_WAIT_MAX_S:.0f} s for a complete report; else the exit status is 1"),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False,
) -> None:
    """Erase bodies: of a row, of a column of it, or of one cell. The word row may be left out."""
    if as_json and not (dry_run or yes):
        raise Invalid("--json", "needs --dry-run or --yes, because nobody can be asked")
    if dry_run or not yes:
        document = client.erase(row_key, column, ref_key, reason=reason, dry_run=True)
        if not dry_run:
            typer.confirm(f"erase {quantity(document['matched'], 'cell')} for good?", abort=True)
    if not dry_run:
        document = client.erase(row_key, column, ref_key, reason=reason)
        if wait:
            document = _completed(client, document["erasure"])
            _print_report(document, as_json)
            raise typer.Exit(int(document["state"] == "running"))
    if as_json:
        print_json(document)
    elif dry_run:
        print(f"{quantity(document['matched'], 'cell')} would be erased (dry run)")
    else:
        print(f"{quantity(document['matched'], 'cell')} to be erased, erasure {document['erasure']}")
        print_notice(f"`schemaless erase status {document['erasure']}` tells about every other place")


@api_command
def status(client: Client, as_json: bool, erasure: ErasureId) -> None:
    """Tell where bodies of an erasure were found and removed, where they remain, and what wasn't searched."""
    _print_report(client.erasure(erasure), as_json)


@api_command
def verify(client: Client, as_json: bool, erasure: ErasureId) -> None:
    """Search all places of an erasure again. The exit status is 1 if a body is still there."""
    document = client.erasure(erasure, verify=True)
    _print_report(document, as_json)
    raise typer.Exit(int(any(place["found"] > place["removed"] for place in document["places"])))


def _completed(client: Client, erasure: str) -> dict[str, Any]:
    """Returns the report once it is complete, or as it is when nobody should wait any longer."""
    deadline = time.monotonic() + _WAIT_MAX_S
    while (document := client.erasure(erasure))["state"] == "running" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return document


def _print_report(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    parts = (document[name] for name in ("row_key", "column_name", "ref_key"))
    what = "/".join(str(part) for part in parts if part is not None)
    print(f"erasure {document['erasure']} of {what} is {document['state']}")
    print(f"{document['who']} ordered it at {document['ordered_at']}: {document['reason']}")
    columns = ("place", "found", "removed", "remains_until", "not_searched")
    rows = [[place.get(column) for column in columns] for place in document["places"]]
    print_table([column.replace("_", " ") for column in columns], rows)
