"""Which processes a stack runs: its servers and its services. Owns their command lines and environments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from schemaless.errors import Misconfigured
from schemaless.stack.default_datastore import DEFAULT_DATASTORE
from schemaless.stack.plan import StackPlan, api_names
from schemaless.stack.program import ProcessRole, SupervisedProgram

MYSQL_STOP_TIMEOUT_S = 60
DEFAULT_CONSUMER = "examples.census"


class NoCheckout(Misconfigured):
    hint = "run it in a checkout of the project, after `make venv`, or in its image"


def checkout_folder() -> Path:
    """Where the services are. Raises NoCheckout when the wheel alone is installed."""
    found = importlib.util.find_spec("api")
    if found is None or found.origin is None:
        raise NoCheckout("the services are not part of the installed package, so there is nothing to start")
    return Path(found.origin).parent.parent


def server_programs(plan: StackPlan) -> list[SupervisedProgram]:
    mysql = [
        SupervisedProgram(
            server.name, ProcessRole.MYSQL, server.argv(), str(plan.home), stop_timeout_s=MYSQL_STOP_TIMEOUT_S
        )
        for server in plan.servers()
    ]
    return [
        *mysql,
        SupervisedProgram("kafka", ProcessRole.KAFKA, plan.broker().argv(), str(plan.home), stop_timeout_s=30),
    ]


def service_programs(plan: StackPlan) -> list[SupervisedProgram]:
    """The services that every stack has; programs that were added later are not among them."""
    shared = service_environment(plan)
    apis = [
        _python(name, ProcessRole.API, ["api"], {**shared, "SCHEMALESS_API_PORT": str(plan.ports[name])})
        for name in api_names()
    ]
    consume = ["consumers", DEFAULT_CONSUMER, "--datastore", DEFAULT_DATASTORE]
    return [
        *apis,
        _python("tailer-0", ProcessRole.TAILER, ["tailer"], shared),
        _python("indexer-0", ProcessRole.INDEXER, ["indexer"], shared),
        _python("consumers-0", ProcessRole.CONSUMERS, consume, {**shared, "CENSUS_DIR": str(plan.home / "census")}),
        _python("cleaner-0", ProcessRole.CLEANER, ["cleaner"], shared),
    ]


def service_environment(plan: StackPlan) -> dict[str, str]:
    """What a service needs to find the servers of this stack."""
    return {
        "SCHEMALESS_TOPOLOGY": str(plan.topology_file),
        "SCHEMALESS_KAFKA": plan.broker().bootstrap,
        "SCHEMALESS_HOSTS": ",".join(plan.api_urls()),
        "SCHEMALESS_API_HOST": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def _python(name: str, role: ProcessRole, arguments: list[str], env: Mapping[str, str]) -> SupervisedProgram:
    return SupervisedProgram(name, role, [sys.executable, "-m", *arguments], str(checkout_folder()), env)
