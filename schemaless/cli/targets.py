"""Targets of commands: the API's hosts, or the servers themselves. They come from the command's options, then from the
environment, then from the embedded stack.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.cell import created_at_text
from schemaless.cli.output import print_json, print_notice, print_table
from schemaless.client.client import Client
from schemaless.client.transport import CHOSEN_PROFILE
from schemaless.config import ClientSettings, OperatorSettings, StackSettings
from schemaless.errors import Misconfigured, NotFound, SchemalessError
from schemaless.runtime.extras import Extra, needs
from schemaless.runtime.tls import read_private_text
from schemaless.stack.plan import DEFAULT_DATASTORE, StackPlan, home_folder, load_plan
from schemaless.topology import Datastore, Topology, load_topology

HostsOption = Annotated[
    str,
    typer.Option(
        "--hosts", help="the API's addresses, separated by commas; default: SCHEMALESS_HOSTS, else the stack's"
    ),
]
DatastoreOption = Annotated[str, typer.Option("--datastore", "-d", help="name of the datastore")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for programs")]

Command = Callable[..., None]
_API_OPTIONS = (
    Parameter("datastore", Parameter.KEYWORD_ONLY, default=DEFAULT_DATASTORE, annotation=DatastoreOption),
    Parameter("hosts", Parameter.KEYWORD_ONLY, default="", annotation=HostsOption),
    Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
)


@dataclass(frozen=True, slots=True)
class Servers:
    """The storage servers, and Kafka's bootstrap address. `topology_file` is where the topology was read from.

    `admin_topology_file` has the same servers with an account that may grant, where there is one. `kafka_account_file`
    has the account of Kafka that services use, where the stack has accounts. `token_file` is where the stack keeps
    the token of its programs, or will once access is on.
    """

    topology: Topology
    topology_file: Path
    kafka: str
    admin_topology_file: Path | None = None
    kafka_account_file: Path | None = None
    token_file: Path | None = None

    def worker_settings(self) -> dict[str, str]:
        """Returns the variables by which a process that is started here finds these servers and is let in.

        It finds the API as its parent did. None of them is a secret.
        """
        found = {"SCHEMALESS_TOPOLOGY": str(self.topology_file), "SCHEMALESS_KAFKA": self.kafka}
        if self.kafka_account_file is not None:
            found["SCHEMALESS_KAFKA_ACCOUNT"] = str(self.kafka_account_file)
        if profile := CHOSEN_PROFILE.get():
            found["SCHEMALESS_PROFILE"] = profile
        elif self.token_file is not None:
            found["SCHEMALESS_TOKEN_FILE"] = str(self.token_file)
        return found

    def datastore(self, name: str) -> Datastore:
        """Returns the datastore of that name. Raises NotFound."""
        return self.datastores(name)[0]

    def datastores(self, name: str = "") -> list[Datastore]:
        """Returns the named datastore, or all of them if no name is given. Raises NotFound."""
        from schemaless.ops.datastores import list_datastores

        known = list_datastores(self.topology)
        if name and name not in known:
            raise NotFound(f"there is no datastore {name!r}")
        return [known[name]] if name else list(known.values())


def api_command(command: Command) -> Command:
    """Adds --datastore, --hosts and --json to a command, whose first arguments are then a client and `as_json`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[2:]

    def run(*, datastore: str, hosts: str, as_json: bool, **arguments: Any) -> None:
        with open_client(hosts, datastore) as client:
            command(client, as_json, **arguments)

    return offering([*own, *_API_OPTIONS], run, command)


def offering(
    parameters: Sequence[Parameter], run: Callable[..., None], like: Callable[..., None]
) -> Callable[..., None]:
    """Gives a command these parameters, all by name, and the name and the help of another one."""
    run.__name__, run.__doc__, run.__module__ = like.__name__, like.__doc__, like.__module__
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return run


def open_client(hosts: str, datastore: str) -> Client:
    """Returns a client of the named hosts, else of the known ones. Raises Misconfigured when no host is known."""
    return Client([host.strip() for host in hosts.split(",") if host.strip()], datastore=datastore)


def stack_token() -> str | None:
    """Returns the token of the embedded stack, or None while access is off."""
    plan = _stack()
    kept = None if plan is None else read_private_text(plan.token_file)
    return kept and kept.strip()


def stack_without_token() -> Path | None:
    """Returns where the embedded stack's token belongs, if commands go to that stack and it has none yet."""
    plan = None if OperatorSettings().topology else _stack()
    return None if plan is None or plan.token_file.exists() else plan.token_file


def servers() -> Servers:
    """Returns the servers of SCHEMALESS_TOPOLOGY and SCHEMALESS_KAFKA, else of the stack. Raises Misconfigured."""
    given = OperatorSettings()
    if given.topology is not None and given.kafka is not None:
        return Servers(load_topology(given.topology), given.topology, given.kafka, given.admin_topology)
    plan = _stack()
    if plan is None:
        raise Misconfigured(
            "no servers are known: set SCHEMALESS_TOPOLOGY and SCHEMALESS_KAFKA, or SCHEMALESS_HOME to the folder of a"
            " stack that runs elsewhere, or start one here with `schemaless up`"
        )
    if given.topology is not None:
        return Servers(load_topology(given.topology), given.topology, plan.broker().bootstrap, given.admin_topology)
    return servers_of(plan, kafka=given.kafka)


def servers_of(plan: StackPlan, *, kafka: str | None = None) -> Servers:
    """Returns the servers of an embedded stack, with another Kafka if one is given."""
    file, account = plan.topology_file, None
    if kafka is None and plan.kafka_accounts is not None:
        account = plan.kafka_account_file(KafkaUser.SERVICE)
    kept = plan.token_file if _goes_to(plan, ClientSettings()) else None
    return Servers(load_topology(file), file, kafka or plan.broker().bootstrap, plan.admin_topology_file, account, kept)


def _goes_to(plan: StackPlan, client: ClientSettings) -> bool:
    """Returns whether clients ask the API of this stack, and nothing else names a token for it."""
    names_token = client.token is not None or client.token_file is not None or client.profile is not None
    return not names_token and set(client.hosts) <= set(plan.api_urls())


def _stack() -> StackPlan | None:
    return load_plan(home_folder(StackSettings()))


# `schemaless actions`, and what puts commands there: who ran one that changes something, and what came of it (I17).

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
            return await record_action(storage, AdminAction(0, user_name(), what, socket.gethostname(), outcome))

    try:
        with ThreadPoolExecutor(1) as thread:  # a program that calls a command may have an event loop of its own
            is_kept = thread.submit(lambda: asyncio.run(write())).result()
        if not is_kept:
            print_notice(f"no server took the record of this action: {what}")
    except SchemalessError:  # no servers are known, so nothing was changed
        return


def user_name() -> str:
    """Returns the user of this machine."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
