"""Targets of commands: the API's hosts, or the servers themselves. They come from the command's options, then from the
environment, then from the embedded stack.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.client.client import Client
from schemaless.client.transport import CHOSEN_PROFILE
from schemaless.config import OperatorSettings, StackSettings
from schemaless.errors import Misconfigured, NotFound
from schemaless.runtime.private_file import read_private_text
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

_API_OPTIONS = (
    Parameter("datastore", Parameter.KEYWORD_ONLY, default=DEFAULT_DATASTORE, annotation=DatastoreOption),
    Parameter("hosts", Parameter.KEYWORD_ONLY, default="", annotation=HostsOption),
    Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
)


@dataclass(frozen=True, slots=True)
class Servers:
    """The storage servers, and Kafka's bootstrap address. `topology_file` is where the topology was read from.

    `admin_topology_file` has the same servers with an account that may grant, where there is one. `kafka_account_file`
    has the account of Kafka that services use, where the stack has accounts.
    """

    topology: Topology
    topology_file: Path
    kafka: str
    admin_topology_file: Path | None = None
    kafka_account_file: Path | None = None

    def worker_settings(self) -> dict[str, str]:
        """Returns the variables by which a process that is started here finds these servers and is let in.

        It finds the API as its parent did. None of them is a secret.
        """
        found = {"SCHEMALESS_TOPOLOGY": str(self.topology_file), "SCHEMALESS_KAFKA": self.kafka}
        if self.kafka_account_file is not None:
            found["SCHEMALESS_KAFKA_ACCOUNT"] = str(self.kafka_account_file)
        if profile := CHOSEN_PROFILE.get():
            found["SCHEMALESS_PROFILE"] = profile
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


def api_command(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --datastore, --hosts and --json to a command, whose first arguments are then a client and `as_json`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[2:]

    @functools.wraps(command)
    def run(*, datastore: str, hosts: str, as_json: bool, **arguments: Any) -> None:
        with open_client(hosts, datastore) as client:
            command(client, as_json, **arguments)

    parameters = [*(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own), *_API_OPTIONS]
    del run.__wrapped__  # Typer would read the command's own signature
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
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
    return Servers(load_topology(file), file, kafka or plan.broker().bootstrap, plan.admin_topology_file, account)


def _stack() -> StackPlan | None:
    return load_plan(home_folder(StackSettings()))
