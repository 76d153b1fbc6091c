"""An example for each command, and how its --help shows it. A test reads each example as the command line does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

if TYPE_CHECKING:
    from typer import _click

_ROW = "5b1d5b2e-8d5a-4a3e-9a53-4f0f6a3f2a11"

EXAMPLES = {
    "up": "schemaless up",
    "down": "schemaless down a1",
    "status": "schemaless status --json",
    "put": f"schemaless put {_ROW} BASE next '{{\"fare\": 12.5}}'",
    "get": f"schemaless get {_ROW} BASE 1",
    "latest": f"schemaless latest {_ROW} STATUS --datastore trips",
    "row": f"schemaless row {_ROW} --json",
    "versions": f"schemaless versions {_ROW} STATUS --limit 10",
    "log": "schemaless log 62 --after end --follow",
    "shard-of": f"schemaless shard-of {_ROW}",
    "explain": "schemaless explain 7:1:1000",
    "erase row": f"schemaless erase row {_ROW} --column BASE --reason 'request 4711' --dry-run",
    "erase status": "schemaless erase status 5a1c0ffee00c0ffe",
    "erase verify": "schemaless erase verify 5a1c0ffee00c0ffe",
    "audit": "schemaless audit mezzanine --wait 60",
    "tail": "schemaless tail mezzanine --from beginning --no-follow --column STATUS --json",
    "actions": "schemaless actions --limit 20",
    "demo": "schemaless demo",
    "datastore create": "schemaless datastore create trips --shards 64 --partitions 8",
    "datastore list": "schemaless datastore list",
    "datastore grant": "schemaless datastore grant trips --copies billing",
    "topology show": "schemaless topology show",
    "topology history": "schemaless topology history a --limit 20",
    "topology switch": "schemaless topology switch a a2 --yes",
    "topology promote": "schemaless topology promote a --without a3 --fenced",
    "topology open": "schemaless topology open a",
    "topology acknowledge": "schemaless topology acknowledge a",
    "topology rejoin": "schemaless topology rejoin a a3 --yes",
    "topology add-cluster": "schemaless topology add-cluster c",
    "topology add-node": "schemaless topology add-node a a4 --dry-run",
    "topology remove-node": "schemaless topology remove-node a2",
    "topology move-shard": "schemaless topology move-shard mezzanine 0-3 c --dry-run",
    "topology moves": "schemaless topology moves mezzanine",
    "topology move-throttle": "schemaless topology move-throttle mezzanine 0-3 --lag-ms 1000",
    "topology move-follow": "schemaless topology move-follow mezzanine 0-3",
    "topology reverse": "schemaless topology reverse mezzanine 3",
    "topology complete": "schemaless topology complete mezzanine 0-3",
    "topology move-cancel": "schemaless topology move-cancel mezzanine 1,2",
    "buffer show": "schemaless buffer show --datastore trips",
    "buffer wait": "schemaless buffer wait --datastore trips --timeout 60",
    "conflicts list": "schemaless conflicts list --datastore trips",
    "index create": "schemaless index create driver_index.yaml --change --hold",
    "index list": "schemaless index list --datastore trips",
    "index status": "schemaless index status driver_index",
    "index wait": "schemaless index wait driver_index --timeout 60",
    "index query": "schemaless index query driver_index driver=d-17 fare.gte=10 limit=5",
    "index pause": "schemaless index pause driver_index",
    "index resume": "schemaless index resume driver_index",
    "index throttle": "schemaless index throttle driver_index --cells-per-s 500",
    "index problems": "schemaless index problems driver_index --limit 20",
    "index switch": "schemaless index switch driver_index --back",
    "index drop": "schemaless index drop driver_index",
    "index verify": "schemaless index verify driver_index --shard 3 --shard 4",
    "index repair": "schemaless index repair driver_index --dry-run",
    "index job": "schemaless index job 1f0c9c8b7a6d5e4f",
    "triggers run": "schemaless triggers run billing.py --datastore trips --from beginning",
    "triggers list": "schemaless triggers list --datastore trips",
    "triggers status": "schemaless triggers status billing",
    "triggers doubts": "schemaless triggers doubts billing",
    "triggers pause": "schemaless triggers pause billing --reason 'a deploy'",
    "triggers resume": "schemaless triggers resume billing --shard 7",
    "triggers seek": "schemaless triggers seek billing 2026-01-31T00:00:00Z --dry-run",
    "triggers remove": "schemaless triggers remove billing --dry-run",
    "parked list": "schemaless parked list billing cause=error column=BASE",
    "parked show": f"schemaless parked show billing {_ROW}",
    "parked retry": "schemaless parked retry billing all --rate 100 --dry-run",
    "parked discard": "schemaless parked discard billing cause=verdict --reason 'test rides'",
    "tailer status": "schemaless tailer status trips --shards",
    "tailer pause": "schemaless tailer pause trips",
    "tailer resume": "schemaless tailer resume trips",
    "tailer seek": "schemaless tailer seek trips 1:1000 --shard 7 --dry-run",
    "tailer take-over": "schemaless tailer take-over trips",
    "tailer new-generation": "schemaless tailer new-generation trips --shard 7 --dry-run",
    "token create": "schemaless token create loader --datastore trips --scope write --expires 90d",
    "token list": "schemaless token list",
    "token revoke": "schemaless token revoke loader",
    "token rotate": "schemaless token rotate loader --overlap 10m",
}  # fmt: skip
"""By the words of the command."""


_TYPES_SHOWN = {"<bool>": "", "<list[str]>": "<str>", "<list[int]>": "<int>", "<int range>": "<int>"}
"""What --help says in place of Python's types."""


class HelpedCommand(TyperCommand):
    """A command whose --help names no type where there is none to give, and whose example can be copied.

    Typer shows `<bool>` beside each flag and `<list[str]>` beside each list. It breaks an example where the terminal is
    narrow.
    """

    def get_params(self, ctx: _click.Context) -> list[_click.Parameter]:
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption | TyperArgument):
                shown = _TYPES_SHOWN.get(param.display_type_rich(ctx) or "")
                if shown is not None:
                    param.display_type_rich = lambda ctx, shown=shown: shown  # type: ignore[method-assign, misc]
        return params

    def format_help(self, ctx: _click.Context, formatter: _click.HelpFormatter) -> None:
        example, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)
        self.epilog = example
        typer.echo(f" {example}\n")


def add_examples(app: typer.Typer, *words: str) -> None:
    """Adds its example to each registered command of an app and of its groups."""
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        command.cls = HelpedCommand
        command.epilog = f"Example: {EXAMPLES[' '.join((*words, name))]}"
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, *words, group.name or "")
