"""The processes of a stack: which servers and services it runs, and how supervisord learns of each.

Owns command lines and environments. A process is started again without end, and it ends with the supervisor.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from schemaless.bus.kafka_accounts import KafkaUser
from schemaless.config import RENAMED
from schemaless.errors import Misconfigured
from schemaless.stack.plan import DEFAULT_DATASTORE, StackPlan, api_names, write_private_json
from schemaless.stack.ports import free_ports, is_free

RESTARTS_MAX = 10**9  # a supervisor must not give up at night
STARTED_AFTER_S = 1  # a server that ends sooner is started again, a second later each time
SERVICE_STARTED_AFTER_S = 10
"""The same of services. One that can't start, because its module or its group refuses, may need seconds to say so."""

_BEGINS_COMMENT = re.compile(r"[\r\n]|\s[;#]")

STOP_TIMEOUT_S = 25  # a process whose end hangs cuts itself off after 20 s, a tailer after 35 s, and says where
MYSQL_STOP_TIMEOUT_S = 60
TAILER_STOP_TIMEOUT_S = 40
"""Longer than a tailer takes for its last transactions (tailer/__main__.py)."""


class ProcessRole(StrEnum):
    API = "api"
    TAILER = "tailer"
    INDEXER = "indexer"
    CONSUMERS = "consumers"
    CLEANER = "cleaner"
    MYSQL = "mysql"
    KAFKA = "kafka"


_SERVERS = (ProcessRole.MYSQL, ProcessRole.KAFKA)


@dataclass(frozen=True, slots=True)
class SupervisedProgram:
    """A program of the supervisor. `stop_timeout_s` is the time from SIGTERM to SIGKILL."""

    name: str
    role: ProcessRole
    argv: Sequence[str]
    directory: str
    env: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: int = STOP_TIMEOUT_S


def save_program(folder: Path, program: SupervisedProgram, *, log: Path) -> None:
    """Writes the description, and supervisord's section of it. Raises Misconfigured for words it can't hold."""
    section = _section(program, log)
    write_private_json(folder / f"{program.name}.json", asdict(program))
    (folder / f"{program.name}.conf").write_text(section)


def load_programs(folder: Path) -> dict[str, SupervisedProgram]:
    """Returns all programs, by name and in the order of names."""
    programs = {}
    for path in sorted(folder.glob("[!.]*.json")):
        document = json.loads(path.read_bytes())
        programs[path.stem] = SupervisedProgram(**{**document, "role": ProcessRole(document["role"])})
    return programs


def forget_program(folder: Path, name: str) -> None:
    for suffix in (".conf", ".json"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def _section(program: SupervisedProgram, log: Path) -> str:
    # supervisord's own `environment=` can't take every value, but env(1) can.
    variables = [f"{name}={value}" for name, value in program.env.items()]
    argv = ending_with_supervisor(["/usr/bin/env", *variables, *program.argv])
    lines = {
        "command": " ".join(_quoted(word) for word in argv),
        "directory": _escaped(program.directory),
        "autostart": "false",
        "autorestart": "true",
        "startsecs": STARTED_AFTER_S if program.role in _SERVERS else SERVICE_STARTED_AFTER_S,
        "startretries": RESTARTS_MAX,
        "stopsignal": "TERM",
        "stopwaitsecs": program.stop_timeout_s,
        "redirect_stderr": "true",
        "stdout_logfile": _escaped(str(log)),
        "stdout_logfile_maxbytes": "20MB",
        "stdout_logfile_backups": 3,
    }
    return f"[program:{program.name}]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())


def ending_with_supervisor(argv: Sequence[str]) -> list[str]:
    """Returns a command whose process ends with the supervisor, so that no orphan keeps ports and data folders."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *argv] if setpriv else list(argv)


def _quoted(word: str) -> str:
    return '"' + _escaped(word).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(word: str) -> str:
    if _BEGINS_COMMENT.search(word):
        raise Misconfigured(f"supervisord's file can't hold {word!r}: a line break, or ; or # after a blank")
    return word.replace("%", "%%")  # supervisord expands %(name)s


DEFAULT_CONSUMER = "examples.census"


class NoCheckout(Misconfigured):
    hint = "run it in a checkout of the project, after `make venv`, or in its image"


def checkout_folder() -> Path:
    """Returns the folder of the services. Raises NoCheckout when only the wheel is installed."""
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
    """Returns the services that every stack has, without programs that were added later."""
    shared, tailing = service_environment(plan), service_environment(plan, KafkaUser.TAILER)
    apis = [
        _python(name, ProcessRole.API, ["api"], {**shared, "SCHEMALESS_API_PORT": str(plan.ports[name])})
        for name in api_names()
    ]
    consume = ["consumers", DEFAULT_CONSUMER, "--datastore", DEFAULT_DATASTORE]
    services = [
        _python("tailer-0", ProcessRole.TAILER, ["tailer"], tailing, stop_timeout_s=TAILER_STOP_TIMEOUT_S),
        _python("indexer-0", ProcessRole.INDEXER, ["indexer"], shared),
        _python("consumers-0", ProcessRole.CONSUMERS, consume, {**shared, "CENSUS_DIR": str(plan.home / "census")}),
        _python("cleaner-0", ProcessRole.CLEANER, ["cleaner"], shared),
    ]
    return [*apis, *(with_metrics_port(service, plan.ports[f"{service.name}-metrics"]) for service in services)]


def with_metrics_port(program: SupervisedProgram, port: int) -> SupervisedProgram:
    """Returns a program that serves its metrics at a port of loopback."""
    return replace(program, env={**program.env, _metrics_variable(program.role): str(port)})


def metrics_port(program: SupervisedProgram) -> int | None:
    """Returns the port at which a process serves its metrics, which is the API's own port, or None for a server."""
    port = program.env.get(
        "SCHEMALESS_API_PORT" if program.role is ProcessRole.API else _metrics_variable(program.role)
    )
    return None if port is None else int(port)


def _metrics_variable(role: ProcessRole) -> str:
    return f"SCHEMALESS_{role.value.upper()}_METRICS_PORT"


def service_environment(plan: StackPlan, kafka_user: KafkaUser = KafkaUser.SERVICE) -> dict[str, str]:
    """Returns the settings by which a service finds the servers of this stack, and is let in."""
    account = {} if plan.kafka_accounts is None else {"SCHEMALESS_KAFKA_ACCOUNT": plan.kafka_account_file(kafka_user)}
    return {
        **{name: str(file) for name, file in account.items()},
        "SCHEMALESS_TOPOLOGY": str(plan.topology_file),
        "SCHEMALESS_KAFKA": plan.broker().bootstrap,
        "SCHEMALESS_HOSTS": ",".join(plan.api_urls()),
        "SCHEMALESS_TOKEN_FILE": str(plan.token_file),
        "SCHEMALESS_API_HOST": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def _python(
    name: str, role: ProcessRole, arguments: list[str], env: Mapping[str, str], *, stop_timeout_s: int = STOP_TIMEOUT_S
) -> SupervisedProgram:
    argv = [sys.executable, "-m", *arguments]
    return SupervisedProgram(name, role, argv, str(checkout_folder()), env, stop_timeout_s)


def with_present_settings(program: SupervisedProgram, plan: StackPlan) -> SupervisedProgram:
    """Returns a stored program with the settings that services have now, and none under an old name."""
    env = {name: value for name, value in program.env.items() if name not in RENAMED}
    program = replace(program, env={**env, **service_environment(plan)})
    port = metrics_port(program)
    return program if port is not None and is_free(port) else with_metrics_port(program, *free_ports(1))
