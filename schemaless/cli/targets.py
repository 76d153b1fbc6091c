"""What a command talks to: the API's hosts, or the servers themselves. What was given, else the embedded stack's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from schemaless.client.client import Client
from schemaless.config import ClientSettings, OperatorSettings, StackSettings
from schemaless.errors import Misconfigured, NotFound
from schemaless.stack.plan import StackPlan, home_folder, load_plan
from schemaless.topology import Datastore, Topology

DEFAULT_DATASTORE = "mezzanine"  # the one that a stack has from its start

HostsOption = Annotated[
    str, typer.Option("--hosts", help="addresses of the API, with commas; default: SCHEMALESS_HOSTS, else the stack's")
]
DatastoreOption = Annotated[str, typer.Option("--datastore", "-d", help="which datastore")]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs")]


@dataclass(frozen=True, slots=True)
class Servers:
    """The topology file, and Kafka's bootstrap address."""

    topology: Path
    kafka: str


def open_client(hosts: str, datastore: str) -> Client:
    """Raises Misconfigured when no host is known."""
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    return Client(named or ClientSettings().hosts or _stack_hosts(), datastore=datastore)


def known_hosts() -> Sequence[str]:
    """For a program that a command starts; none when no API is known, which it may not need."""
    try:
        return ClientSettings().hosts or _stack_hosts()
    except Misconfigured:
        return ()


def servers() -> Servers:
    """Of SCHEMALESS_TOPOLOGY and SCHEMALESS_KAFKA, else of the embedded stack. Raises Misconfigured."""
    given = OperatorSettings()
    if given.topology is not None and given.kafka is not None:
        return Servers(given.topology, given.kafka)
    plan = _stack()
    if plan is None:
        raise Misconfigured(
            "no servers are known: set SCHEMALESS_TOPOLOGY and SCHEMALESS_KAFKA, or run `schemaless up`"
        )
    return Servers(given.topology or plan.topology_file, given.kafka or plan.broker().bootstrap)


def kafka_address(given: str) -> str:
    """Of what was given, of SCHEMALESS_KAFKA, else of the embedded stack. Raises Misconfigured."""
    if found := given or OperatorSettings().kafka:
        return found
    plan = _stack()
    if plan is None:
        raise Misconfigured("no Kafka is known: give --kafka, set SCHEMALESS_KAFKA, or run `schemaless up`")
    return plan.broker().bootstrap


def named_datastore(topology: Topology, name: str) -> Datastore:
    """Raises NotFound."""
    from schemaless.ops.datastores import list_datastores

    found = list_datastores(topology).get(name)
    if found is None:
        raise NotFound(f"there is no datastore {name!r}")
    return found


def _stack() -> StackPlan | None:
    return load_plan(home_folder(StackSettings()))


def _stack_hosts() -> Sequence[str]:
    plan = _stack()
    try:
        if plan is not None:
            hosts: list[str] = json.loads(plan.endpoints_file.read_bytes())["api"]
            return hosts
    except FileNotFoundError:
        pass
    raise Misconfigured("no API is known: give --hosts, set SCHEMALESS_HOSTS, or start a stack with `schemaless up`")
