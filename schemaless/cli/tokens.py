"""`schemaless token create|list|revoke|rotate`: access (I17), on the servers themselves.

The commands go to MySQL, not to the API. So they work without a token, for whoever may read the topology file: that is
the way back when the last administrator's token was lost or revoked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from schemaless.access import ALL_DATASTORES, LIFETIME_DEFAULT, Scope, Token, now_us, parse_lifetime
from schemaless.cell import created_at_text
from schemaless.cli.output import add_group, print_json, print_notice, print_table
from schemaless.cli.targets import JsonOption, record, recorded, servers, stack_without_token
from schemaless.runtime.extras import Extra, needs
from schemaless.runtime.tls import write_private_text

STACK_TOKEN = "stack-cli"

T = TypeVar("T")
Name = Annotated[str, typer.Argument(help="name of the token")]


def register(app: typer.Typer) -> None:
    commands: dict[str, Callable[..., None]] = {"create": create, "list": list_all, "revoke": revoke, "rotate": rotate}
    add_group(app, "token", "Issue, list, revoke and rotate tokens.", commands)


@needs("token create", Extra.KAFKA, Extra.MYSQL)
@recorded("token create")
def create(
    name: Name,
    datastore: Annotated[
        list[str], typer.Option("--datastore", "-d", help=f"a datastore, {ALL_DATASTORES} for all; may be repeated")
    ],
    scope: Annotated[Scope, typer.Option(help="write includes read, and admin includes both")],
    expires: Annotated[str, typer.Option(help="lifetime, like 90d, 12h or 30m")] = LIFETIME_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Issue a token, and print it once. From then on every request needs one."""
    from schemaless.ops.tokens import create_token

    issued = _run(lambda storage: create_token(storage, name, datastore, scope, expires))
    _print_issued(issued.secret, issued.token, issued.unreached, as_json)
    # The embedded stack's own commands and programs need a token, as soon as access is on.
    from schemaless.ops.tokens import issue_for_services

    file = stack_without_token()
    if file is not None:
        issued = _run(lambda storage: issue_for_services(storage, STACK_TOKEN))
        record(f"token create name={STACK_TOKEN}")
        write_private_text(file, issued.secret + "\n")
        print_notice(
            f"the commands of this stack use the token {STACK_TOKEN!r} in {file}."
            " Programs that run read it when they need it"
        )


@needs("token list", Extra.KAFKA, Extra.MYSQL)
def list_all(as_json: JsonOption = False) -> None:
    """List the tokens. Nobody can read a token again."""
    from schemaless.ops.tokens import known_tokens

    known = _run(known_tokens)
    now = now_us()
    views = [token.view(now) for token in sorted(known.values(), key=lambda token: token.created_at)]
    if as_json:
        print_json({"tokens": views})
        return
    rows = [(view["name"], " ".join(map(str, _list(view["datastores"]))), *list(view.values())[2:]) for view in views]
    print_table(("token", "datastores", "scope", "state", "created", "expires", "revoked"), rows)


@needs("token revoke", Extra.KAFKA, Extra.MYSQL)
@recorded("token revoke")
def revoke(name: Name, as_json: JsonOption = False) -> None:
    """Revoke a token now. Running API processes refuse it within about a second, and end its streams."""
    from schemaless.ops.tokens import revoke_token

    unreached = _run(lambda storage: revoke_token(storage, name))
    _name_unreached(unreached)
    if as_json:
        print_json({"name": name, "unreached": list(unreached)})
    else:
        print(f"{name} is revoked")


@needs("token rotate", Extra.KAFKA, Extra.MYSQL)
@recorded("token rotate")
def rotate(
    name: Name,
    overlap: Annotated[
        str, typer.Option(help="how long the old token stays valid, like 10m; default: not at all")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Issue a token with the same name, reach and lifetime, and end the old one."""
    from schemaless.ops.tokens import rotate_token

    overlap_s = parse_lifetime(overlap, "overlap") if overlap else 0
    issued = _run(lambda storage: rotate_token(storage, name, overlap_s))
    _print_issued(issued.secret, issued.token, issued.unreached, as_json)


def _run(work: Callable[..., Awaitable[T]]) -> T:
    """Runs `work` on the servers."""
    from schemaless.storage.asyncmy_driver import AsyncStorage

    async def run() -> T:
        async with AsyncStorage(servers().topology) as storage:
            return await work(storage)

    return asyncio.run(run())


def _print_issued(secret: str, token: Token, unreached: tuple[str, ...], as_json: bool) -> None:
    _name_unreached(unreached)
    if as_json:
        print_json({"token": secret, **token.view(now_us()), "unreached": list(unreached)})
        return
    reach = " ".join(token.datastores)
    print_notice(f"{token.name}: {token.scope} on {reach} until {created_at_text(token.expires_at)}; shown only now:")
    print(secret)


def _name_unreached(unreached: tuple[str, ...]) -> None:
    if unreached:
        print_notice(f"not reached: {', '.join(unreached)}. API processes write it there when they are back")


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []
