"""`schemaless actions`, and what puts commands there: who ran one that changes something, and what came of it (I17)."""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ParamSpec, TypeVar

import typer

from schemaless.cell import created_at_text
from schemaless.cli.output import print_json, print_notice, print_table
from schemaless.cli.targets import JsonOption, servers
from schemaless.errors import SchemalessError
from schemaless.runtime.extras import Extra, needs

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_DONE = "done"
_NOT_TOLD = ("as_json", "yes")
"""Arguments that change nothing of what is done."""


def register(app: typer.Typer) -> None:
    app.command("actions")(list_actions)


@needs("actions", Extra.KAFKA, Extra.MYSQL)
def list_actions(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="how many actions at most")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List what administrators did: who, what, when, and from where. Newest first."""
    from schemaless.ops import tokens
    from schemaless.storage.asyncmy_driver import AsyncStorage

    async def read() -> list[tuple[str, ...]]:
        async with AsyncStorage(servers().topology) as storage:
            found = await tokens.list_actions(storage, limit)
        return [(created_at_text(one.at), one.who, one.what, one.peer, one.outcome) for one in found]

    columns = ("at", "who", "what", "peer", "outcome")
    rows = asyncio.run(read())
    if as_json:
        print_json({"actions": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_table(columns, rows)


def recorded(command: str) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Decorates a command that changes something on the servers: it is recorded with the user of this machine.

    A failure is recorded, too. A dry run isn't, because it changes nothing.
    """

    def decorate(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            if kwargs.get("dry_run"):
                return function(*args, **kwargs)
            told = [f"{name}={_text(value)}" for name, value in kwargs.items() if value and name not in _NOT_TOLD]
            what = " ".join((command, *told))
            try:
                answer = function(*args, **kwargs)
            except (SchemalessError, KeyboardInterrupt) as error:
                record(what, f"{type(error).__name__}: {error}".rstrip(": "))
                raise
            record(what)
            return answer

        return run

    return decorate


def record(what: str, outcome: str = _DONE) -> None:
    """Records an action. It never fails the command: where no server takes it, standard error has it."""
    from schemaless.ops.tokens import record_action
    from schemaless.storage.admin_action_table import AdminAction
    from schemaless.storage.asyncmy_driver import AsyncStorage

    async def write() -> bool:
        async with AsyncStorage(servers().topology) as storage:
            return await record_action(storage, AdminAction(0, _user(), what, socket.gethostname(), outcome))

    try:
        with ThreadPoolExecutor(1) as thread:  # a program that calls a command may have an event loop of its own
            is_kept = thread.submit(lambda: asyncio.run(write())).result()
        if not is_kept:
            print_notice(f"no server took the record of this action: {what}")
    except SchemalessError:  # no servers are known, so nothing was changed
        return


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
